"""What scorers read where Triton runs: run by kernels/test_triton.py under its interpreter, in a process of its own."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("elsewhere: test_triton.py runs this file under Triton's interpreter", allow_module_level=True)

import ag
from ag.engine.layer_reader import LayerReader
from tests.support.bounds import hold, of_logits

PROMPT, NEW = 20, 2
IDS = torch.randint(3, 128, (2, PROMPT + NEW), generator=torch.Generator().manual_seed(0))


def decoded(model, *policy, mask=None, guard=None):
    """Logits of the new tokens, and what is held in the end."""
    cache = ag.EvictionCache(model, *policy)
    real = torch.ones_like(IDS) if mask is None else mask
    logits = []
    with torch.no_grad():
        model(IDS[:, :PROMPT], attention_mask=real[:, :PROMPT], past_key_values=cache)
        if guard is not None:
            guard()
        for t in range(PROMPT, PROMPT + NEW):
            step = {"attention_mask": real[:, : t + 1], "past_key_values": cache}
            logits.append(model(IDS[:, t : t + 1], **step).logits[:, 0])
    return torch.stack(logits), [cache.kept_positions(layer) for layer in range(len(cache.state.layers))]


def same(held):
    """Positions by layer, sequence and head, in a row."""
    return torch.cat([torch.cat([torch.tensor([-len(x)]), x]) for layer in held for row in layer for x in row])


@pytest.mark.parametrize("padded", [True], ids=["left"])
@pytest.mark.parametrize("name", ["h2o@heads"])
def test_weights_of_a_decoded_token_come_from_the_kernel(tiny_llama, monkeypatch, name, padded):
    """No key is copied to float32 to be multiplied again; tokens that stay are those of the plain version."""
    model, mask = tiny_llama(num_hidden_layers=1), torch.ones_like(IDS)
    mask[1, : 7 * padded] = 0
    monkeypatch.setenv("AG_KERNELS", "reference")
    want, held = decoded(model, name, 8, "every", mask=mask)
    monkeypatch.setenv("AG_KERNELS", "triton")

    def guard():
        copied = property(lambda reader: pytest.fail("keys were copied to float32"))
        monkeypatch.setattr(LayerReader, "keys_float32", copied)

    found, mine = decoded(model, name, 8, "every", mask=mask, guard=guard)
    assert torch.equal(same(mine), same(held))
    hold(found, want, of_logits(model))

"""Decoding reads ragged rows where they lie, whatever wraps the model."""

import copy

import pytest
import torch

import ag
from ag.engine.store import PagedStore
from tests.support.gates_for import gates_for

PROMPT, NEW = 60, 3


def logits(model, forward, *policy, **options):
    """The logits of a batch of two after the prompt and after each further token, and what was held at the end."""
    ids = torch.randint(3, 128, (2, PROMPT + NEW), generator=torch.Generator().manual_seed(0))
    cache = ag.EvictionCache(model, *policy, **options)
    with torch.no_grad():
        out = [forward(ids[:, :PROMPT], past_key_values=cache).logits[:, -1]]
        out += [forward(ids[:, t : t + 1], past_key_values=cache).logits[:, -1] for t in range(PROMPT, PROMPT + NEW)]
    return torch.stack(out), [layer.store.lengths.tolist() for layer in cache.evicting_layers]


def test_uneven_heads_are_not_gathered(tiny_llama, monkeypatch):
    model = tiny_llama()
    ag.attach(model, gates_for(model, recent_tokens=5))
    ids = torch.randint(3, 128, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    for policy in (("gates",), ("snapkv@heads", 40)):
        cache = ag.EvictionCache(model, *policy)
        with torch.no_grad():
            model(ids, past_key_values=cache)
            assert any(len(set(layer.store.lengths.tolist())) > 1 for layer in cache.evicting_layers)
            with monkeypatch.context() as patch:
                patch.setattr(PagedStore, "padded", lambda store: pytest.fail("the layer was gathered"))
                for _ in range(NEW):
                    model(ids[:, :1], past_key_values=cache)
        assert cache.seen_tokens == PROMPT + NEW


@pytest.mark.slow
@pytest.mark.parametrize("decoded", [0, 1, 4])
@pytest.mark.parametrize("trained", ["q_proj", "k_proj", "v_proj"])
@pytest.mark.parametrize(
    "policy", [("tova", 30, "every"), ("knorm", 30, "every"), ("gates",)], ids=["tova", "knorm", "ring"]
)
def test_gradients_through_a_decoded_token_are_right(tiny_llama, policy, trained, decoded):
    """Against differences of losses, norms being in float32."""
    model = tiny_llama().double().requires_grad_(False)
    if policy == ("gates",):
        ag.attach(model, gates_for(model, covers="all", window=6, recent_tokens=7).double())
    ids = torch.randint(3, 128, (1, 47), generator=torch.Generator().manual_seed(0))
    cache = ag.EvictionCache(model, *policy)
    with torch.no_grad():
        for part in ids[:, : 40 + decoded].split([40] + [1] * decoded, 1):
            model(part, past_key_values=cache)
    weights = [getattr(block.self_attn, trained).weight.requires_grad_() for block in model.model.layers]
    aim = torch.randn(128, generator=torch.Generator().manual_seed(1), dtype=torch.double)

    def loss():
        return model(ids[:, -1:], past_key_values=copy.deepcopy(cache)).logits[0, -1] @ aim

    gradients = torch.autograd.grad(loss(), weights)
    for weight, gradient in zip(weights, gradients, strict=True):
        step = 1e-3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(2), dtype=torch.double)
        with torch.no_grad():
            weight.add_(step)
            more = loss()
            weight.sub_(2 * step)
            less = loss()
            weight.add_(step)
        assert torch.isclose((more - less) / 2, (gradient * step).sum(), rtol=0.01, atol=1e-5)


@pytest.mark.slow
def test_a_compiled_model_equals_the_plain_one(tiny_llama):
    """The engine stays outside of what is compiled."""
    model = tiny_llama(num_hidden_layers=2)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    for policy in (("full",), ("snapkv@heads", 40), ("tova", 30, "every")):
        expected, held = logits(model, model, *policy)
        found, held_compiled = logits(model, compiled, *policy)
        assert held == held_compiled
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()

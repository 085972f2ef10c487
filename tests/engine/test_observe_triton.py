"""What scorers read where Triton runs: run by kernels/test_triton.py under its interpreter, in a process of its own."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("elsewhere: test_triton.py runs this file under Triton's interpreter", allow_module_level=True)

import ag
from ag.engine import observe
from ag.engine.observe import Keys, Observation
from ag.engine.rows import attention
from tests.support.attention_by_hand import Scene
from tests.support.bounds import hold, of_logits, of_weights

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
    return torch.stack(logits), [cache.kept_positions(layer) for layer in range(len(cache.evicting_layers))]


def same(held):
    """Positions by layer, sequence and head, in a row."""
    return torch.cat([torch.cat([torch.tensor([-len(x)]), x]) for layer in held for row in layer for x in row])


@pytest.mark.parametrize("padded", [False, True], ids=["", "left"])
@pytest.mark.parametrize("name", ["h2o@heads", "tova"])
def test_weights_of_a_decoded_token_come_from_the_kernel(tiny_llama, monkeypatch, name, padded):
    """No key is copied to float32 to be multiplied again; tokens that stay are those of the plain version."""
    model, mask = tiny_llama(num_hidden_layers=1), torch.ones_like(IDS)
    mask[1, : 7 * padded] = 0
    monkeypatch.setenv("AG_KERNELS", "reference")
    want, held = decoded(model, name, 8, "every", mask=mask)
    monkeypatch.setenv("AG_KERNELS", "triton")

    def guard():
        monkeypatch.setattr(Keys, "single", property(lambda keys: pytest.fail("keys were copied to float32")))

    found, mine = decoded(model, name, 8, "every", mask=mask, guard=guard)
    assert torch.equal(same(mine), same(held))
    hold(found, want, of_logits(model))


#: Layers, and whether a kernel may sum what all their queries pay.
SCENES = {
    "one": ({"lengths": (37,)}, True),
    "mha": ({"heads": 3, "kv_heads": 3, "lengths": (20, 20)}, True),
    "left": ({"lengths": (19, 4, 1), "padding": "left"}, True),
    "right": ({"lengths": (3, 21), "padding": "right"}, True),
    "turn": ({"lengths": (35, 35), "queries": 6}, True),
    "sliding": ({"lengths": (24, 6), "window": 4}, True),
    "ragged": ({"lengths": (22,), "ragged": True}, False),
    "ragged-left": ({"lengths": (22, 5), "ragged": True, "padding": "left"}, False),
    "padded-turn": ({"lengths": (35, 4), "queries": 6}, False),
    "sliding-ragged": ({"lengths": (24,), "window": 3, "ragged": True}, False),
}


@pytest.mark.parametrize("name", SCENES)
def test_what_all_queries_pay_is_summed_by_a_kernel(monkeypatch, name):
    """Where each new query stands at the slot of its own key: then no tile of logits is made. By hand in float64."""
    options, summed = SCENES[name]
    scene = Scene(seed=3, **options)
    if summed:
        monkeypatch.setattr(Observation, "_blocks", lambda seen: pytest.fail("the queries were visited in blocks"))
    else:
        monkeypatch.setattr(observe, "column_sums", lambda *x: pytest.fail("slots and queries do not line up"))
    found = scene.seen.total(attention)
    assert found.dtype == torch.float32
    for b in range(len(scene.lengths)):
        for h in range(scene.heads):
            want = scene.dense(b, h)[0].sum(0)
            loose = of_weights(scene.q[b, h], scene.k[b, h // scene.group], scene.scaling, scene.q.shape[2])
            hold(found[b, h, : len(want)], want, loose * want)
            assert not found[b, h, len(want) :].any()


@pytest.mark.parametrize("schedule", ["prefill", "blocks:8"])
def test_the_engine_says_when_queries_and_slots_line_up(tiny_llama, monkeypatch, schedule):
    """A prompt that is read whole, padded or not; blocks of it as long as all heads hold equally many tokens."""
    model, calls = tiny_llama(num_hidden_layers=1), []
    kernel = observe.column_sums
    monkeypatch.setattr(observe, "column_sums", lambda *given: calls.append(given[0].shape[2]) or kernel(*given))
    for padding, counts in ((0, {"prefill": [20], "blocks:8": [8, 8, 4]}), (7, {"prefill": [20]})):
        mask = torch.ones_like(IDS)
        mask[1, :padding] = 0
        if schedule not in counts:
            continue
        calls.clear()
        monkeypatch.setenv("AG_KERNELS", "triton")
        _, mine = decoded(model, "h2o", 0.5, schedule, mask=mask)
        assert calls == counts[schedule]
        monkeypatch.setenv("AG_KERNELS", "chunked")
        _, held = decoded(model, "h2o", 0.5, schedule, mask=mask)
        assert calls == counts[schedule] and torch.equal(same(mine), same(held))

"""Evicting a token gives the same logits as masking it: training (masks) against serving (physical drop)."""

import pytest
import torch

import ag
from tests.support.batches import padded, row, step
from tests.support.bounds import hold, of_logits
from tests.support.gates_for import gates_for

PROMPTS, RESPONSE = (30, 23), 8
VARIANTS = {
    "recent-sinks": {"recent_tokens": 4, "sink_tokens": 2},
    "query-heads": {"granularity": "query_head"},
    "dense": {"prefill": "dense", "recent_tokens": 3},
    "dense-prompt": {"prefill": "dense", "scope": "prompt", "shortcut": True},
    "previous-layer-4-2": {"layer_offset": 1, "first_layer": 2, "scope": "prompt"},
    "linear": {"kind": "linear"},
}


def train_logits(model, gates, rows, prompts):
    """Logits under masks, right padded as the data modules do."""
    ids, valid = padded(rows, "right").values()
    with torch.no_grad():
        logits = model(ids, gating=ag.Gating(gates, valid, torch.tensor(prompts)), use_cache=False).logits
    return [logits[i, p - 1 : len(row)] for i, (row, p) in enumerate(zip(rows, prompts, strict=True))]


def serve_logits(model, rows, prompts, block=1):
    """Logits of prefill, eviction and decoding in blocks, left padded as generation does."""
    ids, mask = padded([tokens[:p] for tokens, p in zip(rows, prompts, strict=True)]).values()
    cache = ag.EvictionCache(model, "gates")
    outs = [step(model, cache, ids, mask)[:, -1:]]
    for start in range(0, len(rows[0]) - prompts[0], block):
        new = torch.stack([tokens[p + start : p + start + block] for tokens, p in zip(rows, prompts, strict=True)])
        mask = torch.cat([mask, torch.ones_like(new)], 1)
        outs.append(step(model, cache, new, mask))
    return torch.cat(outs, 1), cache


@pytest.mark.parametrize(
    ("family", "variant"),
    [
        *(("tiny_llama", x) for x in VARIANTS),
        *((x, "recent-sinks") for x in ("tiny_mistral", "tiny_qwen2", "tiny_qwen3")),
    ],
)
def test_served_logits_equal_trained_logits(family, variant, request):
    model = request.getfixturevalue(family)()
    gates = gates_for(model, **VARIANTS[variant])
    rows = [row(p + RESPONSE, p) for p in PROMPTS]
    ag.attach(model, gates)
    trained = train_logits(model, gates, rows, PROMPTS)
    for block in (1, 3):
        served, cache = serve_logits(model, rows, PROMPTS, block)
        for b, want in enumerate(trained):
            hold(served[b], want, of_logits(model))
        assert 0.2 < cache.kept_share() < 0.95, "the flags are not mixed: the test shows nothing"
    alone, _ = serve_logits(model, rows[1:], PROMPTS[1:])
    hold(alone[0], trained[1], of_logits(model))


@pytest.mark.parametrize("scope", ["causal", "prompt"])
@pytest.mark.parametrize("prefill", ["sparse", "dense"])
def test_no_logit_that_carries_loss_depends_on_a_later_token(tiny_llama, scope, prefill):
    model = tiny_llama()
    gates = gates_for(model, scope=scope, prefill=prefill)
    ag.attach(model, gates)
    prompt, length = 20, 28
    ids = torch.randint(3, 128, (1, length), generator=torch.Generator().manual_seed(2))
    plain_text = scope == "causal" and prefill == "sparse"
    cases = [torch.tensor([prompt])] + ([None] if plain_text else [])

    def logits(tokens, prompts):
        with torch.no_grad():
            return model(tokens, gating=ag.Gating(gates, torch.ones_like(tokens), prompts), use_cache=False).logits

    for prompts in cases:
        first = 0 if prompts is None else prompt - 1  # the first position whose next token carries loss
        before = logits(ids, prompts)
        for position in range(first + 1, length):
            changed = ids.clone()
            changed[0, position] = (ids[0, position] - 3 + 1) % 125 + 3
            after = logits(changed, prompts)
            assert torch.equal(after[:, first:position], before[:, first:position])
            assert not torch.equal(after[:, position], before[:, position])

"""The training forward pass against one written out with dense masks (``by_hand``)."""

import numpy as np
import pytest
import torch

import ag
from ag.data.collate import Collator
from ag.data.rows import Row
from ag.errors import UserError
from tests.support import batches, by_hand
from tests.support.bounds import conditioned, hold, in_float64, of_logits
from tests.support.gates_for import gates_for
from tests.support.refused import refuses

LENGTHS, PROMPTS = (26, 19, 8), (18, 11, 2)
VARIANTS = {
    "causal": {},
    "prompt": {"scope": "prompt"},
    "recent-sinks": {"recent_tokens": 4, "sink_tokens": 2},
    "dense": {"prefill": "dense", "recent_tokens": 3},
    "previous-layer": {"layer_offset": 1, "first_layer": 1},
    "all": {"covers": "all", "recent_tokens": 4, "sink_tokens": 2},
    "all-dense": {"covers": "all", "prefill": "dense", "recent_tokens": 3, "window": 6},
    "linear": {"kind": "linear", "granularity": "query_head"},
    "affine": {"kind": "affine"},
    "mlp": {"kind": "mlp", "hidden": 16, "sink_tokens": 1},
    "fast_kvzip": {"kind": "fast_kvzip", "granularity": "query_head", "hidden": 3},
    "window": {"window": 5, "shortcut": True, "recent_tokens": 3},
}


def padded(side):
    rows = [batches.row(n) for n in LENGTHS]
    places = [slice(26 - n, 26) if side == "left" else slice(0, n) for n in LENGTHS]
    ids, mask = batches.padded(rows, side).values()
    return rows, places, ids, mask.bool()


def run(model, gating, ids, valid):
    positions = (valid.long().cumsum(1) - 1).clamp_min(0)
    return model(ids, position_ids=positions, gating=gating, use_cache=False).logits


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    ("family", "variant"),
    [*(("tiny_llama", variant) for variant in VARIANTS), *(("tiny_mistral", x) for x in ("recent-sinks", "all-dense"))],
)
def test_logits_and_flags_of_a_padded_batch(family, variant, side, request):
    model = request.getfixturevalue(family)()
    gates = gates_for(model, **VARIANTS[variant])
    ag.attach(model, gates)
    rows, places, ids, valid = padded(side)
    for hard in (False, True):
        gating = ag.Gating(gates, valid, torch.tensor(PROMPTS), hard)
        with torch.no_grad():
            logits = run(model, gating, ids, valid)
        assert list(gating.logits) == gates.layer_indices
        for b, (row, place, prompt) in enumerate(zip(rows, places, PROMPTS, strict=True)):
            want, flags = by_hand.forward(model, gates, row, prompt)
            hold(logits[b, place], want, of_logits(model))
            gated = gating.counted()[b].nonzero().flatten()
            length = len(row) if gates.config.covers == "all" else prompt
            assert gated.tolist() == list(range(place.start, place.start + length))
            for layer, said in gating.logits.items():
                assert torch.equal(gates.flags(said)[b][:, gated], flags[layer])


def test_straight_through_slope_is_the_sigmoids(tiny_llama):
    """A kept token's gradient: the sigmoid's slope times the finite difference in the weight of its flag."""
    model = tiny_llama(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1).requires_grad_(False)
    in_float64(model)
    gates = gates_for(model, kind="linear").double()
    ag.attach(model, gates)
    ids = torch.randint(3, 128, (1, 12), generator=torch.Generator().manual_seed(1))
    valid, prompt = torch.ones_like(ids), torch.tensor([9])

    def loss(flags=None):
        gating = ag.Gating(gates, valid, prompt)
        if flags is not None:
            gates.keep = lambda logits: flags
        out = model(ids, gating=gating, use_cache=False).logits[0, 8:].logsumexp(-1).sum()
        vars(gates).pop("keep", None)
        return out, gating

    value, gating = loss()
    logits = gating.logits[0]
    (got,) = torch.autograd.grad(value, logits)
    slope = lambda x: x.sigmoid() * (1 - x.sigmoid())  # noqa: E731
    slopes, rounded = slope(logits.detach()), conditioned(slope, logits) + 2**-23  # 1 - p is rounded in float32
    flags = (logits > 0).double()
    assert 0 < flags.sum() < 9
    for t in range(9):
        if flags[0, 0, t]:
            step = torch.zeros_like(flags)
            step[0, 0, t] = 1e-3
            with torch.no_grad():
                wide, near = ((loss(flags + n * step)[0] - loss(flags - n * step)[0]) / (2e-3 * n) for n in (2, 1))
            want = near * slopes[0, 0, t]
            # a central difference is off by the square of its step: of half the step a third of what it changes by
            hold(got[0, 0, t], want, near.abs() * rounded[0, 0, t] + (wide / near - 1).abs() * want.abs())
    assert (got[0, 0][flags[0, 0] == 0] != 0).any(), "evicted tokens learn nothing"


def test_soft_flags_are_noisy_in_training_only(tiny_llama):
    model = tiny_llama()
    gates = gates_for(model, estimator="soft")
    ag.attach(model, gates)
    _, _, ids, valid = padded("right")

    def logits(hard=False):
        with torch.no_grad():
            return run(model, ag.Gating(gates, valid, torch.tensor(PROMPTS), hard), ids, valid)[valid]

    assert not torch.equal(gates.train() and logits(), logits())
    assert torch.equal(logits(hard=True), logits(hard=True))
    want = logits(hard=True)
    gates.eval()
    hold(logits(), want, of_logits(model))


@pytest.mark.parametrize(
    ("gate", "given", "parts"),
    [
        ({"scope": "prompt"}, {}, "gate.scope=prompt scope=causal prefill=sparse"),
        ({"prefill": "dense"}, {}, "gate.prefill=dense scope=causal prefill=sparse"),
        ({}, {"prompt_length": torch.tensor([2]), "first": torch.ones(1, 4)}, "first prompt_length"),
        ({}, {"valid": torch.tensor([[1, 1, 0, 1]])}, "Padding between tokens"),
    ],
)
def test_what_does_not_fit_together(tiny_llama, gate, given, parts):
    with refuses(UserError, *parts.split()):
        ag.Gating(gates_for(tiny_llama(), **gate), **{"valid": torch.ones(1, 4)} | given)


def test_a_model_without_hooks_has_no_logits(tiny_llama):
    """transformers drops an argument that it does not know."""
    model, (_, _, ids, valid) = tiny_llama(), padded("right")
    gating = ag.Gating(gates_for(model), valid, torch.tensor(PROMPTS))
    run(model, gating, ids, valid)
    with refuses(UserError, "no forward pass", "ag.attach(model, gates)"):
        gating.logits.values()


DOCUMENTS = [(7, 1, 12, 6), (20, 4)]  # lengths in two packed rows, the second shorter


def packed(documents):
    """Rows of documents, and what the collator says of them."""
    draw = torch.Generator().manual_seed(3)
    texts = [[[*torch.randint(3, 128, (n - 1,), generator=draw).tolist(), 2] for n in row] for row in documents]
    rows = [Row(np.array(sum(row, []), dtype=np.int32)) for row in texts]
    return texts, Collator(0, end=2)(rows)


@pytest.mark.parametrize("hard", [False, True], ids=["training", "hard"])
@pytest.mark.parametrize("variant", ["recent-sinks", "previous-layer", "window"])
@pytest.mark.parametrize("family", ["tiny_llama", "tiny_mistral"])
def test_a_packed_document_is_what_it_is_alone(family, variant, hard, request):
    model = request.getfixturevalue(family)()
    gates = gates_for(model, **VARIANTS[variant])
    ag.attach(model, gates)
    texts, batch = packed(DOCUMENTS)
    gating = ag.Gating(gates, batch["attention_mask"], hard=hard, first=batch["document_start"])
    assert next(gating.passes(None))[1][0].tolist() == [i for n in DOCUMENTS[0] for i in range(n)]
    with torch.no_grad():
        logits = model(batch["input_ids"], gating=gating, use_cache=False).logits
    for b, row in enumerate(texts):
        start = 0
        for text in row:
            want, flags = by_hand.forward(model, gates, torch.tensor(text), len(text))
            place = slice(start, start + len(text))
            hold(logits[b, place], want, of_logits(model))
            for layer, said in gating.logits.items():
                assert torch.equal(gates.flags(said)[b][:, place], flags[layer])
            start += len(text)


@pytest.mark.parametrize("covers", ["prompt", "all"])
@pytest.mark.parametrize("share", [0.1, 0.37, 1.0])
def test_the_boundary_of_a_share(tiny_llama, covers, share):
    """A dense pass; exactly the share of its flags, of all layers and heads together, is 1 under the boundary."""
    model = tiny_llama()
    gates = gates_for(model, covers=covers, threshold=0.3, bias=0.7)
    ag.attach(model, gates)
    rows, places, ids, valid = padded("left")
    dense = ag.Gating(gates, valid, torch.tensor(PROMPTS), open=True)
    logits = run(model, dense, ids, valid)
    boundary = dense.boundary_of(share)
    kept = total = 0
    for b, (row, place, prompt) in enumerate(zip(rows, places, PROMPTS, strict=True)):
        with torch.no_grad():
            want = model(row[None], use_cache=False).logits[0]
        hold(logits[b, place], want, of_logits(model))
        length = len(row) if covers == "all" else prompt
        for said in dense.logits.values():
            mine = said[b][:, place.start : place.start + length]
            kept, total = kept + int((mine > boundary).sum()), total + mine.numel()
    assert kept == round(share * total)
    moved = ag.Gating(gates, valid, torch.tensor(PROMPTS), hard=True, boundary=boundary)
    first = gates.layer_indices[0]  # what it reads depends on no flag
    run(model, moved, ids, valid)
    assert torch.equal(gates.flags(moved.logits[first]), dense.logits[first] > boundary)
    at_home = ag.Gating(gates, valid, torch.tensor(PROMPTS), boundary=gates.config.boundary)
    assert torch.equal(
        run(model, at_home, ids, valid), run(model, ag.Gating(gates, valid, torch.tensor(PROMPTS)), ids, valid)
    )

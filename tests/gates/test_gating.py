"""The training forward pass against one written out with dense masks (``by_hand``)."""

import numpy as np
import pytest
import torch

import ag
from ag.data.collate import Collator, Row
from ag.errors import UserError
from tests.support import batches, by_hand
from tests.support.bounds import hold, of_logits
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


DOCUMENTS = [(7, 1, 12, 6), (20, 4)]  # lengths in two packed rows, the second shorter


def packed(documents):
    """Rows of documents, and what the collator says of them."""
    draw = torch.Generator().manual_seed(3)
    texts = [[[*torch.randint(3, 128, (n - 1,), generator=draw).tolist(), 2] for n in row] for row in documents]
    rows = [Row(np.array(sum(row, []), dtype=np.int32)) for row in texts]
    return texts, Collator(0, end=2)(rows)


@pytest.mark.parametrize("hard", [False, True], ids=["training", "hard"])
@pytest.mark.parametrize(
    ("family", "variant"),
    [("tiny_mistral", "recent-sinks"), ("tiny_llama", "previous-layer"), ("tiny_mistral", "window")],
)
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


@pytest.mark.parametrize(("covers", "share"), [("prompt", 0.37), ("all", 0.1), ("all", 1.0)])
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

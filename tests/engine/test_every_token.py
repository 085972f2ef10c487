"""Gates that act on every token (``gate.covers=all``): inference against the training forward and an oracle."""

import copy

import pytest
import torch

import ag
from ag.errors import UserError
from tests.support import batches
from tests.support.bounds import hold, of_logits
from tests.support.gates_for import gates_for
from tests.support.held import feed
from tests.support.refused import refuses

LENGTHS = (100, 61)
KINDS = {
    "attention": {},
    "window": {"window": 20, "shortcut": True, "granularity": "query_head"},
    "linear": {"kind": "linear"},
    "mlp": {"kind": "mlp", "hidden": 16},
}
PASSES = {
    "decode": [[60, 21], *[[1, 1]] * 40],
    "chunks-7": [[7, 7 if n >= 6 else 0] for n in range(13)] + [[9, 12]],
    "blocks:9": [[100, 61]],
    "chunks-64": [[64, 25], [36, 36]],
    "turns": [[50, 26], *[[1, 1]] * 15, [30, 11], [5, 4], [0, 1], [0, 3], [0, 1]],
    "pauses": [[60, 34], *[[1, n % 3 > 0] for n in range(40)], [0, 1]],
}


def everywhere(model, **changes):
    """Gates on every token, attached."""
    gates = gates_for(model, covers="all", **{"recent_tokens": 9, "sink_tokens": 2} | changes)
    ag.attach(model, gates)
    return gates


def rows_of(lengths=LENGTHS, seed=0):
    return [batches.row(n, n + seed) for n in lengths]


@torch.no_grad()
def trained(model, gates, row, prompt=None):
    """Logits ``[T, V]`` of a packed row through the training forward, and the flags by layer ``[Hkv, T]``."""
    gating = ag.Gating(gates, torch.ones(1, len(row)), None if prompt is None else torch.tensor([prompt]))
    logits = model(row[None], gating=gating, use_cache=False).logits[0]
    return logits, {layer: gates.flags(found)[0] for layer, found in gating.logits.items()}


CASES = [
    ("tiny_llama", "window", "turns", "right"),
    ("tiny_llama", "window", "pauses", "left"),
    ("tiny_llama", "linear", "chunks-7", "any"),
    ("tiny_mistral", "window", "chunks-64", "left"),
    ("tiny_qwen3", "mlp", "blocks:9", "right"),
    ("tiny_gemma3", "attention", "decode", "left"),
]


@pytest.mark.parametrize(("family", "kind", "passes", "side"), CASES, ids=lambda value: value)
def test_logits_are_those_of_the_training_forward(family, kind, passes, side, request):
    model = request.getfixturevalue(family)()
    gates, rows = everywhere(model, **KINDS[kind]), rows_of()
    whole, blocks = passes.startswith(("chunks", "blocks")), passes.startswith("blocks")
    cache = ag.EvictionCache(model, ag.policy("gates", schedule=passes if blocks else "prefill"))
    result = feed(cache, model, rows, PASSES[passes], side, parts=len(PASSES[passes]) if whole else 0)
    for b, row in enumerate(rows):
        assert len(result.logits[b]) == len(row)
        want, flags = trained(model, gates, row)
        hold(result.logits[b], want, of_logits(model))
        share = torch.stack([*flags.values()]).float().mean()
        assert 0.1 < share < 0.9, "flags are mixed"


def test_what_gates_cannot_do_is_refused_and_loses_nothing(tiny_llama):
    model, (row,) = tiny_llama(), rows_of([40])
    gates = gates_for(model, scope="prompt")
    ag.attach(model, gates)
    with refuses(UserError, "gate.scope=prompt", "one forward pass", "schedule"):
        ag.EvictionCache(model, "gates", budget=9, schedule="blocks:8")
    ag.detach(model)
    with refuses(ValueError, "gate.covers=all", "gate.scope=prompt"):
        everywhere(model, scope="prompt")
    gates = everywhere(model)
    cache = ag.EvictionCache(model, "gates")
    with torch.no_grad():
        model(row[None, :30], past_key_values=cache)
        ag.detach(model)
        with refuses(UserError, "ag.detach"):
            model(row[None, 30:31], past_key_values=cache)
        ag.attach(model, gates)
        got = model(row[None, 30:], past_key_values=cache).logits[0]
    hold(got, trained(model, gates, row)[0][30:], of_logits(model))


@torch.no_grad()
def test_copies_crops_and_beams(tiny_llama):
    """Copies of one cache go on as the text of each demands: cut, with others' questions, in another order."""
    model = tiny_llama()
    gates = everywhere(model, window=6)
    context, other = rows_of([60, 60])[0], rows_of([60], 1)[0]
    questions = rows_of([23], 2)[0], rows_of([23], 3)[0]
    cache = ag.EvictionCache(model, "gates")
    model(torch.stack([context, other]), past_key_values=cache)
    for new in (7, 8, 9):
        model(torch.full((2, 1), new), past_key_values=cache)
    start = [torch.cat([x, torch.tensor([7, 8, 9])]) for x in (context, other)]
    want = {(i, j): trained(model, gates, torch.cat([start[i], questions[j]]))[0][63:] for i in (0, 1) for j in (0, 1)}

    def ask(cache, order, asked, sizes):
        ids = torch.stack([questions[j] for j in asked])
        out = torch.cat([model(part, past_key_values=cache).logits for part in ids.split(sizes, 1)], 1)
        for got, i, j in zip(out, order, asked, strict=True):
            hold(got, want[i, j], of_logits(model))

    def draft(cache, size):
        model(torch.full((len(cache.valid), size), 5), past_key_values=cache)
        cache.crop(-size)

    ask(copy.deepcopy(cache), (0, 1), (1, 0), [1] * 23)
    drafted = copy.deepcopy(cache)
    draft(drafted, 9)
    draft(drafted, 5)
    ask(drafted, (0, 1), (0, 1), [1, 1, 1, 20])
    waiting = copy.deepcopy(cache)  # with a pass that is not settled
    model(torch.full((2, 6), 5), past_key_values=waiting)
    waiting.crop(-6)
    ask(copy.deepcopy(waiting), (0, 1), (1, 1), [3, 20])
    beams = copy.deepcopy(cache)
    beams.reorder_cache(torch.tensor([1, 1]))
    ask(beams, (1, 1), (0, 1), [1, 22])
    picked = copy.deepcopy(cache)
    draft(picked, 3)
    picked.batch_repeat_interleave(2)
    picked.batch_select_indices(torch.tensor([3, 0, 1]))
    ask(picked, (1, 0, 0), (0, 0, 1), [1, 1, 21])
    ask(cache, (0, 1), (0, 0), [23])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("spec", ["h2o", "kvzip", "rkv"])
@torch.no_grad()
def test_the_default_type_of_torch_changes_nothing(tiny_llama, spec, dtype):
    """The kernels in C++ read and write float32, and scores are float32, whatever the type of new tensors is."""
    model, ids, found = tiny_llama(), torch.arange(3, 39)[None], []
    for default in (torch.float32, dtype):
        torch.set_default_dtype(default)
        try:
            cache = ag.EvictionCache(model, ag.policy(spec, 12, "prefill" if spec == "kvzip" else "every"))
            out = [model(part, past_key_values=cache).logits[:, -1] for part in ids.split([30, *[1] * 6], 1)]
        finally:
            torch.set_default_dtype(torch.float32)
        found.append(torch.cat(out))
    assert torch.equal(*found)


def test_another_default_device_is_refused(tiny_llama):
    """Tables of the cache would be made there."""
    model = tiny_llama()
    with torch.device("meta"), refuses(UserError, "default device is meta", "set_default_device('cpu')"):
        ag.EvictionCache(model, "h2o", 12)

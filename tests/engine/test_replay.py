"""A step that is recorded once and done again in the same memory is the step of the model, bit by bit."""

import copy

import pytest
import torch

import ag
from ag.engine.cache import EvictionCache
from ag.engine.step_runner import StepRunner
from tests.support.batches import columns, padded, positions, row
from tests.support.gates_for import gates_for
from tests.support.tape import Recorder
from tests.support.unlike import unlike_llama

#: By name: what EvictionCache takes, the model, what gates are attached, and the most recordings of one text in 150
#: steps. The tables move once where all is kept; an interval has two kinds of steps.
CASES = {
    "full": (("full",), {}, "llama", None, 2),
    "full, windowed": (("full",), {}, "mistral", None, 1),
    "h2o": (("h2o", 20, "every"), {}, "llama", None, 1),
    "h2o, int8": (("h2o", 20, "every"), {"kv_dtype": "int8"}, "llama", None, 1),
    "h2o, windowed": (("h2o", 9, "every"), {}, "mistral", None, 1),
    "h2o, unlike heads": (("h2o", 20, "every"), {}, "unlike", None, 1),
    "h2o, interval": (("h2o", 20, "steps:16"), {}, "llama", None, 4),
    "tova@pyramid": (("tova@pyramid", 0.5, "every"), {}, "llama", None, 1),
    "snapkv": (("snapkv", 20), {"window": 4}, "llama", None, 2),
    "keydiff": (("keydiff", 20, "every"), {}, "llama", None, 1),
    "flags that look back": (("flags",), {}, "llama", {"covers": "all", "window": 8, "scope": "causal"}, 2),
    "ranked": (
        ("gates@uniform", 20, "every"), {}, "llama", {"covers": "all", "kind": "mlp", "scope": "causal"}, 1
    ),
    "heads, interval": (("h2o@heads", 20, "steps:16"), {}, "llama", None, 2),
}  # fmt: skip
QUICK = "full", "h2o, int8", "h2o, windowed", "h2o, unlike heads", "h2o, interval", "flags that look back"
#: Policies of which no step can be recorded: queries that are looked back at move on, and a wrapper may do anything.
UNSTEADY = {
    "snapkv": (("snapkv", 20, "every"), {"window": 4}),
    "criticalkv": (("h2o+criticalkv", 20, "steps:4"), {}),
    "heads": (("h2o@heads", 20, "every"), {}),
}


@pytest.fixture(scope="module")
def models(tiny_llama, tiny_mistral):
    return {"llama": tiny_llama(), "mistral": tiny_mistral(), "unlike": unlike_llama()}


@pytest.fixture(autouse=True)
def plain_models(models):
    yield
    for model in models.values():
        ag.detach(model)


def read(model, given, options, lengths, gates=None):
    """A cache that has read prompts of these lengths, padded on the left, and a copy."""
    if gates is not None:
        ag.attach(model, gates_for(model, recent_tokens=4, sink_tokens=1, **gates))
    cache = EvictionCache(model, *given, **options)
    batch = padded([row(length, number) for number, length in enumerate(lengths)])
    model(**batch, position_ids=positions(batch["attention_mask"], max(lengths)), past_key_values=cache)
    return cache, copy.deepcopy(cache)


def plain_step(model, cache, tokens):
    return model(tokens, position_ids=cache.state.sequences.num_tokens[:, None], past_key_values=cache).logits[:, -1]


def tokens(batch, number):
    return torch.randint(3, 128, (batch, 1), generator=torch.Generator().manual_seed(100 + number))


def check_same(mine, plain):
    """Two caches hold the same."""
    for name in ("num_tokens", "num_held", "evicted_at"):
        assert torch.equal(getattr(mine.state.sequences, name), getattr(plain.state.sequences, name))
    assert columns(mine) == columns(plain)
    for ours, theirs in zip(mine.state.stores, plain.state.stores, strict=True):
        assert torch.equal(ours.lengths_cpu, theirs.lengths_cpu) and torch.equal(ours.lengths, theirs.lengths)
        assert torch.equal(ours.lengths.long(), ours.lengths_cpu)
        for noted, wanted in zip(ours.records, theirs.records, strict=True):
            assert all(torch.equal(x, wanted[name]) for name, x in noted.items())


@pytest.mark.parametrize(
    ("name", "lengths", "steps"),
    [(x, [30, 24], 36) for x in QUICK]
    + [pytest.param(x, [70], 150, marks=[pytest.mark.slow, pytest.mark.nightly]) for x in CASES],
)
@torch.no_grad()
def test_recorded_steps_are_those_of_the_model(models, name, lengths, steps):
    given, options, kind, gates, most = CASES[name]
    model, record = models[kind], Recorder()
    cache, plain = read(model, given, options, lengths, gates)
    step = StepRunner(model, cache, record)
    for number in range(steps):
        new = tokens(len(lengths), number)
        assert torch.equal(step(new), plain_step(model, plain, new)), number
    check_same(cache, plain)
    assert 1 <= len(record.tapes) <= most * len(lengths)
    # the first of each kind runs as it is, and so do evictions of heads that compete
    asking = steps // 5 if "heads" in name else 16 * (gates is not None)
    assert record.replays >= steps - 2 * len(record.tapes) - asking


@torch.no_grad()
def test_a_pool_that_grows_by_copying(models, monkeypatch):
    """Steps are recorded anew, without another one that runs as it is."""
    monkeypatch.setattr("ag.engine.block_pool.RESERVES", False)
    monkeypatch.setattr("ag.engine.block_pool.FIRST", 1)
    model, record, steps = models["llama"], Recorder(), 80  # the block table has room for them
    cache, plain = read(model, ("h2o", 100, "every"), {}, [40])
    step, versions = StepRunner(model, cache, record), set()
    for number in range(steps):
        given = tokens(1, number)
        assert torch.equal(step(given), plain_step(model, plain, given))
        versions.add(cache.setup.pool.version)
    check_same(cache, plain)
    assert len(record.tapes) >= len(versions) > 2
    assert record.replays + len(record.tapes) == steps - 2  # the first of each kind, which evicts or not


@pytest.mark.parametrize("name", UNSTEADY)
@torch.no_grad()
def test_what_cannot_be_recorded_runs_as_it_is(models, name):
    model, record = models["llama"], Recorder()
    cache, plain = read(model, *UNSTEADY[name], [40])
    step = StepRunner(model, cache, record)
    for number in range(8):
        assert torch.equal(step(tokens(1, number)), plain_step(model, plain, tokens(1, number)))
    check_same(cache, plain)
    assert not record.tapes


@torch.no_grad()
def test_what_happens_to_the_cache_in_between(models):
    """Other calls of the model, copies, sequences that come and go: steps are recorded anew."""
    given, options, kind, gates, _ = CASES["ranked"]
    model, record = models[kind], Recorder()
    cache, plain = read(model, given, options, [40, 31], gates)
    step = StepRunner(model, cache, record)
    between = [
        lambda one: model(tokens(2, 99), position_ids=one.state.sequences.num_tokens[:, None], past_key_values=one),
        copy.deepcopy,  # whose blocks are shared from now on
        lambda one: model(
            tokens(2, 98).expand(-1, 3),
            position_ids=one.state.sequences.num_tokens[:, None] + torch.arange(3),
            past_key_values=one,
        ),
        lambda one: one.batch_select_indices(torch.tensor([1, 0, 1])),
        lambda one: one.protect([(70, 72)]),
        lambda one: one.remove([0]),
    ]
    kept = []
    for number, happens in enumerate(between):
        for part in range(5):
            new = tokens(len(cache.state.sequences), 10 * number + part)
            assert torch.equal(step(new), plain_step(model, plain, new)), (number, part)
        check_same(cache, plain)
        kept.append([happens(each) for each in (cache, plain)])
    assert len(record.tapes) >= 4 and record.replays >= 2 * len(between)
    check_same(*kept[1])
    assert kept[1][0].state.sequences.columns == 40 + 2 * 5 + 1

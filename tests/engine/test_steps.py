"""Steps are the same operations on the same memory, without a wait, so that a CUDA graph can record them."""

import copy
import functools
from collections import Counter

import pytest
import torch
from torch.nn import functional as F

import ag
from ag.engine.decide import NonFiniteScoreError
from ag.engine.step import decode
from tests.support.gates_for import gates_for
from tests.support.recorded import kernels_seen
from tests.support.refused import refuses

PROMPT, PADDED = 40, [40, 33, 37]
#: Policies whose steps are alike, by name: what EvictionCache takes, and what gates are attached.
ALIKE = {
    "full": (("full",), {}, None),
    "prefill": (("snapkv", 20), {"window": 4}, None),
    "full, windowed": (("full",), {"sliding_window": 12}, None),
    "h2o": (("h2o", 20, "every"), {}, None),
    "h2o@heads": (("h2o@heads", 20, "every"), {}, None),
    "h2o@global": (("h2o@global", 20, "every"), {}, None),
    "tova": (("tova", 20, "every"), {}, None),
    "tova@heads": (("tova@heads", 20, "every"), {}, None),
    "tova@pyramid": (("tova@pyramid", 0.5, "every"), {}, None),
    "streaming_llm": (("streaming_llm", 20, "every"), {}, None),
    "streaming_llm@heads": (("streaming_llm@heads", 20, "every"), {}, None),
    "keydiff": (("keydiff", 20, "every"), {}, None),
    "knorm": (("knorm", 20, "every"), {}, None),
    "random": (("random", 20, "every"), {}, None),
    "gates of the prompt": (("flags",), {}, {"covers": "prompt"}),
    "gates of all": (("flags",), {}, {"covers": "all", "kind": "mlp", "scope": "causal"}),
    "gates of all that look back": (("flags",), {}, {"covers": "all", "window": 8, "scope": "causal"}),
    "gates with a budget": (("gates", 20, "every"), {}, {"covers": "all", "kind": "mlp", "scope": "causal"}),
}
#: Policies of which they are not: queries that are looked back at move on, a plugin or a wrapper may do anything, and
#: what is rotated anew has to be known at once.
UNLIKE = {
    "snapkv": (("snapkv", 20, "every"), {"window": 4}),
    "expected_attention": (("expected_attention", 20, "every"), {}),
    "wrapped": (("h2o+vatp", 20, "every"), {"sinks": 2}),
    "every third": (("h2o", 20, "steps:3"), {}),
    "slots": (("streaming_llm", 20, "every"), {"positions": "slot"}),
}


@pytest.fixture(autouse=True)
def plain_products(monkeypatch):
    """Let PyTorch multiply: products of one token in C++ are no operation of PyTorch's."""
    monkeypatch.setattr("ag.model.products.best_version", lambda: "reference")


@pytest.fixture
def read(tiny_llama, tiny_mistral):
    """Make a cache that has read a prompt of one sequence, or of three that are padded."""

    def made(given, options, gates, batch, layers=3):
        options = dict(options)
        window = options.pop("sliding_window", None)
        make = tiny_llama if window is None else functools.partial(tiny_mistral, sliding_window=window)
        model = make(num_hidden_layers=layers)
        if gates is not None:
            ag.attach(model, gates_for(model, recent_tokens=4, **gates))
        cache = ag.EvictionCache(model, *given, **options)
        ids = torch.randint(3, 128, (batch, PROMPT), generator=torch.Generator().manual_seed(1))
        mask = torch.ones_like(ids)
        for row, length in zip(mask, PADDED, strict=False):
            row[: PROMPT - length] = 0
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        with torch.no_grad():
            model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
        return model, cache

    return made


def tokens(batch, number):
    return torch.randint(3, 128, (batch, 1), generator=torch.Generator().manual_seed(100 + number))


def work(recording):
    """The operations that compute something, with their operands."""
    return [x for x in recording.operations if x[0] in set(recording.work)]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ALIKE)
def test_two_steps_are_the_same_operations_on_the_same_memory(read, monkeypatch, name, batch):
    check_alike(read, monkeypatch, name, batch)


@torch.no_grad()
def check_alike(read, monkeypatch, name, batch, layers=3, before=10):
    model, cache = read(*ALIKE[name], batch, layers)
    cache.reserve(40)
    step = ag.NextToken(model, cache)
    with kernels_seen(monkeypatch) as recording:
        for number in range(before):
            step(tokens(batch, number))
        found = []
        for number in range(before, before + 2):
            with recording() as each:
                step(tokens(batch, number))
            found.append(each)
    assert not found[0].waits and not found[1].waits
    first, second = map(work, found)
    assert first == second and len(first) > 15 * layers


def state(cache):
    """What a cache depends on, tensors as lists."""

    def plain(x):
        if isinstance(x, torch.Tensor):
            return x.tolist()
        if isinstance(x, dict):
            return {key: plain(value) for key, value in x.items() if key != "scoring_seconds"}
        return [plain(value) for value in x] if isinstance(x, (list, tuple)) else x

    return plain({name: part.state_dict() for name, part in cache.parts.items()})


@pytest.mark.parametrize("batch", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ALIKE)
def test_a_step_that_is_replayed_does_what_the_model_does(read, monkeypatch, name, batch):
    check_replayed(read, monkeypatch, name, batch)


@torch.no_grad()
def check_replayed(read, monkeypatch, name, batch, layers=3, steps=45):
    """Over ends of pages, and with a token that goes by itself and a copy in between, 14 steps before the end."""
    model, cache = read(*ALIKE[name], batch, layers)
    plain, made, replayed = copy.deepcopy(cache), [], []
    with kernels_seen(monkeypatch) as recording:

        def record(run):
            with recording() as found:
                out = run()
            assert not found.waits
            made.append(found)

            def replay():
                replayed.append(found)
                found.replay()

            return out, replay

        mine, theirs = ag.NextToken(model, cache, record), ag.NextToken(model, plain)
        for each in (cache, plain):
            each.reserve(30)
        for number in range(steps):
            assert torch.equal(mine(tokens(batch, number)), theirs(tokens(batch, number))), number
            if number == steps - 15:
                for each in (cache, plain):
                    model(tokens(batch, 99), position_ids=each.text.next_ranks(), past_key_values=each)
                copies = [copy.deepcopy(each) for each in (cache, plain)]
    assert len(made) >= 2 and len(replayed) >= 10
    assert state(cache) == state(plain)
    assert [each.seen_tokens for each in copies] == [cache.seen_tokens - 14] * 2
    cache.batch_select_indices(torch.tensor([0, 0]))
    plain.batch_select_indices(torch.tensor([0, 0]))
    assert torch.equal(mine(tokens(2, 50)), theirs(tokens(2, 50)))


@torch.no_grad()
@pytest.mark.parametrize("name", UNLIKE)
def test_what_cannot_be_recorded_runs_as_it_is(read, name):
    model, cache = read(*UNLIKE[name], None, 1)
    plain = copy.deepcopy(cache)

    def record(run):
        raise AssertionError("recorded")

    step = ag.NextToken(model, cache, record)
    for number in range(8):
        want = model(tokens(1, number), past_key_values=plain).logits[:, -1]
        assert torch.equal(step(tokens(1, number)), want)


@torch.no_grad()
def test_scores_that_are_not_finite_are_found_within_sixteen_steps(read):
    model, cache = read(*ALIKE["h2o"], 1)
    step = ag.NextToken(model, cache)
    for number in range(20):
        step(tokens(1, number))
    cache.evicting_layers[1].memory["sums"][:, :, :4] = float("nan")
    with refuses(NonFiniteScoreError, "H2O", "layer 1", "finite"):
        for number in range(16):
            step(tokens(1, number))


@pytest.mark.parametrize("given", [(1, 2), (1,)])
def test_one_token_of_each_sequence_behind_a_prompt(read, tiny_llama, given):
    model, cache = read(*ALIKE["full"], 1)
    with refuses(ag.errors.UserError, str(list(given)), "[B, 1]"):
        ag.NextToken(model, cache)(torch.ones(given, dtype=torch.long))
    with refuses(ag.errors.UserError, "0 columns", "prompt"):
        ag.NextToken(model, ag.EvictionCache(model, "full"))(tokens(1, 0))


#: Launches of a kernel on a card: attention is split and combined, and records go with their tokens.
LAUNCHES = {"paged_decode": 2, "paged_decode_weights": 2}


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "most"),
    [("full", 26), ("prefill", 26), ("gates of the prompt", 26), ("gates of all", 31), ("h2o", 34), ("tova", 34)],
)
def test_operations_of_a_layer(tiny_llama, monkeypatch, name, most):
    """What one more layer adds to a step on a card, kernels included; transformers' own cache takes 36."""
    given, options, gates = ALIKE[name]

    def counted(layers):
        model = tiny_llama(num_hidden_layers=layers)
        if gates is not None:
            ag.attach(model, gates_for(model, recent_tokens=4, **gates))
        cache = ag.EvictionCache(model, *given, **options)
        with kernels_seen(monkeypatch) as recording:
            model(torch.arange(3, 43)[None], past_key_values=cache)
            cache.reserve(40)
            step = ag.NextToken(model, cache)
            for number in range(8):
                step(tokens(1, number))
            with recording() as found:
                step(tokens(1, 8))
        launches = Counter({kernel: LAUNCHES.get(kernel, 1) * n for kernel, n in Counter(found.work).items()})
        launches["records"] = sum(bool(layer.memory) for layer in cache.evicting_layers)
        return launches

    more = counted(4)
    more.subtract(counted(2))
    assert more.total() / 2 <= most, more


@pytest.mark.parametrize("given", [{"do_sample": False}, {"do_sample": True, "temperature": 1.3, "top_p": 0.9}])
def test_the_decoding_loop_is_that_of_transformers(tiny_llama, given):
    """Of sequences that end at different tokens, and of a text that goes on."""
    model = tiny_llama(eos_token_id=5, pad_token_id=0)
    ids = torch.randint(6, 128, (3, 20), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    found = []
    for extra in ({}, {"custom_generate": decode}):
        torch.manual_seed(1)
        cache = ag.EvictionCache(model, "h2o", 12, "every")
        options = {"past_key_values": cache, "max_new_tokens": 25, **given, **extra}
        text = model.generate(input_ids=ids, attention_mask=mask, **options)
        longer = torch.cat([mask, torch.ones(3, text.shape[1] + 2 - 20, dtype=torch.long)], 1)
        text = model.generate(input_ids=F.pad(text, (0, 2), value=7), attention_mask=longer, **options)
        found.append((text.tolist(), state(cache)["text"]))
    assert found[0] == found[1]
    assert len({tuple(row) for row in found[0][0]}) == 3

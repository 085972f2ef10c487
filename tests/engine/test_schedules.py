"""Schedules: whole policies against slow ones, memory, state that moves, tokens that are taken back."""

import copy
import gc
import re
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import ag
from ag.engine import EvictionCache
from ag.engine.block_pool import BLOCK
from ag.engine.evictor import NonFiniteScoreError
from ag.engine.kv_store import SPARE_BLOCKS
from ag.engine.layer import Layer
from ag.errors import UserError
from tests.support import slow_policies
from tests.support.batches import columns, padded, read, row
from tests.support.held import feed, observed_calls, run, seen_by
from tests.support.memory import storages
from tests.support.pairs import covering
from tests.support.refused import refuses

STEPS = 8
PAGE_BYTES = 16 * (2 * 16 * 4 + 4)  # of the tiny model: key, value and token index of a token
GREEDY = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}  # of which one makes steps:3 due
PROMPTS = (29, 23)
#: Each token once: two of a kind have keys of one norm in layer 0, up to rounding.
ROWS = [torch.randperm(125, generator=torch.Generator().manual_seed(p))[: p + STEPS] + 3 for p in PROMPTS]
SCHEDULES = ("prefill", "blocks:7", "every", "steps:3", "blocks:7+every")
SNAP = {"window": 4, "kernel": 3}
#: Options of the scorers that :mod:`slow_policies` knows, by name; what follows a hyphen says which.
SCORERS: dict[str, dict[str, Any]] = {
    "streaming_llm": {"sinks": 2},
    "h2o": {},
    "h2o-window": {"window": 5},
    "h2o-sinks": {"sinks": 2, "recent": 3},
    "scissorhands": {"window": 9, "recent": 3},
    "tova": {},
    "tova-kv_head": {"scope": "kv_head", "recent": 0},
    "snapkv": SNAP,
    "snapkv-avg": {"pooling": "avg", "window": 3},
    "cake": SNAP | {"kernel": 5},
}


def make(name: str, schedule: str, budget: float = 0.5, **options: Any) -> ag.Policy:
    """Make the policy of a name, with the options of its first part in ``SCORERS``."""
    base, end = re.fullmatch(r"([\w-]+)(.*)", name).groups()
    given = SCORERS.get(base, {}) | ({"observers": 4} if end.endswith("@preference") else {})
    return ag.policy(base.partition("-")[0] + end, budget=budget, schedule=schedule, **given | options)


@pytest.mark.parametrize(
    ("name", "reading", "writing", "family"),
    [
        *covering(
            name=list(SCORERS),
            reading=["", "blocks:7"],
            writing=["", "every", "steps:3"],
            family=["tiny_llama", "tiny_mistral"],
        ),
        ("h2o", "blocks:1", "every", "tiny_llama"),
        ("snapkv", "blocks:16", "steps:5", "tiny_mistral"),
    ],
)
def test_what_is_held_is_what_the_policy_says(family, name, reading, writing, request, monkeypatch):
    """Every layer's own q, k, v go to a slow version of the whole policy, which must hold the same after every pass."""
    windows = {"sliding_window": 24} if family == "tiny_mistral" else {}
    model, prompt, passes = request.getfixturevalue(family)(**windows), 27, [1, 1, 3, 1, 1, 1, 2]
    spec, capacity, schedule = name.partition("-")[0], 15, "+".join(filter(None, (reading, writing))) or "prefill"
    calls = observed_calls(monkeypatch)
    policy = ag.policy(f"{spec}@uniform", budget=capacity, schedule=schedule, **SCORERS[name])
    result = run(model, policy, [row(prompt + sum(passes), 5)], [prompt], steps=passes)
    for layer, seen in calls.items():
        q, k, first = seen_by(seen, "q", 0), seen_by(seen, "k", 0), seen[0][0]
        slow = slow_policies.Layer(spec, q, k, first.scaling, capacity, SCORERS[name], first.window)
        wanted = slow_policies.follow(slow, prompt, passes, policy.block, policy.steps)
        assert [held[layer][0] for held in result.held] == wanted


@pytest.mark.parametrize(
    ("name", "sees_all"),
    [
        *[(name, False) for name in ("snapkv", "rkv", "cake@preference", "expected_attention", "snapkv+vatp")],
        *[(name, True) for name in ("scissorhands", "tova", "snapkv@heads")],
    ],
)
def test_a_step_scores_the_sequences_that_are_evicted_from(llama, name, sees_all, monkeypatch):
    """The third prompt is shorter than the budget, and reaches it at another step than the others."""
    policy, prompts = make(name, "steps:3", 14), (*PROMPTS, 12)
    rows = [*ROWS, ROWS[0].flip(0)[: 12 + STEPS]]
    alone = [run(llama, policy, [text], [prompt]).held for text, prompt in zip(rows, prompts, strict=True)]
    scored, cls = [], type(policy.scorer)
    score = cls.score
    monkeypatch.setattr(cls, "score", lambda self, inputs: scored.append(len(inputs.lengths)) or score(self, inputs))
    held = run(llama, policy, rows, prompts).held
    for after, layers in enumerate(held):
        assert layers == [[text[after][layer][0] for text in alone] for layer in range(3)]
    first = 3 if name == "expected_attention" else 2  # which has sums of all prompts until then
    evicted_together = [n for n in ([3] * 4 if sees_all else [first, 1, 2, 1]) for _ in range(3)]
    assert scored[3:] == evicted_together


@pytest.mark.parametrize(("name", "schedule"), [("h2o", "prefill"), ("snapkv", "steps:3"), ("tova@heads", "every")])
def test_a_batch_without_compiled_kernels(llama, name, schedule, monkeypatch):
    """As on a machine without a compiler."""
    held = []
    for version in (None, "reference"):
        if version:
            monkeypatch.setenv("AG_KERNELS", version)
        held.append(run(llama, make(name, schedule, 12), ROWS, PROMPTS).held)
    assert held[0] == held[1]


@torch.no_grad()
def test_steps_after_a_long_prompt_read_what_is_held(tiny_llama):
    """Not the room of the prompt's tokens, which were evicted."""
    model = tiny_llama()
    cache = ag.EvictionCache(model, make("scissorhands", "every", 16))
    model(torch.randint(3, 128, (1, 1200)), past_key_values=cache)
    [store] = cache.state.stores
    room = (1 + SPARE_BLOCKS) * BLOCK
    assert store.slots <= 2 * room < 1200
    assert all(record.shape[-1] == store.slots for records in store.records for record in records.values())
    model(torch.tensor([[5]]), past_key_values=cache)
    assert int(store.lengths_cpu.max()) == 16


# ---- budgets


def per_layer(held):
    return [[len(head) for head in layer[0]] for layer in held]


@pytest.mark.parametrize(
    ("name", "schedule"),
    [("h2o", "every"), ("snapkv@pyramid", "steps:3"), ("cake@preference", "blocks:4+every"), ("tova@heads", "every")],
)
def test_a_prompt_that_fits_is_cut_to_the_mean_later(llama, name, schedule):
    policy = make(name, schedule, 12)
    result = run(llama, policy, [ROWS[0]], [9], steps=[1] * 7)
    for after, held in enumerate(result.held):
        most = 12 + (after % policy.steps if after else 0)
        if name.endswith("heads") and 9 + after > 12:
            assert [sum(layer) for layer in per_layer(held)] == [2 * most] * 3
        else:
            assert per_layer(held) == [[min(most, 9 + after)] * 2] * 3


@pytest.mark.parametrize("name", ["snapkv+caote@pyramid", "tova@heads"])
def test_a_long_prompt_in_blocks_never_holds_more_than_budget_and_block(tiny_llama, name, monkeypatch):
    """Measured at every arrival: in the store of a layer by head, and in the bytes of all layers."""
    prompt, budget, block = 208, 64, 32
    model, sizes, read = tiny_llama(max_position_embeddings=prompt), [], Layer.append_and_attend
    cache = EvictionCache(model, make(name, f"blocks:{block}", budget))

    def recording(layer, call, batch, store, *others):
        lengths = store.lengths[layer.index]
        before = lengths.flatten().tolist()
        found = read(layer, call, batch, store, *others)
        sizes.append((before, lengths.flatten().tolist(), cache.layer_nbytes()[layer.index]))
        return found

    monkeypatch.setattr(Layer, "append_and_attend", recording)
    with torch.no_grad():
        model(row(prompt)[None], past_key_values=cache, logits_to_keep=1)
    assert len(sizes) == 3 * -(-prompt // block)
    most = [budget] * 3
    if "pyramid" in name:
        most = [max(heads) for heads in per_layer(columns(cache))]
        assert sum(most) == 3 * budget
        assert most[0] > most[1] > most[2]
    for index, (before, after, nbytes) in enumerate(sizes):
        mean = 2 * most[index % 3]
        assert sum(before) <= mean if "heads" in name else max(before) <= mean // 2
        assert sum(after) <= mean + 2 * block
        assert nbytes <= sum(-(-length // 16) for length in after) * PAGE_BYTES


@pytest.mark.parametrize("name", ["scissorhands@heads"])
def test_decoding_with_every_holds_flat_memory(tiny_llama, name):
    steps = 60
    model = tiny_llama(max_position_embeddings=steps + 64)
    cache, sizes, everything = EvictionCache(model, make(name, "every", 32)), [], []
    ids = row(40 + steps, 0)[None]
    gc.collect()
    gc.freeze()  # the collector does not walk what other tests left, which takes seconds
    with torch.no_grad():
        model(ids[:, :40], past_key_values=cache, logits_to_keep=1)
        for t in range(40, 40 + steps):
            model(ids[:, t : t + 1], past_key_values=cache)
            sizes.append(cache.nbytes)
            if t in (40 + steps // 3, 39 + steps):
                everything.append(sum(storages().values()))
    assert max(sizes) - min(sizes) <= 3 * 2 * PAGE_BYTES  # what a head loses another one gets
    assert everything[1] - everything[0] <= 64 * steps  # of each token of the input: its validity, its token index


# ---- sequences that move, tokens that are taken back


@pytest.mark.parametrize("name", ["scissorhands@heads", "cake@preference"])
def test_reset_forgets_all_that_was_recorded(llama, name):
    policy = make(name, "steps:3")
    cache = run(llama, policy, ROWS, PROMPTS).cache
    assert any(x > 0 for x in cache.report().seconds)
    cache.reset()
    assert (cache.state.evictor.budgets.layer_budget, cache.interceptor.batch, cache.seen_tokens, cache.nbytes) == (
        {},
        None,
        0,
        0,
    )
    for layer, new in zip(cache.state.layers, EvictionCache(llama, policy).state.layers, strict=True):
        assert vars(layer) | {"watch": layer.watch.seconds} == vars(new) | {"watch": 0.0}
    again = feed(cache, llama, [ROWS[1]], [[23], *[[1]] * STEPS])
    assert again.held == run(llama, policy, [ROWS[1]], [23]).held
    cache = run(llama, make(name, "prefill"), ROWS, PROMPTS).cache  # which remembers nothing, as nothing more goes
    assert not any(cache.state.stores[0].records)
    assert not any(x.observation_window.queries or x.gate_memory for x in cache.state.layers)


@pytest.mark.parametrize(
    ("name", "schedule", "fed", "back", "reason"),
    [
        ("tova", "every", 3, 1, "first 32"),
        ("snapkv", "steps:3", 2, 1, "recorded"),
        ("tova", "prefill", 3, 4, "first 29"),
    ],
)
def test_crop_where_something_was(llama, name, schedule, fed, back, reason):
    cache = EvictionCache(llama, make(name, schedule, 12))
    before = feed(cache, llama, [ROWS[0][: 29 + fed]], [[29], *[[1]] * fed]).held[-1]
    with refuses(UserError, "crop", reason):
        cache.crop(-back)
    assert columns(cache) == before
    assert cache.seen_tokens == 29 + fed


# ---- bad input


@torch.no_grad()
@pytest.mark.parametrize("allocator", ["preference", "heads", "pyramid"])
def test_a_sequence_that_has_ended_keeps_its_tokens(tiny_llama, allocator):
    """Later parts of the prompt have no queries of it, whose mean and variance would be NaN."""
    model, rows = tiny_llama(), [row(5), row(20)]
    policy = ag.policy(f"cake@{allocator}", 8, "blocks:8", window=1)
    together, alone = ag.EvictionCache(model, policy), ag.EvictionCache(model, policy)
    model(**padded(rows), past_key_values=together)
    model(rows[0][None], past_key_values=alone)
    assert (
        [layer[0] for layer in columns(together)] == [layer[0] for layer in columns(alone)] == [[[*range(5)]] * 2] * 3
    )


@pytest.mark.parametrize(
    ("name", "schedule"),
    [("h2o", "every"), ("tova@heads", "blocks:7"), ("knorm+caote", "prefill"), ("kvzip", "prefill")],
)
def test_scores_that_are_not_finite(tiny_llama, name, schedule):
    model = tiny_llama()
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0, 0] = float("nan")
    with refuses(NonFiniteScoreError, f"'{name}'", "budget=12", "layer 1", "finite"):
        run(model, make(name, schedule, 12), [ROWS[0]], [29])


@torch.no_grad()
def test_scores_that_are_not_finite_are_refused_until_the_cache_is_reset(tiny_llama, tmp_path):
    model = tiny_llama()
    cache = EvictionCache(model, make("knorm", "every", 12))
    model(ROWS[0][None, :29], past_key_values=cache)
    key = model.model.layers[1].self_attn.k_proj.weight
    old = key.clone()
    key[0, 0] = float("nan")
    model(ROWS[0][None, 29:30], past_key_values=cache)
    for _ in range(2):
        with refuses(NonFiniteScoreError, "'knorm'", "layer 1"):
            cache.save(tmp_path / "cache")
    key.copy_(old)
    cache.reset()
    model(ROWS[0][None, :29], past_key_values=cache)
    cache.save(tmp_path / "cache")


# ---- the report


@torch.no_grad()
def test_what_the_last_layer_holds_may_be_asked_before_a_step(tiny_llama):
    model = tiny_llama()
    caches = [read(model, ROWS[0][:29], make("h2o", "every", 12)) for _ in range(2)]
    held = [caches[0].kept_positions(layer)[0] for layer in (-1, 2)]
    assert all(torch.equal(*heads) for heads in zip(*held, strict=True))
    for t in range(29, 32):
        assert torch.equal(*(model(ROWS[0][None, t : t + 1], past_key_values=x).logits for x in caches))
    assert columns(caches[0]) == columns(caches[1])


def test_report(llama):
    cache = EvictionCache(llama, make("h2o@heads", "every", 12))
    policy = "ag.policy('h2o@heads', budget=12, schedule='every')"
    assert str(cache.report()).startswith(f"{policy}: 100.0% of all 0 tokens held")
    assert repr(cache) == f"<EvictionCache {policy}: empty>"
    held = feed(cache, llama, ROWS, [PROMPTS, *[[1, 1]] * STEPS]).held[-1]
    report = cache.report()
    assert report.kept == [[sum(len(layer[b][h]) for b in range(2)) for h in range(2)] for layer in held]
    assert report.tokens == sum(PROMPTS) + 2 * STEPS
    assert sum(report.nbytes) == cache.nbytes
    assert report.kept_share == pytest.approx(cache.kept_share()) == 24 * 2 * 3 / (report.tokens * 6)
    assert all(0 < x < 10 for x in report.seconds) and cache.scoring_seconds == sum(report.seconds)
    assert repr(cache).endswith(f"{report.kept_share:.1%} held in {cache.nbytes:,} bytes>")
    for index, line in enumerate(str(report).splitlines()[2:5]):
        cells = line.replace(",", "").split()
        assert cells[:4] == [str(index), str(min(report.kept[index])), "24.0", str(max(report.kept[index]))]
        assert cells[5] == str(report.nbytes[index])


@pytest.mark.parametrize("places", ["original", "slot"])
def test_a_report_compares_with_the_cache_of_transformers(tiny_llama, places):
    """Which has the type of the weights, also where the pool needs float32."""
    model = tiny_llama().to(torch.bfloat16)
    plain = DynamicCache(config=model.config)
    with torch.no_grad():
        model(row(40)[None], past_key_values=plain)
    cache = read(model, row(40), "streaming_llm", 20, positions=places)
    assert cache.report().plain_nbytes == sum(x.keys.nbytes + x.values.nbytes for x in plain.layers)


@pytest.mark.parametrize(("name", "schedule"), [("tova@pyramid", "blocks:8+steps:3")])
def test_heads_that_are_evicted_alike_hold_the_same_slots(tiny_llama, name, schedule):
    """What the mean over a layer's heads relies on, also behind forks and joins."""
    model = tiny_llama()
    policy = ag.policy(name, 10, schedule)
    assert policy.same_for_all_heads
    assert not any(ag.policy(other, 10).same_for_all_heads for other in ("tova@heads", "tova+caote"))
    pool = ag.Pool(model, 1 << 20)
    caches = [EvictionCache(model, policy, pool=pool) for _ in range(2)]
    ids, mask = torch.stack([row(60, 1), row(60, 2)]), torch.ones(2, 60, dtype=torch.long)
    mask[1, :13] = 0
    places = (mask.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        for cache in caches:
            model(ids, attention_mask=mask, position_ids=places, past_key_values=cache)
        copied = copy.deepcopy(caches[0])
        caches[0].add(caches[1])
        for cache in (caches[0], copied):
            for _ in range(8):
                tokens = torch.full((len(cache.state.sequences), 1), 5)
                model(tokens, past_key_values=cache)
            for layer in range(3):
                token_indices = cache.state.stores[0].token_indices(layer)
                assert torch.equal(token_indices, token_indices[:, :1].expand_as(token_indices))


@pytest.mark.parametrize("spec", ["h2o@pyramid", "h2o@preference"])
@torch.no_grad()
def test_recents_are_of_the_mean_where_layers_get_unequal_budgets(tiny_llama, spec):
    """Counted by the host or decided by PyTorch, half of the mean budget stays for the newest tokens of each layer."""
    model, held = tiny_llama(num_hidden_layers=4), []
    for counted in (True, False):
        cache = ag.EvictionCache(model, spec, 16, "every")
        assert cache.state.evictor._host_counts_decode
        cache.state.evictor._host_counts_decode = counted
        model(row(80)[None], past_key_values=cache)
        for token in row(20, 1):
            model(token[None, None], past_key_values=cache)
        held.append(columns(cache))
    assert held[0] == held[1]
    assert len({len(layer[0][0]) for layer in held[0]}) > 1
    assert all({*range(92, 100)} <= {*head} for layer in held[0] for head in layer[0])

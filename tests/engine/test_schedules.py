"""Schedules: physical drop against masks, whole policies against slow ones, budgets, padding, state that moves."""

import copy
import gc
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet

import ag
from ag.config import ModelConfig
from ag.engine import EvictionCache
from ag.engine.decide import NonFiniteScoreError
from ag.engine.layer import Layer
from ag.engine.wrappers import WRAPPERS
from ag.errors import BudgetWarning, UserError
from ag.model import base as models
from tests.support import slow_policies
from tests.support.batches import padded, row, step
from tests.support.bounds import hold, in_float64, of_logits, of_nats
from tests.support.gates_for import gates_for
from tests.support.held import alone_too, check, contents, everything, feed, observed_calls, run, seen_by
from tests.support.memory import storages
from tests.support.pairs import covering
from tests.support.refused import refuses

STEPS = 8
PAGE_BYTES = 16 * (2 * 16 * 4 + 4)  # of the tiny model: key, value and rank of a token
GREEDY = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}  # of which one makes steps:3 due
PROMPTS = (29, 23)
#: Each token once: two of a kind have keys of one norm in layer 0, up to rounding.
ROWS = [torch.randperm(125, generator=torch.Generator().manual_seed(p))[: p + STEPS] + 3 for p in PROMPTS]
SCHEDULES = ("prefill", "blocks:7", "every", "steps:3", "blocks:7+every")
SNAP = {"window": 4, "kernel": 3}
#: Options of scorers by name; what follows a hyphen says which.
SCORERS: dict[str, dict[str, Any]] = {
    "streaming_llm": {"sinks": 2},
    "h2o": {},
    "h2o-window": {"window": 5},
    "h2o-sinks": {"sinks": 2, "recent": 3},
    "h2o-max": {"group": "max"},
    "h2o-count": {"normalize": "count"},
    "h2o-count_window": {"normalize": "count", "window": 9, "recent": 2},
    "scissorhands": {"window": 9, "recent": 3},
    "scissorhands-count": {"window": 9, "recent": 3, "count": True},
    "tova": {},
    "tova-kv_head": {"scope": "kv_head", "recent": 0},
    "tova-max": {"scope": "kv_head", "group": "max"},
    "snapkv": SNAP,
    "snapkv-avg": {"pooling": "avg", "window": 3},
    "cake": SNAP | {"kernel": 5},
    "gates": {},
    "gates-recent": {"recent": 3, "sinks": 1},
    "random": {},
    "knorm": {"recent": 2},
    "keydiff": {"sinks": 1},
    "rkv": SNAP | {"threshold": 0.1},
    "kvzip": {"sinks": 1, "chunk": 12, "ask": "5 6 7", "ask_part": "8 9", "overlap": 2, "answer": "4"},
    "expected_attention": {"sinks": 2, "future": 8, "window": 6},
    "expected_attention-mixture": {"sinks": 1, "future": 5, "window": 6, "mixture": True, "eps": 0.01},
}
WRAPPED = {base: list(WRAPPERS) for base in ("h2o", "snapkv", "tova", "cake")}
WRAPPED |= dict.fromkeys(("gates", "keydiff", "rkv", "expected_attention"), ["caote", "fastcaote", "criticalkv"])
WRAPPED["knorm"] = ["caote", "fastcaote"]  # under criticalkv equal tokens of layer 0 tie, up to rounding
WITHOUT_ROWS = ("gates", "kvzip", "random", "knorm", "keydiff", "rkv", "expected_attention")
#: Every scorer and every wrapper once, for what does not depend on the two together.
ONCE = [
    "streaming_llm",
    "h2o+obcache_joint",
    "scissorhands",
    "tova+vatp",
    "snapkv+obcache_key",
    "cake+obcache_value",
    "gates+caote",
    "random",
    "knorm+fastcaote",
    "keydiff+criticalkv",
    "rkv",
    "kvzip",
    "expected_attention",
]
UNEVEN = ["pyramid", "preference", "heads", "global"]


def possible(base: str, wrapper: str | None, allocator: str, schedule: str, **others: object) -> bool:
    """Whether the parts combine, as far as this file tries."""
    refused = base == "kvzip" and schedule != "prefill"
    if "-" in base:  # a scorer's options change neither how tokens are shared out nor how they go
        refused |= (allocator, schedule) not in (("uniform", "steps:3"), ("heads", "blocks:7+every"))
    return not refused and (wrapper is None or wrapper in WRAPPED.get(base, []))


def once(allocators: Sequence[str], schedules: Sequence[str]) -> list[tuple[str, ...]]:
    """Names of policies, and schedules: of the pairs of a scorer and a wrapper those of ``ONCE`` alone."""

    def allowed(start: str, **parts: Any) -> bool:
        base, _, wrapper = start.partition("+")
        return possible(base, wrapper or None, **parts)

    found = covering(allowed, start=ONCE, allocator=allocators, schedule=schedules)
    return [(f"{start}@{allocator}", schedule) for start, allocator, schedule in found]


def marked(found: list[tuple[str, ...]]) -> Iterator[ParameterSet]:
    """Yield all; slow are those without a new scorer, wrapper, or pair of an allocator and a schedule.

    So are scorers with options of their own.
    """
    seen: set[str | tuple[str, str]] = set()
    for case in found:
        start, _, allocator = case[0].partition("@")
        new = {*start.split("+"), (allocator, case[1])} - seen
        slow = "-" in start or not new
        if not slow:
            seen |= new
        yield pytest.param(*case, marks=[pytest.mark.slow] * slow)


def make(name: str, schedule: str, budget: float = 0.5, **options: Any) -> ag.Policy:
    """Make the policy of a name, whose first part is a key of ``SCORERS``."""
    base, end = re.fullmatch(r"([\w-]+)(.*)", name).groups()
    given = SCORERS[base] | ({"sinks": 2} if "+vatp" in end else {})
    given |= {"observers": 4} if end.endswith("@preference") else {}
    return ag.policy(base.partition("-")[0] + end, budget=budget, schedule=schedule, **given | options)


def by_steps(prompts: Sequence[int], steps: Sequence[int]) -> list[list[int]]:
    """Passes of prompts and then of so many tokens for each sequence."""
    return [list(prompts), *([n] * len(prompts) for n in steps)]


@pytest.fixture(scope="module")
def llama(tiny_llama):
    model = tiny_llama()
    ag.attach(model, gates_for(model))
    return model


@pytest.mark.parametrize(
    ("name", "schedule", "side"),
    list(
        marked(
            [
                (base + (f"+{wrapper}" if wrapper else "") + f"@{allocator}", schedule, side)
                for base, wrapper, allocator, schedule, side in covering(
                    possible,
                    base=list(SCORERS),
                    wrapper=[None, *WRAPPERS],
                    allocator=["uniform", *UNEVEN],
                    schedule=SCHEDULES,
                    side=["left", "right"],
                )
            ]
        )
    ),
)
def test_physical_drop_equals_masking_and_a_batch_its_rows(llama, name, schedule, side):
    rows = [tokens[:-4] for tokens in ROWS]
    held = alone_too(llama, make(name, schedule), rows, by_steps(PROMPTS, [1] * 4), side).held[-1]
    for b, prompt in enumerate(PROMPTS):
        assert min(len(head) for layer in held for head in layer[b]) < prompt - 3, "nothing was evicted"


FAMILIES = ["tiny_mistral", "tiny_qwen2", "tiny_qwen3", "alternating"]
SOME = ["h2o", "snapkv+caote", "scissorhands@heads", "cake@uniform"]


@pytest.mark.parametrize(("family", "name", "schedule"), covering(family=FAMILIES, name=SOME, schedule=SCHEDULES[1:]))
def test_other_models(family, name, schedule, request):
    """Mistral's window covers all layers, which evict all the same; windowed layers beside full ones are left alone."""
    if family == "alternating":
        kinds = ["full_attention", "sliding_attention", "full_attention"]
        model = request.getfixturevalue("tiny_qwen2")(use_sliding_window=True, sliding_window=9, layer_types=kinds)
    else:
        model = request.getfixturevalue(family)()
    result = run(model, make(name, schedule), ROWS, PROMPTS, "left", [1, 4, 1, 2])
    check(model, ROWS, result)
    lengths = [max(map(len, layer[0])) for layer in result.held[-1]]
    if family == "alternating":
        assert lengths.pop(1) == 9 + 1  # what the two queries of the last pass see
    assert max(lengths) < PROMPTS[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["h2o", "snapkv+obcache_joint@pyramid", "cake", "tova", "gates+fastcaote@heads"])
def test_smollm2_in_float64(smollm2, name):
    """In float32 without a sink, rounding alone would move the logits."""
    model, tokenizer = models.load_base(ModelConfig(name=str(smollm2)))
    text = "A gate looks at every token of the prompt and says whether later tokens will want to see it again. "
    rows = [torch.tensor(tokenizer(text * n).input_ids) for n in (3, 2)]
    # the first layers, and the tokens of the text alone: all 30 and all 49,152 take ten times as long
    words, embedding = torch.cat(rows).unique(), model.get_input_embeddings()
    embedding.weight = model.lm_head.weight = torch.nn.Parameter(embedding.weight[words].detach())
    model.model.layers = model.model.layers[:6]
    model.config.num_hidden_layers, model.config.vocab_size = 6, len(words)
    model, rows = in_float64(model), [torch.searchsorted(words, tokens) for tokens in rows]
    ag.attach(model, gates_for(model).double())
    options = {"window": 8} if name.startswith(("snapkv", "cake")) else {}
    policy = ag.policy(name, 0.4, "every" if name == "cake" else "blocks:16+every", **options)
    check(model, rows, run(model, policy, rows, [len(tokens) - STEPS for tokens in rows]))


@pytest.mark.parametrize(
    ("name", "reading", "writing", "family"),
    [
        *covering(
            name=[name for name in SCORERS if name.partition("-")[0] not in WITHOUT_ROWS],
            reading=["", "blocks:7"],
            writing=["", "every", "steps:3"],
            family=["tiny_llama", "tiny_mistral"],
        ),
        ("h2o", "blocks:1", "every", "tiny_llama"),
        ("tova", "blocks:1", "", "tiny_mistral"),
        ("snapkv", "blocks:1", "steps:5", "tiny_llama"),
        ("scissorhands", "blocks:16", "", "tiny_llama"),
        ("cake", "blocks:16", "steps:5", "tiny_mistral"),
        ("h2o-count", "blocks:5", "steps:3", "tiny_mistral"),
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
    ("name", "schedule", "side"),
    covering(
        name=["h2o", "snapkv", "tova@global", "scissorhands-count", "gates@heads", "cake@preference"],
        schedule=["every", "steps:3"],
        side=["left", "right"],
    ),
)
def test_padding_in_later_turns(llama, name, schedule, side):
    """A pass brings each sequence another number of tokens, or none; steps count a sequence's own tokens."""
    passes = [[29, 20], [3, 1], [2, 0], [1, 1], [0, 4], [1, 3], [1, 1]]
    rows = [tokens[: sum(n[b] for n in passes)] for b, tokens in enumerate(ROWS)]
    alone_too(llama, make(name, schedule), rows, passes, side)


# ---- budgets


def per_layer(held):
    return [[len(head) for head in layer[0]] for layer in held]


@pytest.mark.parametrize(
    ("name", "schedule"), list(marked(once(["uniform", *UNEVEN], ["prefill", "steps:3", "blocks:7+every"])))
)
def test_budgets_are_exact_and_stay(llama, name, schedule):
    """C tokens a head over all layers, or over the heads of a layer; while decoding every layer keeps its own."""
    allocator = name.partition("@")[2]
    policy = make(name, schedule, 12, **({"recent": 3} if name.startswith("scissorhands") else {}))
    result = run(llama, policy, [ROWS[0][:-1]], [29])
    counts = per_layer(result.held[0])
    settled = [sum(layer) for layer in counts]
    assert sum(settled) == 2 * 12 * 3
    if allocator == "uniform":
        assert counts == [[12, 12]] * 3
    elif allocator == "heads":
        assert settled == [24] * 3 and min(map(min, counts)) >= 2
    else:
        assert allocator == "global" or all(first == second for first, second in counts)
        assert len(set(settled)) > 1 or "streaming_llm" in name  # whose scores are the same everywhere
    for after, held in enumerate(result.held[1:], 1):
        extra = 2 * (after if policy.steps is None else after % policy.steps)
        assert [sum(layer) for layer in per_layer(held)] == [n + extra for n in settled]


@pytest.mark.parametrize("schedule", ["every", "steps:3", "blocks:4+every"])
@pytest.mark.parametrize("name", ["h2o", "snapkv@pyramid", "cake@preference", "tova@heads"])
def test_a_prompt_that_fits_is_cut_to_the_mean_later(llama, name, schedule):
    policy = make(name, schedule, 12)
    result = run(llama, policy, [ROWS[0]], [9], steps=[1] * 7)
    for after, held in enumerate(result.held):
        most = 12 + (after % policy.steps if after else 0)
        if name.endswith("heads") and 9 + after > 12:
            assert [sum(layer) for layer in per_layer(held)] == [2 * most] * 3
        else:
            assert per_layer(held) == [[min(most, 9 + after)] * 2] * 3


@pytest.mark.parametrize("name", ["h2o", "snapkv+caote", "tova", "streaming_llm", "h2o@pyramid", "tova@heads"])
def test_a_long_prompt_in_blocks_never_holds_more_than_budget_and_block(tiny_llama, name, monkeypatch):
    """Measured at every arrival: in the store of a layer by head, and in the bytes of all layers."""
    prompt, budget, block = 600, 64, 32
    model, sizes, read = tiny_llama(max_position_embeddings=prompt), [], Layer.read
    cache = EvictionCache(model, make(name, f"blocks:{block}", budget))

    def recording(layer, call, batch, store, *others):
        lengths = store.lengths[layer.index]
        before = lengths.flatten().tolist()
        found = read(layer, call, batch, store, *others)
        sizes.append((before, lengths.flatten().tolist(), cache.layer_nbytes()[layer.index]))
        return found

    monkeypatch.setattr(Layer, "read", recording)
    with torch.no_grad():
        model(row(prompt)[None], past_key_values=cache, logits_to_keep=1)
    assert len(sizes) == 3 * -(-prompt // block)
    most = [budget] * 3
    if "pyramid" in name:
        most = [max(heads) for heads in per_layer(everything(cache))]
        assert sum(most) == 3 * budget
        assert most[0] > most[1] > most[2]
    for index, (before, after, nbytes) in enumerate(sizes):
        mean = 2 * most[index % 3]
        assert sum(before) <= mean if "heads" in name else max(before) <= mean // 2
        assert sum(after) <= mean + 2 * block
        assert nbytes <= sum(-(-length // 16) for length in after) * PAGE_BYTES


@pytest.mark.parametrize("name", ["h2o", "snapkv", "scissorhands@heads"])
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
    if name.endswith("heads"):
        assert max(sizes) - min(sizes) <= 3 * 2 * PAGE_BYTES  # what a head loses another one gets
    else:
        assert max(sizes) == min(sizes) == 3 * 2 * 3 * PAGE_BYTES  # for the token that comes
    assert everything[1] - everything[0] <= 64 * steps  # of each token of the input: its validity, its rank


@pytest.fixture(scope="module")
def plain_text(tiny_llama):
    """A left-padded batch and what the untouched model makes of it."""
    batch = padded([tokens[:p] for tokens, p in zip(ROWS, PROMPTS, strict=True)])
    return batch, tiny_llama().generate(**batch, **GREEDY)


# ---- sequences that move, tokens that are taken back


@pytest.mark.parametrize(
    ("name", "schedule", "how"),
    covering(
        name=["h2o", "scissorhands@heads", "snapkv", "gates", "h2o@pyramid", "cake@preference"],
        schedule=["prefill", "steps:3", "blocks:7+every"],
        how=["reorder_cache", "batch_select_indices", "batch_repeat_interleave"],
        allowed=lambda name, schedule, **_: schedule != "prefill" or name in ("h2o", "gates"),  # nothing is recorded
    ),
)
def test_sequences_move_with_what_was_recorded(llama, name, schedule, how):
    """Reordered, repeated and dropped sequences go on as they would have alone."""
    policy = make(name, schedule)
    alone = [run(llama, policy, [tokens[: p + 4]], [p]) for tokens, p in zip(ROWS, PROMPTS, strict=True)]
    cache = EvictionCache(llama, policy)
    feed(cache, llama, [tokens[: p + 2] for tokens, p in zip(ROWS, PROMPTS, strict=True)], [PROMPTS, *[[1, 1]] * 2])
    if how == "batch_repeat_interleave":
        chosen = [0, 0, 1, 1]
        cache.batch_repeat_interleave(2)
    else:
        chosen = [1, 1, 0]
        getattr(cache, how)(torch.tensor(chosen))
    mask = cache.valid.long()
    for at in range(2, 4):  # the first of them is due under steps:3
        mask = torch.cat([mask, torch.ones(len(chosen), 1, dtype=torch.long)], 1)
        logits = step(llama, cache, torch.stack([ROWS[b][PROMPTS[b] + at] for b in chosen])[:, None], mask)
        for place, b in enumerate(chosen):
            hold(logits[place, 0], alone[b].logits[0][PROMPTS[b] + at], of_logits(llama))
            for layer in range(3):
                assert contents(cache, layer)[place] == alone[b].held[at + 1][layer][0]


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("h2o", "every"),
        ("h2o@pyramid", "steps:3"),
        ("snapkv", "blocks:7+every"),
        ("scissorhands@heads", "every"),
    ],
)
def test_beam_search(llama, name, schedule, plain_text):
    """With room for all it is that of the untouched model; without, its best beam is what its tokens alone make."""
    batch = plain_text[0]
    beams = GREEDY | {"num_beams": 3}
    cache = EvictionCache(llama, make(name, schedule, 60))
    assert torch.equal(llama.generate(**batch, past_key_values=cache, **beams), llama.generate(**batch, **beams))
    cache = EvictionCache(llama, make(name, schedule, 12))
    wanted = {"output_scores": True, "return_dict_in_generate": True}
    out = llama.generate(**batch, past_key_values=cache, **beams, **wanted)
    for b, p in enumerate(PROMPTS):
        tokens = out.sequences[b][29 - p :]
        logits = run(llama, make(name, schedule, 12), [tokens], [p]).logits[0][p - 1 : -1]
        score = logits.log_softmax(-1).gather(1, tokens[p:, None]).sum() / 5
        assert float(out.sequences_scores[b]) == pytest.approx(float(score), abs=of_nats(llama))


@pytest.mark.parametrize("name", ["h2o", "scissorhands@heads", "snapkv", "gates", "h2o@pyramid", "cake@preference"])
def test_reset_forgets_all_that_was_recorded(llama, name):
    policy = make(name, "steps:3")
    cache = run(llama, policy, ROWS, PROMPTS).cache
    assert any(x > 0 for x in cache.report().seconds)
    cache.reset()
    assert (cache.evictor.decision.budgets.settled, cache.batch, cache.seen_tokens, cache.nbytes) == ({}, None, 0, 0)
    for layer, new in zip(cache.layers, EvictionCache(llama, policy).layers, strict=True):
        assert vars(layer) | {"watch": layer.watch.seconds} == vars(new) | {"watch": 0.0}
    again = feed(cache, llama, [ROWS[1]], [[23], *[[1]] * STEPS])
    assert again.held == run(llama, policy, [ROWS[1]], [23]).held


def test_nothing_is_remembered_that_no_later_decision_needs(llama):
    for name in ("h2o", "scissorhands", "snapkv", "gates"):
        for schedule in ("prefill", "blocks:7"):
            cache = run(llama, make(name, schedule), ROWS, PROMPTS).cache
            assert not any(cache.store.records)
            for layer in cache.layers:
                assert (layer.observation_window.queries, bool(layer.gate_memory)) == (None, False)


@pytest.mark.parametrize(
    ("name", "schedule", "fed", "back", "reason"),
    [
        ("tova", "every", 3, 1, "first 32"),
        ("tova", "steps:3", 5, 3, "first 32"),
        ("h2o", "every", 3, 1, "first 32"),
        ("snapkv", "steps:3", 2, 1, "recorded"),
        ("tova", "prefill", 3, 4, "first 29"),
        ("h2o", "blocks:7", 3, 4, "first 29"),
    ],
)
def test_crop_where_something_was(llama, name, schedule, fed, back, reason):
    cache = EvictionCache(llama, make(name, schedule, 12))
    before = feed(cache, llama, [ROWS[0][: 29 + fed]], [[29], *[[1]] * fed]).held[-1]
    with refuses(UserError, "crop", reason):
        cache.crop(-back)
    assert everything(cache) == before
    assert cache.seen_tokens == 29 + fed


@pytest.mark.parametrize("name", ["h2o", "snapkv@pyramid", "cake@preference", "gates", "tova@heads"])
@pytest.mark.parametrize("schedule", ["prefill", "blocks:7"])
def test_drafts_that_are_taken_back(llama, plain_text, name, schedule):
    """Drafts come with the prompt and after it, and change no word; what the policy keeps of the prompt neither."""
    ids, budget = plain_text[0]["input_ids"][:1], None if name == "gates" and schedule == "prefill" else 12
    text, held = [], []
    for draft in ({}, {"prompt_lookup_num_tokens": 3}, {"assistant_model": copy.deepcopy(llama)}):
        cache = EvictionCache(llama, make(name, schedule, budget))
        text.append(llama.generate(ids, past_key_values=cache, **draft, **GREEDY).tolist())
        held.append([[x[x < ids.shape[1]].tolist() for x in cache.kept_positions(i)[0]] for i in range(3)])
    assert text[0] == text[1] == text[2]
    assert held[0] == held[1] == held[2]


def test_drafts_are_refused_where_they_could_make_something_go(llama, plain_text):
    cache = EvictionCache(llama, make("tova", "every", 12))
    with refuses(UserError, "'tova', budget=12, schedule='every'", "drafts"):
        llama.generate(plain_text[0]["input_ids"][:1], past_key_values=cache, prompt_lookup_num_tokens=3, **GREEDY)


@pytest.mark.parametrize(
    ("name", "schedule", "chunk"),
    covering(
        name=["h2o", "h2o-window", "snapkv+obcache_joint@uniform", "scissorhands", "cake@preference"],
        schedule=["prefill", "blocks:7+every", "blocks:5"],
        chunk=[3, 8, 40],
    ),
)
def test_a_prompt_in_chunks_is_as_one_in_a_piece(llama, name, schedule, chunk, plain_text):
    """``prefill_chunk_size`` in a padded batch: same text, same tokens held."""
    found = []
    for options in ({}, {"prefill_chunk_size": chunk}):
        cache = EvictionCache(llama, make(name, schedule))
        text = llama.generate(**plain_text[0], past_key_values=cache, **options, **GREEDY)
        found.append((text.tolist(), everything(cache)))
    assert found[0] == found[1]


# ---- bad input


@pytest.mark.parametrize("schedule", ["prefill", "every", "blocks:7"])
@pytest.mark.parametrize("name", ["h2o", "tova@heads", "cake", "knorm+caote"])
def test_scores_that_are_not_finite(tiny_llama, name, schedule):
    model = tiny_llama()
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0, 0] = float("nan")
    with refuses(NonFiniteScoreError, f"'{name}'", "budget=12", "layer 1", "finite"):
        run(model, make(name, schedule, 12), [ROWS[0]], [29])


@pytest.mark.parametrize("schedule", ["prefill", "every", "steps:30", "blocks:7"])
@pytest.mark.filterwarnings("error::ag.errors.BudgetWarning")
def test_a_budget_below_what_is_protected_matters_when_something_has_to_go(llama, schedule):
    policy = ag.policy("snapkv", budget=20, schedule=schedule, window=32)
    for lengths in [29], [29, 15]:  # the other sequence's prompt fits
        with pytest.raises(BudgetWarning, match=rf"protects {21 if 'blocks' in schedule else 29} tokens per KV head"):
            run(llama, policy, ROWS[: len(lengths)], lengths, steps=[1])
    if schedule != "every":
        assert per_layer(run(llama, policy, [ROWS[0]], [15], steps=[1] * 20).held[-1]) == [[35, 35]] * 3


# ---- the report


def test_report(llama):
    cache = EvictionCache(llama, make("h2o@heads", "every", 12))
    empty, policy = cache.report(), "ag.policy('h2o@heads', budget=12, schedule='every')"
    assert (empty.tokens, empty.kept, empty.nbytes, empty.kept_share) == (0, [[0, 0]] * 3, [0, 0, 0], 1.0)
    assert (cache.kept_share(), cache.nbytes, cache.seen_tokens, cache.kept_positions(0)) == (1.0, 0, 0, [])
    assert str(empty).startswith(f"{policy}: 100.0% of all 0 tokens held")
    assert repr(cache) == f"<EvictionCache {policy}: empty>"
    held = feed(cache, llama, ROWS, [PROMPTS, *[[1, 1]] * STEPS]).held[-1]
    report = cache.report()
    assert report.kept == [[sum(len(layer[b][h]) for b in range(2)) for h in range(2)] for layer in held]
    assert report.tokens == sum(PROMPTS) + 2 * STEPS
    assert sum(report.nbytes) == cache.nbytes
    assert report.kept_share == pytest.approx(cache.kept_share()) == 24 * 2 * 3 / (report.tokens * 6)
    assert all(0 < x < 10 for x in report.seconds)
    assert repr(cache).endswith(f"{report.kept_share:.1%} held in {cache.nbytes:,} bytes>")
    lines = str(report).splitlines()
    assert len(lines) == 2 + 3 + 1 + 1 and "transformers" in lines.pop()
    for index, line in enumerate(lines[2:5]):
        cells = line.replace(",", "").split()
        assert cells[:4] == [str(index), str(min(report.kept[index])), "24.0", str(max(report.kept[index]))]
        assert cells[5] == str(report.nbytes[index])
    assert lines[-1].split()[:3] == ["all", "24.0", f"{report.kept_share:.1%}"]
    assert len({len(line) for line in lines[1:]}) == 1


@pytest.mark.parametrize("schedule", ["every", "blocks:16+every", "blocks:8+steps:3"])
@pytest.mark.parametrize("name", ["tova", "tova@pyramid"])
def test_heads_that_are_evicted_alike_hold_the_same_slots(tiny_llama, name, schedule):
    """What the mean over a layer's heads relies on, also behind forks and joins."""
    model = tiny_llama()
    policy = ag.policy(name, 10, schedule)
    assert policy.alike and not ag.policy("tova@heads", 10).alike and not ag.policy("tova+caote", 10).alike
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
                tokens = torch.full((len(cache.sequences), 1), 5)
                model(tokens, past_key_values=cache)
            for layer in range(3):
                ranks = cache.store.ranks(layer)
                assert torch.equal(ranks, ranks[:, :1].expand_as(ranks))

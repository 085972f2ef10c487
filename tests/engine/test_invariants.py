"""What holds for any policy, in any batch: eviction is as masking, a batch as each alone, chunks as the whole prompt.

And kept counts are exact, by the rule of the schedule. The texts come in passes that bring each sequence another number
of tokens, or none, with padding anywhere.
"""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet

import ag
from ag.engine import EvictionCache
from ag.engine.evictor import Evictor
from tests.support.batches import row
from tests.support.gates_for import gates_for
from tests.support.held import Run, check, feed
from tests.support.pairs import covering

#: Every scorer and every wrapper once, with options under which what is protected fits the budget.
STARTS: dict[str, dict[str, Any]] = {
    "streaming_llm": {"sinks": 2},
    "h2o": {},
    "h2o+obcache_joint": {"window": 9, "recent": 2},
    "scissorhands": {"window": 9, "recent": 3},
    "tova": {},
    "tova+vatp": {"sinks": 2, "scope": "kv_head"},
    "snapkv+obcache_key": {"window": 4, "kernel": 3},
    "snapkv+caote": {"window": 4, "kernel": 3},
    "cake+obcache_value": {"window": 4},
    "gates": {"recent": 2},
    "gates+fastcaote": {},
    "random": {},
    "knorm": {"recent": 2},
    "keydiff+criticalkv": {},
    "rkv": {"window": 4, "kernel": 3, "threshold": 0.1},
    "kvzip": {"sinks": 1, "chunk": 12, "ask": "5 6 7", "ask_part": "8 9", "overlap": 2, "answer": "4"},
    "expected_attention": {"sinks": 2, "future": 8, "window": 6},
}
ALLOCATORS = ["uniform", "pyramid", "preference", "heads", "global"]
SCHEDULES = ["prefill", "blocks:7", "every", "steps:3", "blocks:7+every"]
SIDES = ["left", "right", "any"]
BUDGET = 0.4


def allowed(start: str, schedule: str = "prefill", **_: str) -> bool:
    return start != "kvzip" or schedule == "prefill"


def marked(found: list[tuple[str, ...]]) -> Iterator[ParameterSet]:
    """Yield all; those that bring nothing new, but another pair, run with --all."""
    seen: set[object] = set()
    for case in found:
        new = {*case[0].split("+"), case[1:3], case[2:]} - seen
        seen |= new
        marks = (
            []
            if {*case[0].split("+")} & new
            else [pytest.mark.slow]
            if new
            else [pytest.mark.slow, pytest.mark.nightly]
        )
        yield pytest.param(*case, marks=marks)


def made(start: str, allocator: str, schedule: str, **more: Any) -> ag.Policy:
    options = STARTS[start] | ({"observers": 4} if allocator == "preference" else {}) | more
    return ag.policy(f"{start}@{allocator}", options.pop("budget", BUDGET), schedule, **options)


def turns(draw: random.Random, batch: int) -> list[list[int]]:
    """Draw how many tokens of each sequence come in each pass: the prompt, then single ones and turns of any size."""
    passes = [[draw.randint(17, 34) for _ in range(batch)]]
    for _ in range(6):
        several = [draw.randint(0, 4) for _ in range(batch - 1)] + [1]
        passes.append([1] * batch if draw.random() < 0.5 else several)
    return passes


def held_alone(model: Any, policy: ag.Policy, rows: list[torch.Tensor], passes: list[list[int]], together: Run) -> None:
    """Assert that each row alone holds the same after each pass that brings it something."""
    for b, tokens in enumerate(rows):
        alone = feed(EvictionCache(model, policy), model, [tokens], [[n[b]] for n in passes if n[b]])
        wanted = [[layer[b] for layer in held] for held, n in zip(together.held, passes, strict=True) if n[b]]
        assert wanted == [[layer[0] for layer in held] for held in alone.held]


def hold_in_chunks(model: Any, policy: ag.Policy, rows: Any, passes: Any, draw: random.Random, whole: Run) -> None:
    """Assert that prompts that come in chunks of drawn sizes leave what they leave as a whole."""
    ends, prompt, longest = [0], passes[0], max(passes[0])
    first = min(prompt) - 1
    while ends[-1] < first:
        ends.append(min(first, ends[-1] + draw.randint(1, 9)))
    # the shorter prompt ends right before the longer one, whose last queries saw what has left a window since
    ends += sorted({max(first, longest - 2), longest} - {first})
    parts = [[max(0, min(n, end) - start) for n in prompt] for start, end in zip(ends, ends[1:], strict=False)]
    chunks = feed(EvictionCache(model, policy), model, rows, parts, "left", parts=len(parts))
    assert chunks.held[-1] == whole.held[0]


def counted(policy: ag.Policy, passes: list[list[int]]) -> list[list[int]]:
    """Tokens per KV head that the schedule leaves each sequence after each pass, a mean over layers and heads."""
    capacity = policy.capacity(torch.tensor(passes[0])).tolist()
    held = [min(pair) for pair in zip(passes[0], capacity, strict=True)]
    found = [held]
    for new in passes[1:]:
        held = [n + more for n, more in zip(held, new, strict=True)]
        if policy.steps:
            due = [more and n >= most + policy.steps for n, more, most in zip(held, new, capacity, strict=True)]
            held = [most if goes else n for n, most, goes in zip(held, capacity, due, strict=True)]
        found.append(held)
    return found


def hold_exactly(policy: ag.Policy, passes: list[list[int]], held: list[Any]) -> None:
    """Assert how many tokens layers and heads hold: all together, and of each where the allocator says so."""
    kind = policy.spec.resolved().allocator
    for number, wanted in enumerate(counted(policy, passes)):
        for b, count in enumerate(wanted):
            counts = [[len(head) for head in layer[b]] for layer in held[number]]
            assert sum(map(sum, counts)) == count * len(counts) * len(counts[0])
            if kind == "uniform":
                assert {n for layer in counts for n in layer} == {count}
            elif kind == "heads":
                assert {sum(layer) for layer in counts} == {count * len(counts[0])}
            elif kind != "global":
                assert all(len(set(layer)) == 1 for layer in counts)


@pytest.mark.parametrize(
    ("start", "allocator", "schedule", "side"),
    list(marked(covering(allowed, start=list(STARTS), allocator=ALLOCATORS, schedule=SCHEDULES, side=SIDES))),
)
def test_any_policy(llama, start, allocator, schedule, side):
    draw, policy = random.Random(f"{start} {allocator} {schedule}"), made(start, allocator, schedule)
    passes = turns(draw, 2)
    # each token once: two of a kind have keys of one norm in layer 0, up to rounding
    rows = [row(200, b).unique()[torch.randperm(60)][: sum(n[b] for n in passes)] for b in range(2)]
    together = feed(EvictionCache(llama, policy), llama, rows, passes, side)
    check(llama, rows, together)
    held_alone(llama, policy, rows, passes, together)
    hold_exactly(policy, passes, together.held)
    assert all(
        min(map(len, layer[b])) < passes[0][b] - 3 for layer in together.held[0] for b in range(2)
    ) or "@g" in repr(policy)
    if not (start == "expected_attention" and policy.block):  # which counts the queries that come with a decision
        hold_in_chunks(llama, policy, rows, passes, draw, together)


@pytest.mark.slow
@pytest.mark.parametrize("start", STARTS)
def test_scores_under_autocast_are_float32(llama, start, monkeypatch):
    """Attention is in bfloat16 there; what is noted and decided is not."""
    policy, passes = made(start, "uniform", "prefill" if start == "kvzip" else "every"), [[30, 19], *[[1, 1]] * 4]
    autocast, real = set(), Evictor.evict

    def evict(*arguments):
        autocast.add(torch.is_autocast_enabled("cpu"))
        return real(*arguments)

    monkeypatch.setattr(Evictor, "evict", evict)
    with torch.autocast("cpu", torch.bfloat16):
        run = feed(EvictionCache(llama, policy), llama, [row(34, 0), row(23, 1)], passes)
    hold_exactly(policy, passes, run.held)
    assert autocast == {False}


@pytest.mark.parametrize(
    ("family", "name", "schedule"),
    covering(
        family=["tiny_mistral", "tiny_qwen2", "tiny_qwen3", "alternating"],
        name=["h2o@uniform", "snapkv+caote@preference", "scissorhands@heads", "full"],
        schedule=["blocks:7+every", "steps:3"],
        allowed=lambda name, schedule, **_: name != "full" or schedule == "steps:3",
    )
    + [("tiny_mistral", "scissorhands@heads", "steps:3")],
)
def test_other_models(family, name, schedule, request):
    """Mistral's window covers all layers, which evict all the same; windowed layers beside full ones are left alone."""
    if family == "alternating":
        kinds = ["full_attention", "sliding_attention", "full_attention"]
        model = request.getfixturevalue("tiny_qwen2")(use_sliding_window=True, sliding_window=9, layer_types=kinds)
    else:
        model = request.getfixturevalue(family)(**{"sliding_window": 7} if family == "tiny_mistral" else {})
    start, _, allocator = name.partition("@")
    policy = made(start, allocator, schedule) if allocator else ag.policy("full")
    draw = random.Random(name)
    passes = turns(draw, 2)
    rows = [row(sum(n[b] for n in passes), b) for b in range(2)]
    together = feed(EvictionCache(model, policy), model, rows, passes, "any")
    check(model, rows, together)
    held_alone(model, policy, rows, passes, together)
    hold_in_chunks(model, policy, rows, passes, draw, together)
    lengths = [max(map(len, layer[0])) for layer in together.held[-1]]
    if family == "alternating":
        assert lengths.pop(1) <= 9 + 4  # what the queries of the last pass see
    assert max(lengths) < len(rows[0]) or (name == "full" and family != "tiny_mistral")


@pytest.mark.parametrize(
    ("start", "allocator", "kind"),
    [
        ("snapkv+caote", "uniform", torch.bfloat16),
        ("keydiff+criticalkv", "preference", torch.float16),
        ("expected_attention", "global", torch.bfloat16),
        ("h2o+obcache_joint", "heads", "int8"),
        ("gates", "pyramid", "int8"),
    ],
)
def test_counts_are_exact_in_every_type(tiny_llama, start, allocator, kind):
    """What is kept may differ where numbers are rounded, but not how much."""
    model, coded = tiny_llama(num_hidden_layers=2), {"kv_dtype": kind} if kind == "int8" else {}
    model = model if coded else model.to(kind)
    ag.attach(model, gates_for(model))
    policy, passes = made(start, allocator, "blocks:7+every", **coded), [[30, 19], *[[1, 1]] * 4]
    rows = [row(sum(n[b] for n in passes), b) for b in range(2)]
    result = feed(EvictionCache(model, policy), model, rows, passes)
    assert all(logits.isfinite().all() for logits in result.logits)
    hold_exactly(policy, passes, result.held)

"""Random shapes, budgets, paddings, types and parts through the real cache: what must hold of every policy."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ag
from ag.engine.allocators import ALLOCATORS
from ag.engine.decide import Decision
from ag.engine.evictor import Evictor
from ag.engine.scorers import SCORERS
from ag.engine.wrappers import WRAPPERS
from ag.kernels.kv_compact import Worst
from tests.support.gates_for import gates_for
from tests.support.held import feed

SMALL = settings(
    max_examples=40,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
ROWLESS = ("knorm", "keydiff", "rkv", "kvzip", "expected_attention", "gates")
ALONE = ("streaming_llm", "random")
BODIES = [*SCORERS] + [
    f"{scorer}+{wrapper}"
    for scorer in SCORERS
    for wrapper in WRAPPERS
    if scorer not in ALONE
    and not (scorer in ROWLESS and WRAPPERS[wrapper].__dataclass_fields__["inner"].type == "RowScorer")
]


@st.composite
def cases(draw):
    """A model's geometry, a policy whose protection fits its budget, and passes of a padded batch."""
    kv_heads, group = draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2)]))
    geometry = {
        "hidden_size": 48,
        "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads,
        "head_dim": draw(st.sampled_from([8, 16])),
        "num_hidden_layers": draw(st.integers(1, 3)),
    }
    body, allocator = draw(st.sampled_from(BODIES)), draw(st.sampled_from(sorted(ALLOCATORS)))
    schedules = ["prefill"]
    schedules += ["every", "steps:2", "blocks:4", "blocks:5+every"] * (not body.startswith("kvzip"))
    sinks, recent = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    options = {"sinks": sinks, "recent": recent}
    if body.startswith(("snapkv", "rkv", "cake", "h2o", "scissorhands")):
        options["window"] = draw(st.integers(1, 3))
    if allocator == "preference":
        options["observers"] = draw(st.integers(1, 4))
    prompts = draw(st.lists(st.integers(6, 17), min_size=1, max_size=2))
    budget = draw(st.one_of(st.integers(6, 12), st.sampled_from([0.9, 1.0])))
    options["kv_dtype"] = draw(st.sampled_from(["float", "float", "int8"]))
    policy = ag.policy(f"{body}@{allocator}", budget, draw(st.sampled_from(schedules)), **options)
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    return geometry, policy, prompts, draw(st.sampled_from(["left", "right"])), dtype, draw(st.integers(0, 3))


@pytest.mark.slow
@given(cases())
@SMALL
def test_every_policy(tiny_llama, case):
    geometry, policy, prompts, side, dtype, seed = case
    model = tiny_llama(seed=seed, **geometry).to(dtype)
    if policy.by_gates:
        ag.attach(model, gates_for(model, kind="linear"))
    rows = [torch.randint(3, 128, (p + 4,), generator=torch.Generator().manual_seed(p + seed)) for p in prompts]
    passes = [prompts, *[[1] * len(rows)] * 4]
    cache, scores = ag.EvictionCache(model, policy), []
    candidates, evict, shown = Decision._candidates, Evictor.evict, []

    def judged(self, seen, due, records):
        found = candidates(self, seen, due, records)
        scores.append(bool(found.score[found.valid & ~found.protected & due[:, None, None]].isfinite().all()))
        return found

    def shows(self, seen, *others):
        shown.append(seen)
        evict(self, seen, *others)

    def ranked(**given):
        found, seen = Worst(**given), shown[-1]
        first, end = found.sinks[:, None, None], found.recent_from[:, None, None]
        rivals = seen.key_valid & (seen.key_ranks >= first) & (seen.key_ranks < end) & seen.due[:, None, None]
        scores.append(bool(found.score[rivals].isfinite().all()))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decision, "_candidates", judged)
        patch.setattr(Evictor, "evict", shows)
        patch.setattr("ag.engine.evictor.Worst", ranked)
        batch = feed(cache, model, rows, passes, side)
    assert scores
    assert all(scores)
    assert all(logits.isfinite().all() for logits in batch.logits)
    layers, heads = geometry["num_hidden_layers"], geometry["num_key_value_heads"]
    sinks, recent = policy.options["sinks"], policy.options["recent"]
    for after, held in enumerate(batch.held):
        for b, prompt in enumerate(prompts):
            n = prompt + after
            capacity = int(policy.capacity(torch.tensor([prompt]))[0])
            exact = min(prompt, capacity)
            counts = [[len(head) for head in layer[b]] for layer in held]
            for layer in held:
                for head in layer[b]:
                    assert head == sorted(set(head))
                    assert all(0 <= t < n for t in head)
                    assert set(range(min(sinks, prompt))) <= set(head)
                    assert set(range(n - recent, n)) <= set(head)
            if after == 0:
                assert sum(map(sum, counts)) == exact * layers * heads
                if policy.spec.resolved().allocator == "uniform":
                    assert counts == [[exact] * heads] * layers
                if policy.spec.resolved().allocator == "heads":
                    assert [sum(layer) for layer in counts] == [exact * heads] * layers
            elif policy.steps is None:
                assert sum(map(sum, counts)) == (exact + after) * layers * heads
            elif policy.steps == 1:
                total = min(n, capacity) * layers * heads
                assert sum(map(sum, counts)) == total
    if len(rows) > 1 and dtype == torch.float32 and policy.kv_dtype == "float":  # a code can fall to either side
        for b, row in enumerate(rows):
            alone = feed(ag.EvictionCache(model, policy), model, [row], [[n[b]] for n in passes])
            assert [[layer[b] for layer in held] for held in batch.held] == [
                [layer[0] for layer in held] for held in alone.held
            ]

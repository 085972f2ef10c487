"""Schedules evict in vLLM when `ag.EvictionCache` evicts: while an answer is written, and while a prompt is read."""

import pytest

from tests.vllm.conftest import prompts_of

pytest.importorskip("vllm", reason="needs vLLM: bash scripts/vllm_env.sh test")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

COUNT = 30
STEPS = {"policy": "gates:smollm2", "budget": 0.3, "recent": 12, "schedule": "steps:8"}
BOTH = STEPS | {"schedule": "blocks:48+steps:8"}


def differing(prompts, got, reference, count=COUNT, **options):
    """Lengths of the prompts with other tokens than the reference; short prompts are evicted from too."""
    return [len(p) for p, g in zip(prompts, got, strict=True) if g != reference(p, count=count, **options)]


def all_free(llm):
    free, blocks = llm.blocks
    return free == blocks


@pytest.mark.parametrize("ag", [STEPS, BOTH], ids=lambda ag: ag["schedule"])
def test_batch(engine, prompts, reference, ag):
    with engine(ag=ag) as llm:
        assert differing(prompts, llm.tokens(prompts, COUNT), reference, **ag) == []
        assert llm.most_running == len(prompts) and all_free(llm)
        llm.core.step()  # by which the worker hears of the end
        assert llm.builder.packed == llm.builder.prompts == {}


def test_chunks_beside_answers(engine, prompts, reference):
    with engine(ag=BOTH, max_num_batched_tokens=70) as llm:
        assert differing(prompts, llm.tokens(prompts, COUNT), reference, **BOTH) == []
        protected = llm.tokens(prompts, COUNT, extra_args={"ag_protect": 40})
        assert differing(prompts, protected, reference, **BOTH, protected=40) == []


@pytest.mark.parametrize(
    ("schedule", "budget", "shares"), [("steps:70", 0.3, True), ("blocks:48+steps:40", 0.6, False)]
)
def test_preemption(engine, reference, schedule, budget, shares):
    """A request that gave its blocks back reads its answer again, up to each eviction."""
    chosen, count, ag = prompts_of([140] * 4, seed=1), 110, STEPS | {"budget": budget, "schedule": schedule}
    with engine(
        ag=ag, num_gpu_blocks_override=25, max_num_batched_tokens=512, max_model_len=272, enable_prefix_caching=shares
    ) as llm:
        assert differing(chosen, llm.tokens(chosen, count), reference, count=count, **ag) == []
        assert llm.preempted and all_free(llm)


def test_shared_prefixes_cold_and_warm(engine, prompts, reference):
    with engine(ag=STEPS, enable_prefix_caching=True, max_num_batched_tokens=256) as llm:
        for _ in range(2):
            assert differing(prompts, llm.tokens(prompts, COUNT), reference, **STEPS) == []
        assert all_free(llm)


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("gates:smollm2@uniform", {"budget": 0.3, "schedule": "steps:8"}),
        ("keydiff@global", {"budget": 160, "schedule": "blocks:64+steps:6"}),
        ("random", {"budget": 0.5, "seed": 3, "schedule": "blocks:48+every"}),
    ],
)
def test_other_policies(engine, prompts, reference, policy, options):
    """Of a prompt that is shorter than the budget a part of the answer is the first to go."""
    with engine(ag={"policy": policy, **options}, max_num_batched_tokens=512) as llm:
        assert differing(prompts, llm.tokens(prompts, COUNT), reference, policy=policy, **options) == []


def test_text_that_is_longer_than_the_memory(engine, reference):
    """A request holds the blocks of its budget and of an interval, of the prompt or of the answer."""
    (prompt,), held = prompts_of([400]), []
    ag = {"policy": "streaming_llm", "budget": 96, "schedule": "blocks:64+steps:16"}
    with engine(ag=ag, num_gpu_blocks_override=12, max_model_len=512) as llm:  # one of them is the null block
        schedule = llm.scheduler.schedule

        def counted(*args, **kwargs):
            out = schedule(*args, **kwargs)
            held.append(llm.blocks[1] - llm.blocks[0])
            return out

        llm.scheduler.schedule = counted
        assert differing([prompt], llm.tokens([prompt], 100), reference, count=100, **ag) == []
    assert held[:2] == [128 // 16, (96 + 64) // 16]  # of the first 64 tokens nothing goes
    assert max(held) == (96 + 64) // 16 and {*held[-50:]} == {(96 + 16) // 16}

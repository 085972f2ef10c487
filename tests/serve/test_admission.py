"""What a request is admitted with is what it may take: never less than it takes, and no more under a fixed budget."""

from __future__ import annotations

import random

import pytest

import ag
from ag.serve import Request, Scheduler
from tests.support.gates_for import gates_for

#: Policies whose bound is met exactly by an answer that is long enough, by name.
EXACT = {
    "full": ag.policy("full"),
    "prefill": ag.policy("h2o", 40),
    "every": ag.policy("h2o", 40, "every"),
    "steps": ag.policy("streaming_llm", 33, "steps:9"),
    "share of the prompt": ag.policy("keydiff", 0.4, "every"),
    "share of the prompt, steps": ag.policy("keydiff", 0.5, "steps:5"),
    "more protected than allowed": ag.policy("snapkv", 8, window=30),
    "protected by the request": ag.policy("h2o", 8, "every"),
    "blocks": ag.policy("h2o", 24, "blocks:20+every"),
}
#: Policies under which rows are not equally long.
UNEVEN = {
    "pyramid": ag.policy("snapkv@pyramid", 30, window=4),
    "heads": ag.policy("h2o@heads", 30, "every"),
    "global": ag.policy("knorm@global", 24, "every"),
    "global, steps": ag.policy("knorm@global", 0.3, "steps:6"),
    "preference": ag.policy("cake", 20, "every", window=4),
    "kvzip": ag.policy("kvzip", 0.3),
    "gates": ag.policy("gates", 0.3, "every"),
    "wrapped": ag.policy("h2o+vatp", 30, "every", sinks=2),
}
NAMES = [*EXACT, *UNEVEN, "window"]
QUICK = "full", "every", "global", "window"


def model_of(name, tiny_llama, tiny_mistral):
    if name == "window":
        return tiny_mistral(sliding_window=24)
    model = tiny_llama(eos_token_id=None)
    if name == "gates":
        ag.attach(model, gates_for(model, recent_tokens=4, covers="all", scope="causal"))
    return model


def peaks(scheduler, requests, monkeypatch):
    """The most blocks taken while prompts are read, and after they were."""
    pool, found = scheduler.pool, [0, 0]
    allocate = type(pool).allocate

    def look():
        behind = scheduler._reading is None and not scheduler._waiting
        found[behind] = max(found[behind], pool.capacity - pool.free)

    def counted(self, count):
        blocks = allocate(self, count)
        look()
        return blocks

    with monkeypatch.context() as patch:
        patch.setattr(type(pool), "allocate", counted)
        for request in requests:
            scheduler.submit(request)
        while scheduler.busy:
            scheduler.step()
            look()
    assert pool.free == pool.capacity and scheduler.counts.ended == {"length": len(requests)}
    return found


@pytest.mark.parametrize("name", [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in NAMES])
def test_no_answer_takes_more_than_it_is_admitted_with(tiny_llama, tiny_mistral, tiny_tokenizer, monkeypatch, name):
    """Alone, and with others in one batch; the prompt comes in parts."""
    model, draw = model_of(name, tiny_llama, tiny_mistral), random.Random(name)
    policy = (EXACT | UNEVEN).get(name, EXACT["full"])
    requests = [
        Request(
            tokens=[draw.randrange(6, 128) for _ in range(prompt)],
            max_tokens=answer,
            protect=((prompt // 3, prompt - 1),) if name == "protected by the request" else (),
        )
        for prompt, answer in ((draw.randrange(60, 120), draw.randrange(20, 40)), (90, 3), (draw.randrange(4, 60), 16))
    ]
    needs = []
    for request in requests:
        part = draw.randrange(7, 50)
        scheduler = Scheduler(model, tiny_tokenizer, policy, ag.Pool(model, 2**22), prefill_tokens=part)
        need = scheduler._admission.need(request)
        reading, writing = peaks(scheduler, [request], monkeypatch)
        assert reading <= max(need.reading, need.writing) and writing <= need.writing
        needs.append((need, reading, writing))
    scheduler = Scheduler(model, tiny_tokenizer, policy, ag.Pool(model, 2**22), prefill_tokens=29)
    together = max(peaks(scheduler, requests, monkeypatch))
    assert together <= sum(need.writing for need, _, _ in needs) + max(need.reading for need, _, _ in needs)
    if name in EXACT or name == "window":
        need, _, writing = needs[0]
        assert writing == need.writing


@pytest.mark.parametrize("blocks", [40, 60])
def test_flags_are_admitted_with_what_they_kept_before(tiny_llama, tiny_tokenizer, blocks):
    model = model_of("gates", tiny_llama, None)
    size = ag.Pool(model, 2**14).block_nbytes()
    scheduler = Scheduler(model, tiny_tokenizer, "flags", ag.Pool(model, blocks * size))
    request = Request(tokens=[7 + i % 90 for i in range(90)], max_tokens=2)
    whole = scheduler._admission.need(request)
    assert whole.writing == 3 * 2 * 6
    scheduler.submit(request)
    scheduler.step()
    share = scheduler._admission._kept / 90
    assert 0.1 < share < 0.7
    rows, tokens = 6, int(1.25 * 90 * share) + 1
    assert scheduler._admission.need(request).writing == rows * (tokens + 15) // 16 < whole.writing


@pytest.mark.slow
def test_where_four_whole_requests_fit_three_times_as_many_do_at_a_quarter(tiny_llama, tiny_tokenizer):
    """A prompt holds all of itself only while it is read, and one is read at a time."""
    model, draw = model_of("h2o", tiny_llama, None), random.Random(0)
    pool = ag.Pool(model, 4 * 6 * 22 * ag.Pool(model, 2**14).block_nbytes())
    found = {}
    for name, policy in {"full": ag.policy("full"), "h2o": ag.policy("h2o", 0.25, "every")}.items():
        scheduler, most = Scheduler(model, tiny_tokenizer, policy, pool), 0
        for _ in range(14):
            scheduler.submit(Request(tokens=[draw.randrange(6, 128) for _ in range(320)], max_tokens=32))
        while scheduler.busy:
            scheduler.step()
            most = max(most, len(scheduler.snapshot().running))
        assert scheduler.counts.preempted == 0
        found[name] = most
    # blocks of a row: 22 of 88 whole; at a quarter 6, while 20 are free for the prompt of the last one
    assert found == {"full": 4, "h2o": 12}

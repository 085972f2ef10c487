"""The bound of a request's blocks: never below what it takes, and exact under a fixed budget."""

from __future__ import annotations

import random

import pytest

import ag
from ag.serve import Request, Scheduler
from tests.support.gates_for import gates_for

#: Policies whose bound is met exactly by a long answer, by name.
EXACT = {
    "full": ag.policy("full"),
    "prefill": ag.policy("h2o", 40),
    "every": ag.policy("h2o", 40, "every"),
    "share of the prompt, steps": ag.policy("keydiff", 0.5, "steps:5"),
    "protected by the request": ag.policy("h2o", 8, "every"),
    "blocks": ag.policy("h2o", 24, "blocks:20+every"),
}
#: Policies under which rows have different lengths.
UNEVEN = {
    "pyramid": ag.policy("snapkv@pyramid", 30, window=4),
    "heads": ag.policy("h2o@heads", 30, "every"),
    "global, steps": ag.policy("knorm@global", 0.3, "steps:6"),
    "kvzip": ag.policy("kvzip", 0.3),
    "gates": ag.policy("gates", 0.3, "every"),
    "gates of some layers": ag.policy("gates", 0.3, "every"),
}
NAMES = [*EXACT, *UNEVEN, "window"]
QUICK = "full", "every", "heads", "gates of some layers", "window"


def model_of(name, tiny_llama, tiny_mistral):
    if name == "window":
        return tiny_mistral(sliding_window=24)
    model = tiny_llama(eos_token_id=None)
    if name.startswith("gates"):
        first = int(name != "gates")
        ag.attach(model, gates_for(model, recent_tokens=4, covers="all", scope="causal", first_layer=first))
    return model


def peaks(scheduler, requests, monkeypatch):
    """The most blocks taken while prompts are read, and afterwards."""
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
    """Alone, and in one batch with others; prompts are read in chunks."""
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
        need = scheduler._main.admission.need(request)
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
    whole = scheduler._main.admission.need(request)
    assert whole.writing == 3 * 2 * 6
    scheduler.submit(request)
    scheduler.step()
    share = scheduler._main.admission._kept / 90
    assert 0.1 < share < 0.7
    rows, tokens = 6, int(1.25 * 90 * share) + 1
    assert scheduler._main.admission.need(request).writing == rows * (tokens + 15) // 16 < whole.writing

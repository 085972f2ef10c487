"""The bound of a request's blocks: never below what it takes, and exact under a fixed budget."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("openai", reason="needs the server's libraries: pip install 'ag[serve]'")

import ag  # noqa: E402
from ag.serve import Request, Scheduler  # noqa: E402
from tests.support.gates_for import gates_for  # noqa: E402

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
        behind = scheduler._prefill_job is None and not scheduler._waiting
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
    assert pool.free == pool.capacity and scheduler.counts.num_ended == {"length": len(requests)}
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
            ignore_eos=True,
            protect=((prompt // 3, prompt - 1),) if name == "protected by the request" else (),
        )
        for prompt, answer in ((draw.randrange(60, 120), draw.randrange(20, 40)), (90, 3), (draw.randrange(4, 60), 16))
    ]
    needs = []
    for request in requests:
        part = draw.randrange(7, 50)
        scheduler = Scheduler(model, tiny_tokenizer, policy, ag.Pool(model, 2**22), prefill_tokens=part)
        need = scheduler._default_batch.admission.need(request)
        reading, writing = peaks(scheduler, [request], monkeypatch)
        assert reading <= max(need.prefill, need.decode) and writing <= need.decode
        needs.append((need, reading, writing))
    scheduler = Scheduler(model, tiny_tokenizer, policy, ag.Pool(model, 2**22), prefill_tokens=29)
    together = max(peaks(scheduler, requests, monkeypatch))
    assert together <= sum(need.decode for need, _, _ in needs) + max(need.prefill for need, _, _ in needs)
    if name in EXACT or name == "window":
        need, _, writing = needs[0]
        assert writing == need.decode


@pytest.mark.parametrize("name", ["full", "prefill", "every"])
def test_as_many_requests_run_at_once_as_the_log_says(tiny_llama, tiny_tokenizer, name):
    model, request = model_of(name, tiny_llama, None), Request(tokens=[7] * 90, max_tokens=30)
    scheduler = Scheduler(model, tiny_tokenizer, EXACT[name], ag.Pool(model, 2**19))
    fits, most = scheduler.admission.max_concurrent(request, scheduler.pool.capacity), 0
    for _ in range(fits + 2):
        scheduler.submit(request)
    while scheduler.busy:
        scheduler.step()
        most = max(most, len(scheduler._running))
    assert most == fits > 2 and scheduler.admission.max_concurrent(request, scheduler.pool.capacity // 99) == 0


def test_what_fits_is_said_in_tokens_of_a_whole_cache(tiny_llama, tiny_tokenizer):
    model = tiny_llama(eos_token_id=None)
    scheduler = Scheduler(model, tiny_tokenizer, "h2o", ag.Pool(model, 2**18), 40)
    context, size = scheduler.context_length, scheduler.pool.tokens[0]
    text = scheduler.admission.capacity_text(scheduler.pool.capacity, context, scheduler.batch)
    tokens = int(text.removeprefix("memory for ").partition(" tokens of a whole cache")[0].replace(",", ""))
    rows = sum(heads for heads, _ in scheduler.admission._rows)
    assert rows * (tokens // size) <= scheduler.pool.capacity < rows * (tokens // size + 1)
    assert f"requests of {context:,} tokens ({context // 8:,} of the answer)" in text


@pytest.mark.parametrize("blocks", [40, 60])
def test_flags_are_admitted_with_what_they_kept_before(tiny_llama, tiny_tokenizer, blocks):
    model = model_of("gates", tiny_llama, None)
    size = ag.Pool(model, 2**14).block_nbytes()
    scheduler = Scheduler(model, tiny_tokenizer, "flags", ag.Pool(model, blocks * size))
    request = Request(tokens=[7 + i % 90 for i in range(90)], max_tokens=2)
    whole = scheduler._default_batch.admission.need(request)
    assert whole.decode == 3 * 2 * 6
    scheduler.submit(request)
    scheduler.step()
    share = scheduler._default_batch.admission._kept_tokens / 90
    assert 0.1 < share < 0.7
    rows, tokens = 6, int(1.25 * 90 * share) + 1
    assert scheduler._default_batch.admission.need(request).decode == rows * (tokens + 15) // 16 < whole.decode

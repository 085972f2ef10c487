"""Many requests in one batch: each answer equals that of the request alone, and every block is freed."""

from __future__ import annotations

import random
import threading
from dataclasses import replace

import pytest
import torch

import ag
from ag.engine.block_pool import PoolFullError
from ag.engine.cache import EvictionCache
from ag.engine.evictor import NonFiniteScoreError
from ag.errors import UserError
from ag.serve import Request, Scheduler
from ag.serve.admission import BlockNeed
from ag.serve.sampler import processors
from ag.serve.scheduler import MIN_PASS_TOKENS, QueueFullError, QueueTimeoutError, StoppedError
from tests.support.gates_for import gates_for
from tests.support.refused import refuses
from tests.support.served import alone, finish, options, read, text

POLICIES = {
    "full": ag.policy("full"),
    "h2o": ag.policy("h2o", 0.25),
    "every": ag.policy("h2o", 12, "every"),
    "snapkv": ag.policy("snapkv", 16, window=8),
    "streaming_llm": ag.policy("streaming_llm", 20, "steps:3"),
    "flags": ag.policy("flags"),
}


def model_for(tiny_llama, name):
    model = tiny_llama(num_hidden_layers=2, eos_token_id=2, pad_token_id=0)
    if name == "flags":
        ag.attach(model, gates_for(model, recent_tokens=4, covers="all", scope="causal"))
    return model


def pool_of(model, blocks):
    return ag.Pool(model, blocks * ag.Pool(model, 2**14).block_nbytes())


@pytest.mark.parametrize(
    ("name", "count"),
    [("every", 14)]
    + [pytest.param(x, n, marks=pytest.mark.slow) for x, n in (("flags", 14), ("snapkv", 24), ("streaming_llm", 24))],
)
def test_answers_are_those_of_each_request_alone(tiny_llama, tiny_tokenizer, name, count):
    """Random requests in a pool that is too small: some wait, some share prefixes, some are cancelled.

    Each has options of its own.
    """
    model = model_for(tiny_llama, name).double()  # in float32 two tokens may be equally likely but for rounding
    policy, draw = POLICIES[name], random.Random(0)
    pool = pool_of(model, 106)
    scheduler = Scheduler(model, tiny_tokenizer, policy, pool, prefill_tokens=24)
    systems = [text(draw, 66) for _ in range(2)]
    requests, streams = [], []
    for number in range(count):
        tokens = draw.choice([*systems, []]) + text(draw, draw.randrange(1, 40))
        requests.append(Request(tokens=tokens, max_tokens=draw.randrange(12, 24), **options(draw)))
        streams += scheduler.submit(requests[-1])
        if number % 5 == 4:
            streams[-draw.randrange(1, 4)].cancel()
        for _ in range(draw.randrange(5)):
            scheduler.step()
    finish(scheduler)
    for request, stream in zip(requests, streams, strict=True):
        found, wanted = read(stream), alone(model, request.policy or policy, request)
        assert found == wanted[: len(found)]
        assert stream.reason == "cancelled" or (len(found) == len(wanted) and stream.reason in ("stop", "length"))
    counts = scheduler.counts
    assert {request.policy for request in requests} > {None} and [*scheduler._batches.values()] == [
        scheduler._default_batch
    ]
    assert counts.cached and counts.num_ended.total() == count and 0 < counts.num_ended["cancelled"] <= count // 5
    assert pool.free < pool.capacity and pool.has(lambda: pool.capacity)  # prefixes give way


def test_a_pool_of_int8(tiny_llama, tiny_tokenizer):
    """Prompts that are read at once, one after the other, are answered as alone."""
    model, policy, draw = model_for(tiny_llama, "every"), POLICIES["every"], random.Random(1)
    pool = ag.Pool(model, 2**18, "int8")
    scheduler = Scheduler(model, tiny_tokenizer, policy, pool, prefill_tokens=64)
    for _ in range(3):
        request = Request(tokens=text(draw, draw.randrange(20, 60)), max_tokens=12)
        [stream] = scheduler.submit(request)
        finish(scheduler)
        assert read(stream) == alone(model, policy.with_kv_dtype("int8"), request)
    assert pool.has(lambda: pool.capacity)


@pytest.mark.parametrize("name", ["full", pytest.param("flags", marks=pytest.mark.slow)])
def test_a_preempted_answer_loses_no_token(tiny_llama, tiny_tokenizer, monkeypatch, name):
    """With a bound of 0 blocks all requests are admitted, so that the pool runs out."""
    model, policy, draw = model_for(tiny_llama, name), POLICIES[name], random.Random(1)
    pool = pool_of(model, 86 if name == "full" else 40)
    scheduler = Scheduler(model, tiny_tokenizer, policy, pool)
    monkeypatch.setattr(scheduler._default_batch.admission, "need", lambda request: BlockNeed(0, 0))
    requests = [Request(tokens=text(draw, 40), max_tokens=60) for _ in range(8)]
    streams = [stream for request in requests for stream in scheduler.submit(request)]
    finish(scheduler)
    assert scheduler.counts.preempted
    for request, stream in zip(requests, streams, strict=True):
        assert read(stream) == alone(model, policy, request)
    assert pool.free == pool.capacity


def test_a_step_without_room_for_copies_loses_no_token(tiny_llama, tiny_tokenizer, monkeypatch):
    """Answers share the blocks of their prompt until the first eviction; the copies exceed the pool."""
    model, policy, draw = model_for(tiny_llama, "every"), ag.policy("h2o", 48, "every"), random.Random(9)
    pool, broken = pool_of(model, 44), []
    scheduler = Scheduler(model, tiny_tokenizer, policy, pool)
    monkeypatch.setattr(scheduler._default_batch.admission, "need", lambda request: BlockNeed(0, 0))
    preempt = scheduler._preempt
    monkeypatch.setattr(
        scheduler, "_preempt", lambda batch, error: (broken.append(batch.cache.state.pass_open), preempt(batch, error))
    )
    request = Request(tokens=text(draw, 40), max_tokens=40, n=4)
    streams = scheduler.submit(request)
    finish(scheduler)
    assert broken and not any(broken) and scheduler.counts.preempted  # the step was refused before it began
    assert [read(stream) for stream in streams] == [alone(model, policy, request)] * 4
    assert pool.free == pool.capacity


@pytest.mark.parametrize("name", ["full", "flags"])
def test_drafts_change_no_answer(tiny_llama, tiny_tokenizer, name):
    """Repetitive texts, greedy and sampled; some answers are preempted."""
    model, policy, draw = model_for(tiny_llama, name), POLICIES[name], random.Random(7)
    found = []
    requests = [
        Request(
            tokens=text(draw, 9) * 3 + text(draw, n), max_tokens=30, temperature=0.5 * (n % 2), seed=n, stop=("zz",)
        )
        for n in range(5)
    ]
    for drafts in (0, 9):
        pool = pool_of(model, 106)
        scheduler = Scheduler(model, tiny_tokenizer, policy, pool, prefill_tokens=24, prompt_lookup=drafts)
        streams = []
        for number, request in enumerate(requests):
            streams += scheduler.submit(request)
            for _ in range(5):
                scheduler.step()
            if number == 3:
                scheduler._preempt(scheduler._default_batch, PoolFullError("full"))
        finish(scheduler)
        found.append([read(stream) for stream in streams])
        assert scheduler.counts.preempted and pool.free == pool.capacity
        assert bool(drafts) == bool(scheduler.counts.accepted) == (scheduler.counts.accepted < scheduler.counts.drafted)
    assert found[0] == found[1]
    greedy = [(request, answer) for request, answer in zip(requests, found[1], strict=True) if not request.temperature]
    assert all(answer == alone(model, policy, request) for request, answer in greedy)


@pytest.mark.parametrize("one_ends", [False, True])
def test_drafts_that_a_full_pool_cannot_take_back(tiny_llama, tiny_tokenizer, monkeypatch, one_ends):
    """Copies of shared blocks have no room: the answers are preempted, and lose no token.

    One that is left alone has the blocks of the answer that ends in this step.
    """
    model, draw = model_for(tiny_llama, "full"), random.Random(7)
    pool, crop, refused = ag.Pool(model, 2**22), EvictionCache.crop, []

    def full(cache, remove):
        due = any(remove) and len(remove) > 1 if not one_ends else scheduler.counts.num_ended.total()
        if due and not refused:
            refused.append(remove)
            cache.state.pass_open = True  # as rows of some layers may be shorter already
            raise PoolFullError("full")
        crop(cache, remove)

    monkeypatch.setattr(EvictionCache, "crop", full)
    scheduler = Scheduler(model, tiny_tokenizer, "full", pool, prompt_lookup=9)
    repetitive = [text(draw, 9) * 3 + text(draw, n) for n in range(3 - one_ends)]
    requests = [Request(tokens=tokens, max_tokens=4 + 13 * n) for n, tokens in enumerate(repetitive)]
    streams = [stream for request in requests for stream in scheduler.submit(request)]
    finish(scheduler)
    assert refused and scheduler.counts.preempted == len(refused[0]) - one_ends
    assert [read(stream) for stream in streams] == [alone(model, "full", request) for request in requests]
    assert pool.free == pool.capacity


def test_a_budget_of_one_token_is_not_that_of_everything(tiny_llama, tiny_tokenizer):
    model = model_for(tiny_llama, "h2o")
    scheduler = Scheduler(model, tiny_tokenizer, "full", ag.Pool(model, 2**20))
    requests = [
        Request(
            tokens=text(random.Random(0), 40), max_tokens=6, policy=ag.policy("h2o", budget), report_kept_share=True
        )
        for budget in (1.0, 1)
    ]
    streams = [stream for request in requests for stream in scheduler.submit(request)]
    finish(scheduler)
    assert [stream.kept_share for stream in streams] == [1, 1 / 40]


def test_no_drafts_under_a_policy_that_cannot_reject_them(tiny_llama, tiny_tokenizer):
    model = model_for(tiny_llama, "every")
    scheduler = Scheduler(model, tiny_tokenizer, POLICIES["every"], ag.Pool(model, 2**20), prompt_lookup=9)
    scheduler.submit(Request(tokens=[7, 8, 9] * 9, max_tokens=20))
    finish(scheduler)
    assert scheduler.counts.drafted == 0


def test_several_answers_share_a_prompt(tiny_llama, tiny_tokenizer):
    """With a seed an answer does not depend on the batch; the n answers to a request differ."""
    model, draw = model_for(tiny_llama, "full"), random.Random(2)
    pool = ag.Pool(model, 2**22)
    drawn = Request(
        tokens=text(draw, 70),
        max_tokens=12,
        temperature=1.5,
        top_p=0.95,
        top_k=90,
        min_p=1e-4,
        seed=3,
        n=3,
        logprobs=2,
        frequency_penalty=0.7,
        presence_penalty=-0.3,
        min_tokens=12,
        repetition_penalty=1.2,
    )
    found = []
    for others in (0, 4):
        scheduler = Scheduler(model, tiny_tokenizer, "full", pool)
        for _ in range(others):
            scheduler.submit(Request(tokens=text(draw, 30), max_tokens=20))
        streams = scheduler.submit(drawn)
        for _ in range(2):
            scheduler.step()
        if not others:  # the blocks of the prompt, and a last block of each answer
            assert pool.capacity - pool.free <= 3 * 2 * (70 // 16 + 3 * 2)
        finish(scheduler)
        found.append([list(stream) for stream in streams])
    assert [[token.id for token in answer] for answer in found[0]] == [
        [token.id for token in answer] for answer in found[1]
    ]
    assert len({tuple(token.id for token in answer) for answer in found[0]}) == 3
    for answer in found[0]:
        for token in answer:
            (_, first), (_, second) = token.top_logprobs
            assert first >= second and token.logprob <= first <= 0


def test_what_ends_an_answer(tiny_llama, tiny_tokenizer):
    model, draw, now = model_for(tiny_llama, "full"), random.Random(3), [0.0]
    model.generation_config.eos_token_id = 5  # the tokenizer's is 2, which ends an answer too
    pool = ag.Pool(model, 2**22)
    scheduler = Scheduler(model, tiny_tokenizer, "full", pool, batch=3, clock=lambda: now[0])
    whole = Request(tokens=text(draw, 20), max_tokens=24)
    answer = alone(model, "full", whole)
    said = tiny_tokenizer.decode(answer[3:5])
    place = next(i for i in range(1, 25) if said in tiny_tokenizer.decode(answer[:i]))
    before = tiny_tokenizer.decode(answer, skip_special_tokens=True).partition(said)[0]
    (stops,) = scheduler.submit(Request(tokens=whole.tokens, max_tokens=24, stop=(said,)))
    (leaves,) = scheduler.submit(whole)
    (late,) = scheduler.submit(Request(tokens=whole.tokens, max_tokens=24, answer_seconds=5))
    (waits,) = scheduler.submit(Request(tokens=whole.tokens, wait_seconds=3))
    (forced,) = scheduler.submit(Request(tokens=whole.tokens, max_tokens=2, logit_bias={7: 1e4}))
    (by_tokenizer,) = scheduler.submit(Request(tokens=whole.tokens, max_tokens=9, logit_bias={2: 1e4}))
    scheduler.step()
    scheduler.step()
    leaves.cancel()
    now[0] = 4.0
    taken = pool.capacity - pool.free
    scheduler.step()
    assert leaves.reason == "cancelled" and waits.reason == "timeout" and pool.capacity - pool.free < 1.1 * taken
    now[0] = 6.0
    finish(scheduler)
    tokens = list(stops)
    assert ([token.id for token in tokens], stops.reason) == (answer[:place], "stop")
    assert "".join(token.text for token in tokens) == before
    begun = read(late)
    assert late.reason == "timeout" and 0 < len(begun) < 24 and begun == answer[: len(begun)]
    assert (read(forced), forced.reason) == ([7, 7], "length")
    assert (read(by_tokenizer), by_tokenizer.reason) == ([tiny_tokenizer.eos_token_id], "stop")
    assert pool.free == pool.capacity


@pytest.mark.slow
def test_an_answer_without_a_limit_takes_what_is_free(tiny_llama, tiny_tokenizer):
    """Beyond its reserve it is preempted for an older one, loses no token, and ends where the pool does."""
    model, draw = model_for(tiny_llama, "full"), random.Random(10)
    pool = pool_of(model, 36)
    scheduler = Scheduler(model, tiny_tokenizer, "full", pool)
    requests = [
        Request(tokens=text(draw, 30), max_tokens=450, reserved=reserved, ignore_eos=True) for reserved in (4, 4, None)
    ]
    with refuses(UserError, "450", "pool"):
        scheduler.submit(requests.pop())
    streams = [stream for request in requests for stream in scheduler.submit(request)]
    scheduler.step()
    assert len(scheduler._running) == 2
    finish(scheduler)
    assert scheduler.counts.preempted and [stream.reason for stream in streams] == ["length"] * 2
    for request, stream in zip(requests, streams, strict=True):
        found = read(stream)
        assert 40 < len(found) < 450 and found == alone(
            model, "full", request.model_copy(update={"max_tokens": len(found)})
        )
    assert pool.free == pool.capacity


def test_an_error_ends_one_request_only(tiny_llama, tiny_tokenizer, monkeypatch):
    model, draw = model_for(tiny_llama, "full"), random.Random(4)
    pool = ag.Pool(model, 2**22)
    scheduler = Scheduler(model, tiny_tokenizer, "full", pool)
    (first,) = scheduler.submit(Request(tokens=text(draw, 20), max_tokens=6))
    scheduler.step()
    (broken,) = scheduler.submit(Request(tokens=[200, 5], max_tokens=6))  # not in the vocabulary
    undrawn = scheduler.submit(Request(tokens=[7, 8], temperature=1.0, n=2))
    for answer in scheduler._waiting[-1]:
        monkeypatch.setattr(answer.sampler, "_generator", "no generator")
    (late,) = scheduler.submit(Request(tokens=[7, 8], max_tokens=6, temperature=1.0, ignore_eos=True))
    scheduler.step()
    monkeypatch.setattr(scheduler._running[-1].sampler, "_generator", "no generator")
    finish(scheduler)
    for stream in [*undrawn, late]:
        with pytest.raises(TypeError):
            read(stream)
    assert len(read(first)) == 6
    with pytest.raises(IndexError):
        read(broken)
    assert pool.free == pool.capacity


@pytest.mark.parametrize("what", ["one leaves", "one comes"])
def test_scores_that_are_not_finite_end_the_answers_of_their_batch(tiny_llama, tiny_tokenizer, what):
    """Hidden states overflow, as in float16. It is noticed when the sequences of the batch change; others go on."""
    model, draw, overflows = model_for(tiny_llama, "every"), random.Random(4), [False]

    def overflow(module, given, states):
        if overflows[0]:
            states = states.clone()
            states[0] = torch.nan
        return states

    model.model.embed_tokens.register_forward_hook(overflow)
    model.lm_head.register_forward_hook(lambda module, given, logits: logits.nan_to_num())  # or they end the answer
    pool = ag.Pool(model, 2**22)
    scheduler = Scheduler(model, tiny_tokenizer, POLICIES["every"], pool)
    requests = [Request(tokens=text(draw, 40), max_tokens=30, ignore_eos=True) for _ in range(3)]
    broken, other = (scheduler.submit(request)[0] for request in requests[:2])
    scheduler.step()
    scheduler.step()
    overflows[0] = True
    scheduler.step()
    overflows[0] = False
    if what == "one leaves":
        other.cancel()
        scheduler.step()
    (late,) = scheduler.submit(requests[2])
    finish(scheduler)
    with refuses(NonFiniteScoreError, "budget=12"):
        read(broken)
    assert read(late) == alone(model, POLICIES["every"], requests[2]) and late.reason == "length"
    assert pool.free == pool.capacity and not scheduler.failed


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_end_the_answer(tiny_llama, tiny_tokenizer, temperature):
    """The greatest of them would be the first NaN, which is no answer."""
    model, draw, overflows = model_for(tiny_llama, "full"), random.Random(4), [False]
    model.lm_head.register_forward_hook(lambda module, given, logits: logits * torch.nan if overflows[0] else None)
    pool = ag.Pool(model, 2**22)
    scheduler = Scheduler(model, tiny_tokenizer, "full", pool)
    request = Request(tokens=text(draw, 30), max_tokens=6, temperature=temperature, ignore_eos=True)
    [stream] = scheduler.submit(request)
    scheduler.step()
    overflows[0] = True
    finish(scheduler)
    with refuses(FloatingPointError, "NaN"):
        read(stream)
    assert pool.free == pool.capacity


@pytest.mark.parametrize("temperature", [5e-324, 1e-20])
def test_the_lower_a_temperature_the_more_greedy(tiny_llama, tiny_tokenizer, temperature):
    """Probabilities are valid at any temperature, and sampling is greedy well above 0."""
    model, draw = model_for(tiny_llama, "full"), random.Random(8)
    request = Request(tokens=text(draw, 20), max_tokens=6, temperature=temperature, repetition_penalty=0.01)
    scheduler = Scheduler(model, tiny_tokenizer, "full", ag.Pool(model, 2**20))
    streams = [
        stream
        for other in (request, request.model_copy(update={"temperature": 0.0}))
        for stream in scheduler.submit(other)
    ]
    finish(scheduler)
    drawn, greedy = map(read, streams)
    assert drawn == greedy


@pytest.mark.parametrize("temperature", [0.3, 1.7])
def test_probabilities_are_those_of_the_logits_over_the_temperature(temperature):
    logits = 9 * torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    logits[0, 3] = -torch.inf
    [found] = processors(Request(tokens=[7], temperature=temperature))(torch.tensor([[7]]), logits).softmax(-1)
    expected = (logits[0].double() / temperature).softmax(-1)
    # a probability moves by what its logit does, which is rounded once: half an eps of up to twice the largest one
    eps, largest = torch.finfo(torch.float32).eps, float(logits[logits.isfinite()].abs().max())
    assert float((found - expected).abs().max()) <= 4 * eps * largest / temperature


def test_answers_that_end_before_submit_returns(tiny_llama, tiny_tokenizer):
    """The thread of the scheduler may go on as soon as the request is queued."""
    model = model_for(tiny_llama, "full")
    scheduler = Scheduler(model, tiny_tokenizer, "full", ag.Pool(model, 2**20))
    lock = scheduler._lock

    class Queued(threading.Condition):
        def __exit__(self, *error):
            super().__exit__(*error)
            scheduler._lock = lock
            finish(scheduler)

    scheduler._lock = Queued()
    assert [len(read(stream)) for stream in scheduler.submit(Request(tokens=[7, 8], max_tokens=2, n=2))] == [2, 2]


def test_many_short_prompts_do_not_stall_a_running_answer(tiny_llama, tiny_tokenizer):
    model, passes = model_for(tiny_llama, "full"), 3
    scheduler = Scheduler(model, tiny_tokenizer, "full", ag.Pool(model, 2**20), prefill_tokens=passes * MIN_PASS_TOKENS)
    [running] = scheduler.submit(Request(tokens=[7] * 9, max_tokens=99, ignore_eos=True))
    scheduler.step()
    for _ in range(4 * passes):
        scheduler.submit(Request(tokens=[7, 8], max_tokens=1))
    for steps in range(1, 5):
        before = scheduler.counts.tokens
        scheduler.step()
        assert scheduler.counts.num_ended["length"] == steps * passes
        assert scheduler.counts.tokens - before == passes + 1  # one is of the running answer
    running.cancel()
    finish(scheduler)


def test_a_request_that_may_not_wait_is_answered_if_it_need_not(tiny_llama, tiny_tokenizer):
    """However long the scheduler takes to begin its next step."""
    model, now = model_for(tiny_llama, "full"), [0.0]
    scheduler = Scheduler(model, tiny_tokenizer, "full", ag.Pool(model, 2**20), batch=1, clock=lambda: now[0])
    streams = []
    for _ in range(2):
        streams += scheduler.submit(Request(tokens=[7, 8], max_tokens=4, ignore_eos=True, wait_seconds=0))
        now[0] += 1
    for _ in range(2):
        scheduler.step()
        now[0] += 1
    assert streams[0].reason is None and streams[1].reason == "timeout"
    finish(scheduler)
    assert len(read(streams[0])) == 4
    with refuses(QueueTimeoutError, "0 seconds"):
        read(streams[1])


def test_a_scheduler_that_stops_takes_no_request(tiny_llama, tiny_tokenizer):
    """Which nothing would answer. Those that it has are answered, unless it stops for a reason."""
    model = model_for(tiny_llama, "full")
    scheduler = Scheduler(model, tiny_tokenizer, "full", ag.Pool(model, 2**20))
    [stream] = scheduler.submit(Request(tokens=[7, 8], max_tokens=4, ignore_eos=True))
    for reason, words in (("", "stopping"), ("the end", "the end")):
        scheduler.stop(reason)
        with refuses(StoppedError, words):
            scheduler.submit(Request(tokens=[7, 8]))
        if not reason:
            scheduler.run()
            assert len(read(stream)) == 4


def test_what_is_refused(tiny_llama, tiny_tokenizer):
    model = model_for(tiny_llama, "full")
    pool = ag.Pool(model, 2**18)
    scheduler = Scheduler(model, tiny_tokenizer, "full", pool, queue=2)
    with refuses(UserError, "max_tokens=-1", "greater than or equal to 0"):
        Request(tokens=[7], max_tokens=-1)
    with refuses(UserError, "repetition_penalty=1e-300", "greater than or equal to 0.01"):
        Request(tokens=[7], repetition_penalty=1e-300)
    with refuses(UserError, "temperature='hot'", "number"):
        Request(tokens=[7], temperature="hot")
    with refuses(UserError, "min_tokens=9", "at most max_tokens=8"):
        Request(tokens=[7], min_tokens=9, max_tokens=8)
    with refuses(UserError, "protect=((1, 3),)", "(0, 40)", "2 tokens"):
        Request(tokens=[7, 8], protect=((1, 3),))
    with refuses(UserError, "tokens=[]", "at least 1"):
        Request(tokens=[])
    with refuses(UserError, "500", "512", "context"):
        scheduler.submit(Request(tokens=[7] * 500, max_tokens=20))
    with refuses(UserError, "400", str(pool.capacity * pool.block_nbytes())):
        scheduler.submit(Request(tokens=[7] * 400, max_tokens=20, n=9))
    for _ in range(2):
        scheduler.submit(Request(tokens=[7], max_tokens=1))
    with refuses(QueueFullError, "2 requests"):
        scheduler.submit(Request(tokens=[7], max_tokens=1))
    finish(scheduler)
    assert pool.free == pool.capacity


def test_snapshots(tiny_llama, tiny_tokenizer):
    model, draw, now = model_for(tiny_llama, "h2o"), random.Random(6), [10.0]
    pool = ag.Pool(model, 2**22)
    scheduler = Scheduler(
        model, tiny_tokenizer, ag.policy("h2o", 24, "every"), pool, prefill_tokens=72, batch=2, clock=lambda: now[0]
    )
    for tokens in (40, 70, 30):
        scheduler.submit(Request(tokens=text(draw, tokens), max_tokens=9))
    assert scheduler.snapshot().num_waiting == 3 and scheduler.snapshot().blocks == pool.capacity
    now[0] = 13.0
    scheduler.step()
    seen = scheduler.snapshot()
    assert (seen.num_waiting, seen.num_prefilling, len(seen.running)) == (1, 1, 1)
    (first,) = seen.running
    assert (first.index, first.num_prompt_tokens, first.num_generated, first.seconds) == (0, 40, 2, 3.0)
    assert first.cached == (24.0,) * 2 and seen.memory == first.memory
    assert (first.memory.num_tokens, first.memory.num_held) == (41, 24.0)
    counts = seen.counts
    assert (counts.prompts, counts.tokens, counts.num_started, counts.ttft_seconds) == (40, 2, 1, 3.0)
    assert seen.free == pool.free and seen.block_nbytes * seen.blocks == pool.nbytes
    finish(scheduler)
    last = scheduler.snapshot()
    assert (last.running, last.free, last.counts.num_ended) == ((), pool.capacity, {"length": 3})
    assert seen.counts.tokens == 2 and last.counts.tokens == 27


@pytest.mark.parametrize("kv_dtype", ["float", "int8"])
@pytest.mark.parametrize("name", POLICIES)
def test_the_memory_of_an_answer_is_that_of_a_cache_of_its_own(tiny_llama, tiny_tokenizer, name, kv_dtype):
    """The tokens held and the bytes saved, against transformers' cache of what was read; the last token is not."""
    model = model_for(tiny_llama, name)
    policy = replace(POLICIES[name], kv_dtype=kv_dtype)
    scheduler = Scheduler(model, tiny_tokenizer, policy, ag.Pool(model, 2**22, kv_dtype))
    request = Request(tokens=text(random.Random(1), 90), max_tokens=9, ignore_eos=True)
    [stream] = scheduler.submit(request)
    finish(scheduler)
    ids = torch.tensor([[*request.tokens, *(token.id for token in stream)][:-1]])
    cache = ag.EvictionCache(model, policy)
    with torch.no_grad():
        for part in (ids[:, :90], *ids[:, 90:].split(1, 1)):
            model(part, past_key_values=cache)
    memory, held = stream.memory, cache.report()
    taken = sum(held.nbytes) - sum(layer.gate_memory.nbytes for layer in cache.state.layers)
    assert memory.num_tokens == held.tokens == 98
    assert memory.saved_bytes == max(0, held.plain_nbytes - taken)
    assert bool(memory.saved_bytes) == (name != "full" or kv_dtype == "int8")
    if name == "flags":  # a cache counts only those that later tokens see
        assert held.kept_share <= memory.kept_share < 1
    else:
        assert memory.kept_share == pytest.approx(held.kept_share, rel=2**-23)  # a quotient of float32

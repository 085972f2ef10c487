"""A common prefix of prompts is read once, and every answer equals that of its request alone."""

from __future__ import annotations

import random

import pytest
import torch

import ag
from ag.serve import Request, Scheduler
from ag.serve.prefix_cache import PrefixCache
from tests.support.gates_for import gates_for
from tests.support.served import alone, finish, read, text

CAUSAL = {"covers": "all", "scope": "causal", "recent_tokens": 4}
#: By name: the policy, the gates attached, and whether a prefix can be cached.
POLICIES = {
    "full": (ag.policy("full"), None, True),
    "full, some windows": (ag.policy("full"), None, True),
    "h2o, every": (ag.policy("h2o", 30, "every"), None, True),
    "h2o, steps": (ag.policy("h2o", 0.3, "steps:5"), None, True),
    "scissorhands": (ag.policy("scissorhands", 40, window=50), None, True),
    "snapkv": (ag.policy("snapkv@pyramid", 24, window=8), None, True),
    "kvzip": (ag.policy("kvzip", 0.3, chunk=50), None, True),
    "slots": (ag.policy("streaming_llm", 30, "every", positions="slot"), None, True),
    "gates": (ag.policy("gates", 0.3, "every"), CAUSAL, True),
    "flags": (ag.policy("flags"), CAUSAL, True),
    "flags, dense": (ag.policy("flags"), CAUSAL | {"covers": "prompt", "prefill": "dense"}, True),
    "flags that look back": (ag.policy("flags"), CAUSAL | {"window": 8}, True),
    "flags of the prompt": (ag.policy("flags"), {"covers": "prompt", "scope": "prompt"}, False),
    "flags, slots": (ag.policy("flags", positions="slot"), CAUSAL, False),
    "blocks": (ag.policy("h2o", 30, "blocks:16"), None, False),
}


def model_of(name, gates, tiny_llama, tiny_gemma3=None):
    kind, layers = (tiny_gemma3, {}) if name == "full, some windows" else (tiny_llama, {"num_hidden_layers": 2})
    model = kind(**layers, eos_token_id=2, pad_token_id=0)
    if gates is not None:
        ag.attach(model, gates_for(model, **gates))
    return model


QUICK = "full", "h2o, every", "flags"


@pytest.mark.parametrize("name", [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in POLICIES])
def test_answers_are_those_of_each_request_alone(tiny_llama, tiny_gemma3, tiny_tokenizer, name):
    """Prompts with one, two or no common prefix, and one that continues an answer."""
    policy, gates, held = POLICIES[name]
    model, draw = model_of(name, gates, tiny_llama, tiny_gemma3), random.Random(name)
    system, chat = text(draw, 83), text(draw, 40)
    prompts = [system + text(draw, draw.randrange(1, 30)) for _ in range(4)]
    prompts += [system + chat + text(draw, draw.randrange(1, 20)) for _ in range(3)]
    prompts += [text(draw, 60), system[:70], prompts[0], prompts[0]]
    pool = ag.Pool(model, 2**22)
    scheduler = Scheduler(model, tiny_tokenizer, policy, pool, prefill_tokens=45)
    requests = [Request(tokens=tokens, max_tokens=draw.randrange(2, 12)) for tokens in prompts]
    streams = [stream for request in requests for stream in scheduler.submit(request)]
    finish(scheduler)
    answers = [read(stream) for stream in streams]
    further = prompts[5] + answers[5] + text(draw, 9)
    for number in range(2):  # the second one continues the first one
        requests.append(Request(tokens=further + text(draw, 7 * number), max_tokens=5))
        streams += scheduler.submit(requests[-1])
        finish(scheduler)
        answers.append(read(streams[-1]))
    for request, answer in zip(requests, answers, strict=True):
        assert answer == alone(model, scheduler.policy, request)
    seen = scheduler.snapshot()
    assert seen.counts.prompts + seen.counts.cached == sum(len(request.tokens) for request in requests)
    # the system prompt in nine prompts, the chat in two, a whole prompt in one, an answer in one
    assert seen.counts.cached >= 9 * 64 + 2 * 32 if held else seen.counts.cached == 0
    assert seen.prefixes >= 3 if held else seen.prefixes == 0
    assert pool.capacity - pool.free == seen.prefix_blocks and bool(seen.prefix_blocks) == held
    assert pool.has(lambda: pool.capacity)


@pytest.mark.parametrize("name", ["h2o, every", "flags"])
def test_what_is_protected_is_a_part_of_a_prefix(tiny_llama, tiny_tokenizer, name):
    policy, gates, _ = POLICIES[name]
    model, draw = model_of(name, gates, tiny_llama), random.Random(name)
    system = text(draw, 90)
    scheduler = Scheduler(model, tiny_tokenizer, policy, ag.Pool(model, 2**22))
    requests = [
        Request(tokens=system + text(draw, 20), max_tokens=6, protect=protect)
        for protect in ((), ((0, 20),), ((0, 20), (95, 110)), ((0, 21),), (), ((100, 102),), ((0, 20),))
    ]
    streams = [stream for request in requests for stream in scheduler.submit(request)]
    finish(scheduler)
    answers = [read(stream) for stream in streams]
    assert answers == [alone(model, policy, request) for request in requests]
    # three prompts protect the first 20 tokens, three do not; the first of each three is read whole
    assert scheduler.counts.cached == 4 * 80 and scheduler.snapshot().prefixes == 2


def test_earlier_prefixes_give_way_to_new_ones(tiny_llama, tiny_tokenizer):
    """In a pool that they fill."""
    model, draw = model_of("full", None, tiny_llama), random.Random(1)
    pool = ag.Pool(model, 130 * ag.Pool(model, 2**14).block_nbytes())
    scheduler, requests, streams = Scheduler(model, tiny_tokenizer, "full", pool), [], []
    for system in (text(draw, 85) for _ in range(5)):
        for _ in range(3):
            requests.append(Request(tokens=system + text(draw, 9), max_tokens=4))
            streams += scheduler.submit(requests[-1])
            finish(scheduler)
    assert scheduler.counts.cached == 5 * 80 and not scheduler.counts.preempted
    assert [read(stream) for stream in streams] == [alone(model, "full", request) for request in requests]


def test_prompts_that_are_read_whole_are_cached_once_at_most(tiny_llama, tiny_tokenizer):
    model, draw = model_of("full", None, tiny_llama), random.Random(0)
    scheduler, system = Scheduler(model, tiny_tokenizer, "full", ag.Pool(model, 2**22)), text(draw, 90)
    for best in (None, None, 0, 0, 0):
        scheduler.submit(Request(tokens=system + text(draw, 9), max_tokens=1, prompt_logprobs=best))
        finish(scheduler)
    assert scheduler.snapshot().prefixes == 1


def test_what_texts_have_in_common(tiny_llama):
    pool = ag.Pool(tiny_llama(), 2**14)
    found = PrefixCache(pool)
    first, second = torch.arange(200), torch.cat([torch.arange(100), torch.zeros(50, dtype=torch.long)])
    for each in (first, second):
        found.recent_keys.append(each)
    assert found.shared_prefix_length(first) == found.shared_prefix_length(second) == 96
    found.recent_keys.append(torch.arange(130))
    assert (
        found.shared_prefix_length(first) == 128 and found.shared_prefix_length(torch.arange(130)) == 128
    )  # less than all
    assert found.shared_prefix_length(second[:70]) == 64
    assert found.shared_prefix_length(torch.arange(60)) == 0  # not worth it
    assert found.find(first) is None and not found.drop()
    assert not pool.spares  # other threads make such caches, while the pool reads its spares


def test_a_prompt_that_needs_its_prefix_s_blocks_for_itself(tiny_llama, tiny_tokenizer):
    """In a pool without room for copies of them the prefix goes, and then nothing has to be copied."""
    model, draw = model_of("snapkv", None, tiny_llama), random.Random(2)
    pool = ag.Pool(model, 100 * ag.Pool(model, 2**14).block_nbytes())  # 25 blocks for each of 4 layers and heads
    scheduler, prompt = Scheduler(model, tiny_tokenizer, ag.policy("snapkv", 24, window=8), pool), text(draw, 220)
    for _ in range(4):
        request = Request(tokens=prompt, max_tokens=4)
        [stream] = scheduler.submit(request)
        finish(scheduler)
        assert read(stream) == alone(model, scheduler.policy, request)
        prompt = prompt + text(draw, 20)

"""Answers after an evicted prompt against one answer at a time, and greedy text against ``generate``."""

import pytest
import torch

import ag
from ag.engine import read_prompt
from ag.evaluate.tasks.follow import greedy, score
from ag.model.structure import end_tokens
from tests.support.bounds import hold, of_nats

PROMPT = torch.randint(3, 128, (40,), generator=torch.Generator().manual_seed(1)).tolist()
ANSWERS = [[5, 9, 40, 77], [12], [30, 31, 99, 100, 101, 102, 64]]
POLICIES = [ag.policy("full"), ag.policy("h2o", 12, "every"), ag.policy("tova", 9, "blocks:8+steps:3")]


def read(model, policy):
    [(cache, last)] = read_prompt(model, [policy], torch.tensor([PROMPT]))
    return cache, last


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_answers_together_are_as_each_alone(tiny_llama, plain, step_by_step, policy):
    model = tiny_llama()
    for (nats, likeliest), answer in zip(score(model, *read(model, policy), ANSWERS), ANSWERS, strict=True):
        if policy.scorer is None:
            wanted = plain(model, PROMPT, answer)
        elif policy.steps == 1:
            wanted = step_by_step(model, ag.EvictionCache(model, policy), PROMPT, answer)
        else:  # pieces of three: within a piece nothing goes, as between two evictions of a decoder
            [(wanted, _)] = score(model, *read(model, policy), [answer])
        hold(nats, wanted, of_nats(model))
        assert likeliest.shape == nats.shape


def test_greedy_is_generate_for_each_policy_of_a_batch(tiny_llama):
    model, options = tiny_llama(), {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    prompts, ids = [read(model, policy) for policy in POLICIES], torch.tensor([PROMPT])
    expected = []
    for policy in POLICIES:
        text = model.generate(ids, past_key_values=ag.EvictionCache(model, policy), **options)
        expected.append(text[0, len(PROMPT) :].tolist())
    assert greedy(model, prompts, 12, set()) == expected and expected[0] != expected[1]
    assert [cache.seen_tokens for cache, _ in prompts] == [len(PROMPT) + 11] * len(POLICIES)
    stop = expected[1][3]  # at which texts end at different steps
    cut = [text[: text.index(stop)] if stop in text else text for text in expected]
    assert greedy(model, [read(model, policy) for policy in POLICIES], 12, {stop}) == cut and len({*map(len, cut)}) > 1


def test_likeliest_tokens_and_ends(tiny_llama):
    model = tiny_llama()
    [found] = greedy(model, [read(model, POLICIES[0])], 6, set())
    wrong = [*found[:2], found[2] + 1, 5]
    [(_, right), (_, flags)] = score(model, *read(model, POLICIES[0]), [found, wrong])
    assert right.tolist() == [True] * 6 and flags.tolist()[:3] == [True, True, False]
    assert greedy(model, [read(model, POLICIES[0])], 6, {found[2]}) == [found[: found.index(found[2])]]
    assert greedy(model, [read(model, POLICIES[0])], 6, {found[0]}) == [[]]
    [other] = greedy(model, [read(model, POLICIES[0])], 6, {found[0]}, min_new_tokens=1)
    assert other and found[0] not in other
    model.generation_config.eos_token_id = [2, 7]
    assert end_tokens(model, 9) == {2, 7, 9}
    model.generation_config.eos_token_id = None
    assert end_tokens(model, None) == set()

"""Answers after an evicted prompt against one answer at a time, and greedy text against ``generate``."""

import pytest
import torch

import ag
from ag.engine import read_prompt
from ag.evaluate.tasks.follow import end_tokens, greedy, score
from tests.support.bounds import hold, of_nats

PROMPT = torch.randint(3, 128, (40,), generator=torch.Generator().manual_seed(1)).tolist()
ANSWERS = [[5, 9, 40, 77], [12], [30, 31, 99, 100, 101, 102, 64]]
POLICIES = [
    ag.policy("full"),
    ag.policy("snapkv", 0.4, window=4),
    ag.policy("h2o", 12, "every"),
    ag.policy("tova", 9, "blocks:8+steps:3"),
]


def read(model, policy):
    [(cache, last)] = read_prompt(model, [policy], torch.tensor([PROMPT]))
    return cache, last


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_answers_together_are_as_each_alone(tiny_llama, plain, step_by_step, policy):
    model = tiny_llama()
    for (nats, likeliest), answer in zip(score(model, *read(model, policy), ANSWERS), ANSWERS, strict=True):
        if policy.steps in (None, 1):
            wanted = step_by_step(model, ag.EvictionCache(model, policy), PROMPT, answer)
            hold(nats, wanted, of_nats(model))
        else:  # pieces of three: within a piece nothing goes, as between two evictions of a decoder
            [(alone, _)] = score(model, *read(model, policy), [answer])
            hold(nats, alone, of_nats(model))
        if policy.scorer is None:
            hold(nats, plain(model, PROMPT, answer), of_nats(model))
        assert likeliest.shape == nats.shape


def test_likeliest(tiny_llama):
    model = tiny_llama()
    best = greedy(model, *read(model, POLICIES[0]), 4, set())
    [(_, right), (_, wrong)] = score(model, *read(model, POLICIES[0]), [best, [*best[:2], best[2] + 1, 5]])
    assert right.tolist() == [True] * 4
    assert wrong.tolist()[:3] == [True, True, False]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_greedy_is_generate(tiny_llama, policy):
    model = tiny_llama()
    wanted = model.generate(
        torch.tensor([PROMPT]),
        past_key_values=ag.EvictionCache(model, policy),
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=None,
    )
    assert greedy(model, *read(model, policy), 12, set()) == wanted[0, len(PROMPT) :].tolist()


def test_greedy_ends(tiny_llama):
    model = tiny_llama()
    found = greedy(model, *read(model, POLICIES[0]), 6, set())
    assert greedy(model, *read(model, POLICIES[0]), 6, {found[2]}) == found[: found.index(found[2])]
    assert greedy(model, *read(model, POLICIES[0]), 6, {found[0]}) == []
    other = greedy(model, *read(model, POLICIES[0]), 6, {found[0]}, least=1)
    assert other
    assert found[0] not in other


def test_end_tokens(tiny_llama):
    model = tiny_llama()
    model.generation_config.eos_token_id = [2, 7]
    assert end_tokens(model, 9) == {2, 7, 9}
    model.generation_config.eos_token_id = None
    assert end_tokens(model, None) == set()

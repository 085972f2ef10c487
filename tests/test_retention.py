"""The rule of eviction against plain Python, token by token."""

import random

import pytest
import torch

from ag import retention


def scene(seed):
    """One head of one sequence: which tokens it holds, in any order, their scores, and what the policy protects."""
    draw = random.Random(seed)
    num_tokens = draw.randint(1, 30)
    held = draw.sample(range(num_tokens), draw.randint(1, num_tokens))
    return {
        "num_tokens": num_tokens,
        "held": held,
        "scores": [float(draw.choice([-1, 0, 1]) if seed % 2 else draw.gauss(0, 1)) for _ in held],  # ties in half
        "sinks": draw.randint(0, 5),
        "recent": draw.randint(0, 6),
        "by_caller": draw.sample(range(num_tokens), draw.randint(0, num_tokens)) if seed % 3 else [],
        "window": draw.randint(1, 30) if seed % 4 == 0 else None,
        "budget": draw.randint(0, 12),
    }


def is_protected(case, token):
    return token < case["sinks"] or token >= case["num_tokens"] - case["recent"] or token in case["by_caller"]


def is_expired(case, token):
    """The next query is token ``num_tokens``, and sees itself and the window - 1 tokens before it."""
    return case["window"] is not None and token <= case["num_tokens"] - case["window"]


def kept_by_hand(case):
    """The protected tokens, then the others by descending score and ascending index until the budget is full."""
    protected = [x for x in case["held"] if is_protected(case, x) and not is_expired(case, x)]
    score = dict(zip(case["held"], case["scores"], strict=True))
    others = [x for x in case["held"] if not is_protected(case, x) and not is_expired(case, x)]
    others.sort(key=lambda x: (-score[x], x))
    return {*protected, *others[: max(0, case["budget"] - len(protected))]}


@pytest.mark.parametrize("seed", range(300))
def test_a_head_keeps_the_protected_and_the_best_tokens(seed):
    case = scene(seed)
    held, num_tokens = torch.tensor(case["held"])[None, None], torch.tensor([case["num_tokens"]])
    marks = torch.zeros(1, case["num_tokens"], dtype=torch.bool)
    marks[0, case["by_caller"]] = True
    protected = retention.protected_mask(held, num_tokens, case["sinks"], case["recent"], marks)
    expired = None if case["window"] is None else retention.expired_mask(held, num_tokens, case["window"])
    score = retention.eviction_score(torch.tensor(case["scores"])[None, None], protected, expired)
    keep = retention.keep_mask(score, torch.tensor([[case["budget"]]]), held) & (score > -retention.INF)
    assert {*held[keep].tolist()} == kept_by_hand(case)
    if case["held"] == sorted(case["held"]):
        assert torch.equal(
            keep, retention.keep_mask(score, torch.tensor([[case["budget"]]])) & (score > -retention.INF)
        )


@pytest.mark.parametrize("seed", range(300))
def test_the_host_counts_the_protected_tokens_that_have_not_expired(seed):
    case = scene(seed)
    marks = torch.zeros(1, 35, dtype=torch.bool)
    marks[0, case["by_caller"]] = True
    want = sum(is_protected(case, x) and not is_expired(case, x) for x in range(case["num_tokens"]))
    arguments = torch.tensor([case["num_tokens"]]), case["sinks"], case["recent"]
    assert retention.count_protected(*arguments, marks, case["window"]).tolist() == [want]
    without = case | {"by_caller": []}
    want = sum(is_protected(without, x) and not is_expired(without, x) for x in range(case["num_tokens"]))
    assert retention.count_protected(*arguments, None, case["window"]).tolist() == [want]


def test_a_head_keeps_its_protected_tokens_over_the_budget():
    assert retention.keep_count(torch.tensor([3, 9]), torch.tensor([5, 5])).tolist() == [5, 9]


def test_scores_that_are_not_finite_are_nan_unless_their_token_is_protected_or_expired():
    inf = retention.INF
    score = torch.tensor([[[float("nan"), inf, -inf, inf, -inf, 1.0]]])
    protected = torch.tensor([[[False, False, False, True, False, False]]])
    expired = torch.tensor([[[False, False, False, False, True, False]]])
    got = retention.eviction_score(score, protected, expired)[0, 0]
    assert got[:3].isnan().all() and got[3:].tolist() == [inf, -inf, 1.0]

"""Kept shares: as text, and which results hold equally much, so that they may be compared."""

from __future__ import annotations

from collections.abc import Sequence

from ag.evaluate.comparison.result import Result

SPARE = 0.02  # of a prompt, by which two shares may differ and count as equal
OF_SHARE = 0.2  # and of the smaller one, which is less where little is held
APART = "Not compared with each other, because they hold different shares:"


def percent(share: float) -> str:
    """Return a share as text: ``25 %``, and with a decimal below ten."""
    return f"{_number(share)} %"


def held(results: Sequence[Result]) -> str:
    """Return as text what a policy holds: a share for each budget, from the least to the most of the tasks."""
    shares: dict[str, list[float]] = {}
    for result in results:
        if result.shares is not None:
            shares.setdefault(result.budget, []).append(result.shares[0])
    ends = sorted((min(found), max(found)) for found in shares.values())
    texts = [dict.fromkeys(map(_number, pair)) for pair in ends]
    return f"{', '.join(dict.fromkeys(' to '.join(text) for text in texts))} %" if texts else ""


def _number(share: float) -> str:
    return f"{100 * share:.{0 if share >= 0.0995 else 1}f}"


def shown(result: Result) -> str:
    """Return what pictures call a result: its name and the share that it holds."""
    return result.name if result.shares is None else f"{result.name} ({percent(result.shares[0])})"


def agree(one: float, other: float) -> bool:
    """Whether two kept shares count as equal: at most 2 % of the prompt apart, and a fifth of the smaller one."""
    return abs(one - other) <= min(SPARE, OF_SHARE * min(one, other)) + 1e-9  # 0.27 - 0.25 is a little over 0.02


def hold_alike(one: Result, other: Result) -> bool:
    """Whether two results hold equally much: the same share of all tokens, and of a prompt on average.

    With prompts of different lengths the two differ: a budget in tokens is a large share of a short prompt and a small
    one of a long prompt, where flags hold about the same share of both. The memory is a mean over tokens, the score one
    over prompts. Where the texts differ in length, because the model wrote them, holding as many tokens counts too.
    """
    if one.shares is None or other.shares is None:
        return False
    if all(agree(*shares) for shares in zip(one.shares, other.shares, strict=True)):
        return True
    mine, theirs = one.tokens, other.tokens
    mean = (mine + theirs) / 2
    return mine != theirs and agree(one.shares[0] * mine / mean, other.shares[0] * theirs / mean)


def may_pair(one: Result, other: Result) -> bool:
    """Whether two results of a task may be paired: they hold equally much, or one of them is the full cache."""
    return not (one.evicts and other.evicts) or hold_alike(one, other)


def at_budget(results: Sequence[Result], budget: str) -> list[Result]:
    """Return those results of a task that evict and may be compared at a budget; empty: those that were told none.

    The one that holds least of those that were told this budget sets the share: others may protect more than it. What
    was told no budget (flags) takes part where it holds as much by itself.
    """
    evicting, least = _evicting(results, budget)
    return [result for result in evicting if not budget or (least is not None and hold_alike(result, least))]


def apart(results: Sequence[Result], budget: str) -> list[str]:
    """Say which results of a task may not be compared at a budget, and what they hold instead of what others hold."""
    evicting, least = _evicting(results, budget)
    if not budget or least is None:
        return []
    return [differing(result, least) for result in evicting if not hold_alike(result, least)]


def differing(result: Result, other: Result) -> str:
    """Say what a result holds, and another one that holds another share."""
    assert result.shares is not None and other.shares is not None
    which = 0 if not agree(result.shares[0], other.shares[0]) else 1
    of = ("", " of a prompt on average")[which]
    return f"{result.name} holds {100 * result.shares[which]:.1f} %{of}, {other.name} {100 * other.shares[which]:.1f} %"


def _evicting(results: Sequence[Result], budget: str) -> tuple[list[Result], Result | None]:
    """Return what evicts under a budget or none, and which of those that were told the budget holds least."""
    found = [one for one in results if one.shares is not None and one.evicts and one.budget in ("", budget)]
    return found, min((one for one in found if one.budget == budget), key=lambda one: one.shares or (), default=None)

"""What came out of a cell, and how it compares with another one on the same samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ag.engine.spec import PolicySpec
from ag.evaluate.comparison.folder import Summary, tag_values
from ag.evaluate.comparison.statistics import Paired, compare, mean_and_error
from ag.evaluate.comparison.views import View
from ag.evaluate.tasks import Outcome


@dataclass(frozen=True)
class Result:
    """A cell with all that came out of it."""

    summary: Summary
    outcomes: list[Outcome]
    views: list[View]
    spec: PolicySpec
    paired: Paired | None = None  # against the baseline, where it has another one and both have a result
    paired_nats: Paired | None = None  # the same of the right answers' nats, where these were measured

    @cached_property
    def budget(self) -> str:
        """The budget as it is written: 1 is a token, 1.0 the whole prompt; empty without one."""
        return "" if self.summary.budget is None else str(self.summary.budget)

    @cached_property
    def name(self) -> str:
        """The policy and its budget."""
        return self.summary.name

    @cached_property
    def shares(self) -> tuple[float, float] | None:
        """The shares that it holds: of the tokens of all prompts, and of a prompt on average; None without a result."""
        if self.summary.kept is None or not self.outcomes:
            return None
        return self.summary.kept, sum(outcome.kept for outcome in self.outcomes) / len(self.outcomes)

    @cached_property
    def tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(outcome.tokens for outcome in self.outcomes)

    @cached_property
    def is_gated(self) -> bool:
        """Whether gates take part, whatever the policy is called."""
        return self.spec.reads_gates

    @cached_property
    def evicts(self) -> bool:
        """Whether anything may go."""
        return self.spec.evicts

    @cached_property
    def scores(self) -> dict[str, float]:
        """The score of each sample."""
        return {outcome.sample: outcome.score for outcome in self.outcomes}

    @cached_property
    def nats(self) -> tuple[float, float | None] | None:
        """Mean and standard error of the right answers' negative log-likelihood per token, where it was measured."""
        found = tag_values(self.outcomes, "nats")
        return mean_and_error(list(found.values())) if found else None

    def measure(self, nats: bool) -> tuple[float, float, float] | None:
        """Return kept share, mean and standard error of the score or of the nats; None where they are not known."""
        found = self.nats if nats else (self.summary.mean, self.summary.error)
        if self.summary.kept is None or found is None or found[0] is None:
            return None
        return self.summary.kept, found[0], found[1] or 0.0


def pair(result: Result, other: Result, nats: bool = False) -> Paired | None:
    """Compare the scores of two results, or the nats of their right answers; None where they share no sample."""
    if nats:
        mine, theirs = _matched(*(tag_values(one.outcomes, "nats") for one in (result, other)))
        return compare(mine, theirs) if mine else None
    mine, theirs = _matched(result.scores, other.scores)
    return compare(mine, theirs, _parts(result, other)) if mine else None


def _parts(one: Result, other: Result) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]] | None:
    """Return for each sample that both have the differences of its blocks and their tokens; None without blocks."""
    theirs = {outcome.sample: outcome for outcome in other.outcomes}
    found = []
    for outcome in one.outcomes:
        if outcome.sample in theirs:
            mine, same = outcome.blocks, theirs[outcome.sample].blocks
            if not mine or mine.keys() != same.keys():
                return None
            differences = np.array([nats - same[start] for start, nats in mine.items()])
            found.append((differences, np.diff([*mine, outcome.tokens]).astype(np.float64)))
    return found


def by_position(result: Result, base: Result | None = None, what: str = "") -> dict[int, tuple[float, float | None]]:
    """Return by block, ascending, the mean over texts of the nats, with its standard error.

    Args:
        result: of a task whose outcomes have blocks.
        base: the differences to this one are taken instead, on the texts and blocks that both have.
        what: take numbered parts instead of blocks, such as turns.
    """

    def numbered(outcome: Outcome) -> Mapping[int, float]:
        return outcome.numbered(what) if what else outcome.blocks

    others = {} if base is None else {outcome.sample: numbered(outcome) for outcome in base.outcomes}
    found: dict[int, list[float]] = {}
    for outcome in result.outcomes:
        mine = numbered(outcome)
        theirs = dict.fromkeys(mine, 0.0) if base is None else others.get(outcome.sample, {})
        for start in mine.keys() & theirs.keys():
            found.setdefault(start, []).append(mine[start] - theirs[start])
    return {start: mean_and_error(values) for start, values in sorted(found.items())}


def part_names(results: Sequence[Result]) -> dict[str, list[str]]:
    """Return the names of the parts that samples have, by what parts are; numbers ascending, others as they came."""
    found: dict[str, dict[str, None]] = {}
    for result in results:
        for outcome in result.outcomes:
            for what, measured in outcome.parts.items():
                found.setdefault(what, {}).update(dict.fromkeys(measured["score"]))
    return {what: sorted(names, key=lambda name: int(name) if name.isdigit() else 0) for what, names in found.items()}


def part_values(result: Result, measure: str, what: str, name: str) -> dict[str, float]:
    """Return the number that each sample with a part of this name has for it; ``measure`` is ``score`` or ``nats``."""
    return tag_values(result.outcomes, f"{measure}@{what} {name}")


def pair_part(result: Result, other: Result, what: str, name: str) -> Paired | None:
    """Compare the nats of one part of the samples; None where two results share none."""
    mine, theirs = _matched(*(part_values(one, "nats", what, name) for one in (result, other)))
    return compare(mine, theirs) if mine else None


def _matched(mine: Mapping[str, float], theirs: Mapping[str, float]) -> tuple[list[float], list[float]]:
    """Return the numbers of the samples that both have, in the same order."""
    both = [sample for sample in mine if sample in theirs]
    return [mine[sample] for sample in both], [theirs[sample] for sample in both]

"""Fewer cases than a cross product: every pair of values of every two parameters takes part in one at least."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Any

Case = tuple[Any, ...]


def covering(allowed: Callable[..., bool] = lambda **_: True, **values: Sequence[Any]) -> list[Case]:
    """Choose cases that cover all pairs, always the same ones.

    Greedy: a case begins with the first pair that is still missing; each further value is the one that brings the most
    missing pairs, of equals the one that was used least.

    Args:
        allowed: says of a complete case, by keyword, whether it may run. A pair that no allowed case holds is left out.
        values: the values of each parameter.

    Returns:
        A tuple a case, in the order of the parameters, sorted by their values' places.
    """
    names = list(values)
    sizes = [len(values[name]) for name in names]
    missing = {
        ((i, x), (j, y)): True
        for i, j in combinations(range(len(names)), 2)
        for x in range(sizes[i])
        for y in range(sizes[j])
    }
    used = [[0] * size for size in sizes]
    found: list[tuple[int, ...]] = []
    while missing:
        pair = next(iter(missing))
        case = next(_completions(dict(pair), sizes, missing, used, lambda c: allowed(**_named(values, c))), None)
        if case is None:  # no case may hold this pair
            del missing[pair]
            continue
        for i, x in enumerate(case):
            used[i][x] += 1
        for both in combinations(enumerate(case), 2):
            missing.pop(both, None)
        found.append(case)
    return [tuple(_named(values, case).values()) for case in sorted(found)]


def _completions(
    chosen: dict[int, int],
    sizes: list[int],
    missing: dict[tuple[tuple[int, int], tuple[int, int]], bool],
    used: list[list[int]],
    allowed: Callable[[tuple[int, ...]], bool],
) -> Iterator[tuple[int, ...]]:
    """Yield the allowed cases that hold what is chosen, the most useful first."""
    free = [i for i in range(len(sizes)) if i not in chosen]
    if not free:
        case = tuple(chosen[i] for i in range(len(sizes)))
        if allowed(case):
            yield case
        return
    place = free[0]

    def gain(x: int) -> tuple[int, int, int]:
        mine = (place, x)
        new = sum((min(mine, other), max(mine, other)) in missing for other in chosen.items())
        return (-new, used[place][x], x)

    for x in sorted(range(sizes[place]), key=gain):
        yield from _completions(chosen | {place: x}, sizes, missing, used, allowed)


def _named(values: dict[str, Sequence[Any]], case: tuple[int, ...]) -> dict[str, Any]:
    return {name: options[x] for (name, options), x in zip(values.items(), case, strict=True)}

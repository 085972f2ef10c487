"""Fewer cases than a cross product: every pair of values of every two parameters takes part in one at least.

allpairspy would be shorter still, but loses pairs where some cases are not allowed: 139 of the policies'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, product
from typing import Any

Case = tuple[int, ...]  # a value's place, by parameter
Pair = tuple[tuple[int, int], ...]


def covering(allowed: Callable[..., bool] = lambda **_: True, **values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Choose cases that cover all pairs, always the same ones.

    Greedy: the first pair that is still missing is covered by the case that brings the most of them.

    Args:
        allowed: says of a case, by keyword, whether it may run. A pair that no allowed case holds is left out.
        values: the values of each parameter.

    Returns:
        A tuple a case, in the order of the parameters, sorted by their values' places.
    """

    def named(case: Case) -> dict[str, Any]:
        return {name: options[place] for (name, options), place in zip(values.items(), case, strict=True)}

    def pairs(case: Case) -> Iterator[Pair]:
        return combinations(enumerate(case), 2)

    holding: dict[Pair, list[Case]] = {}
    for case in product(*(range(len(options)) for options in values.values())):
        if allowed(**named(case)):
            for pair in pairs(case):
                holding.setdefault(pair, []).append(case)
    missing, found = dict.fromkeys(holding), []
    while missing:
        best = max(holding[next(iter(missing))], key=lambda case: sum(pair in missing for pair in pairs(case)))
        found.append(best)
        for pair in pairs(best):
            missing.pop(pair, None)
    return [tuple(named(case).values()) for case in sorted(found)]

"""Fewer cases than a cross product: every pair of values of every two parameters takes part in one at least.

allpairspy would be shorter still, but loses pairs where some cases are not allowed: 139 of the policies'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any


def covering(allowed: Callable[..., bool] = lambda **_: True, **values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Choose cases that cover all pairs, always the same ones: greedily, as many missing pairs as possible at a time.

    Args:
        allowed: predicate of a case, by keyword. A pair that no allowed case holds is left out.
        values: the values of each parameter.

    Returns:
        A tuple for each case, in the order of the parameters, sorted by their values' places.
    """

    def named(case: tuple[int, ...]) -> dict[str, Any]:
        return {name: options[place] for (name, options), place in zip(values.items(), case, strict=True)}

    cases = [case for case in product(*(range(len(x)) for x in values.values())) if allowed(**named(case))]
    pairs = {case: dict.fromkeys(combinations(enumerate(case), 2)) for case in cases}
    missing, found = {pair: None for case in cases for pair in pairs[case]}, []
    while missing:
        first = next(iter(missing))
        holding = (case for case in cases if first in pairs[case])
        found.append(max(holding, key=lambda case: sum(pair in missing for pair in pairs[case])))
        missing = {pair: None for pair in missing if pair not in pairs[found[-1]]}
    return [tuple(named(case).values()) for case in sorted(found)]

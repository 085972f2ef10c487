"""The choice of cases: against all pairs of a cross product, counted one by one."""

from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.pairs import covering


def pairs(cases):
    """Every two parameters' values that stand together in a case, with the parameters' places."""
    return {((i, x), (j, y)) for case in cases for (i, x), (j, y) in combinations(enumerate(case), 2)}


@given(st.lists(st.integers(1, 5), min_size=2, max_size=5), st.integers(0, 7))
def test_every_pair_that_an_allowed_case_holds_is_covered(sizes, forbidden):
    values = {f"p{i}": list(range(size)) for i, size in enumerate(sizes)}

    def allowed(**case):
        return sum(case.values()) % 8 != forbidden

    every = [case for case in product(*values.values()) if sum(case) % 8 != forbidden]
    found = covering(allowed, **values)
    assert set(found) <= set(every)
    assert pairs(found) == pairs(every)
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(("sizes", "most"), [((3, 3, 3), 11), ((7, 5, 4, 2), 40), ((2, 2, 2, 2, 2), 8)])
def test_cases_are_few_and_always_the_same(sizes, most):
    """No fewer than the product of the two largest; a cross product has 27, 280 and 32."""
    values = {f"p{i}": [f"{i}{x}" for x in range(size)] for i, size in enumerate(sizes)}
    found = covering(**values)
    largest, second, *_ = sorted(sizes, reverse=True)
    assert largest * second <= len(found) <= most
    assert found == covering(**values)

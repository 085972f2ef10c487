"""The choice of cases: against all pairs of a cross product, counted one by one."""

from itertools import combinations, product

from hypothesis import given
from hypothesis import strategies as st

from tests.support.pairs import covering


def pairs(cases):
    """Every two parameters' values that stand together in a case, with the parameters' places."""
    return {((i, x), (j, y)) for case in cases for (i, x), (j, y) in combinations(enumerate(case), 2)}


@given(st.lists(st.integers(1, 5), min_size=2, max_size=5), st.integers(0, 7))
def test_every_pair_that_an_allowed_case_holds_is_covered(sizes, forbidden):
    every = [case for case in product(*map(range, sizes)) if sum(case) % 8 != forbidden]
    values = {f"p{i}": list(range(size)) for i, size in enumerate(sizes)}
    found = covering(lambda **case: sum(case.values()) % 8 != forbidden, **values)
    assert set(found) <= set(every) and pairs(found) == pairs(every)
    assert len(set(found)) == len(found) <= len(every)


def test_cases_are_few():
    """No fewer than the product of the two largest; a cross product has 280."""
    assert 35 <= len(covering(**{f"p{size}": list(range(size)) for size in (7, 5, 4, 2)})) <= 40

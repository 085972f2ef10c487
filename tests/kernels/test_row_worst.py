"""The token that goes first from each row: every version against lists."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ag.kernels.row_worst import NOT_FINITE, OVER, cpu, row_worst
from ag.kernels.row_worst.reference import Going, reference_row_going, reference_row_worst
from tests.support.compiled import needs

VERSIONS = [
    pytest.param(reference_row_worst, id="reference"),
    pytest.param(cpu.row_worst, id="cpp", marks=needs(cpu.KERNEL)),
]
GOING = [
    pytest.param(reference_row_going, id="reference"),
    pytest.param(cpu.row_going, id="cpp", marks=needs(cpu.KERNEL)),
]
SCORES = [0.0, -1.0, 2.5, 3e38, math.inf, -math.inf, math.nan]


def check(version, seed, width, finite, ranked, dtype=torch.int32):
    """Hold a version to lists; few different scores, so that many are equal."""
    generator = torch.Generator().manual_seed(seed)
    score = torch.tensor(SCORES)[torch.randint(0, 4 if finite else len(SCORES), (2, 3, width), generator=generator)]
    protected, valid = (torch.rand(2, 3, width, generator=generator) < p for p in (0.3, 0.8))
    ranks = None
    if ranked:  # of a free slot anything
        ranks = torch.rand(2, 3, width, generator=generator).argsort(-1).masked_fill(~valid, -5).to(dtype)
    found = version(score, protected, valid, ranks)
    for b in range(2):
        for h in range(3):
            held = [t for t in range(width) if valid[b, h, t]]
            rivals = [t for t in held if not protected[b, h, t]]
            whole = all(math.isfinite(score[b, h, t]) for t in rivals)
            assert (int(found.held[b, h]), int(found.fixed[b, h])) == (len(held), len(held) - len(rivals))
            assert bool(found.finite[b, h]) == whole
            if whole:
                rank = list(range(width)) if ranks is None else ranks[b, h].tolist()
                gone = min(rivals, key=lambda t: (float(score[b, h, t]), -rank[t]), default=-1)
                assert int(found.slot[b, h]) == gone and found.slot.dtype == torch.int32


@pytest.mark.parametrize("version", VERSIONS)
@settings(max_examples=100)
@given(st.integers(0, 2**31), st.integers(0, 9), st.booleans(), st.booleans())
def test_rows_equal_lists(version, seed, width, finite, ranked):
    check(version, seed, width, finite, ranked)


def check_going(version, seed, width, finite):
    """Hold a version to lists: the worst goes where more is held than the capacity and what is protected."""
    generator = torch.Generator().manual_seed(seed)
    score = torch.tensor(SCORES)[torch.randint(0, 4 if finite else len(SCORES), (2, 3, width), generator=generator)]
    protected, valid = (torch.rand(2, 3, width, generator=generator) < p for p in (0.3, 0.8))
    ranks = torch.rand(2, 3, width, generator=generator).argsort(-1).int()
    capacity = torch.randint(0, width + 2, (2,), generator=generator)
    found = torch.randint(0, 4, (2, 3), generator=generator).to(torch.uint8)
    going = Going(torch.full((2, 3, 1), 77, dtype=torch.int32), found.clone())
    version(score, protected, valid, ranks, capacity, going)
    for b in range(2):
        for h in range(3):
            held = [t for t in range(width) if valid[b, h, t]]
            rivals = [t for t in held if not protected[b, h, t]]
            fixed, room = len(held) - len(rivals), int(capacity[b])
            whole = all(math.isfinite(score[b, h, t]) for t in rivals)
            news = (0 if whole else NOT_FINITE) | (OVER if fixed > room else 0)
            assert int(going.found[b, h]) == int(found[b, h]) | news
            if len(held) <= max(room, fixed):
                assert int(going.slots[b, h]) == -1
            elif whole:
                assert int(going.slots[b, h]) == min(
                    rivals, key=lambda t: (float(score[b, h, t]), -int(ranks[b, h, t]))
                )


@pytest.mark.parametrize("version", GOING)
@settings(max_examples=100)
@given(st.integers(0, 2**31), st.integers(0, 9), st.booleans())
def test_what_goes_equals_lists(version, seed, width, finite):
    check_going(version, seed, width, finite)


@pytest.mark.parametrize("version", VERSIONS)
def test_ranks_that_ascend_say_what_slots_say(version):
    generator = torch.Generator().manual_seed(1)
    score = torch.randint(0, 3, (2, 3, 40), generator=generator).float()
    protected, valid = (torch.rand(2, 3, 40, generator=generator) < p for p in (0.3, 0.8))
    ranks = torch.randint(1, 5, (2, 3, 40), generator=generator).cumsum(-1)
    for mine, theirs in zip(
        version(score, protected, valid, ranks), version(score, protected, valid, None), strict=True
    ):
        assert torch.equal(mine, theirs)


def test_the_layout_of_the_arguments_does_not_count():
    generator = torch.Generator().manual_seed(0)
    score = torch.rand(2, 7, 3, generator=generator).transpose(1, 2)
    protected = torch.rand(7, generator=generator).lt(0.3).expand(2, 3, 7)
    valid = torch.rand(2, 3, 14, generator=generator).lt(0.8)[..., ::2]
    ranks = torch.rand(7, generator=generator).argsort().expand(2, 3, 7)
    found = row_worst(score, protected, valid, ranks)
    want = reference_row_worst(*(x.contiguous() for x in (score, protected, valid, ranks)))
    for mine, theirs in zip(found, want, strict=True):
        assert torch.equal(mine, theirs)


def test_float64_is_left_to_pytorch():
    assert "float64" in cpu.unavailable(torch.zeros(1, 1, 2, dtype=torch.float64))

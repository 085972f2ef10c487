"""What leaves the recent tokens or the window: every version against a search by hand."""

import pytest
import torch

from ag.kernels.pool_expired import cpu, pool_expired, reference_pool_expired
from tests.support.compiled import needs
from tests.support.paged import pages_of, places, read

VERSIONS = [
    pytest.param(reference_pool_expired, id="reference"),
    pytest.param(cpu.pool_expired, id="cpp", marks=needs(cpu.KERNEL)),
    pytest.param(pool_expired, id="picked"),
]
RANKS = range(45)
CASES = {
    "recent": (5, None),
    "window": (None, 9),
    "both": (5, 9),
    "equal": (6, 6),
    "nothing": (None, None),
    "longer_than_all": (200, 300),
}


@pytest.mark.parametrize("find", VERSIONS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("page", [1, 4, 16])
def test_it_equals_a_search(find, case, page):
    check(find, *CASES[case], page)


def check(find, recent, window, page=4):
    """Rows of two sequences, one without a new token; ranks shuffled, so that slots have no order."""
    lengths, heads = [0, 7, 33, 18, 5, 40], 3
    pages = pages_of(lengths, page, gate=torch.bool, seed=page)
    generator = torch.Generator().manual_seed(page)
    for row, length in enumerate(lengths):
        at = places(pages, row)
        pages.ranks.view(-1)[at] = torch.randperm(44, generator=generator)[:length].int()
        pages.gate.view(-1)[at] = torch.rand(length, generator=generator) < 0.5
    for ranks in (torch.tensor([n, 44 - n]) for n in RANKS):
        for new in (ranks, torch.tensor([int(ranks[0]), -1])):
            found = find(pages, new, recent, window).tolist()
            for row in range(len(lengths)):
                assert found[row] == by_hand(pages, row, int(new[row // heads]), recent, window)


def by_hand(pages, row, new, recent, window):
    held = list(zip(read(pages, pages.ranks, row).tolist(), read(pages, pages.gate, row).tolist(), strict=True))
    leaves = ends = -1
    for slot, (rank, flagged) in enumerate(held):
        if new >= 0 and window is not None and rank == new - window:
            ends = slot
        elif new >= 0 and recent is not None and rank == new - recent and not flagged:
            leaves = slot
    return [leaves, ends]


@pytest.mark.parametrize("find", VERSIONS)
def test_without_a_gate_only_the_window_matters(find):
    pages = pages_of([3], page=4)
    pages.ranks.view(-1)[places(pages, 0)] = torch.tensor([4, 2, 3], dtype=torch.int32)
    assert find(pages, torch.tensor([5]), None, 3).tolist() == [[-1, 1]]

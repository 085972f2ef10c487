"""Run by test_triton.py in a process of its own."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("elsewhere: test_triton.py runs this file under Triton's interpreter", allow_module_level=True)

from ag.kernels.paged_attend.triton import triton_paged_attend
from ag.kernels.paged_decode import paged_decode
from ag.kernels.paged_decode.triton import triton_paged_decode
from ag.kernels.pages import New
from ag.kernels.pool_append import pool_append, reference_pool_append
from tests.kernels import test_paged_attend
from tests.support.paged import attended, coded, filled, hold_rows, pages_of, places

CASES = {
    "empty_row": {"lengths": [0, 40, 70], "heads": 6, "dim": 32},
    "pages_of_5": {"lengths": [70, 4, 5, 6], "heads": 4, "page": 5, "dim": 64},
    "G7-D80-Dv48": {"lengths": [59, 20], "heads": 14, "dim": 80, "width": 48},
    "half": {"lengths": [33, 40], "heads": 4, "dim": 32, "dtype": torch.float16},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_decoding(case):
    q, pages = filled(**case)
    pages = coded(pages, "int8")
    weights = torch.full((*q.shape[:2], pages.table.shape[1] * pages.keys.shape[1]), torch.nan)
    out = triton_paged_decode(q, pages, 0.3, weights)
    hold_rows(out, attended(q, pages, 0.3, q.dtype)[0])  # weights of a tile are rounded for its product
    hold_rows(weights, attended(q, pages, 0.3, q.dtype)[1])


@pytest.mark.parametrize("case", ["empty_row", "window_and_recent"])
def test_several_queries(case):
    q, pages, *rest = test_paged_attend.given(**{"dim": 32, **test_paged_attend.CASES[case]})
    test_paged_attend.check(triton_paged_attend, q, coded(pages, "int8"), *rest)


def test_tokens_come_and_go(fresh, caplog):
    """What is written is the reference's, to the bit."""
    caplog.set_level("INFO", logger="ag.kernels.dispatch")
    mine, wanted = (coded(pages_of([0] * 4, page=4, spare=5, dim=48), "int8") for _ in range(2))
    for rank in range(12):
        x = torch.randn(2, 2, 48, generator=torch.Generator().manual_seed(rank))
        new = New(x, -x, torch.tensor([rank, -1 if rank == 5 else rank]))
        victims = torch.tensor([[1]] * 4 if rank > 8 else [[-1]] * 4, dtype=torch.int32)
        for append, pages in ((pool_append, mine), (reference_pool_append, wanted)):
            append(pages, new, victims)
    assert "pool_append: triton" in caplog.text
    assert mine.lengths.tolist() == wanted.lengths.tolist() == [9, 9, 8, 8]
    at = torch.cat([places(mine, row) for row in range(4)])
    for x, y in zip(mine.columns, wanted.columns, strict=True):
        assert torch.equal(x.flatten(0, 1)[at], y.flatten(0, 1)[at])


def test_odd_bytes_are_left_to_others(fresh, caplog):
    caplog.set_level("INFO", logger="ag.kernels.dispatch")
    q, pages = filled([20, 3], 2, dim=5)
    pages = coded(pages, "int8")
    hold_rows(paged_decode(q, pages, 0.3), attended(q, pages, 0.3)[0])
    assert "odd number of bytes" in caplog.text

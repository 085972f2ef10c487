"""Run by test_triton.py in a process of its own."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("elsewhere: test_triton.py runs this file under Triton's interpreter", allow_module_level=True)

from ag.kernels.paged_attention import paged_attention
from ag.kernels.paged_attention.triton import triton_paged_attention
from tests.kernels import test_paged_attention
from tests.support.paged import coded, filled

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
    test_paged_attention.check_held(triton_paged_attention, q, pages, dtype=q.dtype)  # weights of a tile are rounded


@pytest.mark.parametrize("case", ["empty_row", "window_and_recent", "one-window_and_recent"])
def test_queries_behind_masks(case):
    q, pages, *rest = test_paged_attention.given(**{"dim": 32, **test_paged_attention.CASES[case]})
    test_paged_attention.check(triton_paged_attention, q, coded(pages, "int8"), *rest)


def test_odd_bytes_are_left_to_others(fresh, caplog):
    caplog.set_level("INFO", logger="ag.kernels.dispatch")
    q, pages = filled([20, 3], 2, dim=5)
    pages = coded(pages, "int8")
    test_paged_attention.check_held(paged_attention, q, pages)
    assert "odd number of bytes" in caplog.text

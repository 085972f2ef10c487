"""Run by test_triton.py in a process of its own."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("elsewhere: test_triton.py runs this file under Triton's interpreter", allow_module_level=True)

from ag.kernels.paged_attend import paged_attend
from ag.kernels.paged_attend.triton import triton_paged_attend
from tests.kernels import test_paged_attend

CASES = {
    "two": {"lengths": [40, 7], "heads": 2, "count": 2},
    "empty_row": {"lengths": [0, 100, 1], "heads": 6, "count": 3},
    "page_borders": {"lengths": [15, 16, 17, 31, 32, 33], "heads": 6, "count": 5, "batch": 3},
    "window": {"lengths": [150, 90], "heads": 4, "count": 11, "window": 20},
    "recent": {"lengths": [90, 40], "heads": 6, "count": 7, "recent": 6},
    "window_and_recent": {"lengths": [80, 90], "heads": 4, "count": 9, "window": 50, "recent": 6, "batch": 2},
    "ordered": {"lengths": [130, 80], "heads": 2, "count": 60, "ordered": True, "scattered": False},
    "pages_of_5": {"lengths": [70, 4, 5, 6], "heads": 8, "count": 4, "page": 5},
    "G7-D20-Dv48": {"lengths": [59, 20], "heads": 14, "count": 5, "dim": 20, "width": 48},
    "nothing": {"lengths": [0, 0], "heads": 2, "count": 2},
    "no_pages": {"lengths": [0, 0], "heads": 2, "count": 2, "spare": 0},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_attention_by_hand(case):
    test_paged_attend.check(triton_paged_attend, *test_paged_attend.given(**{"dim": 16, **case}))


def test_padding_sees_nothing():
    arguments = test_paged_attend.given([40, 30, 9, 20], 4, 5, batch=2, dim=16)
    arguments[2][0, :2] = -1
    test_paged_attend.check(triton_paged_attend, *arguments)


def test_half_precision():
    arguments = test_paged_attend.given([50, 7], 4, 5, dim=32, dtype=torch.float16)
    test_paged_attend.check(triton_paged_attend, *arguments, dtype=torch.float16)  # weights of a tile are rounded


def test_it_is_picked_in_the_interpreter(fresh, caplog):
    caplog.set_level("INFO", logger="ag.kernels.dispatch")
    test_paged_attend.check(paged_attend, *test_paged_attend.given([50, 7], 2, 3, dim=16))
    assert "paged_attend: triton" in caplog.text

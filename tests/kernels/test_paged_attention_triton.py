"""Run by test_triton.py in a process of its own."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("elsewhere: test_triton.py runs this file under Triton's interpreter", allow_module_level=True)

from ag.kernels.paged_attention import paged_attention
from ag.kernels.paged_attention.triton import triton_paged_attention
from tests.kernels import test_paged_attention
from tests.support.hard import HARD, SCALING, hard
from tests.support.paged import attended, filled, hold_rows, in_pages

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
    "one-window": {"lengths": [150, 90], "heads": 4, "count": 1, "window": 20},
    "one-window_and_recent": {"lengths": [80, 90], "heads": 4, "count": 1, "window": 50, "recent": 6, "batch": 2},
    "one-G7-D20-Dv48": {"lengths": [59, 0], "heads": 14, "count": 1, "dim": 20, "width": 48, "recent": 9},
}
#: Of one query that sees all that is held.
HELD = {
    "B2-H4-D60": {"lengths": [1, 70, 33, 200], "heads": 4, "batch": 2, "dim": 60},
    "B2-H3-D16-E20": {"lengths": [0, 45], "heads": 3, "batch": 2, "dim": 16, "width": 20},
    "page_borders": {"lengths": [0, 1, 15, 16, 17, 31, 32, 33], "heads": 4, "batch": 2, "dim": 5},
    "consecutive": {"lengths": [100, 70], "heads": 2, "dim": 16, "scattered": False},
    "pages_of_5": {"lengths": [70, 4, 5, 6], "heads": 4, "dim": 16, "page": 5},
    "more-chunks-than-are-mixed-at-once": {"lengths": [2000, 1100], "heads": 3, "batch": 2, "dim": 8},
    "nothing": {"lengths": [0, 0], "heads": 2, "dim": 16},
    "no_pages": {"lengths": [0, 0], "heads": 2, "dim": 16, "spare": 0},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_attention_by_hand(case):
    test_paged_attention.check(triton_paged_attention, *test_paged_attention.given(**{"dim": 16, **case}))


@pytest.mark.parametrize("case", HELD.values(), ids=HELD)
def test_one_query_sees_all_that_is_held(case):
    test_paged_attention.check_held(triton_paged_attention, *filled(**case))


def test_several_queries():
    test_paged_attention.test_several_queries_see_all_that_is_held(triton_paged_attention)


@pytest.mark.parametrize("count", [1, 5])
def test_padding(count):
    test_paged_attention.test_padding_sees_nothing(triton_paged_attention, count)


def test_tables_that_share_pages_and_end_anywhere():
    test_paged_attention.test_rows_share_pages(triton_paged_attention)
    test_paged_attention.test_a_table_that_is_cut(triton_paged_attention)


@pytest.mark.parametrize("name", HARD)
def test_hard_inputs(name):
    q, k, v, *_ = hard(name, 100)
    test_paged_attention.check_held(triton_paged_attention, q[:, :, -1:], in_pages(k[0], v[0]), SCALING)


def test_half_precision():
    """Weights of a tile are rounded for its product."""
    arguments = test_paged_attention.given([50, 7], 4, 5, dim=32, dtype=torch.float16)
    test_paged_attention.check(triton_paged_attention, *arguments, dtype=torch.float16)
    test_paged_attention.check_held(
        triton_paged_attention, *filled([50, 7], 4, dim=32, dtype=torch.float16), dtype=torch.float16
    )


def test_a_pool_whose_tokens_lie_apart():
    q, pages = filled([50, 7], 2, dim=16)
    q, wide = q.mT.contiguous().mT, torch.cat([pages.keys, pages.values], 2)
    lengths = torch.stack([pages.lengths] * 2, 1)[:, 0]
    keys, values = wide.split(16, 2)
    out, _ = triton_paged_attention(q, pages._replace(keys=keys, values=values, lengths=lengths), None, 0.2)
    hold_rows(out, attended(q, pages, 0.2)[0])


def test_it_is_picked_in_the_interpreter(fresh, caplog):
    caplog.set_level("INFO", logger="ag.kernels.dispatch")
    test_paged_attention.check(paged_attention, *test_paged_attention.given([50, 7], 2, 3, dim=16))
    assert "paged_attention: triton" in caplog.text

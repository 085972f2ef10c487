"""Run by test_triton.py in a process of its own."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("elsewhere: test_triton.py runs this file under Triton's interpreter", allow_module_level=True)

from ag.kernels.paged_decode import paged_decode, paged_decode_weights
from ag.kernels.paged_decode.triton import triton_paged_decode
from tests.kernels import test_paged_decode
from tests.support.hard import HARD, SCALING, hard
from tests.support.paged import attended, filled, hold_rows, in_pages

CASES = {
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
    test_paged_decode.test_a_version_equals_attention_by_hand(triton_paged_decode, case)


def test_tables_that_share_pages_and_end_anywhere():
    test_paged_decode.test_rows_share_pages(triton_paged_decode)
    test_paged_decode.test_a_table_that_is_cut(triton_paged_decode)


@pytest.mark.parametrize("name", HARD)
def test_hard_inputs(name):
    q, k, v, *_ = hard(name, 100)
    q, pages = q[:, :, -1:], in_pages(k[0], v[0])
    weights = torch.full((1, 4, pages.table.shape[1] * 16), torch.nan)
    out = triton_paged_decode(q, pages, SCALING, weights)
    outs, shares = attended(q, pages, SCALING)
    hold_rows(out, outs)
    hold_rows(weights, shares)


def test_half_precision():
    q, pages = filled([50, 7], 4, dim=32, dtype=torch.float16)
    weights = torch.empty(1, 4, pages.table.shape[1] * 16)
    got = triton_paged_decode(q, pages, 0.2, weights)
    assert got.dtype == torch.float16
    hold_rows(got, attended(q, pages, 0.2, torch.float16)[0])  # weights of a tile are rounded for its product
    hold_rows(weights, attended(q, pages, 0.2)[1])


def test_a_pool_whose_tokens_lie_apart():
    q, pages = filled([50, 7], 2, dim=16)
    q, wide = q.mT.contiguous().mT, torch.cat([pages.keys, pages.values], 2)
    lengths = torch.stack([pages.lengths] * 2, 1)[:, 0]
    keys, values = wide.split(16, 2)
    out = triton_paged_decode(q, pages._replace(keys=keys, values=values, lengths=lengths), 0.2)
    hold_rows(out, attended(q, pages, 0.2)[0])


def test_the_operation_hands_out_what_triton_finds_to_the_bit(monkeypatch):
    monkeypatch.setenv("AG_KERNELS", "triton")
    q, pages = filled([90, 7], 4, dim=16)
    arguments = q, pages, 0.2
    want = torch.empty(1, 4, pages.table.shape[1] * 16)
    mixed = triton_paged_decode(*arguments, want)
    out, weights = paged_decode_weights(*arguments)
    assert torch.equal(weights, want) and torch.equal(out, mixed) and torch.equal(paged_decode(*arguments), mixed)

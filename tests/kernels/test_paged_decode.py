"""Decoding over rows in pages: every version against attention by hand, and what happens without a compiler."""

import logging
import shutil

import pytest
import torch

from ag.errors import UserError
from ag.kernels.paged_decode import cpu, paged_decode, paged_decode_weights, reference_paged_decode
from ag.kernels.pages import Pages
from tests.support.compiled import needs
from tests.support.paged import attended, check_threads_and_pages, filled, hold_rows, places

SCALING = 0.3
needs_compiler = needs(cpu.KERNEL)
VERSIONS = [
    pytest.param(reference_paged_decode, id="reference"),
    pytest.param(cpu.paged_decode, id="cpp", marks=needs_compiler),
]
CASES = {
    "one_token": {"lengths": [1, 1], "heads": 6},
    "empty_row": {"lengths": [0, 7, 300], "heads": 9},
    "nothing": {"lengths": [0, 0], "heads": 2},
    "no_pages": {"lengths": [0, 0], "heads": 2, "spare": 0},
    "page_borders": {"lengths": [0, 1, 15, 16, 17, 33], "heads": 9, "batch": 2},
    "chunk_borders": {"lengths": [255, 256, 257, 513], "heads": 8},
    "uneven_batch": {"lengths": [1000, 3, 41, 640, 77, 0], "heads": 6, "batch": 3},
    "consecutive": {"lengths": [1000, 30, 513, 16], "heads": 4, "scattered": False},
    "pages_of_5": {"lengths": [270, 4, 5, 6], "heads": 4, "page": 5},
    "G1-D60": {"lengths": [33, 290], "heads": 2, "dim": 60},
    "G8-D128": {"lengths": [259, 2], "heads": 16, "dim": 128},
    "G7-D80-Dv48": {"lengths": [259, 20], "heads": 14, "dim": 80, "width": 48},
}


def given(case):
    """Return the queries and the rows of a case, and the arguments that a kernel gets."""
    q, pages = filled(**{"dim": 64, **case})
    return q, pages, (q, pages, SCALING)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_version_equals_attention_by_hand(version, case):
    q, pages, arguments = given(case)
    weights = torch.full((*q.shape[:2], pages.table.shape[1] * pages.keys.shape[1]), torch.nan)
    out = version(*arguments, weights)
    outs, shares = attended(q, pages, SCALING)
    hold_rows(out, outs)
    hold_rows(weights, shares)
    assert torch.equal(version(*arguments), out)


@pytest.mark.parametrize("version", VERSIONS)
def test_rows_share_pages(version):
    """The second row begins with two pages of the first, and the third is the first once more."""
    q, pages = filled([50, 45, 50], 6, dim=64)
    pages.table[1, :2], pages.table[2] = pages.table[0, :2], pages.table[0]
    assert len(places(pages, 1).unique()) == 45
    out = version(q, pages, SCALING)
    hold_rows(out, attended(q, pages, SCALING)[0])


@pytest.mark.parametrize("version", VERSIONS)
def test_a_table_that_is_cut(version):
    """Its rows lie apart, and numbers behind a row's pages name none."""
    q, pages = filled([20, 3, 0], 3, dim=16, spare=9)
    for row, used in enumerate([2, 1, 0]):
        pages.table[row, used:] = 2**31 - 1
    weights = torch.full((1, 3, 32), torch.nan)
    out = version(q, pages._replace(table=pages.table[:, :2]), SCALING, weights)
    outs, shares = attended(q, pages, SCALING)
    hold_rows(out, outs)
    hold_rows(weights, shares)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [60, 64, 128])
def test_half_precision_is_summed_in_float32(version, dtype, dim):
    q, pages, arguments = given({"lengths": [700, 1, 300], "heads": 6, "dim": dim, "dtype": dtype})
    out = version(*arguments)
    assert out.dtype == dtype
    hold_rows(out, attended(q, pages, SCALING)[0])


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [1, 16, 64])
def test_cpp_reads_every_finite_half(dtype, width):
    """Subnormal numbers and the largest ones among them; a weight of 1 gives a value back."""
    values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    values = values[values.isfinite()].view(-1, 1, width)
    table = torch.arange(len(values), dtype=torch.int32)[:, None]
    q = torch.zeros(len(values), 1, 1, width, dtype=dtype)
    pages = Pages(torch.zeros_like(values), values, table, None, table, torch.ones_like(table[:, 0]))
    out = cpu.paged_decode(q, pages, 1.0)
    assert torch.equal(out.flatten(), values.flatten())


@needs_compiler
def test_cpp_depends_neither_on_threads_nor_on_where_pages_lie():
    q, pages, _ = given({"lengths": [2000, 30, 700], "heads": 6})
    check_threads_and_pages(lambda x: cpu.paged_decode(q, x, SCALING), pages)


def test_pytorch_reads_columns_with_gaps_and_cpp_refuses_them(fresh):
    q, pages, _ = given({"lengths": [40, 9], "heads": 2})
    wide = torch.cat([pages.keys, pages.values], 2)
    keys, values = wide.split(64, 2)
    apart = pages._replace(keys=keys, values=values)
    assert cpu.unavailable(apart) is not None
    out = paged_decode(q, apart, SCALING)
    hold_rows(out, attended(q, pages, SCALING)[0])


def test_without_a_compiler_pytorch_takes_over_and_says_so_once(fresh, caplog):
    fresh.delenv("CXX", raising=False)
    fresh.setattr(shutil, "which", lambda name: None)
    caplog.set_level(logging.INFO)
    _, _, arguments = given({"lengths": [40, 9], "heads": 2})
    for _ in range(2):
        out = paged_decode(*arguments)
    assert torch.equal(out, reference_paged_decode(*arguments))
    (line,) = [record.getMessage() for record in caplog.records if "paged_decode" in record.getMessage()]
    assert line.startswith("paged_decode: reference (triton: ")
    assert line.endswith("; cpp: there is no C++ compiler (install g++))")
    fresh.setenv("AG_KERNELS", "cpp")
    with pytest.raises(UserError, match=r"AG_KERNELS=cpp: paged_decode .*C\+\+"):
        paged_decode(*arguments)


def test_float64_is_left_to_pytorch(fresh):
    q, pages, arguments = given({"lengths": [400, 9], "heads": 2, "dtype": torch.float64})
    out, weights = paged_decode_weights(*arguments)
    assert out.dtype == torch.float64 and weights.dtype == torch.float32
    outs, _ = attended(q, pages, SCALING, torch.float64)
    hold_rows(out, outs)
    hold_rows(weights, attended(q, pages, SCALING)[1])

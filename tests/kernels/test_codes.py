"""Keys and values in codes: what becomes of a number, who writes them, and every version that reads them."""

import pytest
import torch

from ag.errors import UserError
from ag.kernels import kv_append, paged_attention
from ag.kernels.codes import GROUP, LARGEST, STEPS, Codes, Format
from tests.kernels import test_paged_attention
from tests.support.compiled import needs
from tests.support.paged import (
    check_threads_and_pages,
    coded,
    filled,
    numbers_of,
    pages_of,
    places,
)

reference = pytest.param(kv_append.reference_kv_append, id="reference")
compiled = needs(paged_attention.cpu.KERNEL)
PAGED = [
    pytest.param(paged_attention.reference_paged_attention, id="reference"),
    pytest.param(paged_attention.cpu.paged_attention, id="cpp", marks=compiled),
]


def drawn(name, count, width):
    """Tokens ``[count, width]`` of a kind that is hard to write in few bits."""
    x = torch.randn(count, width, generator=torch.Generator().manual_seed(width))
    if name == "outlier":
        x[:, width // 2] *= 100
    if name == "constant":
        x[:] = -3.3
    if name == "zeros":
        x[::2], x[1::2] = 0.0, -0.0
    if name == "denormal":
        x *= 1e-40
    if name == "far":
        x = x * 0.01 + 1000
    if name == "beyond":
        x *= 1e5
    return x


HARD = ["normal", "outlier", "constant", "zeros", "denormal", "far", "beyond"]
WIDTHS = [64, 80, 128, 33, 5, 1]


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_number_is_as_near_as_its_group_allows(width, name):
    """Within half a step, and what scale and offset lose in 16 bits: 2^-11 of each, or 2^-25 of subnormal ones."""
    x, codes = drawn(name, 9, width), Codes(width, torch.float32)
    data = codes.encode(x)
    assert data.shape == (9, codes.nbytes) and data.dtype == torch.uint8
    wanted = x.double().clamp(-LARGEST, LARGEST)
    for first in range(0, width, GROUP):
        mine = wanted[:, first : first + GROUP]
        least, most = mine.amin(1, keepdim=True), mine.amax(1, keepdim=True)
        half = 2**-11
        step = (most - least) / STEPS
        lost = half * least.abs() + half * (most - least) + (STEPS + 1) * 2**-25
        got = numbers_of(codes, data)[:, first : first + GROUP]
        bound = step / 2 * (1 + 2 * half) + lost + got.error + torch.finfo(torch.float32).eps * mine.abs()
        assert ((got.exact - mine).abs() <= bound).all()
    got = numbers_of(codes, data)
    assert ((codes.decode(data).double() - got.exact).abs() <= got.error).all()


def test_bytes_of_a_token():
    """Of a head of 64 numbers: 64 bytes of codes, and a scale and an offset of 2 bytes each."""
    token = torch.empty(0, 64)
    assert Format.of("float", token, token) is None
    assert [codes.nbytes for codes in Format.of("int8", token, token)] == [64 + 4, 64 + 4]


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@compiled
def test_cpp_writes_the_same_bytes(width, dtype, name):
    x = drawn(name, 6, width).to(dtype).view(1, 6, width)
    written = []
    for append in (kv_append.cpu.kv_append, kv_append.reference_kv_append):
        pages = coded(pages_of([0] * 6, page=4, dim=width, dtype=dtype), "int8")
        append(pages, x[:, :, None], -x[:, :, None], torch.tensor([[3]]))
        assert pages.lengths.tolist() == [1] * 6
        at = torch.cat([places(pages, row) for row in range(6)])
        written.append([column.flatten(0, 1)[at] for column in pages.columns])
    for mine, wanted in zip(*written, strict=True):
        assert torch.equal(mine, wanted)


@pytest.mark.parametrize("append", [pytest.param(kv_append.cpu.kv_append, marks=compiled, id="cpp"), reference])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_group_with_a_number_that_is_not_finite_becomes_nan(value, dtype, append):
    """It alone: a model that overflows is to be noticed."""
    x = drawn("normal", 2, 128).to(dtype).view(1, 2, 128)
    x[0, 1, 70] = value
    pages = coded(pages_of([0] * 2, page=4, dim=128, dtype=dtype), "int8")
    append(pages, x[:, :, None], -x[:, :, None], torch.tensor([[3]]))
    for column, codes in zip(pages.columns[:2], pages.format[:2], strict=True):
        first, second = (codes.decode(column.flatten(0, 1)[places(pages, row)])[0] for row in range(2))
        assert first.isfinite().all() and second[:64].isfinite().all() and second[64:].isnan().all()


def test_codes_of_float64_are_those_that_pytorch_writes(fresh):
    x = drawn("normal", 6, 64).double().view(1, 6, 64)
    pages, wanted = (coded(pages_of([0] * 6, dim=64, dtype=torch.float64), "int8") for _ in range(2))
    kv_append.kv_append(pages, x[:, :, None], -x[:, :, None], torch.tensor([[3]]))
    kv_append.reference_kv_append(wanted, x[:, :, None], -x[:, :, None], torch.tensor([[3]]))
    at = torch.cat([places(pages, row) for row in range(6)])
    for mine, right in zip(pages.columns, wanted.columns, strict=True):
        assert torch.equal(mine.flatten(0, 1)[at], right.flatten(0, 1)[at])


CASES = {
    "half_a_page": {"lengths": [1, 7, 24], "heads": 3},
    "empty_row": {"lengths": [0, 40, 300], "heads": 9},
    "uneven_batch": {"lengths": [500, 3, 41, 64], "heads": 4, "batch": 2},
    "pages_of_5": {"lengths": [70, 4, 5, 6], "heads": 4, "page": 5},
    "G7-D80-Dv48": {"lengths": [259, 20], "heads": 14, "dim": 80, "width": 48},
    "D128": {"lengths": [150, 20], "heads": 4, "dim": 128},
    "pages_of_100": {"lengths": [230, 7], "heads": 6, "page": 100},
    "D5": {"lengths": [33, 20], "heads": 2, "dim": 5},
    "bfloat16": {"lengths": [33, 90], "heads": 6, "dtype": torch.bfloat16},
    "float16": {"lengths": [33, 90], "heads": 6, "dtype": torch.float16},
}


@pytest.mark.parametrize("version", PAGED)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_one_query(case, version):
    q, pages = filled(**{"dim": 64, **case})
    test_paged_attention.check_held(version, q, coded(pages, "int8"))


ROWS = ["empty_row", "tile_borders", "window_and_recent", "pages_of_5", "G7-D80-Dv48"]
ROWS += ["one-window_and_recent", "one-chunk_borders", "one-G7-D80-Dv48"]


@pytest.mark.parametrize("version", PAGED)
@pytest.mark.parametrize("case", ROWS)
def test_queries_behind_masks(case, version):
    q, pages, *rest = test_paged_attention.given(**{"dim": 64, **test_paged_attention.CASES[case]})
    test_paged_attention.check(version, q, coded(pages, "int8"), *rest)


@compiled
@pytest.mark.parametrize("count", [1, 17])
def test_cpp_depends_neither_on_threads_nor_on_where_pages_lie(count):
    q, pages, *rest = test_paged_attention.given([90, 700], 4, count, dim=64)
    check_threads_and_pages(lambda x: paged_attention.cpu.paged_attention(q, x, *rest)[0], coded(pages, "int8"))


def test_the_operation_picks_a_version(fresh):
    q, pages = filled([40, 9], 2, dim=64)
    pages = coded(pages, "int8")
    test_paged_attention.check_held(paged_attention.paged_attention, q, pages)
    with pytest.raises(TypeError, match="expected torch.float32"):
        x = torch.zeros(1, 2, 64).half()
        kv_append.kv_append(pages, x[:, :, None], x[:, :, None], torch.tensor([[50]]))
    fresh.setenv("AG_KERNELS", "chunks")
    with pytest.raises(UserError, match="AG_KERNELS=chunks"):
        paged_attention.paged_attention(q, pages, None, 0.3)

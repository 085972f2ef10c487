"""Keys and values in codes: the error of a number, and every version that writes codes."""

import pytest
import torch

from ag.kernels.codes import GROUP, LARGEST, STEPS, Codes, Format
from ag.kernels.kv_append import kv_append, reference
from tests.support.compiled import versions
from tests.support.paged import coded, pages_of, read

WIDTHS = [64, 80, 128, 33, 1]
HARD = ["normal", "outlier", "constant", "zeros", "denormal", "far", "beyond"]
writers = versions("kv_append", "cpp", "triton")


def drawn(name, count, width):
    """Tokens ``[count, width]`` of a kind that is hard to write in few bits."""
    x = torch.randn(count, width, generator=torch.Generator().manual_seed(width))
    if name == "outlier":
        x[:, width // 2] *= 100
    if name == "constant":
        x[:] = -3.3
    if name == "zeros":
        x[::2], x[1::2] = 0.0, -0.0
    return {"denormal": x * 1e-40, "far": x * 0.01 + 1000, "beyond": x * 1e5}.get(name, x)


def written(append, x):
    """The bytes of keys x ``[rows, width]`` and values -x, by column and row."""
    pages = coded(pages_of([0] * len(x), page=4, dim=x.shape[1], dtype=x.dtype))
    append(pages, x[None, :, None], -x[None, :, None], torch.tensor([[3]]))
    assert pages.lengths.tolist() == [1] * len(x)
    return [
        torch.cat([read(pages, column, row) for row in range(len(x))]) for column in pages.columns[:2]
    ], pages.format


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_number_is_as_near_as_its_group_allows(width, name):
    """Within half a step, and what scale and offset lose in 16 bits: 2^-11 of each, or 2^-25 of subnormal ones."""
    x, codes = drawn(name, 9, width), Codes(width, torch.float32)
    data = codes.encode(x)
    assert data.shape == (9, codes.nbytes) and data.dtype == torch.uint8
    right = x.double().clamp(-LARGEST, LARGEST)
    for first in range(0, width, GROUP):
        mine = right[:, first : first + GROUP]
        least, most = mine.amin(1, keepdim=True), mine.amax(1, keepdim=True)
        lost = 2**-11 * (least.abs() + most - least) + (STEPS + 1) * 2**-25
        rounded = 4 * torch.finfo(torch.float32).eps * (least.abs() + most.abs())  # of the product and the sum
        bound = (most - least) / STEPS / 2 * (1 + 2 * 2**-11) + lost + rounded
        assert ((codes.decode(data)[:, first : first + GROUP].double() - mine).abs() <= bound).all()


def test_bytes_of_a_token():
    """Of a head of 64 numbers: 64 bytes of codes, and a scale and an offset of 2 bytes each."""
    token = torch.empty(0, 64)
    assert Format.of("float", token, token) is None
    assert [codes.nbytes for codes in Format.of("int8", token, token)] == [64 + 4, 64 + 4]


@writers
@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_version_writes_the_same_bytes(version, dtype, name):
    for width in (64, 80, 33):
        x = drawn(name, 6, width).to(dtype)
        assert all(map(torch.equal, written(version, x)[0], written(reference.kv_append, x)[0]))


@versions("kv_append", "cpp", "reference")
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_group_with_a_number_that_is_not_finite_becomes_nan(value, version):
    """It alone: a model that overflows is to be noticed."""
    x = drawn("normal", 2, 128)
    x[1, 70] = value
    columns, codes = written(version, x)
    for column, of_column in zip(columns, codes, strict=True):
        first, second = of_column.decode(column)
        assert first.isfinite().all() and second[:64].isfinite().all() and second[64:].isnan().all()


def test_codes_of_float64_are_those_that_pytorch_writes(fresh):
    x = drawn("normal", 6, 64).double()
    assert all(map(torch.equal, written(kv_append, x)[0], written(reference.kv_append, x)[0]))

"""Run by test_triton.py in a process of its own."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("test_triton.py runs this file under Triton's interpreter", allow_module_level=True)

from ag.kernels.ragged_decode.triton import triton_ragged_decode


def storage(lengths, heads, dim, width, gap=3):
    """Rows with free slots, not numbers, between them; the last row comes first in the buffer."""
    generator = torch.Generator().manual_seed(sum(lengths))
    counts = torch.tensor(lengths)
    starts = (counts + gap).flip(0).cumsum(0).flip(0) - counts
    size = int((counts + gap).sum()) + gap
    keys, values = torch.full((size, dim), torch.nan), torch.full((size, width), torch.nan)
    for start, count in zip(starts.tolist(), lengths, strict=True):
        keys[start : start + count] = torch.randn(count, dim, generator=generator)
        values[start : start + count] = torch.randn(count, width, generator=generator)
    q = torch.randn(2, heads, dim, generator=generator)
    return q, keys, values, starts, counts


def by_row(q, keys, values, starts, lengths, scaling):
    rows = []
    for query, start, count in zip(q.flatten(0, 1).chunk(len(starts)), starts.tolist(), lengths.tolist(), strict=True):
        k, v = keys[start : start + count].double(), values[start : start + count].double()
        rows.append((query.double() @ k.T * scaling).softmax(-1) @ v)
    return torch.cat(rows).view(*q.shape[:2], -1)


@pytest.mark.parametrize(
    ("lengths", "heads", "dim", "width"),
    [
        ([1, 70, 33, 200], 4, 60, 60),
        ([0, 45], 3, 16, 20),
        ([31, 32, 33, 64, 5, 0], 3, 5, 5),
        ([2000, 1100], 3, 8, 8),  # chunks of 32 tokens, of which 32 are mixed at once
    ],
    ids=["B2-H4-D60", "B2-H3-D16-E20", "B2-H3-D5", "more-chunks-than-are-mixed-at-once"],
)
def test_equals_attention_by_row(lengths, heads, dim, width):
    arguments = storage(lengths, heads, dim, width)
    got = triton_ragged_decode(*arguments, 0.3)
    assert got.shape == (2, heads, width)
    torch.testing.assert_close(got.double(), by_row(*arguments, 0.3), atol=1e-4, rtol=1e-4)


def test_rows_may_fill_the_buffer_and_nothing_may_be_held():
    q, keys, values, starts, lengths = storage([40, 24], 2, 16, 16, gap=0)
    got = triton_ragged_decode(q, keys, values, starts, lengths, 0.2)
    torch.testing.assert_close(got.double(), by_row(q, keys, values, starts, lengths, 0.2), atol=1e-4, rtol=1e-4)
    assert triton_ragged_decode(q, keys, values, starts, lengths * 0, 0.2).abs().sum() == 0


def test_half_precision():
    q, keys, values, starts, lengths = storage([50, 7], 2, 32, 32)
    arguments = (q.half(), keys.half(), values.half(), starts, lengths)
    got = triton_ragged_decode(*arguments, 0.2)
    want = by_row(*arguments, 0.2)
    assert got.dtype == torch.float16 and (got - want).norm() < 5e-3 * want.norm()


def test_two_runs_agree_to_the_bit():
    arguments = storage([90, 7], 4, 16, 16)
    assert torch.equal(triton_ragged_decode(*arguments, 0.2), triton_ragged_decode(*arguments, 0.2))

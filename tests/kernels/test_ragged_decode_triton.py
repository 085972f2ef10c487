"""Run by test_triton.py in a process of its own."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("elsewhere: test_triton.py runs this file under Triton's interpreter", allow_module_level=True)

from rows_by_hand import check_weights

from ag.kernels.ragged_decode import ragged_decode_weights
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
    weights = torch.full((2, heads, max(lengths) + 3), torch.nan)  # as somebody has them who does not know the longest
    got = triton_ragged_decode(*arguments, 0.3, weights)
    assert got.shape == (2, heads, width)
    check_weights(weights, got, *arguments, 0.3)
    assert torch.equal(got, triton_ragged_decode(*arguments, 0.3))  # nobody wants the weights


def test_rows_may_fill_the_buffer_and_nothing_may_be_held():
    q, keys, values, starts, lengths = storage([40, 24], 2, 16, 16, gap=0)
    weights = torch.full((2, 2, 40), torch.nan)
    got = triton_ragged_decode(q, keys, values, starts, lengths, 0.2, weights)
    check_weights(weights, got, q, keys, values, starts, lengths, 0.2)
    nothing = triton_ragged_decode(q, keys, values, starts, lengths * 0, 0.2, weights)
    assert not nothing.any() and not weights.any()
    none = torch.empty(2, 2, 0)
    assert not triton_ragged_decode(q, keys, values, starts, lengths * 0, 0.2, none).any()


def test_half_precision():
    q, keys, values, starts, lengths = storage([50, 7], 2, 32, 32)
    arguments = (q.half(), keys.half(), values.half(), starts, lengths)
    weights = torch.empty(2, 2, 50)
    got = triton_ragged_decode(*arguments, 0.2, weights)
    assert got.dtype == torch.float16
    check_weights(weights, got, *arguments, 0.2)


def test_two_runs_agree_to_the_bit():
    arguments = storage([90, 7], 4, 16, 16)
    one, two = torch.empty(2, 4, 90), torch.empty(2, 4, 90)
    assert torch.equal(triton_ragged_decode(*arguments, 0.2, one), triton_ragged_decode(*arguments, 0.2, two))
    assert torch.equal(one, two)


def test_the_operation_hands_out_the_weights_of_triton(monkeypatch):
    monkeypatch.setenv("AG_KERNELS", "triton")
    arguments = storage([90, 7], 4, 16, 16)
    want = torch.empty(2, 4, 90)
    triton_ragged_decode(*arguments, 0.2, want)
    out, weights = ragged_decode_weights(*arguments, 0.2, 90)
    assert torch.equal(weights, want) and torch.equal(out, triton_ragged_decode(*arguments, 0.2))

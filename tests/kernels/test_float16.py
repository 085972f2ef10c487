"""float16 ends at 65,504, which products of queries and keys pass before they are scaled (key biases as in Qwen2)."""

import pytest
import torch

from ag.kernels.attention_stats.chunked import chunked_attention_stats
from ag.kernels.gated_attention.chunked import chunked_gated_attention
from ag.kernels.gated_prefill.chunked import chunked_gated_prefill

LENGTH = 150


@pytest.fixture
def tensors():
    """Every query pays the first key alone: their product is 100,000, and 10,000 once scaled by 0.1."""
    q, k = (torch.zeros(1, 2, LENGTH, 16, dtype=torch.float16) for _ in range(2))
    q[..., 0], k[:, :, 0, 0] = 100.0, 1000.0
    return q, k, torch.randn(1, 2, LENGTH, 16).half()


@pytest.mark.parametrize("flags", [False, True], ids=["plain", "flags"])
def test_attention(tensors, flags):
    q, k, v = (x.requires_grad_() for x in tensors)
    keep = torch.ones(1, 2, LENGTH) if flags else None
    out = chunked_gated_attention(q, k, v, keep, None, 0.1)
    assert torch.equal(out, v[:, :, :1].expand_as(v))
    out.sum().backward()
    assert v.grad[:, :, 0].sum() == 2 * LENGTH * 16 and v.grad[:, :, 1:].abs().sum() == 0
    assert torch.isfinite(q.grad).all() and torch.isfinite(k.grad).all()


def test_queries_that_see_nothing_get_zeros(tensors):
    valid = torch.arange(LENGTH)[None] >= 40
    out = chunked_gated_attention(*tensors, None, valid, 0.1)
    assert out[:, :, :40].abs().sum() == 0 and torch.isfinite(out).all()


def test_prefill_and_sums_over_columns(tensors):
    q, k, v = tensors
    keep = torch.ones(1, 2, LENGTH, dtype=torch.bool)
    assert torch.equal(chunked_gated_prefill(q, k, v, keep, None, 0.1), v[:, :, :1].expand_as(v))
    ranks = torch.arange(LENGTH)[None]
    for kind, paid in (("sum", LENGTH), ("max", 1)):
        found = chunked_attention_stats(kind, q, k, ranks, ranks[:, None], 0.1)
        assert (found[:, :, 0] == paid).all() and (found[:, :, 1:] == 0).all()

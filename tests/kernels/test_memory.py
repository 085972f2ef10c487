"""No tensor grows with the square of the prompt."""

import pytest
import torch

from ag.engine.rows import attention
from ag.kernels.column_max import column_max
from ag.kernels.column_sums import column_sums
from ag.kernels.gated_attention.chunked import chunked_gated_attention
from tests.support.attention_by_hand import Scene
from tests.support.memory import Largest


def attend(length):
    """Attention under flags, and its gradients."""
    q, k, v = (torch.randn(2, heads, length, 8, requires_grad=True) for heads in (2, 1, 1))
    keep = torch.rand(2, 1, length, requires_grad=True)
    chunked_gated_attention(q, k, v, keep, None, 0.3).sum().backward()


def columns(function, **options):
    def run(length):
        q, k = (torch.randn(2, heads, length, 8) for heads in (2, 1))
        function(q, k, 0.3, torch.ones(2, length, dtype=torch.bool), **options)

    return run


def observe(length):
    Scene(lengths=(length,), heads=2, kv_heads=1, dim=4).seen.total(attention)


@pytest.mark.parametrize(
    "run", [attend, columns(column_max), columns(column_sums, power=2, mean=True), observe],
    ids=["gated_attention", "column_max", "column_sums", "observations"],
)  # fmt: skip
def test_memory_is_linear_in_length(run):
    sizes = []
    for length in (512, 1024, 2048):
        with Largest() as largest:
            run(length)
        sizes.append(largest.size)
    assert sizes[1] <= 2.01 * sizes[0]
    assert sizes[2] <= 2.01 * sizes[1]

"""No tensor grows with the square of the prompt."""

import pytest
import torch

from ag.engine.rows import attention
from ag.kernels.attention_stats import attention_stats
from ag.kernels.gated_attention.chunked import chunked_gated_attention
from tests.support.attention_by_hand import Scene
from tests.support.memory import Largest


def attend(length):
    """Attention under flags, and its gradients."""
    q, k, v = (torch.randn(2, heads, length, 8, requires_grad=True) for heads in (2, 1, 1))
    keep = torch.rand(2, 1, length, requires_grad=True)
    chunked_gated_attention(q, k, v, keep, None, 0.3).sum().backward()


def stats(kind):
    def run(length):
        q, k = (torch.randn(2, heads, length, 8) for heads in (2, 1))
        ranks = torch.arange(length).expand(2, -1)
        attention_stats(kind, q, k, ranks, ranks[:, None], 0.3)

    return run


def observe(length):
    Scene(lengths=(length,), heads=2, kv_heads=1, dim=4).seen.total(attention)


@pytest.mark.parametrize(
    "run", [attend, stats("max"), stats("squares"), observe], ids=["gated_attention", "max", "squares", "observations"]
)
def test_memory_is_linear_in_length(run):
    sizes = []
    for length in (512, 1024, 2048):
        with Largest() as largest:
            run(length)
        sizes.append(largest.size)
    assert sizes[1] <= 2.01 * sizes[0]
    assert sizes[2] <= 2.01 * sizes[1]

"""Metrics against counting by hand; two ranks are imitated by merging their states, as torchmetrics does."""

import pytest
import torch

from ag.gates.calibration import SHARES
from ag.training.metrics import LogitCounts


def merged(first, second):
    """What a rank computes after torchmetrics has summed the states over the ranks."""
    out = type(first)()
    for name, reduce in first._reductions.items():
        assert reduce.__name__ == "dim_zero_sum"
        setattr(out, name, reduce(torch.stack([getattr(first, name), getattr(second, name)])))
    out._update_count = 1
    return out


@pytest.mark.parametrize("scale", [0.01, 1.0, 3e3])
def test_boundaries_of_shares(scale):
    """Two ranks, one of which saw few logits; against the sorted logits."""
    draw = torch.Generator().manual_seed(0)
    parts = [(torch.randn(n, generator=draw) * 2 - 1) * scale for n in (2500, 1500, 37)]
    first, second = LogitCounts(), LogitCounts()
    for part in parts[:2]:
        first.update(part)
    second.update(parts[2])
    second.update(parts[2][:0])
    both = merged(first, second)
    ranked, most = torch.cat(parts).double().sort().values, int(both.counts.max())  # logits of one bin
    for share, boundary in zip(SHARES, both.compute(), strict=True):
        above = int((ranked > boundary).sum())
        assert abs(above - share * len(ranked)) <= most + 1
        wide = boundary.asinh().cosh() * 2 * LogitCounts.REACH / LogitCounts.BINS  # of its bin
        assert ranked[-above - 1] - wide <= boundary <= ranked[-above] + wide

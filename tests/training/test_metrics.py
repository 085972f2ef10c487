"""Metrics against counting by hand; two ranks are imitated by merging their states, as torchmetrics does."""

import math

import pytest
import torch

from ag.gates.calibration import SHARES
from ag.training.metrics import EvictedShare, LogitCounts, MultipleChoiceAccuracy


def merged(first, second):
    """What a rank computes after torchmetrics has summed the states over the ranks."""
    out = type(first)()
    for name, reduce in first._reductions.items():
        assert reduce.__name__ == "dim_zero_sum"
        setattr(out, name, reduce(torch.stack([getattr(first, name), getattr(second, name)])))
    out._update_count = 1
    return out


def test_evicted_share_counts_more_than_a_float_can():
    metric = EvictedShare(1, 1)
    metric.tokens += 2**24
    metric.update(torch.ones(1, 1, 1, 1, dtype=torch.bool), torch.ones(1, 1, dtype=torch.bool))
    assert float(metric.tokens) == 2**24 + 1
    assert float(metric.compute()) == 1 / (2**24 + 1)


def answers(lengths, losses, question, choice, target):
    """Arguments of ``update``: row i has ``lengths[i]`` answer tokens, each with the loss ``losses[i]``."""
    rows = torch.tensor([i for i, n in enumerate(lengths) for _ in range(n)], dtype=torch.long)
    nll = torch.tensor([losses[i] for i in rows.tolist()])
    return nll, rows, *(torch.tensor(x) for x in (question, choice, target))


@pytest.mark.parametrize(("normalise", "right"), [(False, 1), (True, 3)])
def test_multiple_choice_accuracy(normalise, right):
    """Sums 7 and 3, 2 and 8, 1 and 5; means 1 and 3, 2 and 1, 1 and 5; the right answers are 0, 1, 0."""
    metric = MultipleChoiceAccuracy(normalise)
    lengths, losses = [7, 1, 1, 8, 1, 1], [1.0, 3.0, 2.0, 1.0, 1.0, 5.0]
    metric.update(*answers(lengths, losses, [4, 4, 9, 9, 5, 5], [0, 1, 0, 1, 0, 1], [0, 0, 1, 1, 0, 0]))
    assert (float(metric.correct), float(metric.questions)) == (right, 3)
    assert metric.compute() == torch.tensor(right / 3, dtype=metric.compute().dtype)


def test_padding_questions_and_rows_without_tokens():
    metric = MultipleChoiceAccuracy(normalise=True)
    metric.update(*answers([1, 1, 0, 0], [0.5, 1.0, 0, 0], [0, 0, -1, -1], [0, 1, 0, 0], [0, 0, -1, -1]))
    assert (float(metric.correct), float(metric.questions)) == (1, 1)
    empty = MultipleChoiceAccuracy()
    empty.update(*answers([0], [0.0], [-1], [0], [-1]))
    assert math.isnan(float(empty.compute()))


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

"""The one place that selects, on random shapes: exact counts, protection, padding, ties."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ag import retention
from ag.engine.allocators.base import Candidates, topk_over_heads

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


@st.composite
def cases(draw):
    """Scores with many ties, padding anywhere, protection that may lie on padding too, and capacities that hold it."""
    batch, heads, tokens = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(0, 24))
    shape, dtype = (batch, heads, tokens), draw(st.sampled_from(DTYPES))
    make = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    score = torch.randn(shape, generator=make)
    levels = draw(st.sampled_from([1, 2, 5, 1000]))
    score = ((score * levels).round() / levels).to(dtype)
    valid = torch.rand(shape, generator=make) < draw(st.sampled_from([0.3, 0.8, 1.1]))
    protected = torch.rand(shape, generator=make) < draw(st.sampled_from([-0.1, 0.2, 0.6]))
    fixed = (protected & valid).sum(-1)
    capacity = fixed + torch.randint(0, tokens + 3, fixed.shape, generator=make)
    # what does not compete may hold anything
    score = torch.where(valid & ~protected, score, torch.tensor(draw(st.sampled_from([float("nan"), 1e4]))).to(dtype))
    return score, protected, valid, capacity


def by_hand(score, protected, valid, capacity):
    """One head: the protected, then the best of the rest, of equal ones the first."""
    sure = [p for p in range(len(score)) if valid[p] and protected[p]]
    rivals = [p for p in range(len(score)) if valid[p] and not protected[p]]
    return sorted(sure + sorted(rivals, key=lambda p: -score[p])[: capacity - len(sure)])


@given(cases())
@settings(max_examples=60)
def test_select(case):
    score, protected, valid, capacity = case
    keep = retention.keep_mask(retention.eviction_score(score, protected, ~valid), capacity) & valid
    assert keep.dtype == torch.bool
    for b in range(score.shape[0]):
        for g in range(score.shape[1]):
            wanted = by_hand(*(x[b, g].tolist() for x in (score, protected, valid)), int(capacity[b, g]))
            assert keep[b, g].nonzero().flatten().tolist() == wanted


def best_over_heads(score, protected, valid, capacity, floor):
    """One sequence: the protected, the floor of each head, then the best over all heads; lower head, lower index."""
    heads, n = len(score), len(score[0])
    least, kept = int(capacity * floor), []
    for g in range(heads):
        mine = {p for p in range(n) if protected[g][p] and valid[g][p]}
        rivals = sorted((p for p in range(n) if valid[g][p] and p not in mine), key=lambda p, g=g: (-score[g][p], p))
        kept.append(mine | set(rivals[: max(0, least - len(mine))]))
    rest = [(-score[g][p], g, p) for g in range(heads) for p in range(n) if valid[g][p] and p not in kept[g]]
    for _, g, p in sorted(rest)[: max(0, heads * capacity - sum(map(len, kept)))]:
        kept[g].add(p)
    return [sorted(x) for x in kept]


@given(cases(), st.integers(0, 12), st.sampled_from([0.0, 0.2, 0.5, 1.0]))
@settings(max_examples=60)
def test_over_heads(case, extra, floor):
    score, protected, valid, _ = case
    capacity = (protected & valid).sum(-1).amax(1) + extra
    due = torch.ones(len(score), dtype=torch.bool)
    layer = Candidates(retention.eviction_score(score, protected, ~valid), capacity, capacity, due)
    (keep,) = topk_over_heads([layer], floor, capacity * score.shape[1])
    for b in range(len(score)):
        wanted = best_over_heads(*(x[b].tolist() for x in (score, protected, valid)), int(capacity[b]), floor)
        assert [x.nonzero().flatten().tolist() for x in keep[b]] == wanted

"""Scores in float32 against float64, where attention is sharp, flat or mixed and values are far from the origin."""

from functools import partial
from itertools import product

import pytest
import torch

import ag
from ag.engine.attention_stats import AttentionStats
from ag.engine.shown import Keys, Queries
from ag.kernels.attention_stats import cpu
from tests.support.bounds import conditioned, hold
from tests.support.pairs import covering

KEYS, HEADS, KV_HEADS = 130, 4, 2
EPS = torch.finfo(torch.float32).eps
SOME = range(2, KEYS, 7)  # keys that are compared, on any place of a vector
#: How large logits are, by query head, and where the values lie.
SCENES = {
    "flat": (0.1, 0.1, 0.1, 0.1),
    "sharp": (8.0, 8.0, 8.0, 8.0),
    "mixed": (0.1, 1.0, 4.0, 10.0),
}


def scene(name, offset, dim, dtype):
    """Return q, k, v of one layer, whose logits ``q k / sqrt(D)`` have the standard deviations of the scene."""
    make = torch.Generator().manual_seed(dim)
    q = torch.randn(1, HEADS, KEYS, dim, generator=make) * torch.tensor(SCENES[name])[:, None, None]
    k, v = (torch.randn(1, KV_HEADS, KEYS, dim, generator=make) for _ in range(2))
    return q.to(dtype), k.to(dtype), (v + offset).to(dtype)


def observed(q, k, v):
    """Return the layer as scorers see it."""
    ranks, valid = torch.arange(KEYS), torch.ones(1, KV_HEADS, KEYS).bool()
    return AttentionStats(
        keys=Keys(
            stored=lambda: (k, v), shape=(1, KV_HEADS, KEYS), ledger=lambda: (ranks.expand(1, KV_HEADS, KEYS), valid)
        ),
        queries=Queries(q=q, ranks=ranks[None], valid=valid[:, 0]),
        scaling=q.shape[-1] ** -0.5,
        precise=True,
    )


def in_float64(q, k, v):
    """Return logits ``[H, T, N]`` in float64 and values ``[H, N, D]``."""
    q, k, v = (x[0].double() for x in (q, k, v))
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 0) for x in (k, v))
    return (q @ k.mT) / q.shape[-1] ** 0.5, v


def wanted(wrapper, base, s, v):
    """Return the score of some keys ``[Hkv, n]`` by its definition, each difference summed over the other keys."""
    a = s.masked_fill(torch.ones(KEYS, KEYS).triu(1).bool(), -torch.inf).softmax(-1)
    h, result = a[:, {"h2o": 0, "snapkv": KEYS - 32}[base] :].sum(1), []
    for p in SOME:
        others = h.clone()
        others[:, p] = 0.0
        rest = others.sum(1, keepdim=True)
        mean = torch.full_like(h, 1 / KEYS) if wrapper == "fastcaote" else others / rest
        apart = (mean[..., None] * (v[:, p, None] - v)).sum(1)
        odds = h[:, p] / (rest[:, 0] if wrapper == "fastcaote" else h.sum(1))
        result.append((odds[:, None] * apart).square().sum(1))
    return torch.stack(result, 1).unflatten(0, (KV_HEADS, -1)).sum(1).sqrt()


# what is lost depends on the formula, the logits and the values together; versions and bases take turns
@pytest.mark.parametrize(
    ("wrapper", "made", "version", "base"),
    covering(
        wrapper=["caote", "fastcaote"],  # OBCache's sums are those of test_errors_of_outputs.py
        made=list(product(SCENES, [(0.0, 64, torch.float32), (100.0, 128, torch.bfloat16)])),
        version=["cpp", "reference"],
        base=["h2o", "snapkv"],
    ),
    ids=str,
)
def test_scores_agree_with_float64(version, base, wrapper, made, monkeypatch):
    if version == "cpp" and cpu.KERNEL.unavailable("cpu"):
        pytest.skip(f"C++: {cpu.KERNEL.unavailable('cpu')}")
    monkeypatch.setenv("AG_KERNELS", version)
    name, (offset, dim, dtype) = made
    options = {"kernel": 1} if base == "snapkv" else {}
    made = scene(name, offset, dim, dtype)
    scorer = ag.policy(f"{base}+{wrapper}", budget=50, **options).scorer
    got, score = scorer.score(observed(*made))[0], partial(wanted, wrapper, base)
    want, bound = score(*in_float64(*made)), conditioned(score, *in_float64(*made))
    scored = [(i, p) for i, p in enumerate(SOME) if base == "h2o" or p < KEYS - 32]
    places, keys = zip(*scored, strict=True)
    hold(got[:, keys], want[:, places], bound[:, places])


@pytest.mark.parametrize("name", [*SCENES, "equal keys"])
def test_cakes_variance_agrees_with_float64(name):
    """A mean of squares less a squared mean would lose what the indicator of CAKE is about.

    Given the weights: an error of their mean counts squared, as what they differ from it by sums to 0.
    """
    q, k, v = scene(name if name in SCENES else "flat", 0.0, 64, torch.float32)
    if name == "equal keys":
        k = k[:, :, :1].expand_as(k)
    rows = observed(q, k, v).rows(32)
    weights = rows.a[0].double()
    mean = weights.mean(1, keepdim=True)

    def variance(weights):
        return (weights - mean).square().sum(1) / 31

    want = variance(weights)
    # equal terms round alike in a sum, and a square below the normal numbers is off by a step of those
    sums = 32 * EPS * (want + torch.finfo(torch.float32).smallest_normal)
    hold(rows.moments[1][0], want, conditioned(variance, weights) + sums)

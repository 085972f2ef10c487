"""Scores in float32 against float64, where attention is sharp, flat or mixed and values are far from the origin."""

from itertools import product

import pytest
import torch
from pairs import covering

import ag
from ag.engine.observe import Context, Keys, Observation, Queries
from ag.kernels.row_statistics import cpu

KEYS, HEADS, KV_HEADS = 130, 4, 2
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


def observed(q, k, v, outputs=None):
    """Return the layer as scorers see it."""
    ranks, valid = torch.arange(KEYS), torch.ones(1, KV_HEADS, KEYS).bool()
    return Observation(
        keys=Keys(k=k, v=v, ranks=ranks.expand(1, KV_HEADS, KEYS), valid=valid),
        queries=Queries(q=q, ranks=ranks[None], valid=valid[:, 0], outputs=outputs),
        context=Context(scaling=q.shape[-1] ** -0.5, precise=True),
    )


def in_float64(q, k, v):
    """Return weights and logits ``[H, T, N]`` and values ``[H, N, D]``."""
    q, k, v = (x[0].double() for x in (q, k, v))
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 0) for x in (k, v))
    s = (q @ k.mT) / q.shape[-1] ** 0.5
    a = s.masked_fill(torch.ones(KEYS, KEYS).triu(1).bool(), -torch.inf).softmax(-1)
    return a, s.tril(), v


def wanted(wrapper, base, q, k, v):
    """Return the score ``[Hkv, N]`` by its definition, each difference summed over the other keys."""
    a, s, v = in_float64(q, k, v)
    first = {"h2o": 0, "snapkv": KEYS - 32}[base]
    a, s = a[:, first:], s[:, first:]
    result = torch.zeros(HEADS, KEYS, dtype=torch.float64)
    if wrapper.startswith("obcache"):
        for p in range(KEYS):
            mine, by_key = v[:, p, None], s[..., p, None] * (a @ (v[:, p, None] - v))
            change = {"value": mine, "key": by_key, "joint": mine + by_key}[wrapper.removeprefix("obcache_")]
            result[:, p] = (a[..., p, None] * change).square().sum((1, 2))
    else:
        h = a.sum(1)
        for p in range(KEYS):
            others = h.clone()
            others[:, p] = 0.0
            rest = others.sum(1, keepdim=True)
            mean = torch.full_like(h, 1 / KEYS) if wrapper == "fastcaote" else others / rest
            apart = (mean[..., None] * (v[:, p, None] - v)).sum(1)
            odds = h[:, p] / (rest[:, 0] if wrapper == "fastcaote" else h.sum(1))
            result[:, p] = (odds[:, None] * apart).square().sum(1)
    result = result.unflatten(0, (KV_HEADS, -1)).sum(1)
    return result if wrapper.startswith("obcache") else result.sqrt()


# what is lost depends on the formula, the logits and the values together; versions and bases take turns
@pytest.mark.parametrize(
    ("wrapper", "made", "version", "base"),
    covering(
        wrapper=["obcache_value", "obcache_key", "obcache_joint", "caote", "fastcaote"],
        made=list(
            product(SCENES, [(0.0, 64, torch.float32), (100.0, 128, torch.bfloat16), (100.0, 256, torch.float32)])
        ),
        version=["cpp", "reference"],
        base=["h2o", "snapkv"],
    ),
    ids=str,
)
def test_scores_agree_with_float64(version, base, wrapper, made, monkeypatch):
    if version == "cpp" and cpu.KERNEL.failure():
        pytest.skip(f"C++: {cpu.KERNEL.failure()}")
    monkeypatch.setenv("AG_KERNELS", version)
    name, (offset, dim, dtype) = made
    options = {"kernel": 1} if base == "snapkv" else {}
    made = scene(name, offset, dim, dtype)
    scorer = ag.policy(f"{base}+{wrapper}", budget=50, **options).scorer
    a, _, v = in_float64(*made)
    outputs = (a @ v)[None].to(dtype)
    got = scorer.score(observed(*made, outputs=outputs))[0].double()
    want = wanted(wrapper, base, *made)
    if base == "snapkv":
        got, want = got[:, : KEYS - 32], want[:, : KEYS - 32]
    scale = torch.maximum(want, 0.01 * want.amax(-1, keepdim=True))
    assert float(((got - want).abs() / scale).max()) < 1e-5


@pytest.mark.parametrize("name", [*SCENES, "equal keys"])
def test_cakes_variance_agrees_with_float64(name):
    """A mean of squares less a squared mean would lose what the indicator of CAKE is about."""
    q, k, v = scene(name if name in SCENES else "flat", 0.0, 64, torch.float32)
    if name == "equal keys":
        k = k[:, :, :1].expand_as(k)
    rows = in_float64(q, k, v)[0][:, KEYS - 32 :]
    want = (rows - rows.mean(1, keepdim=True)).square().sum(1) / 31
    got = observed(q, k, v).rows(32).moments()[1][0].double()
    assert ((got - want).abs() <= 1e-5 * torch.maximum(want, 0.01 * want.amax(-1, keepdim=True))).all()

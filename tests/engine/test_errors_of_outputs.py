"""Sums of OBCache's errors over rows, against the formulas in float64, pair by pair where that is needed."""

import math

import pytest
import torch

from ag.engine.attention_rows import CentredValues, attention_rows, sum_over_queries
from ag.engine.wrappers.obcache import joint_error, key_error, largest, value_error
from tests.support.bounds import conditioned, hold
from tests.support.pairs import covering

UNDERFLOW = math.exp(-87)  # below which an exponential in float32 may be 0
KINDS = {"attention": None, "value": value_error, "key": key_error, "joint": joint_error}


def summed(kind, logits, counted, values):
    """Sum a statistic over the rows that count."""
    return sum_over_queries(attention_rows(logits, KINDS[kind], values), counted)


def arguments(made, dtype=torch.float32):
    """Return logits, what counts and values as the operation takes them."""
    logits, counted, v = made
    return logits.to(dtype), counted, CentredValues.of(v.to(dtype), torch.ones(v.shape[:3], dtype=torch.bool))


def by_definition(kind, made, places=slice(None)):
    """``||A (by_value v - by_key (v - o))||^2`` of every pair of some keys, from the vectors, in float64.

    ``v_p - o = sum_q a_q (v_p - v_q)``: float64 would lose it too where the largest weight is 1 up to 1e-16.
    """
    logits, counted, v = made
    hidden = logits == -torch.inf
    e = torch.where(hidden, 0.0, (logits - logits.amax(-1, keepdim=True).clamp_min(-1e9)).exp())
    a = e / e.sum(-1, keepdim=True).clamp_min(1e-300)
    a, s = (
        x.reshape(len(v), v.shape[1], -1, v.shape[2]) for x in (a, torch.where(hidden, 0.0, logits))
    )  # [.., G w, N]
    values = []
    for p in torch.arange(v.shape[2])[places].split(8):
        if kind == "attention":
            values.append(a[..., p])
            continue
        change = v[:, :, None, p]  # [B, Hkv, G w, p, D]
        if kind != "value":
            by_key = s[..., p, None] * (a[:, :, None] @ (v[:, :, p, None] - v[:, :, None])).transpose(2, 3)
            change = by_key if kind == "key" else change + by_key
        values.append(a[..., p].square() * change.square().sum(-1))
    values = torch.cat(values, -1).reshape(*hidden.shape[:3], -1)
    return (values * counted[:, None, :, None]).sum(2)


def bound_of(kind, made, places):
    """Bound a sum in float32: what its operands' roundings do, and weights that underflow."""
    logits, counted, v = made
    moved = conditioned(lambda logits, v: by_definition(kind, (logits, counted, v), places), logits, v)
    logit = float(logits.masked_fill(logits == -torch.inf, 0).abs().max())
    change = 2 * float(v.norm(dim=-1).max()) * (1 + logit)
    return moved + 3 * UNDERFLOW * logits.shape[2] * max(1.0, change**2)


def hard(name, offset, dim, dtype):
    """Rows on which an expanded square, or a difference of sums, loses what it is about."""
    make = torch.Generator().manual_seed(dim)
    keys, logits = 160, torch.randn(1, 2, 6, 160, generator=make)
    index = torch.arange(keys)
    logits = {
        "flat": logits * 0.1,
        "mixed": logits * torch.tensor([0.1, 8.0])[:, None, None],
        "sharp": logits * 10,
        "one key has it all": torch.where(index == 17, 30.0, logits),
        "two keys have it all": torch.where(index % 80 == 17, 30.0, logits),
        "equal keys": torch.zeros_like(logits),
        "logits of 80": logits.sign() * 80,
    }[name]
    v = torch.randn(1, 1, keys, dim, generator=make) + offset
    return logits.to(dtype).double(), torch.ones(1, 6).bool(), v.to(dtype).double()


SOME = slice(2, None, 3)  # of the keys, those that have it all among them
HARD = ["flat", "mixed", "sharp", "one key has it all", "two keys have it all", "equal keys", "logits of 80"]


# what cancels depends on the formula, the logits and the place of the values together; the rest takes turns
@pytest.mark.parametrize(
    ("kind", "rows", "size"),
    covering(
        kind=list(KINDS),
        rows=[(name, 100.0 * (number % 2)) for number, name in enumerate(HARD)],
        size=[(64, torch.float32), (128, torch.bfloat16)],
    ),
    ids=str,
)
def test_nothing_cancels(kind, rows, size):
    made = hard(*rows, *size)
    hold(summed(kind, *arguments(made))[..., SOME], by_definition(kind, made, SOME), bound_of(kind, made, SOME))


@pytest.mark.parametrize("keys", [1, 31, 64, 65, 160])
@pytest.mark.parametrize("equal", [False, True])
def test_the_largest_number_of_a_row_is_found(keys, equal):
    made = torch.rand(2, 3, 50, keys, generator=torch.Generator().manual_seed(keys))
    rows = made.round() if equal else made
    assert torch.equal(rows.gather(-1, largest(rows)), rows.amax(-1, keepdim=True))

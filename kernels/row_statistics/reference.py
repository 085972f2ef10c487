"""Row statistics by their formulas, pair by pair, and their sums over rows."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from ag.kernels.row_statistics.values import Values

Kind = Literal["attention", "value", "key", "joint"]
KINDS: tuple[Kind, ...] = ("attention", "value", "key", "joint")


def reference_row_statistics(
    kind: Kind, logits: Tensor, counted: Tensor, values: Values | None = None, outputs: Tensor | None = None
) -> Tensor:
    """Compute :func:`ag.kernels.row_statistics.row_statistics` with several tensors of the size of the logits.

    Known outputs are not read, as their difference to a value cancels where attention is sharp.
    """
    hidden = logits == float("-inf")
    a, s = logits.softmax(-1).masked_fill(hidden, 0.0), logits.masked_fill(hidden, 0.0)
    return pair_statistics(kind, a, s, values).masked_fill(~counted[:, None, :, None], 0.0).sum(2)


def pair_statistics(kind: Kind, a: Tensor, s: Tensor, values: Values | None = None) -> Tensor:
    """Compute the statistic of every pair of row and key; see :func:`ag.kernels.row_statistics.row_statistics`.

    Args:
        kind: which statistic.
        a: weights ``[B, H, w, N]`` that sum to 1 in each row, or to 0 where it sees nothing.
        s: logits ``[B, H, w, N]``, 0 where the row does not see the key.
        values: values of the keys, for all kinds but ``attention``.

    Returns:
        ``[B, H, w, N]``.
    """
    if kind == "attention":
        return a
    assert values is not None
    norms = values.norms.repeat_interleave(a.shape[1] // values.norms.shape[1], 1)[:, :, None]
    if kind == "value":
        return a.square().mul_(norms)
    apart, along = differences(a, values)
    if kind == "key":
        return apart.mul_((a * s).square_())
    moved = apart.mul_(s).add_(along, alpha=2.0).mul_(s).add_(norms)  # ||v + s (v - o)||^2 in powers of s
    return moved.clamp_min_(0.0).mul_(a).mul_(a)


def differences(a: Tensor, values: Values) -> tuple[Tensor, Tensor]:
    """Return ``||v_p - o_i||^2`` and ``<v_p, v_p - o_i>``, ``[B, H, w, N]`` each, where ``o_i = sum_p a_ip v_p``.

    Both are expanded, so that each pair costs one product of vectors. Where attention is sharp, the output is close to
    the value of the key with the largest weight, and the expansion would cancel. The difference of these two is
    therefore summed over the other keys: ``v_p - o_i = sum_(q != p) a_iq (v_p - v_q)``.
    """
    shape, v = a.shape, values.centred
    a = a.reshape(len(v), v.shape[1], -1, shape[-1])  # [B, Hkv, G w, N]
    top, index = a.max(-1, keepdim=True)
    others = a.scatter(-1, index, 0.0)
    mix = others @ v
    nearest = v.gather(2, index.expand(*index.shape[:3], v.shape[-1]))
    difference = others.sum(-1, keepdim=True) * nearest - mix
    o = top * nearest + mix
    dots = o @ v.mT
    apart = (values.spread[:, :, None] - 2 * dots).add_(o.square().sum(-1, keepdim=True)).clamp_min_(0.0)
    along = values.along[:, :, None] - dots.add_(o @ values.centre.mT)
    apart.scatter_(-1, index, difference.square().sum(-1, keepdim=True))
    along.scatter_(-1, index, (difference * (nearest + values.centre)).sum(-1, keepdim=True))
    return apart.view(shape), along.view(shape)

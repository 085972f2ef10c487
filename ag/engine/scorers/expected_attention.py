"""Expected attention: what queries that are still to come would pay, if they were drawn like those of the prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ag.engine.records import Records
from ag.engine.scorer_inputs import ScorerInputs
from ag.engine.scorers.base import Needs, Scorer, grouped
from ag.errors import require
from ag.kernels.softmax import weigh


@dataclass(frozen=True, kw_only=True)
class ExpectedAttention(Scorer):
    """``(mean_g softmax_p E[exp(q k_p)] + eps) ||v_p||`` for future queries ``q`` of a Gaussian.

    Mean and covariance of the queries are taken before their rotation, by query head, over the prompt's queries behind
    the sinks, in whatever parts it comes; behind the first decision (in blocks, and while decoding) over the last
    ``window`` ones. Both are then turned by the mean of the rotations to the next ``future`` places. The logarithm of
    the expectation is
    ``z_p = s k mu' + s^2/2 k Sigma' k``, and the softmax runs over the keys behind the sinks.

    Sink logits of the model take part in the softmax. That logits are capped is left out: there is no closed form.

    Source: Devoto et al. 2025, "Expected Attention: KV Cache Compression by Estimating Attention from Future Queries
    Distribution"; code NVIDIA/kvpress. There ``eps`` is 0, and 0.01 in its benchmark (with Ada-KV: ``@heads``).

    Attributes:
        sinks: first tokens that stay, and are left out of the statistics.
        future: places whose rotations are averaged.
        values: multiply by the norms of the values; a wrapper, which weighs values itself, turns it off.
        eps: added to the weight, so that a value counts where nothing is expected.
        window: queries to look back at when those of the whole prompt are not at hand.
    """

    sinks: int = 4
    future: int = 512
    values: bool = True
    eps: float = 0.0
    window: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "future", self.future >= 1, "1 or more")
        require(self, "window", self.window >= 1, "1 or more")
        require(self, "eps", self.eps >= 0, "0 or more")

    @cached_property
    def needs(self) -> Needs:
        """All queries of a prompt, earlier ones of the statistics, and what turns them."""
        return Needs(lookback=self.window, every_query=True, rotations=True)

    @classmethod
    def wrapped(cls, by_head: bool) -> Mapping[str, tuple[Any, str]]:
        """Return that values are weighed once."""
        return {"values": (False, "{wrapper} weighs values")}

    def score(self, inputs: ScorerInputs) -> Tensor:
        """Return the expected weight times the value's norm, computed once for all budgets."""
        return inputs.once(self, lambda: self._score(inputs))

    def _score(self, inputs: ScorerInputs) -> Tensor:
        competes = inputs.key_valid & (inputs.key_indices >= self.sinks)
        logits = self._logits(inputs, inputs.k.float().masked_fill(~inputs.key_valid[..., None], 0.0))
        hidden = ~competes.repeat_interleave(inputs.group, 1)
        sinks = None if inputs.softmax.sinks is None else inputs.softmax.sinks[:, None]
        weights = weigh(logits.masked_fill(hidden, float("-inf")), sinks).masked_fill(hidden, 0.0)
        score = grouped(weights, inputs, "mean") + self.eps
        if not self.values:
            return score
        norms: Tensor = torch.linalg.vector_norm(inputs.v, dim=-1)
        return score * norms

    def _logits(self, inputs: ScorerInputs, k: Tensor) -> Tensor:
        """Return ``log E[exp(q k_p)]``, ``[B, H, N]``."""
        mean, spread = self._future(inputs, *self._statistics(inputs))
        keys = k.unsqueeze(2)  # [B, Hkv, 1, N, D]
        mean, spread = (x.unflatten(1, (-1, inputs.group)) for x in (mean, spread))
        logits: Tensor = (keys @ mean[..., None])[..., 0] * inputs.scaling
        logits = logits + ((keys @ spread) * keys).sum(-1) * (inputs.scaling**2 / 2)
        return logits.flatten(1, 2)

    def note(self, inputs: ScorerInputs, records: Records) -> None:
        """Sum up the queries of a prompt, of which its later parts are shown the last ones alone."""
        if inputs.sums is None:
            return
        if inputs.decoding:
            inputs.sums.clear()
            return
        new = _moments(inputs, inputs.new, torch.full_like(inputs.lengths, self.sinks))
        sums, due = inputs.sums, torch.zeros_like(new.number, dtype=torch.bool)
        if sums:
            new = merge_moments(Moments(*(sums[name] for name in Moments._fields)), new)
        if inputs.capacity is not None:
            due = torch.ones_like(due) if inputs.due is None else inputs.due.view_as(due)
        past = sums["due"] | sums["past"] if sums else torch.zeros_like(due)
        sums.update(zip(Moments._fields, new, strict=True), due=due, past=past)

    def _statistics(self, inputs: ScorerInputs) -> tuple[Tensor, Tensor]:
        """Return mean ``[B, H, D]`` and covariance ``[B, H, D, D]`` of the queries without their rotation."""
        last = self.window if inputs.sums or inputs.decoding else inputs.longest
        moments = _moments(inputs, inputs.q.shape[2], (inputs.lengths - last).clamp_min(self.sinks))
        if inputs.sums and not inputs.decoding:  # all of the prompt up to its first decision
            past = inputs.sums["past"]  # [B, 1]
            of_prompt = (inputs.sums[name] for name in Moments._fields)
            each = zip(of_prompt, moments, strict=True)
            moments = Moments(*(recent.where(past.view(-1, *[1] * (x.ndim - 1)), x) for x, recent in each))
        return moments.mean, moments.products / moments.number.clamp_min(1)[..., None, None]

    def _future(self, inputs: ScorerInputs, mean: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
        """Turn mean and covariance to the places that follow."""
        first = inputs.lengths[:, None, None]
        ahead = inputs.turn(mean[:, :, None], first, self.future)[:, :, 0]
        once = inputs.turn(spread, first, self.future).mT  # R Sigma R^T, R the mean rotation
        return ahead, inputs.turn(once, first, self.future)


class Moments(NamedTuple):
    """Queries without their rotation, summed up."""

    number: Tensor  # [B, 1]
    mean: Tensor  # [B, H, D]
    products: Tensor  # [B, H, D, D], of their differences to the mean


def _moments(inputs: ScorerInputs, last: int, first: Tensor) -> Moments:
    """Sum up those of the ``last`` newest columns of queries that have token indices from ``first`` ``[B]`` on."""
    token_indices = inputs.query_indices[:, -last:]
    counted = (inputs.query_valid[:, -last:] & (token_indices >= first[:, None]))[:, None, :, None]
    # A place further on, for all queries of a sequence, turns the statistics and the future places alike.
    q = inputs.turn(inputs.q[:, :, -last:].float(), -token_indices[:, None]).masked_fill(~counted, 0.0)
    number = counted.sum((1, 2))
    mean = q.sum(2) / number.clamp_min(1)[..., None]
    centred = (q - mean[:, :, None]).masked_fill(~counted, 0.0)
    return Moments(number, mean, centred.mT @ centred)


def merge_moments(first: Moments, second: Moments) -> Moments:
    """Sum up what two sums have together."""
    number = first.number + second.number
    share = (second.number / number.clamp_min(1))[..., None]
    step = second.mean - first.mean
    between = (step[..., None] * step[..., None, :]) * (first.number[..., None] * share)[..., None]
    return Moments(number, first.mean + step * share, first.products + second.products + between)

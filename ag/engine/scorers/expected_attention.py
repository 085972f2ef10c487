"""Expected attention: the attention of future queries, drawn from the distribution of the prompt's queries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ag.engine.records import Records
from ag.engine.scorer_inputs import Needs, ScorerInputs, UnrotatedQueries
from ag.engine.scorers.base import Scorer
from ag.errors import require
from ag.kernels.softmax import weigh


@dataclass(frozen=True, kw_only=True)
class ExpectedAttention(Scorer):
    """``(mean_g softmax_p E[exp(q k_p)] + eps) ||v_p||`` for future queries ``q`` of a Gaussian.

    Mean and covariance of the queries are taken before their rotation, by query head. At the first decision they are
    those over all queries of the prompt after the sinks, however the prompt is cut into passes. At later decisions (in
    blocks, and while decoding) they are those over the last ``window`` queries. Both are then rotated by the mean of
    the rotations to the next ``future`` positions. The logarithm of the expectation is
    ``z_p = s k mu' + s^2/2 k Sigma' k``, and the softmax runs over the keys after the sinks.

    Sink logits of the model take part in the softmax. The cap of a model's logits is left out: there is no closed form.

    Source: Devoto et al. 2025, "Expected Attention: KV Cache Compression by Estimating Attention from Future Queries
    Distribution"; code NVIDIA/kvpress. There ``eps`` is 0, and 0.01 in its benchmark (with Ada-KV: ``@heads``).

    Attributes:
        sinks: first tokens that are kept, and are left out of the statistics.
        future: positions whose rotations are averaged.
        values: multiply by the norms of the values; a wrapper, which weighs values itself, turns it off.
        eps: added to the weight, so that a value counts even if no attention is expected.
        window: queries to look back at when the queries of the whole prompt are not at hand.
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
        """All queries of a prompt, and keys and values."""
        return self._needs(every_query=("queries",))

    @cached_property
    def decode_needs(self) -> Needs:
        """The queries to look back at, and keys and values."""
        return self._needs(every_query=())

    def _needs(self, every_query: tuple[str, ...]) -> Needs:
        return Needs(
            queries=True,
            keys=True,
            values=self.values,
            key_indices=True,
            key_valid=True,
            every_query=every_query,
            lookback=self.window,
        )

    @classmethod
    def wrapped(cls, by_head: bool) -> Mapping[str, tuple[Any, str]]:
        """Return that values are weighed once."""
        return {"values": (False, "{wrapper} weighs values")}

    def note(self, inputs: ScorerInputs, records: Records) -> None:
        """Sum up the queries of a prompt, as later passes see only the last of them."""
        sums = inputs.prompt_sums
        if inputs.decoding:
            sums.clear()
            return
        queries = inputs.queries
        moments = moments_of(queries, queries.num_new, torch.full_like(inputs.lengths, self.sinks))
        if sums:  # of earlier passes, which may have decided already
            moments = merge_moments(_prompt_moments(sums), moments)
            sums["decided"] = sums["decided"] | sums["evicting"] if "decided" in sums else sums["evicting"]
        none = torch.zeros_like(moments.number, dtype=torch.bool)
        evicting = none if inputs.evicting is None else inputs.evicting.view_as(none)
        sums.update(zip(Moments._fields, moments, strict=True), evicting=evicting)

    def score(self, inputs: ScorerInputs) -> Tensor:
        """Return the expected weight times the value's norm, computed once for all budgets."""
        if self not in inputs.memo:
            inputs.memo[self] = self._score(inputs)
        score: Tensor = inputs.memo[self]
        return score

    def _score(self, inputs: ScorerInputs) -> Tensor:
        mean, covariance = (x.unflatten(1, (-1, inputs.group)) for x in self._future_queries(inputs))
        keys = inputs.keys.float().masked_fill(~inputs.key_valid[..., None], 0.0).unsqueeze(2)  # [B, Hkv, 1, N, D]
        logits = (keys @ mean[..., None])[..., 0] * inputs.scaling
        logits = logits + ((keys @ covariance) * keys).sum(-1) * (inputs.scaling**2 / 2)  # [B, Hkv, G, N]
        hidden = ~(inputs.key_valid & (inputs.key_indices >= self.sinks)).unsqueeze(2)
        sinks = None if inputs.sink_logits is None else inputs.sink_logits.view(-1, inputs.group, 1)
        weights = weigh(logits.masked_fill(hidden, float("-inf")), sinks).masked_fill(hidden, 0.0)
        score: Tensor = weights.mean(2) + self.eps
        return score * torch.linalg.vector_norm(inputs.values, dim=-1) if self.values else score

    def _future_queries(self, inputs: ScorerInputs) -> tuple[Tensor, Tensor]:
        """Return mean ``[B, H, D]`` and covariance ``[B, H, D, D]`` of queries at the ``future`` next positions."""
        moments = self._moments(inputs)
        covariance = moments.products / moments.number.clamp_min(1)[..., None, None]
        start = inputs.lengths[:, None, None]
        mean = inputs.rotate(moments.mean[:, :, None], start, self.future)[:, :, 0]
        half_rotated = inputs.rotate(covariance, start, self.future).mT  # R Sigma R^T, R the mean rotation
        return mean, inputs.rotate(half_rotated, start, self.future)

    def _moments(self, inputs: ScorerInputs) -> Moments:
        """Return the moments of the prompt's queries until its first decision, and then those of the newest queries."""
        sums, queries = inputs.prompt_sums, inputs.queries
        if not inputs.decoding and "decided" not in sums:  # the first pass of a prompt
            return _prompt_moments(sums)
        first = (inputs.lengths - self.window).clamp_min(self.sinks)
        newest = moments_of(queries, queries.vectors.shape[2], first)
        if inputs.decoding:
            return newest
        decided, pairs = sums["decided"], zip(_prompt_moments(sums), newest, strict=True)  # [B, 1]
        return Moments(*(new.where(decided.view(-1, *[1] * (x.ndim - 1)), x) for x, new in pairs))


class Moments(NamedTuple):
    """Moments of queries without their rotation."""

    number: Tensor  # [B, 1], how many
    mean: Tensor  # [B, H, D]
    products: Tensor  # [B, H, D, D], the sum of products of the differences to the mean


def _prompt_moments(sums: Mapping[str, Tensor]) -> Moments:
    """Return the moments of a prompt's queries so far."""
    return Moments(*(sums[name] for name in Moments._fields))


def moments_of(queries: UnrotatedQueries, last: int, first: Tensor) -> Moments:
    """Return the moments of the ``last`` columns of queries whose token index is at least ``first`` ``[B]``."""
    valid = queries.valid[:, -last:] & (queries.token_indices[:, -last:] >= first[:, None])
    counted = valid[:, None, :, None]
    vectors = queries.vectors[:, :, -last:].masked_fill(~counted, 0.0)
    count = counted.sum((1, 2))
    mean = vectors.sum(2) / count.clamp_min(1)[..., None]
    centred = (vectors - mean[:, :, None]).masked_fill_(~counted, 0.0)
    return Moments(count, mean, centred.mT @ centred)


def merge_moments(first: Moments, second: Moments) -> Moments:
    """Return the moments of the queries of both."""
    count = first.number + second.number
    share = (second.number / count.clamp_min(1))[..., None]
    step = second.mean - first.mean
    between = (step[..., None] * step[..., None, :]) * (first.number[..., None] * share)[..., None]
    return Moments(count, first.mean + step * share, first.products + second.products + between)

"""The interface of scorers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from ag import retention
from ag.engine.records import Records
from ag.engine.rows import Statistic, attention
from ag.engine.scorer_inputs import ScorerInputs
from ag.errors import require

#: Metadata of a field that is no option of a policy.
DERIVED = MappingProxyType({"option": False})


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a scorer needs to see or to be given.

    Attributes:
        lookback: earlier queries that a decision needs beside the new ones.
        observers: width of the observation window, in which an allocator may measure too; None means that there is
            none.
        every_query: whether it has to see every query, also when nothing is evicted.
        rows: whether it reads attention weights, which a single query's attention then keeps.
        rotations: whether it rotates queries further, which takes a model with the same known RoPE in all layers.
        output_projection: whether it reads the attention's output projection, which not every model shows.
        steady: whether the score of a step is the same operations on the same memory each time, without a wait for the
            device, so that a CUDA graph can record it.
        from_tokenizer: options that :meth:`Scorer.with_tokenizer` fills in.
    """

    lookback: int = 0
    observers: int | None = None
    every_query: bool = False
    rows: bool = False
    rotations: bool = False
    output_projection: bool = False
    steady: bool = False
    from_tokenizer: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Scorer(ABC):
    """Scores every held token; its fields are its hyper-parameters.

    Attributes:
        sinks: first tokens of a sequence that always stay.
        recent: newest tokens that always stay.
    """

    sinks: int = 0
    recent: int = 0

    #: Why no wrapper may act on this scorer; empty when any may.
    alone: ClassVar[str] = ""
    #: The allocator that goes with this scorer where none is named.
    default_allocator: ClassVar[str] = "uniform"
    #: Whether it scores by gates: those of a folder that the policy names, or those attached to the model. Without a
    #: budget, wrapper and allocator their flags decide.
    reads_gates: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require(self, "sinks", self.sinks >= 0, "0 or more")
        require(self, "recent", self.recent >= 0, "0 or more")

    @cached_property
    def needs(self) -> Needs:
        """What it needs to see or to be given."""
        return Needs()

    @classmethod
    def wrapped(cls, by_head: bool) -> Mapping[str, tuple[Any, str]]:
        """Return the values that options have under a wrapper, and why, where ``{wrapper}`` stands for its name.

        ``by_head`` says whether the wrapper scores each head by itself.
        """
        return {}

    def trained_with(self, sinks: int, recent: int) -> Self:
        """Return the scorer that protects what the training of its gates did, where it says nothing itself.

        ``sinks`` first tokens, and of a prompt ``recent`` newest ones, were seen by every query behind them.
        """
        return self

    def with_tokenizer(self, tokenizer: Any) -> Self:
        """Return the scorer with the options that follow from a tokenizer."""
        return self

    @property
    def alike(self) -> bool:
        """Whether its score of a token is the same in all KV heads, where these hold the same tokens in their slots."""
        return False

    @property
    def rereader(self) -> Any:
        """The scorer that repeats a prompt, which is evicted from once after that; None means that none does."""
        return None

    def note(self, inputs: ScorerInputs, records: Records) -> None:
        """Record what is seen, before each score and, with ``every_query``, without one; see :meth:`recorded`."""
        return

    def recorded(self, inputs: ScorerInputs, *arguments: Any) -> Mapping[str, Tensor]:
        """Return the records of a layer; where there are none, those of this observation, noted with ``how``."""
        if inputs.recorded is not None:
            return inputs.recorded
        records: Records = {}
        self.note(inputs, records, *arguments)
        return records

    @abstractmethod
    def score(self, inputs: ScorerInputs) -> Tensor:
        """Return ``[B, Hkv, N]`` float32, higher is kept; finite on every slot that competes."""

    def second(self, inputs: ScorerInputs, score: Tensor) -> tuple[Tensor, float] | None:
        """Return another score ``[B, Hkv, N]``, and the share of a head's tokens that ``score`` decides over.

        The other one decides over the rest; the numbers of tokens of heads follow from ``score``. None means that there
        is one score.
        """
        return None

    def weight(self, inputs: ScorerInputs, score: Tensor) -> Tensor:
        """Return a score ``[B, Hkv, N]`` as a number that a wrapper may multiply or normalise, in the same order."""
        return score

    def heads(self, inputs: ScorerInputs) -> Tensor:
        """Return a score of at least 0 by query head, ``[B, H, N]``, over all held tokens; CAOTE normalises it."""
        score = self.weight(inputs, self.score(inputs))
        lowest = score.masked_fill(~inputs.key_valid, float("inf")).amin(-1, keepdim=True)
        return (score - lowest).masked_fill(~inputs.key_valid, 0.0).repeat_interleave(inputs.group, 1)

    def limits(self, capacity: Tensor) -> tuple[int | Tensor, int | Tensor]:
        """Return the numbers of first and of newest tokens that stay whatever their score, ``[B]`` long or int each.

        ``capacity`` ``[B]`` long is the tokens per KV head that the budget allows, on average over layers.
        """
        return self.sinks, self.recent

    def protected(self, inputs: ScorerInputs, capacity: Tensor) -> Tensor:
        """Return ``[B, Hkv or 1, N]`` bool, the tokens that :meth:`limits` and the caller protect."""
        return retention.protected_mask(inputs.positions, inputs.lengths, *self.limits(capacity), inputs.marked)


@dataclass(frozen=True, kw_only=True)
class RowScorer(Scorer):
    """A scorer that sums a statistic of attention rows over queries; the query heads of a KV head are averaged."""

    @cached_property
    def needs(self) -> Needs:
        """Attention rows."""
        return Needs(rows=True)

    def note(self, inputs: ScorerInputs, records: Records, statistic: Statistic = attention) -> None:
        """Record the statistic; :meth:`sums` of it reads that."""
        return

    @abstractmethod
    def sums(self, inputs: ScorerInputs, statistic: Statistic = attention) -> Tensor:
        """Return the summed statistic by query head, ``[B, H, N]``."""

    def raw(self, inputs: ScorerInputs) -> Tensor:
        """Return the score by query head before pooling, ``[B, H, N]``."""
        return self.sums(inputs)

    def reduce(self, inputs: ScorerInputs, heads: Tensor) -> Tensor:
        """Turn ``[B, H, N]`` into one score per KV head, ``[B, Hkv, N]``."""
        by_group: Tensor = heads.unflatten(1, (inputs.keys.shape[1], -1))
        return by_group.mean(2)

    def pool(self, inputs: ScorerInputs, score: Tensor, before_window: bool = True) -> Tensor:
        """Smooth a score ``[B, *, N]`` over neighbours in the cache; a plain scorer returns it as it is."""
        return score

    def score(self, inputs: ScorerInputs) -> Tensor:
        """Return the reduced score, pooled."""
        return self.pool(inputs, self.reduce(inputs, self.raw(inputs)))

    def heads(self, inputs: ScorerInputs) -> Tensor:
        """Return the score by query head, pooled over all held tokens."""
        return self.pool(inputs, self.raw(inputs), before_window=False)


def grouped(values: Tensor, inputs: ScorerInputs, reduction: Literal["mean", "sum"]) -> Tensor:
    """Combine ``[B, H, N]`` over the query heads of each KV head, ``[B, Hkv, N]``."""
    values = values.unflatten(1, (inputs.keys.shape[1], -1))
    return values.sum(2) if reduction == "sum" else values.mean(2)


def pooled(values: Tensor, inside: Tensor, kernel: int, kind: str, order: Tensor | None = None) -> Tensor:
    """Pool ``[B, C, N]`` along the last dimension, only what is ``inside`` ``[B, Hkv, N]``; the rest counts as 0.

    Both kinds have stride 1 and padding ``kernel // 2``; ``avg`` divides by ``kernel`` at the edges too, as torch
    does by default and the papers' codes therefore do. Neighbours are those of the ``order`` of slots ``[B, Hkv, N]``;
    None means as they lie.
    """
    if order is not None:
        order = order.repeat_interleave(values.shape[1] // order.shape[1], 1)
    inside = inside.repeat_interleave(values.shape[1] // inside.shape[1], 1)
    values = values.masked_fill(~inside, 0.0)
    values = values if order is None else values.gather(-1, order)
    pool = F.avg_pool1d if kind == "avg" else F.max_pool1d
    smoothed = pool(values, kernel, stride=1, padding=kernel // 2)
    return smoothed if order is None else torch.empty_like(smoothed).scatter_(-1, order, smoothed)

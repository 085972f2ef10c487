"""The interface of scorers, and the few functions that several scorers share."""

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

from ag.engine.records import Records
from ag.engine.scorer_inputs import Needs, ScorerInputs
from ag.errors import require

#: Metadata of a field that is no option of a policy.
DERIVED = MappingProxyType({"option": False})


@dataclass(frozen=True, kw_only=True)
class Scorer(ABC):
    """Scores every cached token; its fields are its hyper-parameters.

    Attributes:
        sinks: first tokens of a sequence that are always kept.
        recent: newest tokens that are always kept.
    """

    sinks: int = 0
    recent: int = 0

    #: The reason why no wrapper may act on this scorer. Empty: any wrapper may.
    alone: ClassVar[str] = ""
    #: The allocator that goes with this scorer if the policy names none.
    default_allocator: ClassVar[str] = "uniform"
    #: Options that :meth:`with_tokenizer` fills in.
    from_tokenizer: ClassVar[tuple[str, ...]] = ()
    #: Whether gates give the score: the gates of a folder that the policy names, else the gates attached to the model.
    #: Without a budget, wrapper and allocator their flags decide.
    reads_gates: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require(self, "sinks", self.sinks >= 0, "0 or more")
        require(self, "recent", self.recent >= 0, "0 or more")

    @cached_property
    def needs(self) -> Needs:
        """The inputs that ``note`` and ``score`` read."""
        return Needs()

    @cached_property
    def decode_needs(self) -> Needs:
        """The inputs that ``note`` and ``score`` read after the prompt; usually :attr:`needs`."""
        return self.needs

    @classmethod
    def wrapped(cls, by_head: bool) -> Mapping[str, tuple[Any, str]]:
        """Return the values that options have under a wrapper, each with the reason.

        ``by_head`` says whether the wrapper scores each head by itself. In a reason ``{wrapper}`` stands for its name.
        """
        return {}

    def with_trained_protection(self, sinks: int, recent: int) -> Self:
        """Return a scorer that protects the tokens that every query saw while its gates were trained.

        These are the ``sinks`` first tokens, and of a prompt the ``recent`` newest tokens. Options of the policy take
        precedence.
        """
        return self

    def with_tokenizer(self, tokenizer: Any) -> Self:
        """Return the scorer with the options that follow from a tokenizer."""
        return self

    @property
    def same_for_all_heads(self) -> bool:
        """Whether the score of a token is equal in all KV heads, if these hold equal tokens in equal slots."""
        return False

    def note(self, inputs: ScorerInputs, records: Records) -> None:
        """Record what must survive from pass to pass, as tensors ``[..., N]`` by name.

        The engine calls it before each score, and in passes without eviction if ``needs.every_query`` names inputs.
        """
        return

    @abstractmethod
    def score(self, inputs: ScorerInputs) -> Tensor:
        """Return ``[B, Hkv, N]`` float32, higher is kept; finite on every slot that competes."""

    def second(self, inputs: ScorerInputs, score: Tensor) -> tuple[Tensor, float] | None:
        """Return another score ``[B, Hkv, N]``, and the share of a head's tokens that ``score`` chooses.

        The other score chooses the remaining tokens. ``score`` alone decides how many tokens each head keeps. None: the
        scorer has one score.
        """
        return None

    def weight(self, inputs: ScorerInputs, score: Tensor) -> Tensor:
        """Return a score ``[B, Hkv, N]`` as a number that a wrapper may multiply or normalise, in equal order."""
        return score

    def heads(self, inputs: ScorerInputs) -> Tensor:
        """Return a score by query head, ``[B, H, N]``, over all cached tokens; CAOTE normalises it.

        Scores of a head with numbers below 0 are shifted up, so that its lowest is 0.
        """
        score = self.weight(inputs, self.score(inputs))
        lowest = score.masked_fill(~inputs.key_valid, float("inf")).amin(-1, keepdim=True).clamp_max(0.0)
        return (score - lowest).masked_fill(~inputs.key_valid, 0.0).repeat_interleave(inputs.group, 1)

    def limits(self, capacity: Tensor) -> tuple[int | Tensor, int | Tensor]:
        """Return the numbers of first and of newest tokens that are kept whatever their score, ``[B]`` long or int.

        ``capacity`` ``[B]`` long is the tokens per KV head that the budget allows, on average over layers.
        """
        return self.sinks, self.recent


@dataclass(frozen=True, kw_only=True)
class RowScorer(Scorer):
    """A scorer that sums attention weights over queries, and averages over the query heads of a KV head.

    A wrapper may replace the weights by another statistic (``Needs.statistic``); :meth:`sums` then returns its sums.
    """

    @cached_property
    def summing(self) -> RowScorer:
        """The scorer whose :meth:`sums` are plain sums, also of a statistic other than the weight; usually this one."""
        return self

    def sums(self, inputs: ScorerInputs) -> Tensor:
        """Return the summed weights by query head, ``[B, H, N]``."""
        return inputs.attention_sums

    def reduce(self, inputs: ScorerInputs, heads: Tensor) -> Tensor:
        """Turn ``[B, H, N]`` into one score for each KV head, ``[B, Hkv, N]``."""
        return grouped(heads, inputs, "mean")

    def pool(self, inputs: ScorerInputs, score: Tensor, before_window: bool = True) -> Tensor:
        """Smooth a score ``[B, *, N]`` over neighbours in the cache; without pooling it is returned as it is."""
        return score

    def score(self, inputs: ScorerInputs) -> Tensor:
        """Return the sums, averaged over the query heads of each KV head and pooled."""
        return self.pool(inputs, self.reduce(inputs, self.sums(inputs)))

    def heads(self, inputs: ScorerInputs) -> Tensor:
        """Return the sums by query head, pooled over all cached tokens."""
        return self.pool(inputs, self.sums(inputs), before_window=False)


def grouped(values: Tensor, inputs: ScorerInputs, reduction: Literal["mean", "sum"]) -> Tensor:
    """Combine ``[B, H, N]`` over the query heads of each KV head, ``[B, Hkv, N]``."""
    values = values.unflatten(1, (-1, inputs.group))
    return values.sum(2) if reduction == "sum" else values.mean(2)


def pooled(values: Tensor, inside: Tensor, kernel: int, kind: str, order: Tensor | None = None) -> Tensor:
    """Pool ``[B, C, N]`` along the last dimension.

    Both kinds have stride 1 and padding ``kernel // 2``. ``avg`` divides by ``kernel`` at the edges too, by torch's
    default, and so do the papers' codes.

    Args:
        values: ``[B, C, N]``, C a multiple of Hkv.
        inside: ``[B, Hkv, N]`` bool, the slots that are pooled; other slots count as 0.
        kernel: width, odd.
        kind: ``avg`` or ``max``.
        order: slots ``[B, Hkv, N]``; neighbours in this order are neighbours in the pooling. None: as they lie.
    """
    if order is not None:
        order = order.repeat_interleave(values.shape[1] // order.shape[1], 1)
    inside = inside.repeat_interleave(values.shape[1] // inside.shape[1], 1)
    values = values.masked_fill(~inside, 0.0)
    values = values if order is None else values.gather(-1, order)
    pool = F.avg_pool1d if kind == "avg" else F.max_pool1d
    smoothed = pool(values, kernel, stride=1, padding=kernel // 2)
    return smoothed if order is None else torch.empty_like(smoothed).scatter_(-1, order, smoothed)

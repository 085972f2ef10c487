"""The interface of allocators, and the candidates that layers bring to them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from ag import retention
from ag.engine.scorer_inputs import ScorerInputs
from ag.stateful import Attributes


@dataclass
class Candidates:
    """The tokens that one layer brings to a decision, in the order of their positions.

    Attributes:
        score: ``[B, Hkv, N]`` float32, see :func:`ag.retention.eviction_score`; -inf also where there is no token.
        capacity: ``[B]`` long, tokens per KV head on average over layers.
        prompt: ``[B]`` long, own tokens of each prompt, of which less may be held.
        due: ``[B]`` bool, sequences to evict from; the others keep all.
        preference: ``[B]`` float64, the layer's preference where the allocator measures one.
        second: ``[B, Hkv, N]`` float32, decides over the rest of a head's tokens; None means that there is one score.
        first_share: share of a head's tokens that ``score`` decides over where there are two.
    """

    score: Tensor
    capacity: Tensor
    prompt: Tensor
    due: Tensor
    preference: Tensor | None = None
    second: Tensor | None = None
    first_share: float = 1.0

    @cached_property
    def valid(self) -> Tensor:
        """``[B, Hkv, N]`` bool, tokens that may stay."""
        return self.score > -retention.INF

    @property
    def lengths(self) -> Tensor:
        """Tokens of a KV head, ``[B]`` long, the most over heads."""
        return self.valid.sum(-1).amax(1)

    @cached_property
    def fixed(self) -> Tensor:
        """Protected tokens of a KV head, ``[B]`` long, the most over heads."""
        return (self.score == retention.INF).sum(-1).amax(1)

    @cached_property
    def rivals(self) -> Tensor:
        """Competing tokens of a KV head, ``[B]`` long, the most over heads."""
        return self.score.isfinite().sum(-1).amax(1)

    def keep(self, count: Tensor) -> Tensor:
        """Return the mask of ``count`` ``[B]`` or ``[B, Hkv]`` tokens in each head, and of all where nothing is due."""
        count = count.view(len(count), -1).expand(self.score.shape[:2]).where(self.due[:, None], self.score.shape[-1])
        if self.second is None:
            return retention.keep_mask(self.score, count) & self.valid
        sure = retention.keep_mask(self.score, (count * self.first_share + 1e-6).long())
        return retention.keep_mask(retention.eviction_score(self.second, sure, ~self.valid), count) & self.valid

    def as_many(self, kept: Tensor) -> Tensor:
        """Return as many tokens of each head as ``kept`` ``[B, Hkv, N]`` has, which one score chose, by both scores."""
        return kept if self.second is None else self.keep(kept.sum(-1))

    def after(self, kept: Tensor) -> Candidates:
        """Return the candidates that ``kept`` leaves, which close up in their order."""
        order = (~kept).byte().argsort(dim=-1, stable=True)[..., : int(kept.sum(-1).max())]
        score = self.score.masked_fill(~kept, -retention.INF).gather(-1, order)
        return replace(self, score=score, second=None if self.second is None else self.second.gather(-1, order))


def over_heads(parts: Sequence[Candidates], floor: float, total: Tensor) -> list[Tensor]:
    """Keep the best of all heads of some layers by one top-k, as in Ada-KV (Feng et al. 2024).

    Args:
        parts: one of each layer; of equal scores those of earlier layers, heads and tokens stay.
        floor: share of its layer's capacity that every head keeps at least.
        total: ``[B]`` long, tokens to keep of all heads.

    Returns:
        Of each layer ``[B, Hkv, N]`` bool; all tokens of the sequences that are not due.
    """
    scores = [part.score for part in parts]
    if floor:  # the best of each head stay as if they were protected
        floors = [(part.capacity * floor).long()[:, None].expand(part.score.shape[:2]) for part in parts]
        sure = [retention.keep_mask(x, n) & (x > -retention.INF) for x, n in zip(scores, floors, strict=True)]
        scores = [x.masked_fill(mask, retention.INF) for x, mask in zip(scores, sure, strict=True)]
    flat = torch.cat([x.flatten(1) for x in scores], 1)
    keep = retention.keep_mask(flat, total.where(parts[0].due, flat.shape[1]))
    keep_by_layer = keep.split([x[0].numel() for x in scores], 1)
    return [
        keep_of_layer.view_as(part.score) & part.valid for part, keep_of_layer in zip(parts, keep_by_layer, strict=True)
    ]


@dataclass
class LayerBudgets(Attributes):
    """Candidates and budgets of the layers of one batch of prompts.

    Attributes:
        layers: indices of the layers that share the budget, ascending.
        kv_heads: KV heads of each layer of the model.
        open: by layer, candidates of which an allocator may yet take something.
        votes: by layer, what the first score alone would keep of them, by which layers compete.
        settled: by layer, tokens ``[B]`` kept at the end of the prompt, which also bound it while decoding: per KV
            head, or of all heads where layers compete for them.
        over_budget: ``[B]`` bool on the CPU, sequences that hold more than the budget because more is protected; None
            means that nothing was decided.
    """

    STATE: ClassVar[Mapping[str, Any]] = {"layers": Sequence, "settled": dict, "over_budget": Tensor | None}

    layers: list[int]
    kv_heads: Sequence[int]
    open: dict[int, Candidates] = field(default_factory=dict)
    votes: dict[int, Candidates] = field(default_factory=dict)
    settled: dict[int, Tensor] = field(default_factory=dict)
    over_budget: Tensor | None = None

    def settle(self, layer: int, candidates: Candidates, budget: Tensor, mean: Tensor | None = None) -> None:
        """Fix a layer budget for decoding.

        A prompt that fitted leaves every layer the mean, which is the capacity; so does one that stays whole until
        later tokens fill the budget. In blocks, a prompt that ended before the others of its batch keeps what it got.
        """
        fitted = (candidates.prompt <= candidates.capacity) | ~candidates.due
        budget = budget.where(~fitted, candidates.capacity if mean is None else mean)
        self.settled[layer] = budget.where(candidates.due, self.settled.get(layer, budget))

    def join(self, other: LayerBudgets, batch: int, added: int) -> None:
        """Append the budgets of another batch, of ``added`` sequences, to those of ``batch`` sequences."""
        over = self.over_budget, other.over_budget
        if any(x is not None for x in over):  # of the other batch nothing was decided yet
            sizes = zip(over, (batch, added), strict=True)
            self.over_budget = torch.cat([torch.zeros(n, dtype=torch.bool) if x is None else x for x, n in sizes])
        self.settled = {layer: torch.cat([x, other.settled[layer]]) for layer, x in self.settled.items()}

    def select(self, indices: Tensor) -> None:
        """Make the sequences those at ``indices``."""
        self.settled = {layer: x[indices.to(x.device)] for layer, x in self.settled.items()}
        self.over_budget = None if self.over_budget is None else self.over_budget[indices.cpu()]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; raises ``ValueError`` for values that no budgets have."""
        layers = self.layers
        super().load_state_dict(state)
        self.layers = list(self.layers)
        if self.layers != layers:
            raise ValueError("layers")
        if not all(layer in layers and isinstance(x, Tensor) for layer, x in self.settled.items()):
            raise ValueError("settled")
        if self.over_budget is not None:
            self.over_budget = self.over_budget.cpu()
            if self.over_budget.dtype != torch.bool:
                raise ValueError("over_budget")


@dataclass(frozen=True, kw_only=True)
class Allocator(ABC):
    """Shares the budget among layers and heads; its fields are its options."""

    #: Whether what a head keeps depends on the other heads of its layer, also while decoding.
    compares_heads: ClassVar[bool] = False
    #: Options beside the fields, which :meth:`completed` turns into fields.
    shorthands: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def completed(cls, options: Mapping[str, Any], budget: int | float | None, window: int | None) -> dict[str, Any]:
        """Return the fields that the given options mean, under a budget and a scorer with this window (or None)."""
        return dict(options)

    @property
    def lookback(self) -> int:
        """Earlier queries of the prompt that a decision needs beside the new ones."""
        return 0

    def wish(self, inputs: ScorerInputs) -> Tensor | None:
        """Return the layer's preference, ``[B]`` float64; None means that layers have none."""
        return None

    @abstractmethod
    def keep(self, layer: int, candidates: Candidates, budgets: LayerBudgets) -> dict[int, Tensor]:
        """Return masks ``[B, Hkv, N]`` of what stays of the prompt, by layer: this one, and earlier ones that give way.

        What the layer gets is noted in ``budgets``.
        """

    def keep_later(self, layer: int, candidates: Candidates, budgets: LayerBudgets) -> Tensor:
        """Return the mask ``[B, Hkv, N]`` of what stays of a layer while decoding."""
        return candidates.keep(budgets.settled[layer])


@dataclass(frozen=True, kw_only=True)
class LayerAllocator(Allocator):
    """An allocator that finds each layer budget by itself."""

    @abstractmethod
    def layer_budget(self, candidates: Candidates, layer_number: int, layers: int) -> Tensor:
        """Return the tokens per KV head ``[B]`` that a layer keeps at the end of the prompt, or of a block of it.

        ``layer_number`` is its number among the ``layers`` that share the budget.
        """

    def keep(self, layer: int, candidates: Candidates, budgets: LayerBudgets) -> dict[int, Tensor]:
        """Return what stays of the layer."""
        budget = self.layer_budget(candidates, budgets.layers.index(layer), len(budgets.layers))
        budgets.settle(layer, candidates, budget)
        return {layer: candidates.keep(budget)}

"""The interface of allocators, and the candidates that layers bring to them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from ag.engine.attention_stats import AttentionStats
from ag.stateful import Attributes

BY_TOKEN = ("score", "protected", "second", "standing")  # what candidates have of each token


@dataclass
class Candidates:
    """The tokens that one layer brings to a decision: ``[B, Hkv, N]`` each, in the order of their ranks.

    Attributes:
        score: float32, higher is kept.
        protected: bool, stays whatever the score.
        valid: bool, the places that hold a token.
        capacity: ``[B]`` long, tokens per KV head on average over layers.
        prompt: ``[B]`` long, own tokens of each prompt, of which less may be held.
        due: ``[B]`` bool, sequences to evict from; the others keep all.
        preference: ``[B]`` float64, the layer's preference where the allocator measures one.
        second: ``[B, Hkv, N]`` float32, decides over the rest of a head's tokens; None means that there is one score.
        first_share: share of a head's tokens that ``score`` decides over where there are two.
    """

    score: Tensor
    protected: Tensor
    valid: Tensor
    capacity: Tensor
    prompt: Tensor
    due: Tensor
    preference: Tensor | None = None
    second: Tensor | None = None
    first_share: float = 1.0

    @cached_property
    def competing(self) -> Tensor:
        """``[B, Hkv, N]`` bool, tokens whose scores decide."""
        return self.valid & ~self.protected

    @cached_property
    def finite(self) -> Tensor:
        """``[B]`` bool, sequences whose deciding scores are finite numbers."""
        return (torch.isfinite(self.score) | ~self.competing).flatten(1).all(1)

    @cached_property
    def held(self) -> Tensor:
        """Tokens of each row, ``[B, Hkv]`` long."""
        return self.valid.sum(-1)

    @cached_property
    def fixed(self) -> Tensor:
        """Protected tokens of a KV head, ``[B]`` long, the most over heads."""
        return (self.held - self.competing.sum(-1)).amax(1)

    @cached_property
    def rivals(self) -> Tensor:
        """Competing tokens of a KV head, ``[B]`` long, the most over heads."""
        return self.competing.sum(-1).amax(1)

    @cached_property
    def over(self) -> Tensor:
        """``[B]`` bool, sequences that protect more than the capacity."""
        return self.fixed > self.capacity

    @property
    def tight(self) -> Tensor:
        """``[B]`` bool, sequences that protect more than the capacity and hold more than it now."""
        return self.due & self.over & (self.held.amax(1) > self.capacity)

    @cached_property
    def standing(self) -> Tensor:
        """The place of each rival in its head, 0 for the best."""
        return standings(self.score, self.competing)

    def exempting(self, keep: Tensor) -> Tensor:
        """Return a mask ``[B, Hkv, N]`` that keeps all of the sequences that are not due."""
        return keep | (self.valid & ~self.due[:, None, None])

    def keep(self, count: Tensor) -> Tensor:
        """Return the mask of ``count`` ``[B]`` tokens in each head, and of all where nothing is due."""
        return self.keep_heads(count[:, None].expand(self.valid.shape[:2]))

    def keep_heads(self, count: Tensor) -> Tensor:
        """Return the mask of ``count`` ``[B, Hkv]`` tokens, and of all where nothing is due."""
        if self.second is None:
            return self.exempting(best(self.standing, self.protected, self.valid, count))
        sure = best(self.standing, self.protected, self.valid, (count * self.first_share + 1e-6).long())
        return self.exempting(select(self.second, sure, self.valid, count))

    def as_many(self, keep: Tensor) -> Tensor:
        """Return as many tokens of each head as ``keep`` ``[B, Hkv, N]`` has, which one score chose, by both scores."""
        return keep if self.second is None else self.keep_heads(keep.sum(-1))

    def after(self, keep: Tensor) -> Candidates:
        """Return the candidates that ``keep`` leaves, which close up in their order."""
        order = (~keep).byte().argsort(dim=-1, stable=True)[..., : int(keep.sum(-1).max())]
        parts = {name: x.gather(-1, order) for name, x in vars(self).items() if name in BY_TOKEN and x is not None}
        standing = parts.pop("standing", None)
        left = replace(self, **parts, valid=keep.gather(-1, order))
        if standing is not None:
            left.standing = standing  # no worse one moves up
        return left


def select(score: Tensor, protected: Tensor, valid: Tensor, capacity: Tensor) -> Tensor:
    """Keep what is protected and the best of the rest, up to a capacity; of equal scores the first.

    Args:
        score: ``[B, Hkv, N]``.
        protected: ``[B, Hkv, N]`` bool, kept whatever the score.
        valid: ``[B, Hkv, N]`` bool, the places that hold a token, as in the result.
        capacity: ``[B, Hkv]`` long, tokens to keep, not fewer than are protected; heads that hold fewer keep all.
    """
    return best(standings(score, valid & ~protected), protected, valid, capacity)


def standings(score: Tensor, rivals: Tensor) -> Tensor:
    """Return the place of each of the ``rivals`` in its head, 0 for the best, ``[B, Hkv, N]`` long; any elsewhere."""
    order = score.masked_fill(~rivals, float("-inf")).argsort(dim=-1, descending=True, stable=True)
    index = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, index)


def best(standing: Tensor, protected: Tensor, valid: Tensor, capacity: Tensor) -> Tensor:
    """Do what :func:`select` does, from the :func:`standings` of what is not protected."""
    protected = protected & valid
    room = capacity - protected.sum(-1)
    return protected | (valid & (standing < room[..., None]))


def over_heads(parts: Sequence[Candidates], floor: float, total: Tensor) -> list[Tensor]:
    """Keep the best of all heads of some layers by one top-k, as in Ada-KV (Feng et al. 2024).

    Args:
        parts: one of each layer; of equal scores those of earlier layers, heads and tokens stay.
        floor: share of its layer's capacity that every head keeps at least.
        total: ``[B]`` long, tokens to keep of all heads.

    Returns:
        Of each layer ``[B, Hkv, N]`` bool; all tokens of the sequences that are not due.
    """
    sure = []
    for part in parts:
        least = (part.capacity * floor).long()[:, None].maximum((part.protected & part.valid).sum(-1))
        sure.append(best(part.standing, part.protected, part.valid, least))
    score, always, held = (
        torch.cat([x.flatten(1) for x in column], 1)[:, None]
        for column in ([part.score for part in parts], sure, [part.valid for part in parts])
    )
    pieces = select(score, always, held, total[:, None])[:, 0].split([x[0].numel() for x in sure], 1)
    return [part.exempting(piece.view_as(part.valid)) for part, piece in zip(parts, pieces, strict=True)]


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

    def join(self, other: LayerBudgets, mine: int, theirs: int) -> None:
        """Append the budgets of another batch, of ``theirs`` sequences, to those of ``mine`` sequences."""
        over = self.over_budget, other.over_budget
        if any(x is not None for x in over):  # of the other batch nothing was decided yet
            sizes = zip(over, (mine, theirs), strict=True)
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
    def completed(cls, given: Mapping[str, Any], budget: int | float | None, window: int | None) -> dict[str, Any]:
        """Return the fields that the given options mean, under a budget and a scorer with this window (or None)."""
        return dict(given)

    @property
    def lookback(self) -> int:
        """Earlier queries of the prompt that a decision needs beside the new ones."""
        return 0

    def wish(self, seen: AttentionStats) -> Tensor | None:
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
    def layer_budget(self, candidates: Candidates, place: int, layers: int) -> Tensor:
        """Return the tokens per KV head ``[B]`` that a layer keeps at the end of the prompt, or of a block of it.

        ``place`` is its place among the ``layers`` that share the budget.
        """

    def keep(self, layer: int, candidates: Candidates, budgets: LayerBudgets) -> dict[int, Tensor]:
        """Return what stays of the layer."""
        budget = self.layer_budget(candidates, budgets.layers.index(layer), len(budgets.layers))
        budgets.settle(layer, candidates, budget)
        return {layer: candidates.keep(budget)}

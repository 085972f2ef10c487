"""The interface of allocators, and the candidates that layers bring to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from ag import retention
from ag.engine.scorer_inputs import Needs, ScorerInputs
from ag.stateful import Attributes


@dataclass
class Candidates:
    """The tokens of one layer that a decision compares, in the order of their indices.

    Attributes:
        score: ``[B, Hkv, N]`` float32, see :func:`ag.retention.eviction_score`; -inf also where there is no token.
        capacity: ``[B]`` long, tokens per KV head on average over layers.
        prompt_lengths: ``[B]`` long, tokens of each prompt without padding; some may be evicted already.
        evicting: ``[B]`` bool, sequences to evict from; all other sequences keep all tokens.
        preference: ``[B]`` float64, the layer's preference. None: the allocator measures none.
        second: ``[B, Hkv, N]`` float32, chooses a head's tokens after ``score`` has chosen a share. None: ``score``
            chooses all.
        first_share: share of a head's tokens that ``score`` chooses if there is a second score.
    """

    score: Tensor
    capacity: Tensor
    prompt_lengths: Tensor
    evicting: Tensor
    preference: Tensor | None = None
    second: Tensor | None = None
    first_share: float = 1.0

    @cached_property
    def valid(self) -> Tensor:
        """``[B, Hkv, N]`` bool, tokens that can be kept. Where nothing is evicted their scores may be NaN."""
        return self.score != -retention.INF

    @property
    def lengths(self) -> Tensor:
        """Tokens of a KV head, ``[B]`` long, the most over heads."""
        return self.valid.sum(-1).amax(1)

    @cached_property
    def num_protected(self) -> Tensor:
        """Protected tokens of a KV head, ``[B]`` long, the most over heads."""
        return (self.score == retention.INF).sum(-1).amax(1)

    @cached_property
    def num_competing(self) -> Tensor:
        """Competing tokens of a KV head, ``[B]`` long, the most over heads."""
        return self.score.isfinite().sum(-1).amax(1)

    def keep(self, count: Tensor) -> Tensor:
        """Return the mask of the best ``count`` ``[B]`` or ``[B, Hkv]`` tokens of each head of ``evicting``.

        If there is a second score, the first one chooses ``count * first_share`` of them, and the second one the rest.
        """
        count = count.view(len(count), -1).expand(self.score.shape[:2])
        count = count.where(self.evicting[:, None], self.score.shape[-1])
        if self.second is None:
            return retention.keep_mask(self.score, count) & self.valid
        chosen = retention.keep_mask(self.score, retention.share_of(count, self.first_share))
        return retention.keep_mask(retention.eviction_score(self.second, chosen, ~self.valid), count) & self.valid

    def keep_same_counts(self, kept: Tensor) -> Tensor:
        """Return a mask by both scores with the number of tokens that ``kept`` ``[B, Hkv, N]`` has of each head."""
        return kept if self.second is None else self.keep(kept.sum(-1))

    def compacted(self, kept: Tensor) -> Candidates:
        """Return only the candidates in ``kept``, in their order."""
        width = int(kept.sum(-1).max())
        columns = (kept.cumsum(-1) - 1).where(kept, width)  # evicted tokens go to one extra column, which is cut off

        def moved(x: Tensor) -> Tensor:
            return x.new_full((*x.shape[:2], width + 1), -retention.INF).scatter_(-1, columns, x)[..., :width]

        return replace(self, score=moved(self.score), second=None if self.second is None else moved(self.second))


def topk_over_heads(parts: Sequence[Candidates], floor: float, total: Tensor) -> list[Tensor]:
    """Keep the best of all heads of some layers by one top-k, as in Ada-KV (Feng et al. 2024).

    Args:
        parts: candidates of each layer. If scores are equal, the earlier layer, head and token is kept.
        floor: share of its layer's capacity that every head keeps at least.
        total: ``[B]`` long, tokens to keep of all heads.

    Returns:
        A mask for each layer, ``[B, Hkv, N]`` bool; all tokens of the sequences that are not evicted from.
    """
    scores = [part.score for part in parts]
    if floor:  # the best tokens of each head are kept as if they were protected
        floors = [retention.share_of(part.capacity, floor)[:, None].expand(part.score.shape[:2]) for part in parts]
        best = [retention.keep_mask(x, n) & (x > -retention.INF) for x, n in zip(scores, floors, strict=True)]
        scores = [x.masked_fill(mask, retention.INF) for x, mask in zip(scores, best, strict=True)]
    flat = torch.cat([x.flatten(1) for x in scores], 1)
    keep = retention.keep_mask(flat, total.where(parts[0].evicting, flat.shape[1]))
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
        pending: by layer, the candidates that later layers may still evict.
        pending_by_first: by layer, the pending candidates that the first score alone would keep; layers compete.
        layer_budget: by layer, tokens kept at the end of the prompt, ``[B]`` long on the CPU. They also bound the layer
            while decoding. They count per KV head, or summed over the heads if layers compete for tokens.
        over_budget: ``[B]`` bool on the CPU, sequences that hold more than the budget because more is protected. None:
            no decision yet.
    """

    STATE: ClassVar[Mapping[str, Any]] = {"layers": Sequence, "layer_budget": dict, "over_budget": Tensor | None}

    layers: list[int]
    kv_heads: Sequence[int]
    pending: dict[int, Candidates] = field(default_factory=dict)
    pending_by_first: dict[int, Candidates] = field(default_factory=dict)
    layer_budget: dict[int, Tensor] = field(default_factory=dict)
    over_budget: Tensor | None = None

    def set_prompt_budget(self, layer: int, candidates: Candidates, budget: Tensor, mean: Tensor | None = None) -> None:
        """Set the budget of a layer for decoding.

        If a prompt fits, or is whole until later tokens fill the budget, every layer gets the mean, the capacity. In
        blocks, a prompt that ended earlier than other prompts of its batch keeps its budget.
        """
        fitted = (candidates.prompt_lengths <= candidates.capacity) | ~candidates.evicting
        budget = budget.where(~fitted, candidates.capacity if mean is None else mean)
        budget, evicting = budget.cpu(), candidates.evicting.cpu()
        self.layer_budget[layer] = budget.where(evicting, self.layer_budget.get(layer, budget))

    def join(self, other: LayerBudgets, batch: int, added: int) -> None:
        """Append the budgets of another batch of ``added`` sequences to these budgets of ``batch`` sequences."""
        over = self.over_budget, other.over_budget
        if any(x is not None for x in over):  # one batch may have no decision yet
            sizes = zip(over, (batch, added), strict=True)
            self.over_budget = torch.cat([torch.zeros(n, dtype=torch.bool) if x is None else x for x, n in sizes])
        self.layer_budget = {layer: torch.cat([x, other.layer_budget[layer]]) for layer, x in self.layer_budget.items()}

    def select(self, indices: Tensor) -> None:
        """Make the sequences those at ``indices``."""
        self.layer_budget = {layer: x[indices.cpu()] for layer, x in self.layer_budget.items()}
        self.over_budget = None if self.over_budget is None else self.over_budget[indices.cpu()]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; raises ``ValueError`` for values that no budgets have."""
        layers = self.layers
        super().load_state_dict(state)
        self.layers = list(self.layers)
        if self.layers != layers:
            raise ValueError("layers")
        if not all(layer in layers and isinstance(x, Tensor) for layer, x in self.layer_budget.items()):
            raise ValueError("layer_budget")
        if self.over_budget is not None:
            self.over_budget = self.over_budget.cpu()
            if self.over_budget.dtype != torch.bool:
                raise ValueError("over_budget")


@dataclass(frozen=True, kw_only=True)
class Allocator:
    """Shares the budget among layers and heads; its fields are its options."""

    #: Whether the heads of a layer compete with each other, also while decoding.
    compares_heads: ClassVar[bool] = False
    #: Options beside the fields, which :meth:`completed` turns into fields.
    shorthands: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def completed(cls, options: Mapping[str, Any], budget: int | float | None, window: int | None) -> dict[str, Any]:
        """Return the fields that the given options mean, under a budget and a scorer with this window (or None)."""
        return dict(options)

    @cached_property
    def needs(self) -> Needs:
        """The inputs that :meth:`layer_preference` reads."""
        return Needs()

    def layer_preference(self, inputs: ScorerInputs) -> Tensor | None:
        """Return the layer's preference at the end of the prompt, ``[B]`` float64. None: layers have no preference."""
        return None

    def layer_budget(self, candidates: Candidates, layer_number: int, layers: int) -> Tensor:
        """Return the tokens per KV head ``[B]`` that a layer keeps at the end of the prompt, or of a block of it.

        ``layer_number`` is its number among the ``layers`` that share the budget.
        """
        return candidates.capacity

    def keep(self, layer: int, candidates: Candidates, budgets: LayerBudgets) -> dict[int, Tensor]:
        """Return masks ``[B, Hkv, N]`` of the prompt tokens to keep, of this and of earlier layers that lose tokens.

        The method notes the layer's budget in ``budgets``. Here each layer keeps its own :meth:`layer_budget`.
        """
        budget = self.layer_budget(candidates, budgets.layers.index(layer), len(budgets.layers))
        budgets.set_prompt_budget(layer, candidates, budget)
        return {layer: candidates.keep(budget)}

    def keep_in_decode(self, layer: int, candidates: Candidates, budgets: LayerBudgets) -> Tensor:
        """Return the mask ``[B, Hkv, N]`` of the tokens that a layer keeps while decoding."""
        return candidates.keep(budgets.layer_budget[layer].to(candidates.score.device))

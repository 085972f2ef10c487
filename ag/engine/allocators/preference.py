"""CAKE's budgets: layers whose attention is spread out and varies get more, and earlier layers lose tokens to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from ag.engine.allocators.base import Allocator, Candidates, LayerBudgets
from ag.engine.allocators.rounding import largest_remainder
from ag.engine.scorer_inputs import Needs, ScorerInputs
from ag.errors import UserError, require

#: CAKE's published temperatures (tau1, tau2), by model and tokens per layer (code antgroup/cakekv, model2tau.json).
PUBLISHED_TAU = {
    ("llama3.1-8b-128k", 128): (1.6, 0.6),
    ("llama3.1-8b-128k", 1024): (1.6, 0.4),
    ("llama2-7b-chat-4k", 128): (0.9, 2.3),
    ("llama2-7b-chat-4k", 1024): (1.9, 1.8),
    ("llama2-13b-chat-4k", 128): (1.8, 2.0),
    ("llama2-13b-chat-4k", 1024): (0.5, 0.4),
    ("mistral-0.3-7b-32k", 128): (1.0, 0.8),
    ("mistral-0.3-7b-32k", 1024): (0.8, 0.5),
    ("qwen2.5-7b-instruct", 128): (0.4, 0.6),
    ("qwen2.5-7b-instruct", 1024): (1.5, 0.6),
}
MIN_TAU = 0.05  # powers of 20 of an entropy up to 1e7 and a variance from 1e-12 on are numbers of float64


@dataclass(frozen=True, kw_only=True)
class Preference(Allocator):
    """Layers share in proportion to ``H^(1/tau1) V^(1/tau2)``, the entropy and the variance of their attention.

    Source: "CAKE: Cascading and Adaptive KV Cache Eviction with Layer Preferences", section 4; code antgroup/cakekv.

    Attributes:
        tau1: temperature of the entropy, :data:`MIN_TAU` or more.
        tau2: temperature of the variance, :data:`MIN_TAU` or more.
        observers: last queries whose attention is measured. Default: the scorer's window if it has one.
    """

    tau1: float = 1.0
    tau2: float = 1.0
    observers: int = 32
    shorthands: ClassVar[tuple[str, ...]] = ("tau",)

    def __post_init__(self) -> None:
        require(self, "tau1", self.tau1 >= MIN_TAU, f"{MIN_TAU} or more")
        require(self, "tau2", self.tau2 >= MIN_TAU, f"{MIN_TAU} or more")
        require(self, "observers", self.observers >= 1, "1 or more")

    @classmethod
    def completed(
        cls, options_given: Mapping[str, Any], budget: int | float | None, window: int | None
    ) -> dict[str, Any]:
        """Look the temperatures of ``tau`` up, and observe in the scorer's window."""
        completed: dict[str, Any] = {} if window is None else {"observers": window}
        completed |= {name: value for name, value in options_given.items() if name != "tau"}
        if (tau := options_given.get("tau")) is not None:
            for name in ("tau1", "tau2"):
                if name in completed:
                    raise UserError(
                        f"Preference: {name}={completed[name]} beside tau={tau}, which stands for the published tau1 "
                        "and tau2: expected one of both; leave the other out."
                    )
            completed["tau1"], completed["tau2"] = published_tau(str(tau), budget)
        return completed

    @cached_property
    def needs(self) -> Needs:
        """The attention of the observers, and the tokens before them."""
        return Needs(
            attention_rows=self.observers,
            attention_moments=self.observers,
            occupied=True,
            key_indices=True,
            lookback=self.observers - 1,
        )

    def layer_preference(self, inputs: ScorerInputs) -> Tensor:
        """Return the layer's preference, ``[B]`` float64 (section 4.1 of the paper)."""
        entropy, variance = entropy_and_variance(inputs, self.observers)
        spread = entropy.double().clamp_min(1e-12) ** (1 / self.tau1)
        return spread * variance.double().clamp_min(1e-12) ** (1 / self.tau2)

    def keep(self, layer: int, candidates: Candidates, budgets: LayerBudgets) -> dict[int, Tensor]:
        """Return the masks of the layer and of earlier layers: at most the budget and one whole layer are cached.

        One decision at the end would keep equal tokens: a layer budget only falls from layer to layer.
        """
        budgets.pending[layer] = candidates
        brought, last = [*budgets.pending.values()], len(budgets.pending) == len(budgets.layers)
        counts, caps = self._counts(brought, len(budgets.layers))
        is_whole, masks = (counts >= caps).all(0).tolist(), {layer: candidates.valid}
        for index, (other, open_candidates) in enumerate(budgets.pending.items()):
            own = counts[:, index] + open_candidates.num_protected
            if last:
                budgets.set_prompt_budget(other, open_candidates, own)
            if not is_whole[index]:
                masks[other] = open_candidates.keep(own)
            if other in masks:  # this layer evicts expired tokens in any case
                budgets.pending[other] = open_candidates.compacted(masks[other])
        if last:
            budgets.pending.clear()
        return masks

    def _counts(self, several: list[Candidates], layers: int) -> tuple[Tensor, Tensor]:
        """Return how many competing tokens ``[B, L]`` each layer so far keeps, rounded up before the last, and has."""
        brought = [(b.preference, b.num_protected, b.num_competing) for b in several if b.preference is not None]
        preference, num_protected, caps = (torch.stack(column, 1) for column in zip(*brought, strict=True))
        total = (several[0].capacity - num_protected[:, 0]).clamp_min(0) * layers
        shares = water_fill(preference, total, caps)
        if len(several) == layers:
            return largest_remainder(shares, total, caps), caps
        return (shares - 1e-9).ceil().long().minimum(caps), caps


def published_tau(model: str, tokens: int | float | None) -> tuple[float, float]:
    """Return CAKE's published (tau1, tau2) for a model and a budget in tokens per layer; refuse others."""
    try:
        return PUBLISHED_TAU[model, tokens]  # type: ignore[index]
    except KeyError:
        published = ", ".join(f"{name} at {size}" for name, size in PUBLISHED_TAU)
        raise UserError(
            f"no tau was published for {model} at {tokens}; there are {published}; give tau1 and tau2."
        ) from None


def entropy_and_variance(inputs: ScorerInputs, observers: int) -> tuple[Tensor, Tensor]:
    """Return H and V of a layer, ``[B]`` each.

    H is the entropy of the attention that the last queries pay the tokens before them, summed over heads and queries, V
    its variance over those queries, summed over heads and tokens. Attention to the observing tokens themselves does not
    count, and all other weights are not normalised anew.
    """
    weights, query_valid = inputs.attention_rows
    _, variance = inputs.attention_moments
    before_window = (inputs.occupied & (inputs.age >= observers)).repeat_interleave(inputs.group, 1)
    a = weights * (query_valid[:, None, :, None] & before_window[:, :, None])
    entropy = -(a + 1e-10).log_().mul_(a).sum((1, 2, 3))
    return entropy, (variance * before_window).sum((1, 2))


def water_fill(preference: Tensor, total: Tensor, caps: Tensor) -> Tensor:
    """Share totals ``[B]`` in proportion to preferences ``[B, L]`` float64 above 0: ``B_l = min(cap_l, lambda P_l)``.

    Returns ``[B, L]`` float64, summing to the total, or to all ``caps`` ``[B, L]`` where these are less.
    """
    limit = torch.minimum(total, caps.sum(1)).double()
    ratio = caps / preference
    order = ratio.argsort(1)
    caps_sorted, preference_sorted = caps.double().gather(1, order), preference.gather(1, order)
    filled = caps_sorted.cumsum(1) - caps_sorted  # tokens of the layers that are full before this one
    preference_left = preference_sorted.flip(1).cumsum(1).flip(1)
    level = (limit[:, None] - filled) / preference_left  # lambda, if exactly the layers before this one are full
    fits = level * preference_sorted <= caps_sorted
    index = torch.where(fits.any(1), fits.long().argmax(1), order.shape[1] - 1)
    level = level.gather(1, index[:, None])
    return torch.minimum(caps.double(), level * preference)

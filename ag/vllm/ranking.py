"""Which tokens of a prompt stay: the scores of a policy's scorer, ranked by :mod:`ag.retention`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ag import retention
from ag.engine.policy import Policy
from ag.errors import UserError


@dataclass(frozen=True)
class PromptInputs:
    """What a scorer that needs no queries reads of :class:`ag.engine.scorer_inputs.ScorerInputs`, for a whole prompt.

    Attributes:
        key_indices: ``[1, H, T]`` long, token indices.
        layer: index of the layer.
        log_retention: whether the logits are logs of the share of a token's worth that each new token leaves.
        keys: ``[1, H, T, D]``. None: the scorer reads gates.
        gate_logits: ``[1, H, T]`` with their bias. None: the scorer reads no gates.
    """

    key_indices: Tensor
    layer: int
    log_retention: bool
    keys: Tensor | None = None
    gate_logits: Tensor | None = None

    @property
    def key_valid(self) -> Tensor:
        """All tokens are held."""
        return torch.ones_like(self.key_indices, dtype=torch.bool)

    @property
    def lengths(self) -> Tensor:
        """``[1]`` long, tokens of the prompt."""
        return torch.tensor([self.key_indices.shape[-1]], device=self.key_indices.device)


def prompt_keep_mask(
    policy: Policy,
    kept_tokens: int,
    protected: int,
    layers: list[int],
    keys: Callable[[int], Tensor],
    logits: Tensor | None,
) -> Tensor:
    """Return which tokens of a prompt stay, ``[L, H, T]`` bool, of the layers that share the budget.

    Args:
        policy: has a scorer that reads keys or gates, and the allocator ``global`` or ``uniform``.
        kept_tokens: tokens per KV head, of :func:`ag.vllm.placement.kept_tokens`.
        protected: first tokens that the request protects.
        layers: indices of the layers.
        keys: gives the keys ``[H, T, D]`` of a layer.
        logits: stored logits ``[L, H, T]`` of the gates, of these layers. None: the scorer reads keys.

    Raises:
        UserError: a score is not finite.
    """
    assert policy.scorer is not None
    scores = []
    for row, layer in enumerate(layers):
        values = keys(layer) if logits is None else logits[row]
        index = torch.arange(values.shape[1], device=values.device).expand(1, *values.shape[:2])
        decays = policy.gates is not None and policy.gates.decays
        named = {"keys" if logits is None else "gate_logits": values[None]}
        inputs = PromptInputs(index, layer, decays, **named)
        scores.append(policy.scorer.score(cast("Any", inputs))[0])
    score = torch.stack(scores).float()
    if not bool(score.isfinite().all()):
        layer = layers[int((~score.isfinite()).flatten(1).any(1).nonzero()[0])]
        raise UserError(f"Policy '{policy.spec}': layer {layer} has a score that is not finite; look at the gates.")
    length = torch.tensor([score.shape[-1]], device=score.device)
    marked = torch.arange(score.shape[-1], device=score.device)[None] < protected if protected else None
    limits = policy.scorer.limits(policy.capacity(length))
    index = torch.arange(score.shape[-1], device=score.device)[None, None]
    score = retention.eviction_score(score, retention.protected_mask(index, length, *limits, marked))
    count = torch.full(score.shape[:2], kept_tokens, device=score.device)
    if policy.allocator.compares_heads:
        return retention.keep_mask(score.flatten(), count.sum()).view_as(score)
    return retention.keep_mask(score, count)

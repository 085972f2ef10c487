"""Which tokens of a request stay: the scores of a policy's scorer, ranked by :mod:`ag.retention`."""

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
class RowInputs:
    """What a scorer that needs no queries reads of :class:`ag.engine.scorer_inputs.ScorerInputs`, for one request.

    Attributes:
        key_indices: ``[1, H, S]`` long, token indices; -1 where a row holds no token.
        lengths: ``[1]`` long, tokens of the text so far.
        layer: index of the layer.
        log_retention: whether the logits are logs of the share of a token's worth that each new token leaves.
        keys: ``[1, H, S, D]``. None: the scorer reads gates.
        gate_logits: ``[1, H, S]`` with their bias. None: the scorer reads no gates.
    """

    key_indices: Tensor
    lengths: Tensor
    layer: int
    log_retention: bool
    keys: Tensor | None = None
    gate_logits: Tensor | None = None

    @property
    def key_valid(self) -> Tensor:
        """Which slots hold a token."""
        return self.key_indices >= 0

    @property
    def age(self) -> Tensor:
        """The distance of each token to the newest one."""
        return self.lengths[:, None, None] - 1 - self.key_indices


@dataclass(frozen=True)
class Candidates:
    """The tokens of a request, in the order of the text, of the layers that share the budget.

    Attributes:
        layers: indices of these layers.
        token_indices: ``[L, H, S]`` long; -1 where a row holds no token.
        tokens: tokens of the text so far.
        prompt: tokens of the prompt.
        protected: first tokens that the request protects.
        keys: gives the keys ``[H, S, D]`` of a layer.
        logits: stored logits ``[L, H, S]`` of the gates. None: the scorer reads keys.
    """

    layers: list[int]
    token_indices: Tensor
    tokens: int
    prompt: int
    protected: int
    keys: Callable[[int], Tensor]
    logits: Tensor | None


def keep_mask(policy: Policy, candidates: Candidates, kept_tokens: int, layer_totals: Tensor | None) -> Tensor:
    """Return which tokens stay, ``[L, H, S]`` bool.

    Args:
        policy: has a scorer that reads keys or gates, and the allocator ``global`` or ``uniform``.
        candidates: the tokens.
        kept_tokens: tokens per KV head, of :func:`ag.vllm.placement.kept_tokens`.
        layer_totals: ``[L]`` long, tokens that each layer kept of the prompt, if these bound it now. None: while the
            prompt is read heads of all layers compete.

    Raises:
        UserError: a score is not finite.
    """
    assert policy.scorer is not None
    valid, device = candidates.token_indices >= 0, candidates.token_indices.device
    length = torch.tensor([candidates.tokens], device=device)
    decays, scores = policy.gates is not None and policy.gates.decays, []
    for row, layer in enumerate(candidates.layers):
        index, logits = candidates.token_indices[row][None], candidates.logits
        if logits is None:
            inputs = RowInputs(index, length, layer, decays, keys=candidates.keys(layer)[None])
        else:
            inputs = RowInputs(index, length, layer, decays, gate_logits=logits[row].where(valid[row], 0.0)[None])
        scores.append(policy.scorer.score(cast("Any", inputs))[0])
    score = torch.stack(scores).float()
    if not bool((score.isfinite() | ~valid).all()):
        layer = candidates.layers[int((~score.isfinite() & valid).flatten(1).any(1).nonzero()[0])]
        raise UserError(f"Policy '{policy.spec}': layer {layer} has a score that is not finite; look at the gates.")
    marked = torch.ones(1, candidates.protected, dtype=torch.bool, device=device) if candidates.protected else None
    limits = policy.scorer.limits(policy.capacity(torch.tensor([candidates.prompt], device=device)))
    protected = retention.protected_mask(candidates.token_indices[:, None], length, *limits, marked)[:, 0]
    score = retention.eviction_score(score, protected, ~valid)
    count = torch.full(score.shape[:2], kept_tokens, device=device)
    if not policy.allocator.compares_heads:
        keep = retention.keep_mask(score, count)
    elif layer_totals is None:
        keep = retention.keep_mask(score.flatten(), count.sum()).view_as(score)
    else:
        keep = retention.keep_mask(score.flatten(1), layer_totals).view_as(score)
    return keep & valid

"""The losses: language modelling, distillation, eviction and the regression warm start.

Each is a mean over the *global* batch of all ranks. Its gradient is right under DistributedDataParallel, which averages
gradients over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ag.gates.gate import AttentionGates
from ag.gates.gating import Gating
from ag.model.structure import lm_head, lm_logits

Mean = Literal["soft", "hard"]


def world_size() -> int:
    """Return the number of ranks, 1 outside distributed training."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the number of this rank, 0 outside distributed training."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def global_sum(value: Tensor) -> Tensor:
    """Sum a tensor over all ranks, without gradient."""
    value = value.detach().clone()
    if world_size() > 1:
        dist.all_reduce(value)
    return value


def response_positions(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return (rows, columns) ``[N]`` of the positions whose *next* token carries loss; ``labels [B, T]``, -100 none."""
    rows, columns = (labels[:, 1:] != -100).nonzero(as_tuple=True)
    return rows, columns


def sample_labels(labels: Tensor, count: int) -> Tensor:
    """Return labels ``[B, T]`` with loss on at most ``count`` random tokens; a count of 0 leaves all of them."""
    rows, columns = response_positions(labels)
    if not 0 < count < len(rows):
        return labels
    kept = torch.randperm(len(rows))[:count].to(labels.device)
    kept_indices = rows[kept], columns[kept] + 1
    return torch.full_like(labels, -100).index_put(kept_indices, labels[kept_indices])


def token_nll(model: nn.Module, hidden: Tensor, labels: Tensor, chunk: int = 1024) -> tuple[Tensor, Tensor]:
    """Compute the negative log-likelihood of each label ``[B, T]``, in nats, from final hidden states ``[B, T, d]``.

    Labels are aligned with the input, -100 for tokens without loss; the logits of ``chunk`` tokens exist at once.
    Returns the losses ``[N]``, float32, and their rows ``[N]``.
    """
    rows, columns = response_positions(labels)

    def nll(states: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(lm_logits(model, states).float(), target, reduction="none")

    return _losses_in_chunks(model, nll, chunk, hidden[rows, columns], labels[rows, columns + 1]), rows


def token_kl(
    model: nn.Module, hidden: Tensor, teacher: Tensor, labels: Tensor, chunk: int = 1024
) -> tuple[Tensor, Tensor]:
    """Compute KL(teacher || student) of each label's distribution, from both models' final hidden states ``[B, T, d]``.

    Further arguments and the result are as in :func:`token_nll`.
    """
    rows, columns = response_positions(labels)

    def divergence(student_states: Tensor, teacher_states: Tensor) -> Tensor:
        student = lm_logits(model, student_states).float()
        with torch.no_grad():
            target = lm_logits(model, teacher_states).float()
            total = target.logsumexp(-1)
            probability = (target - total[:, None]).exp_()
        # each pass over the vocabulary costs time
        cross: Tensor = torch.linalg.vecdot(probability, target - student)
        return cross + student.logsumexp(-1) - total

    return _losses_in_chunks(model, divergence, chunk, hidden[rows, columns], teacher[rows, columns]), rows


def sample_mean(values: Tensor, rows: Tensor, labels: Tensor) -> Tensor:
    """Average the values ``[N]`` of tokens over each row (``rows`` ``[N]``), then over the rows that have tokens.

    All rows with tokens weigh alike: a batch that is divided over ranks gives the gradient of the whole batch. So does
    an accumulated one, unless its parts differ in the number of rows with tokens. Values of tokens that
    :func:`sample_labels` took from ``labels`` ``[B, T]`` are scaled up to the expectation of the mean over all tokens.
    """
    counts = (labels[:, 1:] != -100).sum(1)
    sums = values.new_zeros(len(labels)).index_add(0, rows, values)
    num_rows = global_sum((counts > 0).sum()).clamp_min(1) / world_size()  # of a rank, in the mean
    mean = (sums / counts.clamp_min(1)).sum() / num_rows
    return mean * (counts.sum().to(values.dtype) / max(len(values), 1))  # times 1 without sampling


def row_means(values: Tensor, rows: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    """Average the values ``[N]`` of tokens over each row (``rows`` ``[N]``).

    Returns:
        The means ``[B]``, 0 for a row without tokens, and whether a row has tokens, ``[B]`` bool.
    """
    sums = values.new_zeros(batch).index_add(0, rows, values)
    counts = values.new_zeros(batch).index_add(0, rows, torch.ones_like(values))
    return sums / counts.clamp_min(1), counts > 0


def gate_means(gates: AttentionGates, gating: Gating) -> dict[Mean, Tensor]:
    """Return the mean gate over all layers, heads and gated tokens of the global batch, as sigmoids and as flags.

    Both are global means with the global mean's gradient; flags have the straight-through gradient.
    """
    counted = gating.counted()[:, None]
    stacked = torch.stack([*gating.logits.values()])
    probability = gates.probability(stacked)
    flags = gates.straight_through(stacked)
    count = global_sum(counted.sum()) * probability.shape[0] * probability.shape[2]

    def mean(values: Tensor) -> Tensor:
        local = (values * counted).sum() / count.clamp_min(1)
        return global_sum(local) + world_size() * (local - local.detach())

    return {"soft": mean(probability), "hard": mean(flags)}


def eviction_loss(mean: Tensor, beta: float) -> Tensor:
    """Return ``|mean - beta|`` (Attention-Gate, section 3.5)."""
    return (mean - beta).abs()


def regression_loss(
    gates: AttentionGates, logits: Tensor, targets: Tensor, mask: Tensor, keep: float, scale: Literal["head", "global"]
) -> Tensor:
    """Regress logits on targets, both ``[L, B, Hkv, T]``, for the tokens in ``mask`` ``[B, T]`` bool.

    The targets are standardised, and shifted until the share ``keep`` of them, in (0, 1), is above the gate's
    threshold: for each head of a sequence, or with a ``scale`` of ``global`` over all layers, sequences and heads of
    this device's batch. The loss is a mean over the tokens of the global batch.
    """
    mask = mask[:, None]
    targets = targets.masked_fill(~mask, float("nan"))
    if scale == "global":
        standardised = _standardise(targets.flatten(), keep).view(targets.shape)
    else:
        standardised = _standardise(targets, keep)
    mask = mask.expand_as(standardised)
    values = F.smooth_l1_loss(logits - gates.config.boundary, standardised, reduction="none") * mask
    return values.sum() / (global_sum(mask.sum()) / world_size()).clamp_min(1)


def _standardise(values: Tensor, keep: float) -> Tensor:
    """Subtract the quantile at ``1 - keep`` and divide by the standard deviation, along the last dimension.

    NaN does not count, and becomes 0.
    """
    sorted_values = values.sort(-1).values  # NaN last; torch.nanquantile takes at most 2^24 numbers
    quantile_index = (1 - keep) * ((~values.isnan()).sum(-1, keepdim=True) - 1).clamp_min(0)
    low, high = (sorted_values.gather(-1, end.long()) for end in (quantile_index.floor(), quantile_index.ceil()))
    quantile = low.lerp(high, (quantile_index - quantile_index.floor()).to(low.dtype))
    centred = values - values.nanmean(-1, keepdim=True)
    deviation = centred.square().nanmean(-1, keepdim=True).sqrt().clamp_min(1e-6)
    return ((values - quantile) / deviation).nan_to_num(0.0)


class _WithGradient(torch.autograd.Function):
    """Losses of tokens, each of one state, with gradients that the forward pass computes.

    Logits are then neither stored for the backward pass nor computed again in it.
    """

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], states: Tensor, *arguments: Tensor) -> Tensor:
        """Compute ``function(states, *rest)`` of states ``[N, d]``, and each loss's gradient."""
        states = states.detach().requires_grad_()
        with torch.enable_grad():
            values = function(states, *arguments)
            ctx.save_for_backward(*torch.autograd.grad(values.sum(), states))
        return values.detach()

    @staticmethod
    def backward(ctx: Any, *outer: Any) -> Any:
        """Scale the gradient of each token."""
        [gradient] = ctx.saved_tensors
        return None, outer[0][:, None].to(gradient.dtype) * gradient, *[None] * (len(ctx.needs_input_grad) - 2)


def _losses_in_chunks(
    model: nn.Module, function: Callable[..., Tensor], chunk: int, states: Tensor, *arguments: Tensor
) -> Tensor:
    """Compute losses of tokens in chunks, with a gradient to the states, and to the head if it is trained."""
    if len(states) == 0:
        return function(states, *arguments)
    parts = zip(*(tensor.split(chunk) for tensor in (states, *arguments)), strict=True)
    if not (torch.is_grad_enabled() and states.requires_grad):
        return torch.cat([function(*chunk_arguments) for chunk_arguments in parts])
    if any(parameter.requires_grad for parameter in lm_head(model).parameters()):
        return torch.cat([checkpoint(function, *chunk_arguments, use_reentrant=False) for chunk_arguments in parts])
    return torch.cat([_WithGradient.apply(function, *chunk_arguments) for chunk_arguments in parts])  # type: ignore[no-untyped-call]

"""A warm start that makes heads comparable: it offsets each head's gate logits by the measured cost of evicting there.

The cost of moving a head's threshold is measured, not trained. The model itself samples labels, and one backward pass
of them gives ``g = d log p / d(output)`` for each head. ``0.5 sum (g . change)^2`` is then the divergence that a change
of the head's output causes, to second order (the Fisher information, with heads taken as independent). Under flags the
first order is added, from a backward pass of the divergence. At each of a few shares, one price for a kept token holds
for all heads; each head gets the offset that costs least with these prices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ag.gates.gate import AffineGate, MLPGate
from ag.model.interceptor import AttentionCall
from ag.model.structure import lm_logits
from ag.training import losses
from ag.training.gated_loss import Batch
from ag.training.replay import CachedPrompt, ReplayLoss, ResponsePass, in_window
from ag.training.replay_attention import attention_weights

KEPT_SHARES = (0.1, 0.2, 0.3, 0.5)  # thresholds are measured at these shares
MAX_OFFSET = 1.5
#: Moves of a head's threshold, in standard deviations of the logits.
THRESHOLD_OFFSETS = MAX_OFFSET * torch.arange(-15, 16) / 15
MAX_LATER_OFFSET = 0.5  # largest move after the first round: later costs hold only near the measured flags
STIFFNESS = 0.02  # relative cost of moving all heads by one standard deviation


class CostRecorder(ResponsePass):
    """A response whose backward passes measure how moving each head's threshold would change its output.

    Args:
        prompt: the prompt of N tokens.
        keep: flags ``[1, Hkv, N]`` of the pass by gated layer.
        logits: gate logits ``[Hkv, N]`` by gated layer, infinite for protected tokens.
        thresholds: ``[M]``, ascending.
    """

    def __init__(
        self, prompt: CachedPrompt, keep: Mapping[int, Tensor], logits: Mapping[int, Tensor], thresholds: Tensor
    ) -> None:
        super().__init__(prompt, {layer: x.requires_grad_() for layer, x in keep.items()})
        self.bins = {layer: torch.bucketize(x, thresholds) for layer, x in logits.items()}
        self.kept = {layer: x[0].detach() for layer, x in keep.items()}
        self.count = len(thresholds) + 1
        #: Sums over queries by gated layer, ``[Hkv, M]``: ``g . change`` and half its square, from the last pass.
        self.linear: dict[int, Tensor] = {}
        self.square: dict[int, Tensor] = {}

    def attend(self, call: AttentionCall) -> Tensor:
        """Attend, and measure as soon as the output's gradient is known."""
        out = super().attend(call)
        if call.layer in self.bins:
            out.register_hook(lambda gradient: self._measure(call, gradient.detach()))
        return out

    @torch.no_grad()
    def _measure(self, call: AttentionCall, gradient: Tensor) -> None:
        layer, kv_heads, (keys, values) = call.layer, call.k.shape[1], (self.prompt.keys, self.prompt.values)
        q, k, v, prompt_k, prompt_v = (x.to(gradient) for x in (call.q, call.k, call.v, keys[layer], values[layer]))
        with torch.autocast(gradient.device.type, enabled=False):  # its products would round the sums of weights
            weights = attention_weights(q, k, prompt_k, call.scaling, call.window)
            prompt_weights, response_weights = weights[0][0], weights[1][0]
            gradient = gradient[0].unflatten(0, (kv_heads, -1)).flatten(1, 2)  # [Hkv, G R, D]
            prompt_value = gradient @ prompt_v.mT * prompt_weights
            response_mass = response_weights.sum(-1)
            response_value = (gradient @ v[0].mT * response_weights).sum(-1)
            bin_of_token = F.one_hot(self.bins[layer], self.count).to(prompt_weights.dtype)  # [Hkv, N, M + 1]
            above = [(x @ bin_of_token).flip(-1).cumsum(-1).flip(-1)[..., 1:] for x in (prompt_weights, prompt_value)]
            kept = self.kept[layer][:, :, None].to(prompt_weights.dtype)
            kept_mass, kept_value = ((x @ kept)[..., 0] for x in (prompt_weights, prompt_value))
        output = (kept_value + response_value) / (kept_mass + response_mass)
        change = (above[1] + response_value[..., None]) / (above[0] + response_mass[..., None]) - output[..., None]
        self.linear[layer], self.square[layer] = change.sum(1), 0.5 * change.square().sum(1)


def fit_bias_offsets(loss: ReplayLoss, batches: Iterable[Batch], rounds: int) -> list[Tensor]:
    """Move the last biases of gates until the logits of heads are comparable by the worth of their tokens.

    Args:
        loss: measures a batch as training does; its gates change.
        batches: this rank's rows to measure; each round measures all of them.
        rounds: number of rounds. The first measures under the whole cache, each later one under the flags of the gates
            at its start, which counts the errors of all heads together.

    Returns:
        The offsets ``[L, Hkv]`` that each round added.
    """
    batches = list(batches)
    return [_measure_round(loss, batches, keep_all=number == 0) for number in range(rounds)]


def _measure_round(loss: ReplayLoss, batches: Iterable[Batch], keep_all: bool) -> Tensor:
    """Measure rows, each at the next of KEPT_SHARES, and move the biases."""
    gates = loss.gates
    assert gates is not None
    shape = len(KEPT_SHARES), len(gates.layers), int(gates.fingerprint["num_kv_heads"]), len(THRESHOLD_OFFSETS)
    device = next(gates.parameters()).device
    # costs, shares, divergences, rows
    sums = [torch.zeros(size, device=device) for size in (shape, shape, shape[:1], shape[:1])]
    rows = [(batch, row) for batch in batches for row in range(len(batch["labels"]))]
    unit = torch.zeros((), device=device)
    if losses.rank() == 0:  # all ranks move thresholds by equal steps
        unit = loss.gate_logits(loss.split_row(*rows[0])[0]).detach().std()
    unit = losses.global_sum(unit)
    for number, (batch, row) in enumerate(rows):
        prompt, tokens, labels = loss.split_row(batch, row)
        row_index = number * losses.world_size() + losses.rank()  # index of the row among the rows of all ranks
        # shares shift by one each round, or each kind of response (kinds repeat every few rows) would always meet the
        # same share
        share_index = (row_index + row_index // len(KEPT_SHARES)) % len(KEPT_SHARES)
        kept_share, offsets = KEPT_SHARES[share_index], THRESHOLD_OFFSETS.to(device) * unit
        generator = torch.Generator(device).manual_seed(row_index)
        measurement = _measure_row(loss, prompt, tokens, labels, kept_share, offsets, generator, keep_all)
        if measurement is not None:
            for total, part in zip(sums, (*measurement, torch.ones(())), strict=True):
                total[share_index] += part.to(device)
    *sums, counts = (losses.global_sum(total).cpu() for total in sums)
    cost, share, divergence = (x / counts.clamp_min(1).view(-1, *[1] * (x.ndim - 1)) for x in sums)
    offset = -float(unit) * _cheapest(cost, share, divergence, MAX_OFFSET if keep_all else MAX_LATER_OFFSET)
    with torch.no_grad():
        for index, gate in enumerate(gates.layers.values()):
            bias: Tensor = (gate.outer if isinstance(gate, MLPGate) else cast("AffineGate", gate).linear).bias
            bias += offset[index].repeat_interleave(len(bias) // shape[2]).to(bias)
    return offset


def _measure_row(
    loss: ReplayLoss, prompt: CachedPrompt, tokens: Tensor, labels: Tensor, share: float, offsets: Tensor,
    generator: torch.Generator, keep_all: bool,
) -> tuple[Tensor, Tensor, Tensor] | None:  # fmt: skip
    """Return costs and shares ``[L, Hkv, M]`` of the moves of thresholds at a share, and the divergence there.

    With ``keep_all`` the pass keeps all tokens, and the divergence is the sum of all heads' costs. None: the gates
    choose nothing (only protected tokens are kept, or the whole prompt), or the response has no second token.
    """
    assert loss.gates is not None
    positions = losses.response_positions(labels)
    if not len(positions[0]):
        return None
    with torch.no_grad():
        logits = loss.gate_logits(prompt)
    flags = loss.keep_flags(logits, share)
    protected = flags.bool().flatten(0, 1).all(0)
    kept_logits = logits[flags.bool() & ~protected]
    if not len(kept_logits):
        return None
    thresholds = kept_logits.min() + offsets
    keep = torch.ones_like(flags) if keep_all else flags
    logits = logits.masked_fill(protected, float("inf"))
    by_layer = dict(zip(prompt.hidden, logits, strict=True))
    recorder = CostRecorder(prompt, dict(zip(prompt.hidden, keep[:, None].clone(), strict=True)), by_layer, thresholds)
    with torch.enable_grad():
        hidden = loss.run_decoder({"input_ids": tokens}, recorder)
        log_probs = lm_logits(loss.model, hidden[positions]).float().log_softmax(-1)
        sampled_ids = log_probs.detach().exp().multinomial(1, generator=generator)
        log_probs.gather(1, sampled_ids).sum().backward(retain_graph=not keep_all)
        cost = torch.stack([recorder.square[layer] for layer in prompt.hidden])  # a backward pass begins at the end
        if not keep_all:
            teacher = loss.run_decoder({"input_ids": tokens}, ResponsePass(prompt, {})).detach()
            divergence = losses.token_kl(loss.model, hidden, teacher, labels)[0]
            divergence.sum().backward()
            cost = cost + torch.stack([recorder.linear[layer] for layer in prompt.hidden])
    visible = in_window(logits.shape[-1], loss.window, logits.device)[:, None]
    cost, kept = cost / len(sampled_ids), ((logits[..., None] > thresholds) & visible).float().mean(2)
    sum_of_costs = cost[..., len(offsets) // 2].sum()  # of the heads, without a move
    return cost, kept, sum_of_costs if keep_all else divergence.detach().mean()


def _cheapest(cost: Tensor, share: Tensor, divergence: Tensor, max_offset: float) -> Tensor:
    """Return the move ``[L, Hkv]`` of each head's threshold that costs least over all K shares.

    Args:
        cost: nats per token of each move ``[K, L, Hkv, M]``.
        share: share of a head's tokens that is kept after each move ``[K, L, Hkv, M]``.
        divergence: nats per token without a move ``[K]``; costs are divided by it.
        max_offset: the largest move, in standard deviations of the logits.
    """
    heads = cost.shape[1] * cost.shape[2]
    cost = cost / divergence.clamp_min(1e-9)[:, None, None, None] + STIFFNESS / heads * THRESHOLD_OFFSETS.square()
    cost = cost.masked_fill(THRESHOLD_OFFSETS.abs() > max_offset + 1e-6, float("inf"))
    total = torch.zeros(cost.shape[1:])
    for cost_at_share, kept in zip(cost, share / heads, strict=True):
        low, high, target_kept = -12.0, 12.0, float(kept[..., len(THRESHOLD_OFFSETS) // 2].sum())
        for _ in range(50):  # until the price of a kept token leaves the total of kept tokens unchanged
            price = (low + high) / 2
            chosen = (cost_at_share + 10**price * kept).argmin(-1, keepdim=True)
            low, high = (price, high) if float(kept.gather(-1, chosen).sum()) > target_kept else (low, price)
        total += cost_at_share + 10**high * kept
    return THRESHOLD_OFFSETS[total.argmin(-1)]

"""A warm start that makes heads comparable: offsets of the gates' logits, from what evicting by each head costs.

The cost of moving a head's threshold is measured, not trained. One backward pass of labels that the model itself draws
gives ``g = d log p / d(output)`` of each head, and ``0.5 sum (g . change)^2`` is the divergence that a change of its
output causes, to second order (the Fisher information, heads taken as independent). Under flags the first order is
added, from a backward pass of the divergence. All heads then pay one price for a kept token at each of a few shares,
and each gets the one offset that costs the least with these prices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ag.gates.gate import AffineGate, MLPGate
from ag.model.hooks import AttentionCall, lm_logits
from ag.training import losses
from ag.training.gated_loss import Batch
from ag.training.replay import Context, ReplayLoss, Reply
from ag.training.replay_attention import attention_weights

KNOTS = (0.1, 0.2, 0.3, 0.5)  # shares at which thresholds are measured
LARGEST = 1.5
MOVES = LARGEST * torch.arange(-15, 16) / 15  # of a head's threshold, in standard deviations of the logits
LARGEST_LATER = 0.5  # move in a round after the first, whose costs hold near the measured flags alone
STIFFNESS = 0.02  # relative cost of moving all heads by one standard deviation


class Watching(Reply):
    """A response whose backward passes measure what moving the threshold of each head would change.

    Args:
        context: the context of N tokens.
        keep: flags ``[1, Hkv, N]`` of the pass by gated layer.
        logits: gate logits ``[Hkv, N]`` by gated layer, infinite where a token is protected.
        thresholds: ``[M]``, ascending.
    """

    def __init__(
        self, context: Context, keep: Mapping[int, Tensor], logits: Mapping[int, Tensor], thresholds: Tensor
    ) -> None:
        super().__init__(context, {layer: x.requires_grad_() for layer, x in keep.items()})
        self.bins = {layer: torch.bucketize(x, thresholds) for layer, x in logits.items()}
        self.kept = {layer: x[0].detach() for layer, x in keep.items()}
        self.count = len(thresholds) + 1
        #: Sums over queries by gated layer, ``[Hkv, M]``: ``g . change`` and half its square, of the last pass.
        self.linear: dict[int, Tensor] = {}
        self.square: dict[int, Tensor] = {}

    def attend(self, call: AttentionCall) -> Tensor:
        """Attend, and measure when the gradient of the output comes."""
        out = super().attend(call)
        if call.layer in self.bins:
            out.register_hook(lambda gradient: self._measure(call, gradient.detach()))
        return out

    @torch.no_grad()
    def _measure(self, call: AttentionCall, gradient: Tensor) -> None:
        layer, kv_heads = call.layer, call.k.shape[1]
        far, near = attention_weights(call.q, call.k, self.context.keys[layer], call.scaling, call.window)
        gradient = gradient[0].unflatten(0, (kv_heads, -1)).flatten(1, 2)  # [Hkv, G R, D]
        value = gradient @ self.context.values[layer].mT * far[0]
        own, own_value = near[0].sum(-1), (gradient @ call.v[0].mT * near[0]).sum(-1)
        place = F.one_hot(self.bins[layer], self.count).to(far.dtype)  # [Hkv, N, M + 1]
        above = [(x @ place).flip(-1).cumsum(-1).flip(-1)[..., 1:] for x in (far[0], value)]
        kept = self.kept[layer][:, :, None].to(far.dtype)
        mass, held = ((x @ kept)[..., 0] for x in (far[0], value))
        now = (held + own_value) / (mass + own)
        change = (above[1] + own_value[..., None]) / (above[0] + own[..., None]) - now[..., None]
        self.linear[layer], self.square[layer] = change.sum(1), 0.5 * change.square().sum(1)


def solve(loss: ReplayLoss, batches: Iterable[Batch], rounds: int) -> list[Tensor]:
    """Move the last biases of gates so that heads compare by what their tokens are worth.

    Args:
        loss: how training measures a batch; its gates change.
        batches: rows to measure, of this rank; each round measures all of them.
        rounds: the first measures under the whole cache; each later one under the flags that the gates have by then,
            so that the errors of heads count together.

    Returns:
        The offsets ``[L, Hkv]`` that each round added.
    """
    batches = list(batches)
    return [_round(loss, batches, whole=number == 0) for number in range(rounds)]


def _round(loss: ReplayLoss, batches: Iterable[Batch], whole: bool) -> Tensor:
    """Measure rows, each at the next knot, and move the biases."""
    gates = loss.gates
    assert gates is not None
    shape = len(KNOTS), len(gates.layers), int(gates.fingerprint["num_kv_heads"]), len(MOVES)
    device = next(gates.parameters()).device
    # costs, shares, divergences, rows
    sums = [torch.zeros(size, device=device) for size in (shape, shape, shape[:1], shape[:1])]
    rows = [(batch, row) for batch in batches for row in range(len(batch["labels"]))]
    unit = torch.zeros((), device=device)
    if losses.rank() == 0:  # all ranks move thresholds by the same steps
        unit = loss.logits_of(loss.parts_of(*rows[0])[0]).detach().std()
    unit = losses.global_sum(unit)
    for number, (batch, row) in enumerate(rows):
        context, tokens, labels = loss.parts_of(batch, row)
        place = number * losses.world_size() + losses.rank()  # of the row among those of all ranks
        knot = (place + place // len(KNOTS)) % len(KNOTS)  # kinds of responses follow each other in a cycle
        draw = torch.Generator(device).manual_seed(place)
        found = _measured(loss, context, tokens, labels, KNOTS[knot], MOVES.to(device) * unit, draw, whole)
        if found is not None:
            for total, part in zip(sums, (*found, torch.ones(())), strict=True):
                total[knot] += part.to(device)
    *sums, times = (losses.global_sum(total).cpu() for total in sums)
    cost, share, divergence = (x / times.clamp_min(1).view(-1, *[1] * (x.ndim - 1)) for x in sums)
    offset = -float(unit) * _cheapest(cost, share, divergence, LARGEST if whole else LARGEST_LATER)
    with torch.no_grad():
        for place, gate in enumerate(gates.layers.values()):
            bias: Tensor = (gate.outer if isinstance(gate, MLPGate) else cast("AffineGate", gate).linear).bias
            bias += offset[place].repeat_interleave(len(bias) // shape[2]).to(bias)
    return offset


def _measured(
    loss: ReplayLoss, context: Context, tokens: Tensor, labels: Tensor, share: float, moves: Tensor,
    draw: torch.Generator, whole: bool,
) -> tuple[Tensor, Tensor, Tensor] | None:  # fmt: skip
    """Return costs and shares ``[L, Hkv, M]`` of the moves of thresholds at a share, and the divergence there.

    With ``whole`` the pass keeps all tokens, and the divergence is what the costs of all heads add up to. None means
    that the gates choose nothing (the share is that of the protected tokens, or all of a context is kept), or that the
    response has no second token.
    """
    assert loss.gates is not None
    positions = losses.response_positions(labels)
    if not len(positions[0]):
        return None
    with torch.no_grad():
        logits = loss.logits_of(context)
    flags = loss.flags_of(logits, share)
    sure = flags.bool().flatten(0, 1).all(0)
    chosen = logits[flags.bool() & ~sure]
    if not len(chosen):
        return None
    thresholds = chosen.min() + moves
    keep = torch.ones_like(flags) if whole else flags
    by_layer = dict(zip(context.hidden, logits.masked_fill(sure, float("inf")), strict=True))
    watching = Watching(context, dict(zip(context.hidden, keep[:, None].clone(), strict=True)), by_layer, thresholds)
    with torch.enable_grad():
        hidden = loss.hidden_of(context, tokens, watching)
        log = lm_logits(loss.model, hidden[positions]).float().log_softmax(-1)
        drawn = log.detach().exp().multinomial(1, generator=draw)
        log.gather(1, drawn).sum().backward(retain_graph=not whole)
        cost = torch.stack([watching.square[layer] for layer in context.hidden])  # a backward pass begins at the end
        if not whole:
            teacher = loss.hidden_of(context, tokens, Reply(context, {})).detach()
            divergence = losses.token_kl(loss.model, hidden, teacher, labels)[0]
            divergence.sum().backward()
            cost = cost + torch.stack([watching.linear[layer] for layer in context.hidden])
    cost, kept = cost / len(drawn), (logits[..., None] > thresholds).float().mean(2)
    return cost, kept, cost[..., len(moves) // 2].sum() if whole else divergence.detach().mean()


def _cheapest(cost: Tensor, share: Tensor, divergence: Tensor, reach: float) -> Tensor:
    """Return the move ``[L, Hkv]`` of each head's threshold that costs the least over all knots.

    Args:
        cost: nats per token of each move ``[K, L, Hkv, M]``.
        share: share of a head's tokens that is kept after each move ``[K, L, Hkv, M]``.
        divergence: nats per token without a move ``[K]``, by which the costs of a knot count.
        reach: the largest move.
    """
    heads = cost.shape[1] * cost.shape[2]
    cost = cost / divergence.clamp_min(1e-9)[:, None, None, None] + STIFFNESS / heads * MOVES.square()
    cost = cost.masked_fill(MOVES.abs() > reach + 1e-6, float("inf"))
    total = torch.zeros(cost.shape[1:])
    for of_knot, kept in zip(cost, share / heads, strict=True):
        low, high, wanted = -12.0, 12.0, float(kept[..., len(MOVES) // 2].sum())
        for _ in range(50):  # the price of a kept token at which as many stay as without a move
            price = (low + high) / 2
            chosen = (of_knot + 10**price * kept).argmin(-1, keepdim=True)
            low, high = (price, high) if float(kept.gather(-1, chosen).sum()) > wanted else (low, price)
        total += of_knot + 10**high * kept
    return MOVES[total.argmin(-1)]

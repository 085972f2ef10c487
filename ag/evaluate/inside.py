"""What goes on inside a model while it reads: its attention, the gates' own, and what eviction does to the outputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ag.engine.allocators.preference import entropy_and_variance
from ag.engine.attention_stats import AttentionStats
from ag.engine.select import closing_order
from ag.engine.shown import Keys, Queries
from ag.gates.gate import AttentionGate
from ag.model.hooks import AttentionCall, Interceptor, decoder_of, instrument


class Reading(Interceptor):
    """A dense forward pass over one sequence that keeps what each layer was shown.

    Attributes:
        calls: by layer, the queries, keys and values.
        hidden: by layer, the hidden states ``[1, T, d]`` that enter the attention.
    """

    def __init__(self, model: nn.Module, ids: Sequence[int]) -> None:
        self.calls: list[AttentionCall] = []
        self.hidden: list[Tensor] = []
        self.length = len(ids)
        instrument(model)
        tokens = torch.tensor([list(ids)], device=next(model.parameters()).device)
        with torch.no_grad():
            decoder_of(model)(input_ids=tokens, gating=self, use_cache=False)

    def begin(self, decoder: nn.Module, attention_mask: Tensor | None, tokens: Tensor) -> None:
        """Do nothing: there is no padding."""

    def enter_layer(self, layer: int, hidden: Tensor) -> None:
        """Keep the hidden states."""
        self.hidden.append(hidden)

    def attend(self, call: AttentionCall) -> Tensor:
        """Attend as the model does, and keep the call."""
        self.calls.append(call)
        return call.dense(None, False)

    def observe(self, layer: int, first: int, last: int, held: Tensor | None = None) -> AttentionStats:
        """Return queries ``first`` to ``last`` of a layer against the keys before ``last``.

        Args:
            layer: index of the layer.
            first: first query.
            last: one past the last query.
            held: ``[Hkv, last]`` bool, the keys that are there; None: all.
        """
        call = self.calls[layer]
        k, v = call.k[:, :, :last], call.v[:, :, :last]
        if held is None:
            held = torch.ones(k.shape[1:3], dtype=torch.bool, device=k.device)
        slots = closing_order(held[None])  # an observation has its free slots at the end
        index = slots[..., None].expand(-1, -1, -1, k.shape[-1])
        ranks = torch.arange(first, last, device=k.device)[None]
        valid = torch.arange(slots.shape[-1], device=k.device) < held.sum(-1)[None, :, None]
        return AttentionStats(
            keys=Keys(stored=lambda: (k.gather(2, index), v.gather(2, index)), ranks=slots, valid=valid),
            queries=Queries(q=call.q[:, :, first:last], ranks=ranks, valid=torch.ones_like(ranks, dtype=torch.bool)),
            scaling=call.scaling,
            softmax=call.softmax,
            layer=layer,
            sliding_window=call.window,
        )


def attention_map(reading: Reading, layer: int) -> Tensor:
    """Return the attention of a layer, ``[H, T, T]`` float32."""
    return reading.observe(layer, 0, reading.length).rows(reading.length).a[0]


@torch.no_grad()
def gate_map(gate: AttentionGate, hidden: Tensor) -> Tensor:
    """Return the gate's own attention over hidden states ``[1, T, d]``, ``[h', T, T]`` float32."""
    config = gate.config
    hidden = hidden.to(next(gate.parameters()).dtype)
    shape = (hidden.shape[1], config.num_heads, config.head_dim)
    q, k = (proj(hidden).view(shape).transpose(0, 1).float() for proj in (gate.q_proj, gate.k_proj))
    logits = q @ k.mT * config.head_dim**-0.5
    if config.scope == "causal":
        distance = torch.arange(shape[0], device=hidden.device)
        distance = distance[:, None] - distance
        unseen = (distance < 0) | (distance >= (config.window or shape[0]))
        logits = logits.masked_fill(unseen, float("-inf"))
    weights: Tensor = logits.softmax(-1)
    return weights


def layer_statistics(reading: Reading, observers: int = 32) -> Tensor:
    """Return CAKE's entropy and variance of every layer's attention, ``[L, 2]``."""
    seen = [reading.observe(layer, 0, reading.length) for layer in range(len(reading.calls))]
    return torch.tensor([[float(x) for x in entropy_and_variance(layer, observers)] for layer in seen])


def output_errors(reading: Reading, kept: Tensor) -> Tensor:
    """Return what eviction from the first tokens does to the attention outputs of the tokens that follow.

    Every layer is shown what it is shown without eviction, so that errors of earlier layers do not count.

    Args:
        reading: the whole text, T tokens.
        kept: ``[L, Hkv, P]`` bool, what was kept of the first P.

    Returns:
        ``[L]``: squared difference of the outputs, over heads and queries, by the squared outputs (CAOTE, Figure 3).
    """
    prompt, length = kept.shape[2], reading.length
    errors = []
    for layer, flags in enumerate(kept.to(reading.calls[0].k.device)):
        held = torch.cat([flags, flags.new_ones(flags.shape[0], length - prompt)], 1)
        full, evicted = (reading.observe(layer, prompt, length, what).rows(length - prompt).o for what in (None, held))
        errors.append(float((evicted - full).square().sum() / full.square().sum()))
    return torch.tensor(errors)

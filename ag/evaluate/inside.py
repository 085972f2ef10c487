"""What goes on inside a model while it reads: what caches keep, its attention, what eviction does to the outputs."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ag.engine import EvictionCache, Policy, read_prompt
from ag.engine.allocators.preference import entropy_and_variance
from ag.engine.attention_stats import AttentionStats
from ag.engine.select import closing_order
from ag.engine.shown import Keys, Queries
from ag.evaluate.tasks import Sample
from ag.gates.gate import AttentionGate
from ag.model.hooks import AttentionCall, Interceptor, decoder_of, instrument

CONTEXT = 4  # tokens before one that its text may depend on


@dataclass(frozen=True)
class View:
    """What a cache kept of one prompt."""

    sample: str  # its id
    pieces: list[str]  # its T tokens as text
    kept: NDArray[np.bool_]  # `[L, Hkv, T]`, True where a token is held

    def to_json(self) -> dict[str, Any]:
        """Return it as texts and numbers; flags are bits in base64, the first token in the lowest bit."""
        packed = np.packbits(self.kept, axis=-1, bitorder="little")
        kept = [[base64.b64encode(head.tobytes()).decode() for head in layer] for layer in packed]
        return {"sample": self.sample, "pieces": self.pieces, "kept": kept}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> View:
        """Read what :meth:`to_json` gave."""
        rows = [[np.frombuffer(base64.b64decode(head), np.uint8) for head in layer] for layer in values["kept"]]
        kept = np.unpackbits(np.array(rows), axis=-1, count=len(values["pieces"]), bitorder="little")
        return cls(values["sample"], values["pieces"], kept.astype(bool))


def record(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    policies: Sequence[Policy],
    samples: Sequence[Sample],
    most_tokens: int,
) -> list[list[View]]:
    """Show the first tokens of some prompts to each policy; returns by policy, for each sample, what was kept."""
    views: list[list[View]] = [[] for _ in policies]
    device = next(model.parameters()).device
    for sample in samples:
        ids = sample.prompt[:most_tokens]
        texts = pieces(tokenizer, ids)
        caches = read_prompt(model, policies, torch.tensor([ids], device=device), protect=sample.protect)
        for mine, (cache, _) in zip(views, caches, strict=True):
            mine.append(View(sample.id, texts, kept_flags(cache)))
    return views


def kept_flags(cache: EvictionCache) -> NDArray[np.bool_]:
    """Return `[L, Hkv, T]`, what a cache holds of the only sequence that it has seen."""
    layers = [cache.kept_positions(layer)[0] for layer in range(len(cache.layers))]
    flags = np.zeros((len(layers), len(layers[0]), cache.seen_tokens), dtype=bool)
    for layer, heads in enumerate(layers):
        for head, positions in enumerate(heads):
            flags[layer, head, positions.cpu().numpy()] = True
    return flags


def pieces(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[str]:
    """Return the text of each token such that together they are the text, up to characters cut in the middle."""
    texts = []
    for index, one in enumerate(ids):
        before = str(tokenizer.decode(ids[max(0, index - CONTEXT) : index]))
        both = str(tokenizer.decode(ids[max(0, index - CONTEXT) : index + 1]))
        texts.append(both[len(before) :] if both.startswith(before) else str(tokenizer.decode([one])))
    return texts


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
            keys=Keys(
                stored=lambda: (k.gather(2, index), v.gather(2, index)),
                shape=(1, len(held), slots.shape[-1]),
                ledger=lambda: (slots, valid),
            ),
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

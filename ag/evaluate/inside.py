"""Kept tokens, attention weights of a model and its gates, and errors of attention outputs after eviction."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase as Tokenizer

from ag.engine import EvictionCache, Policy, read_prompt
from ag.evaluate.tasks import Sample
from ag.gates.gate import AttentionGate
from ag.kernels.softmax import weigh
from ag.model.hooks import instrument
from ag.model.interceptor import AttentionCall, Interceptor
from ag.model.structure import decoder_of

CONTEXT = 4  # number of tokens before a token that its text may depend on


@dataclass(frozen=True)
class KeptTokens:
    """The kept tokens of one prompt."""

    sample: str  # its id
    token_texts: list[str]  # its T tokens as text
    kept: NDArray[np.bool_]  # `[L, Hkv, T]`, True on kept tokens

    def to_json(self) -> dict[str, Any]:
        """Return the view as texts and numbers. The mask is bits in base64, the first token in the lowest bit."""
        packed = np.packbits(self.kept, axis=-1, bitorder="little")
        kept = [[base64.b64encode(head.tobytes()).decode() for head in layer] for layer in packed]
        return {"sample": self.sample, "pieces": self.token_texts, "kept": kept}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> KeptTokens:
        """Make a view of the result of :meth:`to_json`."""
        rows = [[np.frombuffer(base64.b64decode(head), np.uint8) for head in layer] for layer in values["kept"]]
        kept = np.unpackbits(np.array(rows), axis=-1, count=len(values["pieces"]), bitorder="little")
        return cls(values["sample"], values["pieces"], kept.astype(bool))


def record_kept_tokens(
    model: nn.Module, tokenizer: Tokenizer, policies: Sequence[Policy], samples: Sequence[Sample], max_tokens: int
) -> list[list[KeptTokens]]:
    """Run each policy on the first tokens of some prompts. Returns for each policy a view of each sample."""
    views: list[list[KeptTokens]] = [[] for _ in policies]
    device = next(model.parameters()).device
    for sample in samples:
        ids = sample.prompt[:max_tokens]
        texts = token_texts(tokenizer, ids)
        caches = read_prompt(model, policies, torch.tensor([ids], device=device), protect=sample.protect)
        for policy_views, (cache, _) in zip(views, caches, strict=True):
            policy_views.append(KeptTokens(sample.id, texts, kept_mask(cache)))
    return views


def kept_mask(cache: EvictionCache) -> NDArray[np.bool_]:
    """Return the mask `[L, Hkv, T]` of the tokens in a cache with one sequence."""
    layers = [cache.kept_positions(layer)[0] for layer in range(len(cache.state.layers))]
    mask = np.zeros((len(layers), len(layers[0]), cache.seen_tokens), dtype=bool)
    for layer, heads in enumerate(layers):
        for head, token_indices in enumerate(heads):
            mask[layer, head, token_indices.cpu().numpy()] = True
    return mask


def token_texts(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """Return the text of each token. Together they are the text, up to characters cut in the middle."""
    texts = []
    for index, token_id in enumerate(ids):
        context_text = str(tokenizer.decode(ids[max(0, index - CONTEXT) : index]))
        text = str(tokenizer.decode(ids[max(0, index - CONTEXT) : index + 1]))
        texts.append(text[len(context_text) :] if text.startswith(context_text) else str(tokenizer.decode([token_id])))
    return texts


class RecordedPass(Interceptor):
    """A dense forward pass over one sequence that records the inputs of each attention layer."""

    def __init__(self, model: nn.Module, ids: Sequence[int]) -> None:
        self.calls: list[AttentionCall] = []  # by layer, the queries, keys and values
        self.hidden: list[Tensor] = []  # by layer, the hidden states ``[1, T, d]`` that enter the attention
        instrument(model)
        tokens = torch.tensor([list(ids)], device=next(model.parameters()).device)
        with torch.no_grad():
            decoder_of(model)(input_ids=tokens, gating=self, use_cache=False)

    def enter_layer(self, layer: int, hidden: Tensor) -> None:
        """Record the hidden states."""
        self.hidden.append(hidden)

    def attend(self, call: AttentionCall) -> Tensor:
        """Attend as the model does, and record the call."""
        self.calls.append(call)
        return call.dense(None, False)


def attention_map(call: AttentionCall) -> Tensor:
    """Return the attention weights of a layer, ``[H, T, T]`` float32."""
    keys = call.k.repeat_interleave(call.q.shape[1] // call.k.shape[1], 1)
    s = call.softmax.capped(call.q.float() @ keys.float().mT * call.scaling)
    s = s.masked_fill(_unseen_keys(s.shape[-1], call.window, s.device), float("-inf"))
    return weigh(s, call.softmax.by_head(4))[0]


@torch.no_grad()
def gate_map(gate: AttentionGate, hidden: Tensor) -> Tensor:
    """Return the gate's own attention over hidden states ``[1, T, d]``, ``[h', T, T]`` float32."""
    config = gate.config
    hidden = hidden.to(next(gate.parameters()).dtype)
    shape = (hidden.shape[1], config.num_heads, config.head_dim)
    q, k = (proj(hidden).view(shape).transpose(0, 1).float() for proj in (gate.q_proj, gate.k_proj))
    logits = q @ k.mT * config.head_dim**-0.5
    if config.scope == "causal":
        logits = logits.masked_fill(_unseen_keys(shape[0], config.window, logits.device), float("-inf"))
    weights: Tensor = logits.softmax(-1)
    return weights


def output_errors(recorded: RecordedPass, kept: Tensor) -> Tensor:
    """Return the errors of attention outputs after eviction, from a pass over a complete text, T tokens.

    ``kept`` ``[L, Hkv, P]`` bool says which of the first P tokens were kept. An error ``[L]`` is the squared difference
    of a layer's outputs by the squared outputs, over heads and later queries (CAOTE, Figure 3). Every layer has its
    input without eviction: errors of earlier layers do not count.
    """
    errors = []
    for call, flags in zip(recorded.calls, kept.to(recorded.calls[0].k.device), strict=True):
        group, prompt = call.q.shape[1] // call.k.shape[1], flags.shape[-1]
        values = call.v[0].float().repeat_interleave(group, 0)
        weights = attention_map(call)[:, prompt:]
        sinks = 0.0 if call.softmax.sinks is None else 1 - weights.sum(-1, keepdim=True)
        evicted = torch.cat([~flags, flags.new_zeros(len(flags), weights.shape[-1] - prompt)], 1)
        kept_weights = weights.masked_fill(evicted.repeat_interleave(group, 0)[:, None], 0.0)
        full, after_eviction = (a @ values / (a.sum(-1, keepdim=True) + sinks) for a in (weights, kept_weights))
        errors.append((after_eviction - full).square().sum() / full.square().sum())
    return torch.stack(errors)


def _unseen_keys(tokens: int, window: int | None, device: torch.device) -> Tensor:
    """Return ``[T, T]`` bool: True on keys that a causal query does not see, within a window if it is not None."""
    token_indices = torch.arange(tokens, device=device)
    distance = token_indices[:, None] - token_indices
    return (distance < 0) | (distance >= (window or tokens))

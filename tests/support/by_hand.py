"""A Llama or Mistral forward pass under gates, one unpadded row, written out with dense masks: the tests' oracle."""

from typing import Any

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from ag.gates.gate import AttentionGates


@torch.no_grad()
def forward(
    model: Any, gates: AttentionGates, ids: Tensor, prompt: int, probabilities: list[Tensor] | None = None
) -> tuple[Tensor, dict[int, Tensor]]:
    """Return the logits ``[T, V]`` and, by layer, the flags ``[Hkv, prompt]`` of the row ``ids [T]``.

    With ``covers="all"`` the flags are those of the whole row. The gates' probabilities are added to the list
    ``probabilities``.
    """
    config, decoder, length = gates.config, model.get_decoder(), len(ids)
    kv_heads = model.config.num_key_value_heads
    group = model.config.num_attention_heads // kv_heads
    gated = length if config.covers == "all" else prompt
    window = getattr(model.config, "sliding_window", None) or length
    x = decoder.embed_tokens(ids)[None]
    turn = decoder.rotary_emb(x, torch.arange(length)[None])
    distance = torch.arange(length)[:, None] - torch.arange(length)
    inputs: list[Tensor] = []
    flags: dict[int, Tensor] = {}
    for index, layer in enumerate(decoder.layers):
        hidden = layer.input_layernorm(x)
        inputs.append(hidden[:, :gated])
        visible = ((distance >= 0) & (distance < window)).expand(kv_heads, -1, -1).clone()
        if str(index) in gates.layers:
            logits = gates.layers[str(index)](inputs[index - config.layer_offset])[0]
            probability = torch.sigmoid(logits + config.bias)
            flags[index] = probability > config.threshold
            if probabilities is not None:
                probabilities.append(probability.flatten())
            for head in range(kv_heads):
                for t in range(config.sink_tokens, gated):
                    if not flags[index][head, t]:
                        first = max(prompt, t + 1) if config.prefill == "dense" else t + 1
                        visible[head, max(first, t + config.recent_tokens) :, t] = False
        attention = layer.self_attn
        q, k, v = (
            proj(hidden).view(1, length, -1, attention.head_dim).transpose(1, 2)
            for proj in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *turn)
        k, v, mask = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), visible.repeat_interleave(group, 0)
        scores = (q @ k.mT * attention.head_dim**-0.5).masked_fill(~mask, float("-inf"))
        x = x + attention.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return model.lm_head(decoder.norm(x))[0], flags


def greedy(model: Any, gates: AttentionGates, ids: Tensor, prompt: int, steps: int) -> list[int]:
    """Continue the row ``ids [T]``, whose first ``prompt`` tokens were the prompt, without an end; the new tokens."""
    for _ in range(steps):
        logits = forward(model, gates, ids, prompt)[0][-1]
        logits[model.config.eos_token_id] = float("-inf")
        ids = torch.cat([ids, logits.argmax()[None]])
    return ids[-steps:].tolist()


def kept(gates: AttentionGates, flags: Tensor, prompt: int, total: int, first: int = 0) -> list[list[int]]:
    """Columns that a layer holds after ``total`` tokens, a list for each KV head.

    ``first`` is the column of the first query of the last forward pass after the prompt: what it saw is still there.
    """
    config, first = gates.config, max(first, prompt)
    return [
        [
            t
            for t in range(total)
            if t >= prompt or head[t] or t < config.sink_tokens or first - t < config.recent_tokens
        ]
        for head in flags
    ]

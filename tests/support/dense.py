"""The oracle of caches and gates: the forward pass of one row of a Llama, Mistral or Qwen."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

#: From a layer's index, its input ``[T, d]``, and q ``[H, T, D]``, k, v ``[Hkv, T, D]`` as they are before rotation, to
#: the outputs of its heads ``[H, T, D]``.
Attend = Callable[[int, Tensor, Tensor, Tensor, Tensor], Tensor]


@torch.no_grad()
def forward(model: Any, ids: Tensor, attend: Attend) -> Tensor:
    """Return the logits ``[T, V]`` of the row ``ids [T]``."""
    decoder, length = model.get_decoder(), len(ids)
    x = decoder.embed_tokens(ids)
    for index, layer in enumerate(decoder.layers):
        hidden, attention = layer.input_layernorm(x), layer.self_attn
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        q, k, v = (project(hidden).view(length, -1, attention.head_dim).transpose(0, 1) for project in projections)
        if hasattr(attention, "q_norm"):
            q, k = attention.q_norm(q), attention.k_norm(k)
        x = x + attention.o_proj(attend(index, hidden, q, k, v).transpose(0, 1).flatten(1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    logits: Tensor = model.lm_head(decoder.norm(x))
    return logits


def masked(
    model: Any,
    ids: Tensor,
    visible: Callable[[int, Tensor], Tensor],
    watch: Callable[[Tensor, Tensor, Tensor, Tensor], object] = lambda *_: None,
) -> Tensor:
    """Return the logits ``[T, V]`` when queries see, within the model's windows, what is visible.

    Args:
        model: whose layers these are.
        ids: ``[T]``.
        visible: from a layer's index and input ``[T, d]`` to the keys that each query sees, ``[Hkv or 1, T, T]`` bool.
        watch: called with the rotated q, k, v and the input of each layer.
    """
    places = torch.arange(len(ids))
    turn = model.get_decoder().rotary_emb(model.get_input_embeddings()(ids)[None], places[None])
    distance, near = places[:, None] - places, windows(model.config)

    def attend(index: int, hidden: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = (x[0] for x in apply_rotary_pos_emb(q[None], k[None], *turn))
        watch(q, k, v, hidden)
        group, seen = len(q) // len(k), visible(index, hidden)
        if (window := near[index]) is not None:
            seen = seen & (distance < window)
        k, v = (x.repeat_interleave(group, 0) for x in (k, v))
        hides = ~seen.expand(len(q) // group, -1, -1).repeat_interleave(group, 0)
        out: Tensor = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hides, float("-inf")).softmax(-1) @ v
        return out

    logits: Tensor = forward(model, ids, attend)
    return logits


def windows(config: Any) -> list[int | None]:
    """The sliding window of each layer, or None."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]

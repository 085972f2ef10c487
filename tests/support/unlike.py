"""A model whose layers have unequal numbers of KV heads, of unequal sizes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

HEADS = ((2, 8), (1, 16), (4, 8), (2, 8))  # KV heads of each layer, and numbers of a head


class Wide(LlamaAttention):
    """Attention with heads twice as large as the RoPE of the model."""

    def forward(self, hidden_states: Tensor, position_embeddings: Any = None, **kwargs: Any) -> Any:
        """Rotate both halves of a head alike."""
        return super().forward(hidden_states, tuple(torch.cat([x, x], -1) for x in position_embeddings), **kwargs)


def unlike_llama(heads: Sequence[tuple[int, int]] = HEADS) -> Any:
    """Return a Llama with such KV heads, drawn from a seed."""
    torch.manual_seed(0)
    words: Any = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "max_position_embeddings": 512}
    config = LlamaConfig(vocab_size=128, head_dim=8, num_hidden_layers=len(heads), num_key_value_heads=2, **words)
    model = LlamaForCausalLM(config)
    for index, (number, size) in enumerate(heads):
        own = copy.deepcopy(config)
        own.num_key_value_heads, own.head_dim = number, size
        kind = LlamaAttention if size == config.head_dim else Wide
        model.model.layers[index].self_attn = kind(own, index)
    each: Any = {n: {"num_key_value_heads": number, "head_dim": size} for n, (number, size) in enumerate(heads)}
    model.config.per_layer_config = each
    return model.eval()

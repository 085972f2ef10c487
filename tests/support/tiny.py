"""Tiny models with random weights, and a batch for them."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

GEOMETRY = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.15, "head_dim": 16,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def pair(kind: str = "llama") -> tuple[Any, Any]:
    """A model of a kind, and one of the same weights."""
    torch.manual_seed(0)
    made = {
        "llama": (LlamaForCausalLM, LlamaConfig, {}),
        "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 16}),
    }
    model, config, more = made[kind]
    first = model(config(**GEOMETRY | more)).eval()
    return first, copy.deepcopy(first)


def padded(lengths: Sequence[int], width: int) -> tuple[Tensor, Tensor]:
    """Ids and mask of random rows, padded on the left."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 128, (len(lengths), width), generator=generator)
    mask = torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, width - length :] = 1
    return ids * mask, mask

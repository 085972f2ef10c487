"""The models that are measured, what is counted of them, and gates for them."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from ag.commands.bench import BenchConfig
from ag.config import ModelConfig
from ag.config.gate import GateConfig
from ag.gates.gate import AttentionGates
from ag.model.base import load_base
from ag.model.geometry import fingerprint
from ag.model.hooks import decoder_of


def load(config: BenchConfig) -> PreTrainedModel:
    """Load the model that is asked for, or draw its weights."""
    return load_base(ModelConfig(name=config.model, dtype=config.dtype), config.device)[0]


def weight_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of weights that a decoding step reads: all but an input embedding that is no head too."""
    embedding, head = next(model.get_input_embeddings().parameters()), model.get_output_embeddings().weight
    total = sum(parameter.nbytes for parameter in model.parameters())
    return total if embedding is head else total - embedding.nbytes


def token_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of one token's keys and values, over all layers and KV heads."""
    size = fingerprint(decoder_of(model).config)
    entries: int = 2 * size["num_layers"] * size["num_kv_heads"] * size["head_dim"]
    return entries * next(model.parameters()).element_size()


def gates_for(model: PreTrainedModel, share: float = 0.03, **settings: Any) -> AttentionGates:
    """Make causal gates, the widest (4 heads of a power of 2) within a share of the model's parameters.

    Args:
        model: they are made for it.
        share: largest share of its parameters, counted for attention gates.
        settings: what else their configuration says.
    """
    parameters = sum(parameter.numel() for parameter in model.parameters())
    size = fingerprint(decoder_of(model).config)
    head_dim = 128
    while head_dim > 8 and size["num_layers"] * 4 * head_dim * 3 * size["hidden_size"] > share * parameters:
        head_dim //= 2
    own: dict[str, Any] = {"threshold": 0.5, "bias": 0.0, "scope": "causal", "prefill": "sparse"} | settings
    config = GateConfig(num_heads=4, head_dim=head_dim, **own)
    return AttentionGates(model.config, config).to(next(model.parameters()).dtype)

"""The models that are measured: loaded ones, and geometries with random weights, which time the same."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from ag.config import ModelConfig
from ag.config.gate import GateConfig
from ag.errors import UserError
from ag.gates.gate import AttentionGates
from ag.model.base import load_base
from ag.model.geometry import fingerprint
from ag.model.hooks import decoder_of

RANDOM = "random:"
COLUMNS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "tie_word_embeddings"),
)
GEOMETRIES = {
    "tiny": (64, 128, 2, 4, 2, 256, False),
    "smollm2-135m": (576, 1536, 30, 9, 3, 49152, True),
    "llama-1b": (2048, 8192, 16, 32, 8, 128256, True),
    "llama-8b": (4096, 14336, 32, 32, 8, 128256, False),
}


def build(name: str, device: str, dtype: str, seed: int) -> PreTrainedModel:
    """Load a model, or make one of a geometry on the device; frozen, in evaluation mode, with torch's sdpa.

    Raises:
        UserError: for a geometry that does not exist, or a model that cannot be loaded.
    """
    if not name.startswith(RANDOM):
        return load_base(ModelConfig(name=name, dtype=dtype), device)[0]  # type: ignore[arg-type]  # checked as a key
    geometry = name.removeprefix(RANDOM)
    if geometry not in GEOMETRIES:
        raise UserError(f"model={name}: expected random:{', random:'.join(GEOMETRIES)}.")
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    shape: dict[str, Any] = dict(zip(COLUMNS, GEOMETRIES[geometry], strict=True))
    config = LlamaConfig(max_position_embeddings=1 << 20, rope_parameters=rope, **shape)
    config._attn_implementation = "sdpa"
    before = torch.get_default_dtype()
    torch.manual_seed(seed)
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device={device}: {str(error).splitlines()[0]}; give cpu, or one that has room.") from error
    finally:
        torch.set_default_dtype(before)
    model.requires_grad_(False).eval()
    return model


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

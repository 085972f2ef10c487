"""Random models shaped as others than Llama: experts, latent attention (MLA), one projection for q, k and v, sinks."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from tests.support.common import GEOMETRY

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,  # keys of 24, of which 8 are rotated
    "v_head_dim": 12,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
#: By name, how the configuration of transformers begins, and the keys of the configuration.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", EXPERTS | {"head_dim": 16, "sliding_window": None}),
    "deepseek_v3": ("DeepseekV3", LATENT),
    "phi3": ("Phi3", {"sliding_window": None}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 3}),  # no rotation in the last layer
    "gpt_oss": ("GptOss", EXPERTS | {"head_dim": 16, "layer_types": ["full_attention"] * 3}),
    "gemma2": ("Gemma2", {"head_dim": 16, "layer_types": ["full_attention"] * 3, "attn_logit_softcapping": 0.2}),
    "gemma3": ("Gemma3Text", {"head_dim": 16, "layer_types": ["sliding_attention", *["full_attention"] * 2]}),
    "diffllama": ("DiffLlama", {"head_dim": 16}),
}


def shaped(name: str, seed: int = 0, **changes: Any) -> transformers.PreTrainedModel:
    """Return a random float32 model of 3 layers and 4 query heads, in evaluation mode."""
    family, own = SHAPES[name]
    config = getattr(transformers, f"{family}Config")(**GEOMETRY | own | changes)
    torch.manual_seed(seed)
    made: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in made.named_parameters():
        if name.endswith(".sinks"):
            torch.nn.init.normal_(parameter, 1.0)  # those of transformers are nearly alike
    return made

"""A base model with random weights, to measure a run without a download.

``model.name=random:llama-8b`` names a geometry, ``random:PATH.json`` the file of a configuration, and
``random:meta-llama/Llama-2-7b-hf`` a model of the hub whose configuration comes with the package.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import init_empty_weights
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from ag.errors import UserError, first_line
from ag.model import configurations

if TYPE_CHECKING:
    from ag.config import ModelConfig

PREFIX = "random:"
SPREAD = 0.02  # standard deviation of the weights
SPECIAL = ("<unk>", "<s>", "</s>")
COLUMNS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "tie_word_embeddings"),
)
#: Models of Llama's architecture, by name.
GEOMETRIES = {
    "tiny": (64, 128, 2, 4, 2, 512, False),
    "smollm2-135m": (576, 1536, 30, 9, 3, 49152, True),
    "llama-1b": (2048, 8192, 16, 32, 8, 128256, True),
    "llama-8b": (4096, 14336, 32, 32, 8, 128256, False),
}


def geometry(name: str) -> PretrainedConfig:
    """Return the configuration that a name after ``random:`` stands for, or raise a ``UserError``."""
    if (geometry_name := name.removeprefix(PREFIX)) in GEOMETRIES:
        shape: dict[str, Any] = dict(zip(COLUMNS, GEOMETRIES[geometry_name], strict=True))
        rope = {"rope_type": "default", "rope_theta": 500000.0}
        return LlamaConfig(max_position_embeddings=1 << 20, rope_parameters=rope, **shape)
    path = configurations.find(geometry_name) or Path(os.path.expanduser(geometry_name))
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(str(path))
    except Exception as error:  # a file may hold anything
        reason = first_line(error)
        raise UserError(
            f"model.name={name}: {reason}; expected random:{', random:'.join([*GEOMETRIES, *configurations.names()])}, "
            "or random:PATH, a JSON file with a model's configuration."
        ) from error
    return config


def own_device() -> str:
    """Return the GPU of this process, or the CPU where there is none."""
    rank = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0
    return f"cuda:{rank}" if torch.cuda.is_available() else "cpu"


def load(config: ModelConfig, device: torch.device | str | None) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Make the model of ``config.name``, by default on :func:`own_device`, and a tokenizer of single bytes.

    Raises:
        UserError: for a configuration that cannot be read, or a device that is missing or has no room.
    """
    shape = geometry(config.name)
    device = own_device() if device is None else device
    dtype, attention = getattr(torch, config.dtype), config.attention_for_transformers
    try:
        with init_empty_weights(include_buffers=False):  # buffers are computed, not drawn
            model: Any = AutoModelForCausalLM.from_config(shape, dtype=dtype, attn_implementation=attention)
    except Exception as error:  # a configuration may hold anything
        raise UserError(
            f"model.name={config.name}: transformers cannot make this model ({first_line(error)}); expected the "
            "configuration of a causal language model, and an attn_implementation that it has."
        ) from error
    try:
        draw = torch.Generator(device).manual_seed(0)
        if config.quantization == "nf4":
            _quantise(model, dtype, draw)
        for module in model.modules():
            for name, buffer in [*module.named_buffers(recurse=False)]:
                setattr(module, name, buffer.to(device))
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.is_meta:
                    module._parameters[name] = nn.Parameter(_drawn(parameter, draw), requires_grad=False)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device={device}: {first_line(error)}; give cpu, or one that has room.") from error
    model.tie_weights()
    return model, _tokenizer(shape)


def _drawn(parameter: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """Draw a matrix; vectors (scales of norms, biases) are 1."""
    values = torch.empty(parameter.shape, dtype=parameter.dtype, device=draw.device)
    return values.fill_(1) if parameter.ndim < 2 else values.normal_(0, SPREAD, generator=draw)


def _quantise(model: PreTrainedModel, dtype: torch.dtype, draw: torch.Generator) -> None:
    """Replace the linear layers, but for the head, by 4-bit ones with the settings of ``ag.model.base``."""
    bnb: Any = importlib.import_module("bitsandbytes")
    head = model.get_output_embeddings()
    linear = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head]
    for name, module in linear:
        layer = bnb.nn.Linear4bit(
            module.in_features,
            module.out_features,
            bias=module.bias is not None,
            compute_dtype=dtype,
            quant_type="nf4",
            device="meta",
        )
        layer.weight = bnb.nn.Params4bit(
            _drawn(module.weight, draw), requires_grad=False, compress_statistics=True, quant_type="nf4", module=layer
        ).to(draw.device)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer)
    model.is_loaded_in_4bit = model.is_quantized = True  # type: ignore[assignment]  # PEFT reads these


def _tokenizer(shape: PretrainedConfig) -> PreTrainedTokenizerFast:
    """Make a tokenizer of single bytes, the ids below 260."""
    letters = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    if shape.get_text_config().vocab_size < len(letters):
        raise UserError(f"vocab_size={shape.get_text_config().vocab_size}: expected at least {len(letters)}.")
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, [], unk_token=SPECIAL[0]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    unknown, begin, end = SPECIAL
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=unknown, bos_token=begin, eos_token=end)

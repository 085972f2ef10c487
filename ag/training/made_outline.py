"""The sizes of any model that transformers can make, counted on a copy without weights."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from ag.config import Config
from ag.config.sections import ModelConfig
from ag.errors import first_line
from ag.gates.gate import AttentionGate, AttentionGates, gate_kind
from ag.model import base as models
from ag.model import configurations, random_base
from ag.model.geometry import attention_layers, fingerprint, kv_heads, sliding_windows
from ag.model.structure import attention_of, decoder_of
from ag.training.outline import LayerOutline, Matrix, Outline
from ag.wheels import hub_name


def make_outline(config: Config) -> Outline:
    """Return the sizes of a run's model, with its adapters and gates.

    Raises:
        ModelError: the model's configuration cannot be read.
        UserError: no layer can have a gate, or adapters have targets that the model has not.
    """
    geometry = read_geometry(config.model)
    shape, stored = fingerprint(geometry), getattr(torch, config.model.dtype)
    with torch.device("meta"):
        try:
            base = AutoModelForCausalLM.from_config(
                geometry, dtype=stored, trust_remote_code=config.model.trust_remote_code
            )
        except ValueError as error:
            raise models.ModelError(
                f"model.name={config.model.name!r}: transformers cannot make this model ({first_line(error)[:200]}); "
                "expected the configuration of a causal language model."
            ) from error
        base.requires_grad_(False)
        gates = None if config.train == "lora" else AttentionGates(geometry, config.gate)
        head = base.get_output_embeddings()
        adapted = base if config.train == "gates" else models.add_lora(base, config.lora)
    decoder, text = decoder_of(adapted), geometry.get_text_config()
    parts: dict[str, list[nn.Parameter]] = {
        "base": [p for p in adapted.parameters() if not p.requires_grad],
        "gates": [] if gates is None else list(gates.parameters()),
        "LoRA": [p for p in adapted.parameters() if p.requires_grad],
    }
    inside = {id(p) for p in decoder.layers.parameters()}
    linear = [m.weight for m in adapted.modules() if isinstance(m, nn.Linear) and m is not head]
    linear = [weight for weight in linear if not weight.requires_grad]
    windows = dict(zip(attention_layers(decoder.config), sliding_windows(geometry), strict=True))
    return Outline(
        width=shape["hidden_size"],
        num_heads=shape["num_heads"],
        num_kv_heads=shape["num_kv_heads"],
        head_dim=shape["head_dim"],
        vocabulary=text.vocab_size,
        context=text.max_position_embeddings,
        kv_count=sum(x.number * (x.key + x.value) for x in kv_heads(geometry)),
        layers=[_layer(layer, windows.get(index)) for index, layer in enumerate(decoder.layers)],
        attending=attention_layers(decoder.config),
        gates={} if gates is None else {int(index): _matrices(gate) for index, gate in gates.layers.items()},
        gates_attend=gates is not None and gate_kind(config.gate.kind).mix is AttentionGate.mix,
        counts={part: sum(p.numel() for p in group) for part, group in parts.items()},
        nbytes={part: sum(p.nbytes for p in group) for part, group in parts.items()},
        outside_nbytes=sum(p.nbytes for p in parts["base"] if id(p) not in inside),
        linear_count=sum(weight.numel() for weight in linear),
        linear_nbytes=sum(weight.nbytes for weight in linear),
    )


def _layer(layer: nn.Module, window: int | None) -> LayerOutline:
    attention = attention_of(layer)  # None: the matrices hold all its operations
    experts = getattr(getattr(attention, "config", None), "num_experts_per_tok", None) or 0
    named = list(layer.named_parameters())
    return LayerOutline(
        linear=_matrices(layer),
        norms=[p.numel() for name, p in named if "norm" in name and p.ndim == 1],
        attends=attention is not None,
        window=window,
        experts=experts,
        expert_count=sum(p.numel() / len(p) * experts for _, p in named if p.ndim == 3),
    )


def _matrices(module: nn.Module) -> dict[str, Matrix]:
    linear = {name: part.weight for name, part in module.named_modules() if isinstance(part, nn.Linear)}
    return {name: Matrix(weight.shape[0], weight.shape[1], weight.requires_grad) for name, weight in linear.items()}


def read_geometry(model: ModelConfig) -> PretrainedConfig:
    """Read the configuration of ``model.name``: of random weights, from the package, a JSON file, a folder or the hub.

    Raises:
        ModelError: there is no configuration.
    """
    name = model.name
    if name.startswith(random_base.PREFIX):
        return random_base.geometry(name)
    packaged = None if model.revision is not None else configurations.find(hub_name(name))
    if packaged is not None:
        path = str(packaged)
    elif name.endswith(".json") and Path(name).is_file():
        path = name
    else:
        path = models.resolve(name, model.revision)
    try:
        geometry: PretrainedConfig = AutoConfig.from_pretrained(
            path, revision=model.revision, trust_remote_code=model.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise models.ModelError(
            f"model.name={name!r} has no configuration to plan with ({first_line(error)}): give a hub id "
            "that can be reached, a folder or a config.json"
        ) from error
    return geometry

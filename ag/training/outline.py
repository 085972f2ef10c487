"""The sizes of a model that is planned: its matrices and those of its adapters and gates, without torch.

The numbers in the configuration of a decoder like Llama's give all of them. Any other model is made without weights
(:mod:`ag.training.made_outline`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ag.config import Config
from ag.config.gate import GateConfig
from ag.model import configurations
from ag.wheels import BASES, hub_name

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}  # of a number of each type of a model's weights
FLOAT32_BYTES = 4  # of a number of gates and adapters
LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")  # types of models whose sizes follow from these keys
KEYS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "max_position_embeddings", "tie_word_embeddings"),
)
OTHER_SIZES = ("quantization_config", "mlp_bias", "attention_bias", "use_sliding_window")  # keys that change them


@dataclass(frozen=True)
class Matrix:
    """The weight of a linear layer."""

    outputs: int
    inputs: int
    trained: bool = False

    @property
    def count(self) -> int:
        """The numbers in it."""
        return self.outputs * self.inputs


@dataclass(frozen=True)
class LayerOutline:
    """The sizes of one layer of a decoder with its adapters."""

    linear: Mapping[str, Matrix]  # by name in the layer, in the order of the layer's modules
    norms: Sequence[int]  # numbers of each norm's weight
    attends: bool = True  # whether it attends through the attention interface
    window: int | None = None  # tokens that a query sees. None: all earlier ones
    experts: int = 0  # experts that a token goes to
    expert_count: float = 0  # numbers in the stacked matrices of these experts


@dataclass(frozen=True)
class Outline:
    """The sizes of a decoder with its adapters and gates."""

    width: int  # numbers of a hidden state
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocabulary: int  # tokens
    context: int  # longest sequence in tokens
    kv_count: int  # numbers in the keys and values of one token
    layers: Sequence[LayerOutline]
    attending: Sequence[int]  # indices of the layers with keys and values; gates count these layers alone
    gates: Mapping[int, Mapping[str, Matrix]]  # the matrices of each gate, by its index in ``attending``
    gates_attend: bool  # whether gates are attention blocks
    counts: Mapping[str, int]  # numbers in all parameters, by part: base, gates, LoRA
    nbytes: Mapping[str, int]  # bytes of the same parts
    outside_nbytes: int  # bytes of the base's parameters outside of the layers
    linear_count: int  # numbers in the base's linear layers, without the output layer
    linear_nbytes: int  # bytes of the same matrices


def read_outline(config: Config) -> Outline | None:
    """Return the sizes of a run's model from the numbers in its configuration.

    None: the model must be made, because its configuration is not on this machine or is not like Llama's, or because
    adapters or gates are of another kind.
    """
    values = read_values(config.model.name, config.model.revision)
    if values is None or values.get("model_type") not in LLAMA_LIKE or not all(key in values for key in KEYS):
        return None
    if any(values.get(key) for key in OTHER_SIZES) or {*(values.get("layer_types") or ())} - {"full_attention"}:
        return None
    width, heads, kv_heads = (values[x] for x in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    gate_config = config.gate.sized(width)
    gate = _gate(gate_config, width, heads if gate_config.granularity == "query_head" else kv_heads)
    with_gates = range(gate_config.first_layer, values["num_hidden_layers"]) if config.train != "lora" else range(0)
    if config.train != "lora" and (gate is None or not with_gates):
        return None
    layer = _layer(values)
    targets = [] if config.train == "gates" else config.lora.targets
    adapted = {name for name in layer if targets == ["all-linear"] or name.rpartition(".")[2] in targets}
    if config.train != "gates" and not {x.rpartition(".")[2] for x in adapted} >= {*targets} - {"all-linear"}:
        return None
    return _outline(config, values, layer, adapted, [*with_gates], gate or {})


def read_values(name: str, revision: str | None) -> dict[str, Any] | None:
    """Return the configuration of a model that the package or this machine has.

    None: it has none, or the name stands for random weights.
    """
    source = BASES.get(name)
    packaged = None if revision is not None else configurations.find(hub_name(name))
    path = Path(os.path.expanduser(name))
    files = [packaged] if packaged else [path, path / "config.json"]
    if source is not None and revision is None:
        files.append(source.folder() / "config.json")
    config_file = next((file for file in files if file.suffix == ".json" and file.is_file()), None)
    if config_file is None:
        return None
    try:
        values = json.loads(config_file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # transformers says what is wrong
    return values if isinstance(values, dict) else None


def _layer(values: Mapping[str, Any]) -> dict[str, Matrix]:
    """Return the matrices of a layer of the base by name."""
    width, inner, head_dim = values["hidden_size"], values["intermediate_size"], _head_dim(values)
    queries, keys = (values[f"num_{kind}_heads"] * head_dim for kind in ("attention", "key_value"))
    return {
        "self_attn.q_proj": Matrix(queries, width),
        "self_attn.k_proj": Matrix(keys, width),
        "self_attn.v_proj": Matrix(keys, width),
        "self_attn.o_proj": Matrix(width, queries),
        "mlp.gate_proj": Matrix(inner, width),
        "mlp.up_proj": Matrix(inner, width),
        "mlp.down_proj": Matrix(width, inner),
    }


def _head_dim(values: Mapping[str, Any]) -> int:
    return int(values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"])


def _gate(config: GateConfig, width: int, heads: int) -> dict[str, Matrix] | None:
    """Return the matrices of a gate with this many logits; None for the kinds that have more than matrices."""
    inner = config.num_heads * config.head_dim
    if config.kind == "attention":
        projections = {f"{x}_proj": Matrix(inner, width, trained=True) for x in "qkv"}
        shortcut = {"linear": Matrix(heads, width, trained=True)} if config.shortcut else {}
        return projections | {"o_proj": Matrix(heads, inner, trained=True)} | shortcut
    if config.kind in ("linear", "affine"):
        return {"linear": Matrix(heads, width, trained=True)}
    if config.kind in ("mlp", "retention"):
        return {
            "inner": Matrix(config.hidden, width, trained=True),
            "outer": Matrix(heads, config.hidden, trained=True),
        }
    return None


def _outline(
    config: Config,
    values: Mapping[str, Any],
    layer: Mapping[str, Matrix],
    adapted: set[str],
    with_gates: Sequence[int],
    gate: Mapping[str, Matrix],
) -> Outline:
    """Put a model together from the matrices of a layer, the names of those with an adapter, and those of a gate."""
    width, num_layers, head_dim = values["hidden_size"], values["num_hidden_layers"], _head_dim(values)
    heads, kv_heads, kind = values["num_attention_heads"], values["num_key_value_heads"], values["model_type"]
    norms = [head_dim, head_dim] * (kind == "qwen3") + [width, width]
    biases = (heads + 2 * kv_heads) * head_dim * (kind == "qwen2")
    linear_count = num_layers * sum(matrix.count for matrix in layer.values())
    outside = width * (values["vocab_size"] * (1 if values["tie_word_embeddings"] else 2) + 1)  # with the last norm
    with_adapters = dict(_with_adapters(layer, adapted, config.lora.rank))
    gate_biases = sum(x.outputs for x in gate.values()) if config.gate.kind in ("affine", "mlp", "retention") else 0
    counts = {
        "base": outside + linear_count + num_layers * (sum(norms) + biases),
        "gates": len(with_gates) * (sum(matrix.count for matrix in gate.values()) + gate_biases),
        "LoRA": num_layers * sum(matrix.count for matrix in with_adapters.values() if matrix.trained),
    }
    item = ITEM_BYTES[config.model.dtype]
    window = values.get("sliding_window") if kind == "mistral" else None
    return Outline(
        width=width,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=values["vocab_size"],
        context=values["max_position_embeddings"],
        kv_count=2 * num_layers * kv_heads * head_dim,
        layers=[LayerOutline(with_adapters, norms, window=window)] * num_layers,
        attending=range(num_layers),
        gates=dict.fromkeys(with_gates, gate),
        gates_attend=bool(with_gates) and config.gate.kind == "attention",
        counts=counts,
        nbytes={part: count * (item if part == "base" else FLOAT32_BYTES) for part, count in counts.items()},
        outside_nbytes=item * outside,
        linear_count=linear_count,
        linear_nbytes=item * linear_count,
    )


def _with_adapters(layer: Mapping[str, Matrix], adapted: set[str], rank: int) -> Iterator[tuple[str, Matrix]]:
    """Yield the matrices of a layer with those of LoRA, under the names that PEFT gives them."""
    for name, matrix in layer.items():
        if name not in adapted:
            yield name, matrix
            continue
        yield f"{name}.base_layer", matrix
        yield f"{name}.lora_A.default", Matrix(rank, matrix.inputs, trained=True)
        yield f"{name}.lora_B.default", Matrix(matrix.outputs, rank, trained=True)

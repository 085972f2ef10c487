"""Gates of other projects, read as their authors published them: KVzap, Fast KVzip and TRIM-KV.

The files of a folder identify the project. Settings that are not in the files (thresholds, sinks, windows) are the
defaults of the authors' code; each reader names them.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from ag.config.gate import GateConfig
from ag.errors import first_line
from ag.files import checksum
from ag.gates.manifest import CONFIG, MAX_LAYERS, MAX_SIZE, SCHEMA_VERSION, WEIGHTS, ExportError

MODEL_CONFIG, MODEL_WEIGHTS = "config.json", "model.safetensors"  # files of PreTrainedModel.save_pretrained
KVZAP_WINDOW, KVZAP_THRESHOLD = 128, -4.0
FAST_KVZIP = re.compile(r"q(?P<group>[1-9]\d*)_dim(?P<dim>[1-9]\d*)_sink(?P<sinks>[1-9]\d*)\.pt")
FAST_KVZIP_WINDOW, FAST_KVZIP_SINKS = 4096, 4
TRIMKV_WEIGHTS = "trimkv_weights.pth"
TRIMKV_KNOWN = {"retention_gate": ("rg",), "hidden_act": ("silu",), "compress_strategy": ("alpha", "layer_wise_alpha")}


@dataclass(frozen=True)
class ForeignCheckpoint:
    """A checkpoint: its geometry, the configuration of its gates, and the new names of its tensors."""

    file: Path
    fingerprint: dict[str, Any]  # the part of the geometry that the checkpoint has
    config: GateConfig
    names: Mapping[str, str]  # replacements in the names of its tensors, by regular expression
    base: str = ""  # name of the model, if the checkpoint has it

    def info(self) -> dict[str, Any]:
        """Return the keys of ``gate_config.json`` of an export.

        Raises:
            ExportError: the file of the weights is missing.
        """
        if not self.file.is_file():
            raise ExportError(f"{self.file}: no such file: expected it beside {MODEL_CONFIG}; copy the whole folder.")
        digest = checksum(self.file)
        return {
            "schema_version": SCHEMA_VERSION,
            "base_model": {"name": self.base, "revision": None, "fingerprint": self.fingerprint},
            "gate": asdict(self.config),
            "keep_rate": None,
            "metrics": {},
            "sha256": {WEIGHTS: digest},
            "checksum": digest,
        }

    def tensors(self, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights in float32, with the names and shapes of ``expected``.

        Raises:
            ExportError: a tensor is missing, has another shape, or has numbers that are not finite.
        """
        renamed = {}
        for name, tensor in _load_tensors(self.file).items():
            for pattern, replacement in self.names.items():
                name = re.sub(pattern, replacement, name)
            renamed[name] = tensor
        if odd := sorted(renamed.keys() ^ expected.keys()):
            raise ExportError(f"{self.file}: missing or unknown tensors ({odd[0]}, {len(odd)} in all): copy it again.")
        for name, tensor in renamed.items():
            shape, wanted = tuple(tensor.shape), tuple(expected[name].shape)
            if shape != wanted or not tensor.is_floating_point() or not bool(tensor.isfinite().all()):
                raise ExportError(
                    f"{self.file}: {name} is {tensor.dtype} {shape}: expected finite numbers {wanted}; copy it again."
                )
        return {name: tensor.float().contiguous() for name, tensor in renamed.items()}


def detect_foreign(folder: Path) -> ForeignCheckpoint | None:
    """Return the gates of another project in a folder, or None; raise an :class:`ExportError` if they are damaged."""
    if not os.path.isdir(folder) or (folder / CONFIG).is_file():  # pathlib raises for a long name
        return None
    if (weights := weights_of(folder)) is not None:
        return (_kvzap if weights == MODEL_WEIGHTS else _trimkv)(folder, _model_config(folder))
    files = [file for file in sorted(folder.glob("q*_dim*_sink*.pt")) if FAST_KVZIP.fullmatch(file.name)]
    return _fast_kvzip(files[0]) if files else None


def weights_of(folder: Path) -> str | None:
    """Return the name of the file of weights in a folder. None: its configuration is not for gates."""
    config = _model_config(folder)
    if config.get("model_type") == "kvzap":
        return MODEL_WEIGHTS
    return TRIMKV_WEIGHTS if "retention_gate" in config else None


def _model_config(folder: Path) -> dict[str, Any]:
    """Return ``config.json``, empty if it cannot be read."""
    try:
        config = json.loads((folder / MODEL_CONFIG).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def _kvzap(folder: Path, config: dict[str, Any]) -> ForeignCheckpoint:
    """Read a checkpoint of ``KVzapModel.save_pretrained`` (NVIDIA kvpress, Apache-2.0): one module for each layer.

    A module maps the input of the layer's attention to the log of KVzip+ for each KV head. A token that leaves the
    window of the newest 128 tokens is evicted if this value is below the threshold. This applies to prompts, which are
    read densely, and to generated tokens. The checkpoint has no threshold; its README's example is -4.
    """
    linear = config.get("hidden_dim") is None
    config = {**config, "hidden_dim": GateConfig.hidden} if linear else config
    names = "n_modules", "output_dim", "input_dim", "hidden_dim"
    layers, heads, width, hidden = _read_sizes(folder / MODEL_CONFIG, config, *names)
    gate = GateConfig(
        kind="affine" if linear else "mlp",
        hidden=hidden,
        threshold=1 / (1 + math.exp(-KVZAP_THRESHOLD)),
        bias=0.0,
        covers="all",
        prefill="dense",
        recent_tokens=KVZAP_WINDOW + 1,  # the query's own token included
    )
    mlp_names = {r"^(layers\.\d+)\.0": r"\1.inner", r"^(layers\.\d+)\.2": r"\1.outer"}
    new_names = {r"^(layers\.\d+)": r"\1.linear"} if linear else mlp_names
    return ForeignCheckpoint(folder / MODEL_WEIGHTS, _geometry(layers, heads, width), gate, new_names)


def _fast_kvzip(file: Path) -> ForeignCheckpoint:
    """Read a file of Fast KVzip's gates: a list of state dicts, one for each layer.

    Its code ranks the entries of all layers and heads by the score. It also keeps the first 4 tokens and the newest
    4,096 tokens, or 2 % of a shorter prompt.
    """
    tensors, match = _load_tensors(file), FAST_KVZIP.fullmatch(file.name)
    assert match is not None
    dim, sinks, group = (int(match[name]) for name in ("dim", "sinks", "group"))
    keys = tensors.get("layers.0.k_proj.weight")
    if keys is None or keys.ndim != 2 or len(keys) % dim:
        raise ExportError(f"{file}: no k_proj.weight of keys with {dim} numbers: expected Fast KVzip's gates.")
    layers = sum(name.endswith("k_proj.weight") for name in tensors)
    sizes = {"layers": layers, "heads": len(keys) // dim, "width": keys.shape[1], "dim": dim, "sink": sinks, "q": group}
    _read_sizes(file, sizes, *sizes)
    gate = GateConfig(
        kind="fast_kvzip",
        granularity="query_head",
        head_dim=dim,
        hidden=sinks,
        bias=0.0,
        covers="all",
        prefill="dense",
        recent_tokens=FAST_KVZIP_WINDOW + 1,
        sink_tokens=FAST_KVZIP_SINKS,
    )
    geometry = _geometry(layers, len(keys) // dim, keys.shape[1])
    return ForeignCheckpoint(file, geometry | {"num_heads": len(keys) // dim * group}, gate, {})


def _trimkv(folder: Path, config: dict[str, Any]) -> ForeignCheckpoint:
    """Read a checkpoint of TRIM-KV (ngocbh/trimkv): the configuration of its model, and the weights of its gates.

    Each later token multiplies a token's score by the sigmoid of its gate. The authors' code reads a prompt densely.
    When ``memory_size + buffer_size`` tokens are cached, it keeps the ``memory_size`` tokens with the highest scores.
    These two are settings of a run, not of the weights. Here they are the budget and ``schedule=steps:n``, with equal
    results after a prompt that fills both.
    """
    file = folder / MODEL_CONFIG
    for name, supported in TRIMKV_KNOWN.items():
        if (value := config.get(name, supported[0])) not in supported:
            raise ExportError(
                f"{file}: {name}={value!r:.80}: expected {' or '.join(supported)} (not gates that read keys, norms of "
                "keys or thresholds); use another checkpoint."
            )
    names = "num_hidden_layers", "num_key_value_heads", "hidden_size", "retention_gate_intermediate_size"
    layers, heads, width, hidden = _read_sizes(file, config, *names)
    gate = GateConfig(kind="retention", hidden=hidden, bias=0.0, covers="all", prefill="dense")
    geometry = _geometry(layers, heads, width) | {x: str(config[x]) for x in ["model_type"] if x in config}
    new_names = {
        r"^model\.(layers\.\d+)\.self_attn\.retention_gate\.": r"\1.",
        r"^(layers\.\d+)\.linear1\.": r"\1.inner.",
        r"^(layers\.\d+)\.linear2\.weight": r"\1.outer.weight",
        r"^(layers\.\d+)\.bias": r"\1.outer.bias",
    }
    return ForeignCheckpoint(folder / TRIMKV_WEIGHTS, geometry, gate, new_names, str(config.get("base_model") or ""))


def _load_tensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by name; raise an :class:`ExportError` for a pickle with other content."""
    try:
        if file.suffix == ".safetensors":
            return safetensors.torch.load_file(file)
        content = torch.load(file, map_location="cpu", weights_only=True)
        if FAST_KVZIP.fullmatch(file.name):  # a list of state dicts
            layer_states = enumerate(content["module"])
            content = {f"layers.{i}.{name}": tensor for i, state in layer_states for name, tensor in state.items()}
        if all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in content.items()):
            return dict(content)
        raise TypeError("not all of it is tensors by name")
    except Exception as error:  # a pickle may contain anything
        raise ExportError(
            f"{file}: cannot be read as tensors by name ({first_line(error)}): expected the gates as published; copy "
            "it again."
        ) from error


def _geometry(layers: int, heads: int, width: int) -> dict[str, Any]:
    return {"num_layers": layers, "num_kv_heads": heads, "hidden_size": width, "windowed_layers": []}


def _read_sizes(file: Path, sizes: Mapping[str, Any], layers: str, *more_names: str) -> list[int]:
    """Return the sizes of these names; raise an :class:`ExportError` if one is not a number, or is too large."""
    for name in (layers, *more_names):
        size, limit = sizes.get(name), MAX_LAYERS if name == layers else MAX_SIZE
        if type(size) is not int or not 1 <= size <= limit:
            raise ExportError(f"{file}: {name}={size!r:.80}: expected a whole number from 1 to {limit}; copy it again.")
    return [sizes[name] for name in (layers, *more_names)]

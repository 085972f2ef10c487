"""Gates of other projects, read as their authors published them: KVzap, Fast KVzip and TRIM-KV.

The files of a folder tell the project. Settings that are not in the files (thresholds, sinks, windows) are the defaults
of the authors' code, named beside each.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from ag.config.gate import GateConfig
from ag.files import checksum
from ag.gates.manifest import CONFIG, MOST, MOST_LAYERS, SCHEMA_VERSION, WEIGHTS, ExportError

MODEL_CONFIG, MODEL_WEIGHTS = "config.json", "model.safetensors"  # of PreTrainedModel.save_pretrained
KVZAP_WINDOW, KVZAP_THRESHOLD = 128, -4.0
FAST_KVZIP = re.compile(r"q(?P<group>[1-9]\d*)_dim(?P<dim>[1-9]\d*)_sink(?P<sinks>[1-9]\d*)\.pt")
FAST_KVZIP_WINDOW, FAST_KVZIP_SINKS = 4096, 4
TRIMKV_WEIGHTS = "trimkv_weights.pth"
TRIMKV_KNOWN = {"retention_gate": ("rg",), "hidden_act": ("silu",), "compress_strategy": ("alpha", "layer_wise_alpha")}


@dataclass(frozen=True)
class Foreign:
    """A checkpoint: its geometry, the configuration of its gates, and the names of its tensors here."""

    file: Path
    fingerprint: dict[str, Any]  # the part of the geometry that the checkpoint has
    config: GateConfig
    names: Mapping[str, str]  # replacements of parts of its tensors' names, by regular expression
    base: str = ""  # name of the model, if the checkpoint has it

    def info(self) -> dict[str, Any]:
        """Return the keys of ``gate_config.json`` of an export.

        Raises:
            ExportError: the weights are not there.
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
        """Return the weights in float32, of the names and shapes of ``expected``.

        Raises:
            ExportError: a tensor is missing, of another shape, or has numbers that are not finite.
        """
        found = {}
        for name, tensor in _stored(self.file).items():
            for theirs, ours in self.names.items():
                name = re.sub(theirs, ours, name)
            found[name] = tensor
        if odd := sorted(found.keys() ^ expected.keys()):
            raise ExportError(f"{self.file}: missing or unknown tensors ({odd[0]}, {len(odd)} in all): copy it again.")
        for name, tensor in found.items():
            shape, wanted = tuple(tensor.shape), tuple(expected[name].shape)
            if shape != wanted or not tensor.is_floating_point() or not bool(tensor.isfinite().all()):
                raise ExportError(
                    f"{self.file}: {name} is {tensor.dtype} {shape}: expected finite numbers {wanted}; copy it again."
                )
        return {name: tensor.float().contiguous() for name, tensor in found.items()}


def recognise(folder: Path) -> Foreign | None:
    """Return the gates of another project in a folder, or None; raises an :class:`ExportError` for damaged ones."""
    if not folder.is_dir() or (folder / CONFIG).is_file():
        return None
    if (weights := weights_of(folder)) is not None:
        return (_kvzap if weights == MODEL_WEIGHTS else _trimkv)(folder, _model_config(folder))
    files = [file for file in sorted(folder.glob("q*_dim*_sink*.pt")) if FAST_KVZIP.fullmatch(file.name)]
    return _fast_kvzip(files[0]) if files else None


def weights_of(folder: Path) -> str | None:
    """Return the name of the weights of the configuration in a folder; None if that is not one of gates."""
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


def _kvzap(folder: Path, config: dict[str, Any]) -> Foreign:
    """Read what ``KVzapModel.save_pretrained`` wrote (NVIDIA kvpress, Apache-2.0): one module a layer.

    It maps the input of the layer's attention to the log of KVzip+ for each KV head. What leaves the window of the
    newest 128 tokens goes when that is below the threshold: in prompts, which are read densely, and in what is
    generated. The checkpoint has no threshold; its README's example is -4.
    """
    linear = config.get("hidden_dim") is None
    config = {**config, "hidden_dim": GateConfig.hidden} if linear else config
    names = "n_modules", "output_dim", "input_dim", "hidden_dim"
    layers, heads, width, hidden = _sizes(folder / MODEL_CONFIG, config, *names)
    gate = GateConfig(
        kind="affine" if linear else "mlp",
        hidden=hidden,
        threshold=1 / (1 + math.exp(-KVZAP_THRESHOLD)),
        bias=0.0,
        covers="all",
        prefill="dense",
        recent_tokens=KVZAP_WINDOW + 1,  # with the query's own
    )
    one, two = {r"^(layers\.\d+)": r"\1.linear"}, {r"^(layers\.\d+)\.0": r"\1.inner", r"^(layers\.\d+)\.2": r"\1.outer"}
    return Foreign(folder / MODEL_WEIGHTS, _geometry(layers, heads, width), gate, one if linear else two)


def _fast_kvzip(file: Path) -> Foreign:
    """Read a file of Fast KVzip's gates: a list of state dicts, one a layer.

    Its code ranks all entries of all layers and heads by the score, and keeps the first 4 tokens and a window of the
    newest: 4,096 tokens, or 2 % of a shorter prompt.
    """
    stored, named = _stored(file), FAST_KVZIP.fullmatch(file.name)
    assert named is not None
    dim, sinks, group = (int(named[name]) for name in ("dim", "sinks", "group"))
    keys = stored.get("layers.0.k_proj.weight")
    if keys is None or keys.ndim != 2 or len(keys) % dim:
        raise ExportError(f"{file}: no k_proj.weight of keys with {dim} numbers: expected Fast KVzip's gates.")
    layers = sum(name.endswith("k_proj.weight") for name in stored)
    sizes = {"layers": layers, "heads": len(keys) // dim, "width": keys.shape[1], "dim": dim, "sink": sinks, "q": group}
    _sizes(file, sizes, *sizes)
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
    return Foreign(file, geometry | {"num_heads": len(keys) // dim * group}, gate, {})


def _trimkv(folder: Path, config: dict[str, Any]) -> Foreign:
    """Read what TRIM-KV published (ngocbh/trimkv): the configuration of its model, and the weights of its gates alone.

    A gate's sigmoid is the share of a token's worth that is left after each token that comes. The authors' code reads a
    prompt densely; whenever ``memory_size + buffer_size`` tokens are held, the ``memory_size`` with the highest scores
    stay. These two are settings of a run, not of the weights: the budget and ``schedule=steps:n`` here, which
    does the same behind a prompt that fills both.
    """
    file = folder / MODEL_CONFIG
    for name, known in TRIMKV_KNOWN.items():
        if (value := config.get(name, known[0])) not in known:
            raise ExportError(
                f"{file}: {name}={value!r:.80}: expected {' or '.join(known)} (not gates that read keys, norms of keys "
                "or thresholds); use another checkpoint."
            )
    names = "num_hidden_layers", "num_key_value_heads", "hidden_size", "retention_gate_intermediate_size"
    layers, heads, width, hidden = _sizes(file, config, *names)
    gate = GateConfig(kind="retention", hidden=hidden, bias=0.0, covers="all", prefill="dense")
    geometry = _geometry(layers, heads, width) | {x: str(config[x]) for x in ["model_type"] if x in config}
    parts = {
        r"^model\.(layers\.\d+)\.self_attn\.retention_gate\.": r"\1.",
        r"^(layers\.\d+)\.linear1\.": r"\1.inner.",
        r"^(layers\.\d+)\.linear2\.weight": r"\1.outer.weight",
        r"^(layers\.\d+)\.bias": r"\1.outer.bias",
    }
    return Foreign(folder / TRIMKV_WEIGHTS, geometry, gate, parts, str(config.get("base_model") or ""))


def _stored(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by their names; a pickle with other content raises an :class:`ExportError`."""
    try:
        if file.suffix == ".safetensors":
            return safetensors.torch.load_file(file)
        found = torch.load(file, map_location="cpu", weights_only=True)
        if FAST_KVZIP.fullmatch(file.name):  # a list of state dicts
            each = enumerate(found["module"])
            found = {f"layers.{layer}.{name}": tensor for layer, state in each for name, tensor in state.items()}
        if all(isinstance(tensor, Tensor) for tensor in found.values()):
            return dict(found)
        raise TypeError("not all of it is tensors")
    except Exception as error:  # a pickle may hold anything
        raise ExportError(
            f"{file}: cannot be read as tensors by name ({error}): expected the gates as published; copy it again."
        ) from error


def _geometry(layers: int, heads: int, width: int) -> dict[str, Any]:
    return {"num_layers": layers, "num_kv_heads": heads, "hidden_size": width, "windowed_layers": []}


def _sizes(file: Path, sizes: Mapping[str, Any], layers: str, *others: str) -> list[int]:
    """Return the sizes of these names, or raise an :class:`ExportError` for one that is no number or too large."""
    for name in (layers, *others):
        size, most = sizes.get(name), MOST_LAYERS if name == layers else MOST
        if type(size) is not int or not 1 <= size <= most:
            raise ExportError(f"{file}: {name}={size!r:.80}: expected a whole number from 1 to {most}; copy it again.")
    return [sizes[name] for name in (layers, *others)]

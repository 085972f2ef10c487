"""Gates of other projects, which are read as their authors published them: KVzap, Fast KVzip and TRIM-KV.

A folder is told by what lies in it. What its files leave open (thresholds, sinks, windows) is what the authors' code
does by default, said beside each.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from ag.config.gate import GateConfig
from ag.gates.manifest import CONFIG, MOST, MOST_LAYERS, SCHEMA_VERSION, WEIGHTS, ExportError

MODEL_CONFIG, MODEL_WEIGHTS = "config.json", "model.safetensors"  # of PreTrainedModel.save_pretrained
KVZAP_WINDOW, KVZAP_THRESHOLD = 128, -4.0
FAST_KVZIP = re.compile(r"q(?P<group>\d+)_dim(?P<dim>\d+)_sink(?P<sinks>\d+)\.pt")
FAST_KVZIP_WINDOW, FAST_KVZIP_SINKS = 4096, 4
TRIMKV_WEIGHTS = "trimkv_weights.pth"
TRIMKV = re.compile(r"model\.layers\.(\d+)\.self_attn\.retention_gate\.([\w.]+)")
TRIMKV_PARTS = {  # their names, and those of a gate here
    **{"linear1.weight": "inner.weight", "linear1.bias": "inner.bias"},
    **{"linear2.weight": "outer.weight", "bias": "outer.bias"},
}
TRIMKV_STRATEGIES = ("alpha", "layer_wise_alpha")


@dataclass(frozen=True)
class Foreign:
    """A checkpoint: the model and the gates that it is for, and how its tensors are called here."""

    file: Path
    fingerprint: dict[str, Any]  # as much as the checkpoint knows
    config: GateConfig
    read: Callable[[bytes], dict[str, Tensor]]
    base: str = ""  # name of the model, where the checkpoint says it

    def info(self) -> dict[str, Any]:
        """Return what is known, as ``gate_config.json`` of an export says it.

        Raises:
            ExportError: the weights are not there.
        """
        if not self.file.is_file():
            raise ExportError(f"{self.file}: no such file: expected it beside {MODEL_CONFIG}; copy the whole folder.")
        state = self.file.stat()
        digest = _digest(self.file, state.st_size, state.st_mtime_ns)
        return {
            "schema_version": SCHEMA_VERSION,
            "base_model": {"name": self.base, "revision": None, "fingerprint": self.fingerprint},
            "gate": asdict(self.config),
            "keep_rate": None,
            "metrics": {},
            "sha256": {WEIGHTS: digest},
            "checksum": digest,
        }

    def tensors(self, raw: bytes, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights in float32, by the names of :class:`ag.gates.gate.AttentionGates`.

        Args:
            raw: content of the file.
            expected: tensors of these names and shapes.

        Raises:
            ExportError: a tensor is missing, of another shape, or has numbers that are not finite.
        """
        found = self.read(raw)
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
    """Tell whether a folder holds gates of another project.

    Raises:
        ExportError: it does, and they cannot be read.
    """
    if not folder.is_dir() or (folder / CONFIG).is_file():
        return None
    config = _model_config(folder)
    read = {MODEL_WEIGHTS: _kvzap, TRIMKV_WEIGHTS: _trimkv}.get(_weights_of(config))
    if read is not None:
        return read(folder, config)
    files = [file for file in sorted(folder.glob("q*_dim*_sink*.pt")) if FAST_KVZIP.fullmatch(file.name)]
    return _fast_kvzip(files[0]) if files else None


def weights_of(folder: Path) -> str | None:
    """Return the file of gates that goes with the configuration in a folder, wherever it is; None: of no gates."""
    return _weights_of(_model_config(folder)) or None


def _model_config(folder: Path) -> dict[str, Any]:
    """Return ``config.json``; nothing where it cannot be read."""
    try:
        config = json.loads((folder / MODEL_CONFIG).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def _weights_of(config: Mapping[str, Any]) -> str:
    if config.get("model_type") == "kvzap":
        return MODEL_WEIGHTS
    return TRIMKV_WEIGHTS if "retention_gate" in config else ""


def _kvzap(folder: Path, config: dict[str, Any]) -> Foreign:
    """Read what ``KVzapModel.save_pretrained`` wrote (NVIDIA kvpress, Apache-2.0): one module a layer.

    It maps the input of the layer's attention to the log of KVzip+ for each KV head. What leaves the window of the
    newest 128 tokens goes when that is below the threshold: in prompts, which are read densely, and in what is
    generated. The checkpoint has no threshold; its README's example is -4.
    """
    file, hidden = folder / MODEL_CONFIG, config.get("hidden_dim")
    sizes: dict[str, Any] = {name: config.get(name) for name in ("n_modules", "output_dim", "input_dim")}
    _check_sizes(file, sizes | ({} if hidden is None else {"hidden_dim": hidden}))
    kind = "affine" if hidden is None else "mlp"
    names = {"": "linear."} if hidden is None else {"0.": "inner.", "2.": "outer."}

    def read(raw: bytes) -> dict[str, Tensor]:
        try:
            stored = safetensors.torch.load(raw)
        except (SafetensorError, KeyError) as error:
            raise ExportError(f"{folder / MODEL_WEIGHTS}: not safetensors ({error}); copy it again.") from error
        found = {}
        for name, tensor in stored.items():
            match = re.fullmatch(r"layers\.(\d+)\.(\d\.)?(weight|bias)", name)
            inside = None if match is None else names.get(match[2] or "")
            found[name if match is None or inside is None else f"layers.{match[1]}.{inside}{match[3]}"] = tensor
        return found

    gate = GateConfig(
        kind=kind,
        hidden=GateConfig.hidden if hidden is None else hidden,
        threshold=1 / (1 + math.exp(-KVZAP_THRESHOLD)),
        bias=0.0,
        covers="all",
        prefill="dense",
        recent_tokens=KVZAP_WINDOW + 1,  # with the query's own
    )
    layers, heads, width = sizes.values()
    return Foreign(folder / MODEL_WEIGHTS, _geometry(layers, heads, width), gate, read)


def _fast_kvzip(file: Path) -> Foreign:
    """Read a file of Fast KVzip's gates: a list of state dicts, one a layer.

    Its code ranks all entries of all layers and heads by the score, and keeps the first 4 tokens and a window of the
    newest: 4,096 tokens, or 2 % of a shorter prompt.
    """
    states = _fast_kvzip_states(file, file.read_bytes())
    named = FAST_KVZIP.fullmatch(file.name)
    assert named is not None
    dim, sinks, group = (int(named[name]) for name in ("dim", "sinks", "group"))
    keys = states[0].get("k_proj.weight")
    if keys is None or keys.ndim != 2 or len(keys) % dim:
        raise ExportError(f"{file}: no k_proj.weight of keys with {dim} numbers: expected Fast KVzip's gates.")
    heads, width = len(keys) // dim, keys.shape[1]
    _check_sizes(file, {"layers": len(states), "heads": heads, "width": width, "dim": dim, "sink": sinks, "q": group})

    def read(raw: bytes) -> dict[str, Tensor]:
        return {
            f"layers.{layer}.{name}": tensor
            for layer, state in enumerate(_fast_kvzip_states(file, raw))
            for name, tensor in state.items()
        }

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
    return Foreign(file, _geometry(len(states), heads, width) | {"num_heads": heads * group}, gate, read)


def _fast_kvzip_states(file: Path, raw: bytes) -> list[dict[str, Tensor]]:
    found = _unpickled(file, raw, "Fast KVzip's gates")
    states = found.get("module") if isinstance(found, Mapping) else None
    plain = isinstance(states, list) and all(isinstance(state, Mapping) for state in states)
    if not plain or not states or not all(isinstance(x, Tensor) for state in states for x in state.values()):
        raise ExportError(f"{file}: 'module' is no list of state dicts: expected Fast KVzip's gates, one a layer.")
    return [dict(state) for state in states]


def _trimkv(folder: Path, config: dict[str, Any]) -> Foreign:
    """Read what TRIM-KV published (ngocbh/trimkv): the configuration of its model, and the weights of its gates alone.

    A gate's sigmoid is the share of a token's worth that is left after each token that comes. The authors' code reads a
    prompt densely; whenever ``memory_size + buffer_size`` tokens are held, the ``memory_size`` with the highest scores
    stay. These two are settings of a run, not of the weights: the budget and ``schedule=steps:n`` here, which
    does the same behind a prompt that fills both.
    """
    file, weights = folder / MODEL_CONFIG, folder / TRIMKV_WEIGHTS
    for name, known, does in (
        ("retention_gate", ("rg",), "such a gate reads keys and values, and gates here read hidden states"),
        ("hidden_act", ("silu",), "gates of that activation are not known here"),
        ("compress_strategy", TRIMKV_STRATEGIES, "scores with the norms of keys, and thresholds, are not known here"),
    ):
        value = config.get(name, known[0])
        if value not in known:
            raise ExportError(f"{file}: {name}={value!r:.80}: {does}: expected {' or '.join(known)}; use another one.")
    sizes = {
        name: config.get(name)
        for name in ("num_hidden_layers", "num_key_value_heads", "hidden_size", "retention_gate_intermediate_size")
    }
    _check_sizes(file, sizes)
    layers, heads, width, hidden = (int(size or 0) for size in sizes.values())

    def read(raw: bytes) -> dict[str, Tensor]:
        stored = _unpickled(weights, raw, "TRIM-KV's gates")
        if not isinstance(stored, Mapping) or not all(isinstance(x, Tensor) for x in stored.values()):
            raise ExportError(f"{weights}: no state dict: expected TRIM-KV's gates.")
        found = {}
        for name, tensor in stored.items():
            match = TRIMKV.fullmatch(str(name))
            if match is None or match[2] not in TRIMKV_PARTS:
                raise ExportError(
                    f"{weights}: {name!s:.80} is no weight of a retention gate, and the base model stays as it is: "
                    "expected TRIM-KV's gates alone; use another checkpoint."
                )
            found[f"layers.{match[1]}.{TRIMKV_PARTS[match[2]]}"] = tensor
        return found

    gate = GateConfig(kind="retention", hidden=hidden, bias=0.0, covers="all", prefill="dense")
    geometry = _geometry(layers, heads, width)
    if isinstance(config.get("model_type"), str):
        geometry["model_type"] = config["model_type"]
    base = config.get("base_model")
    return Foreign(weights, geometry, gate, read, base if isinstance(base, str) else "")


def _unpickled(file: Path, raw: bytes, expected: str) -> Any:
    """Unpickle tensors, and nothing else."""
    try:
        return torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
    except Exception as error:  # a pickle may hold anything
        raise ExportError(f"{file}: cannot be read as tensors ({error}): expected {expected}.") from error


def _geometry(layers: int, heads: int, width: int) -> dict[str, Any]:
    return {"num_layers": layers, "num_kv_heads": heads, "hidden_size": width, "windowed_layers": []}


def _check_sizes(file: Path, sizes: Mapping[str, Any]) -> None:
    """Refuse sizes that are no numbers, or whose memory nothing would bound."""
    for name, size in sizes.items():
        most = MOST_LAYERS if name in ("n_modules", "layers", "num_hidden_layers") else MOST
        if type(size) is not int or not 1 <= size <= most:
            raise ExportError(f"{file}: {name}={size!r:.80}: expected a whole number from 1 to {most}; copy it again.")


@functools.lru_cache(maxsize=16)
def _digest(file: Path, size: int, changed: int) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()

"""Exported gates: a folder that is whole or absent, and that is checked from end to end when it loads.

- ``gates.safetensors``: the weights, float32, or eight bits: each matrix as int8 with a float32 scale for each row;
- ``gate_config.json``: schema, versions, base model, gate configuration, measurements, hashes (ag.gates.manifest);
- ``adapter/``: the LoRA adapter in PEFT's own format, where one was trained (ag.gates.adapters);
- ``README.md``: a model card (ag.gates.card), with ``figure.png`` where one was drawn.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import safetensors.torch
import torch
from torch import Tensor
from transformers import PretrainedConfig

from ag.config.exports import StrPath
from ag.config.gate import GateConfig
from ag.gates.adapters import (
    adapter_checksum,
    adapter_of,
    adapter_path,
    check_adapter,
    check_mergeable,
    is_merged,
    load_adapter,
    save_adapter,
    save_merged,
    write_adapter,
)
from ag.gates.calibration import Calibration
from ag.gates.card import model_card
from ag.gates.folder import (
    MEGABYTE,
    check_base,
    check_finite,
    check_replaceable,
    local,
    parse,
    read,
    read_info,
    staged,
    upload,
    write,
)
from ag.gates.foreign import recognise
from ag.gates.manifest import (
    ADAPTER,
    ADAPTER_FILES,
    CALIBRATION,
    CARD,
    CONFIG,
    FIGURE,
    PRECISION,
    SCHEMA_VERSION,
    WEIGHTS,
    ExportError,
    check_keys,
    checksum,
    minor,
    validate,
)
from ag.model.geometry import fingerprint
from ag.versions import versions

if TYPE_CHECKING:
    from peft import PeftModel

__all__ = [
    "ExportError",
    "adapter_checksum",
    "adapter_path",
    "check",
    "is_merged",
    "load",
    "load_adapter",
    "local",
    "push",
    "read_info",
    "save",
    "save_adapter",
    "save_merged",
]

FILES = frozenset({WEIGHTS, CONFIG, CARD, FIGURE, ADAPTER})
SCALE, LARGEST = ".scale", 127  # of a matrix in eight bits: the name of its scales, its largest step
Gates = Any  #: :class:`ag.gates.gate.AttentionGates`, whose module reads and writes by this one


def save(
    path: StrPath,
    gates: Gates,
    *,
    base_model: str = "",
    base_revision: str | None = None,
    adapter: PeftModel | None = None,
    metrics: Mapping[str, float] | None = None,
    figure: StrPath | None = None,
    weights: Literal["float32", "int8"] = "float32",
) -> None:
    """Write an export, or replace one; the folder takes its name only when all of it is on disk.

    One process at a time may write to a path. A process that is killed leaves the earlier export under its
    name; or, in the instant between two renames, under a hidden name from which the next export restores it.

    Args:
        path: folder to write.
        gates: the gates, of any floating type and on any device.
        base_model: hub id or folder of the base model, for the reader.
        base_revision: git revision of a hub model.
        adapter: the model with a LoRA adapter named ``default`` that was trained with the gates.
        metrics: numbers for the model card; ``kept`` is the measured share of prompt entries that stay.
        figure: a PNG for the model card.
        weights: data type of the matrices in the file; int8 takes a quarter of the space.

    Raises:
        ExportError: when something else is in the way, a weight is not finite, or the disk refuses; an
            earlier export stays as it was.
        OSError: when the figure cannot be read.
    """
    target = Path(path).resolve()
    check_replaceable(target, FILES, CONFIG)
    picture = None if figure is None else Path(figure).read_bytes()
    tensors = {name: tensor.detach().float().cpu().contiguous() for name, tensor in gates.state_dict().items()}
    check_finite(target / WEIGHTS, tensors)
    with staged(target) as folder:
        packed = pack(tensors) if weights == "int8" else tensors
        sha256 = {WEIGHTS: write(folder / WEIGHTS, safetensors.torch.save(packed))}
        if adapter is not None:
            sha256 |= write_adapter(adapter, folder, base_model)
        if picture is not None:
            write(folder / FIGURE, picture)
        info = _info(target, gates, sha256, base_model, base_revision, metrics or {}, weights)
        write(folder / CARD, model_card(info, FIGURE if picture else None).encode())
        write(folder / CONFIG, (json.dumps(info, indent=2) + "\n").encode())


def _info(
    target: Path,
    gates: Gates,
    sha256: dict[str, str],
    base_model: str = "",
    base_revision: str | None = None,
    metrics: Mapping[str, float] | None = None,
    weights: str = "float32",
) -> dict[str, Any]:
    """Return the content of ``gate_config.json``, checked as a reader will."""
    measured = {name: float(value) for name, value in (metrics or {}).items()}
    numbers = {name: value if math.isfinite(value) else None for name, value in measured.items()}
    info: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "versions": versions("ag", "torch", "transformers", "peft", "safetensors"),
        "base_model": {"name": base_model, "revision": base_revision, "fingerprint": gates.fingerprint},
        "gate": asdict(gates.config),
        "keep_rate": numbers.pop("kept", None),
        "metrics": numbers,
        "sha256": sha256,
        ADAPTER: [],  # exports before had a record here
        CALIBRATION: None if gates.calibration is None else gates.calibration.record(),
        PRECISION: weights,
    }
    info["checksum"] = checksum(info)
    validate(target / CONFIG, info)
    return info


def check(gates: Gates | None, adapter: PeftModel | None, *, path: StrPath | None = None, merge: bool = False) -> None:
    """Refuse what :func:`save`, :func:`save_adapter` or :func:`save_merged` would refuse, before it is trained.

    Without gates an adapter is written alone; ``path`` is a folder that is written or replaced, None a new one.

    Raises:
        ExportError: naming what cannot be exported.
    """
    target = Path("export" if path is None else path).resolve()
    if path is not None:
        check_replaceable(target, *((FILES, CONFIG) if gates is not None else ({ADAPTER}, ADAPTER)))
    if gates is not None:
        _info(target, gates, {WEIGHTS: ""})
    if adapter is not None:
        check_adapter(target, adapter)
    if merge and adapter is not None:
        check_mergeable(target, adapter)


def load(
    path: StrPath,
    make: Callable[[Mapping[str, Any], GateConfig], Gates],
    model_config: PretrainedConfig | None = None,
) -> Gates:
    """Read gates, strictly, in evaluation mode and on the CPU.

    Args:
        path: folder of an export, or of gates of another project (:mod:`ag.gates.foreign`).
        make: from the geometry of a model and a configuration to gates, whose weights are then read.
        model_config: configuration of the model they are for; None skips that comparison.

    Raises:
        ExportError: for anything that is not a whole and unchanged export, or one for another base model.
    """
    folder = local(path)
    info, other = read_info(folder), recognise(folder)
    if model_config is not None:
        check_base(folder, info, model_config)
    with torch.device("meta"):
        try:
            gates = make(info["base_model"]["fingerprint"], GateConfig(**info["gate"]))
        except ValueError as error:
            raise ExportError(f"{folder / CONFIG}: {error}") from error
    expected = {name: tensor.float() for name, tensor in gates.state_dict().items()}
    tensors = _weights(folder, info, expected) if other is None else other.tensors(expected)
    gates.load_state_dict(tensors, assign=True)
    if other is not None and model_config is not None:
        gates.fingerprint = fingerprint(model_config)  # which the checkpoint knows in part
    gates.adapter = adapter_of(folder, info)
    gates.calibration = None if info.get(CALIBRATION) is None else Calibration(**info[CALIBRATION])
    return gates.eval()


def _weights(folder: Path, info: Mapping[str, Any], expected: dict[str, Tensor]) -> dict[str, Tensor]:
    """Read ``gates.safetensors``, checked against its hash and the tensors that gates of this configuration have."""
    file = folder / WEIGHTS
    biases = [name for name in expected if name.endswith(".bias")]
    before = info["gate"]["kind"] == "mlp" and minor(info["schema_version"]) < 3  # without biases, which is with 0
    unwritten = {name: torch.zeros(expected.pop(name).shape) for name in biases} if before else {}
    stored = pack(expected) if info.get(PRECISION) == "int8" else expected
    most = sum(tensor.nbytes for tensor in stored.values()) + MEGABYTE
    tensors = parse(file, read(folder, WEIGHTS, info["sha256"][WEIGHTS], most))
    check_keys(file, tensors, stored)
    for name, tensor in tensors.items():
        found, wanted = ((x.dtype, tuple(x.shape)) for x in (tensor, stored[name]))
        if found != wanted:
            raise ExportError(f"{file}: {name} is {found}: expected {wanted} from {CONFIG}; export the gates again.")
    return unpack(tensors) | unwritten


def pack(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Round each finite float32 matrix to 127 steps of its row's largest absolute value; other tensors stay."""
    packed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() != 2:
            packed[name] = tensor
            continue
        scale = tensor.abs().amax(1) / LARGEST
        steps = tensor / scale.where(scale > 0, 1.0)[:, None]  # a row of zeros has scale 0
        packed[name], packed[name + SCALE] = steps.round().to(torch.int8), scale
    return packed


def unpack(packed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the float32 tensors that :func:`pack` rounded."""
    return {
        name: packed[name + SCALE][:, None] * tensor if name + SCALE in packed else tensor
        for name, tensor in packed.items()
        if not name.endswith(SCALE)
    }


def push(path: StrPath, repository: str) -> str:
    """Upload a finished export with its model card to the Hugging Face hub, with the user's own login.

    Args:
        path: folder of an export.
        repository: hub id, such as ``name/gates``; a new one is private.

    Returns:
        The address of the upload.

    Raises:
        ExportError: the folder is no whole export, or the hub refuses.
    """
    folder = local(path)
    read(folder, WEIGHTS, read_info(path)["sha256"][WEIGHTS])
    adapter = () if adapter_path(path) is None else ADAPTER_FILES
    return upload(folder, repository, [WEIGHTS, CONFIG, CARD, FIGURE, *adapter])

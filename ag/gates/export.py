"""Exported gates: a folder that is written completely or not at all, and checked when it loads.

- ``gates.safetensors``: the weights in float32, or in int8 with a float32 scale for each row of a matrix;
- ``gate_config.json``: schema, versions, base model, gate configuration, measurements, hashes (ag.gates.manifest);
- ``adapter/``: the LoRA adapter in PEFT's own format, if one was trained;
- ``README.md``: a model card (ag.gates.card), with ``figure.png`` if there is a figure.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import safetensors.torch
import torch
from huggingface_hub import HfApi
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ag.config.exports import StrPath
from ag.config.gate import GateConfig
from ag.errors import first_line
from ag.gates.adapters import ADAPTER_NAME, MERGED, adapter_of, check_files, check_type, check_written, layers_kept
from ag.gates.calibration import Calibration
from ag.gates.card import model_card
from ag.gates.folder import (
    HUB_ERRORS,
    MEGABYTE,
    check_base,
    check_finite,
    check_replaceable,
    parse,
    read,
    staged,
    write,
)
from ag.gates.folder import local as local
from ag.gates.folder import read_info as read_info
from ag.gates.foreign import detect_foreign
from ag.gates.manifest import (
    ADAPTER,
    ADAPTER_FILES,
    CALIBRATION,
    CARD,
    CONFIG,
    CONTENT,
    FIGURE,
    PRECISION,
    SCHEMA_VERSION,
    WEIGHTS,
    check_keys,
    checksum,
    minor_version,
    validate,
)
from ag.gates.manifest import ExportError as ExportError
from ag.model import base as models
from ag.model.geometry import fingerprint
from ag.model.quiet import quiet
from ag.versions import versions

if TYPE_CHECKING:
    from peft import PeftModel

FILES = frozenset({WEIGHTS, CONFIG, CARD, FIGURE, ADAPTER})
SCALE, LARGEST = ".scale", 127  # of an int8 matrix: suffix of the name of its scales, largest step
#: PEFT's errors for an adapter that does not fit, or whose configuration it does not support.
UNFIT = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, ImportError)
Gates = Any  # ag.gates.gate.AttentionGates, whose module imports this one


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
    """Write an export, or replace one. The folder gets its name only when all files are on disk.

    One process at a time may write to a path. If the process is killed, the earlier export stays under its name. If it
    is killed between two renames, the earlier export has a hidden name, and the next export restores it.

    Args:
        path: folder to write.
        gates: the gates, of any floating-point type and on any device.
        base_model: hub id or folder of the base model.
        base_revision: git revision of a hub model.
        adapter: the model with a LoRA adapter named ``default`` that was trained with the gates.
        metrics: numbers for the model card; ``kept`` is the measured share of prompt entries that are kept.
        figure: a PNG for the model card.
        weights: data type of the matrices in the file; int8 needs a quarter of the space.

    Raises:
        ExportError: the folder has other files, a weight is not finite, a buffer is not persistent, or the disk
            refuses. An earlier export stays unchanged.
        OSError: the figure cannot be read.
    """
    target = Path(path).resolve()
    check_replaceable(target, FILES, CONFIG)
    _check_buffers(target, gates)
    picture = None if figure is None else Path(figure).read_bytes()
    tensors = {name: tensor.detach().float().cpu().contiguous() for name, tensor in gates.state_dict().items()}
    check_finite(target / WEIGHTS, tensors)
    with staged(target) as folder:
        packed = quantise_weights(tensors) if weights == "int8" else tensors
        sha256 = {WEIGHTS: write(folder / WEIGHTS, safetensors.torch.save(packed))}
        if adapter is not None:
            sha256 |= write_adapter(adapter, folder, base_model)
        if picture is not None:
            write(folder / FIGURE, picture)
        info = _info(target, gates, sha256, base_model, base_revision, metrics or {}, weights)
        write(folder / CARD, model_card(info, FIGURE if picture else None, gates.decays).encode())
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
    """Return the content of ``gate_config.json``, validated."""
    if unknown := sorted(CONTENT["base_model"]["fingerprint"].keys() - gates.fingerprint.keys()):
        raise ExportError(
            f"{target}: the gates' checkpoint, of another project, does not tell {', '.join(unknown)} of its model: "
            "expected gates for a model; read them by AttentionGates.from_pretrained(PATH, model.config)."
        )
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
        ADAPTER: [],  # schema 1.1 had a record here
        CALIBRATION: None if gates.calibration is None else gates.calibration.record(),
        PRECISION: weights,
    }
    info["checksum"] = checksum(info)
    validate(target / CONFIG, info)
    return info


def check(gates: Gates | None, adapter: PeftModel | None, *, path: StrPath | None = None, merge: bool = False) -> None:
    """Raise the errors of :func:`save`, :func:`save_adapter` or :func:`save_merged` before a training run.

    Without gates the adapter is written alone. A ``path`` of None means that the folder is made later.
    """
    target = Path("export" if path is None else path).resolve()
    if path is not None:
        check_replaceable(target, *((FILES, CONFIG) if gates is not None else ({ADAPTER}, ADAPTER)))
    if gates is not None:
        _check_buffers(target, gates)
        _info(target, gates, {WEIGHTS: ""})
    if adapter is not None:
        check_adapter(target, adapter)
    if merge and adapter is not None:
        check_mergeable(target, adapter)


def _check_buffers(label: object, gates: Gates) -> None:
    """Refuse gates with a buffer that the file of weights does not hold."""
    saved = gates.state_dict()
    unsaved = next((name for name, _ in gates.named_buffers() if name not in saved), None)
    if unsaved is not None:
        raise ExportError(
            f"{label}: the gates' buffer {unsaved} is not persistent, so that an export does not hold it: expected "
            "buffers that are saved; make it persistent (register_buffer without persistent=False)."
        )


def load(
    path: StrPath,
    make: Callable[[Mapping[str, Any], GateConfig], Gates],
    model_config: PretrainedConfig | None = None,
) -> Gates:
    """Read gates, strictly, in evaluation mode and on the CPU.

    Args:
        path: folder of an export, or of gates of another project (:mod:`ag.gates.foreign`).
        make: makes gates for the geometry of a model and a configuration.
        model_config: configuration of the base model. None: the base model is not checked.

    Raises:
        ExportError: the export is incomplete, changed, or for another base model; or its kind of gate has a buffer
            that is not persistent.
    """
    folder = local(path)
    foreign = detect_foreign(folder)
    info = read_info(folder) if foreign is None else foreign.info()
    if model_config is not None:
        check_base(folder, info, model_config)
    with torch.device("meta"):
        try:
            gates = make(info["base_model"]["fingerprint"], GateConfig(**info["gate"]))
        except ValueError as error:
            raise ExportError(f"{folder / CONFIG}: {error}") from error
    _check_buffers(folder, gates)
    expected = {name: tensor.float() for name, tensor in gates.state_dict().items()}
    tensors = _weights(folder, info, expected) if foreign is None else foreign.tensors(expected)
    gates.load_state_dict(tensors, assign=True)
    if foreign is not None and model_config is not None:
        gates.fingerprint = fingerprint(model_config)  # the checkpoint has only a part of the geometry
    gates.adapter = adapter_of(folder, info)
    gates.calibration = None if info.get(CALIBRATION) is None else Calibration(**info[CALIBRATION])
    return gates.eval()


def _weights(folder: Path, info: Mapping[str, Any], expected: dict[str, Tensor]) -> dict[str, Tensor]:
    """Read ``gates.safetensors``, and check its hash, and its tensors against ``expected``."""
    file = folder / WEIGHTS
    biases = [name for name in expected if name.endswith(".bias")]
    without_biases = info["gate"]["kind"] == "mlp" and minor_version(info["schema_version"]) < 3  # had no biases
    unwritten = {name: torch.zeros(expected.pop(name).shape) for name in biases} if without_biases else {}
    stored = quantise_weights(expected) if info[PRECISION] == "int8" else expected
    max_bytes = sum(tensor.nbytes for tensor in stored.values()) + MEGABYTE
    tensors = parse(file, read(folder, WEIGHTS, info["sha256"][WEIGHTS], max_bytes))
    check_keys(file, tensors, stored)
    for name, tensor in tensors.items():
        actual, required = ((x.dtype, tuple(x.shape)) for x in (tensor, stored[name]))
        if actual != required:
            raise ExportError(f"{file}: {name} is {actual}: expected {required} from {CONFIG}; export the gates again.")
    return dequantise_weights(tensors) | unwritten


def quantise_weights(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Round each finite float32 matrix to 127 steps of its row's largest absolute value; keep other tensors.

    Raises:
        ExportError: another tensor has the name of a matrix's scales.
    """
    packed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() != 2:
            packed[name] = tensor
            continue
        if name + SCALE in tensors:
            raise ExportError(
                f"export.weights=int8: the gates have a tensor {name}{SCALE}, and the scales of {name} take that name: "
                "expected another one; rename it, or set export.weights=float32."
            )
        scale = tensor.abs().amax(1) / LARGEST
        steps = tensor / scale.where(scale > 0, 1.0)[:, None]  # a row of zeros has scale 0
        packed[name], packed[name + SCALE] = steps.round().to(torch.int8), scale
    return packed


def dequantise_weights(packed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the float32 tensors that :func:`quantise_weights` rounded."""
    # by the type, not the name: a gate may have its own tensor called scale
    scales = {name + SCALE for name, tensor in packed.items() if tensor.dtype == torch.int8}
    return {
        name: packed[name + SCALE][:, None] * tensor if name + SCALE in scales else tensor
        for name, tensor in packed.items()
        if name not in scales
    }


def push(path: StrPath, repository: str) -> str:
    """Upload an export to the Hugging Face hub, with the user's own login; returns its address.

    Args:
        path: folder of an export.
        repository: hub id, for example ``name/gates``; a new repository is private.

    Raises:
        ExportError: the export is incomplete, or the hub refuses.
    """
    folder = local(path)
    read(folder, WEIGHTS, read_info(path)["sha256"][WEIGHTS])
    files = [WEIGHTS, CONFIG, CARD, FIGURE, *(ADAPTER_FILES if adapter_path(path) else ())]
    try:
        hub = HfApi()
        hub.create_repo(repository, private=True, exist_ok=True)
        return str(hub.upload_folder(repo_id=repository, folder_path=str(folder), allow_patterns=files))
    except HUB_ERRORS as error:
        raise ExportError(
            f"export.push_to_hub={repository}: the hub refuses ({first_line(error)}): expected a repository that you "
            f"may write to; log in with `hf auth login`, then upload {folder}."
        ) from error


def is_adapter(path: StrPath) -> bool:
    """Whether a folder has a LoRA adapter and no gates, as :func:`save_adapter` writes it."""
    folder = local(path)
    return os.path.isdir(folder) and [entry.name for entry in folder.iterdir()] == [ADAPTER]


def adapter_checksum(path: StrPath) -> str:
    """Return a hash of the weights of an export, or of the folder of :func:`save_adapter`.

    Raises:
        ExportError: a file is missing or damaged.
    """
    if not is_adapter(path):
        return str(read_info(path)["checksum"])
    return hashlib.sha256(b"".join(read(local(path), name) for name in ADAPTER_FILES)).hexdigest()


def adapter_path(path: StrPath) -> Path | None:
    """Check the hashes of an export's LoRA adapter, and return its folder. None: the export has no adapter.

    Raises:
        ExportError: the export or its adapter is damaged.
    """
    if is_adapter(path):
        return local(path) / ADAPTER
    sha256 = read_info(path)["sha256"]
    files = [name for name in ADAPTER_FILES if name in sha256]
    for name in files:
        read(local(path), name, sha256[name])
    return local(path) / ADAPTER if files else None


def load_adapter(model: PreTrainedModel, path: StrPath, *, merge: bool = False) -> PeftModel | PreTrainedModel:
    """Load the LoRA adapter of an export into its base model, frozen.

    Args:
        model: the base model, which is changed in place.
        path: folder of an export, or of :func:`save_adapter`.
        merge: merge the adapter into the weights, and write its hash into the configuration; returns the plain model.

    Raises:
        ExportError: the export has no adapter, is damaged, or belongs to another base model. The model then has its own
            layers; an adapter that starts by changing their weights (pissa, olora, loftq) may have changed them.
        UserError: the model has the adapter already.
    """
    folder = adapter_path(path)
    if folder is None:
        raise ExportError(f"{path}: the export has no {ADAPTER} folder: expected one trained with train=gates+lora.")
    if not is_adapter(path):
        info = read_info(path)
        check_base(local(path), info, model.config)
        if adapter := adapter_of(local(path), info):
            adapter.check(model, times=0)
    names = check_files(local(path))
    with layers_kept(model):
        wrapped = _wrapped(model, folder, names)
    return _merged(wrapped, path) if merge else wrapped


def _wrapped(model: PreTrainedModel, folder: Path, names: set[str]) -> PeftModel:
    """Load an adapter into PEFT's layers.

    Args:
        model: the base model, whose layers PEFT replaces.
        folder: the folder ``adapter``.
        names: PEFT's names of the tensors in its file.

    Raises:
        ExportError: PEFT cannot load it, or the model needs other tensors.
    """
    import peft  # loads bitsandbytes, which only some models need

    try:
        with quiet():
            wrapped = peft.PeftModel.from_pretrained(model, str(folder)).eval()
    except UNFIT as error:  # other shapes, missing layers, settings that PEFT refuses
        raise ExportError(
            f"{folder}: PEFT cannot load it into this model ({first_line(error)}): expected the base model of the "
            "adapter and the files as exported; load that model, or copy the files again."
        ) from error
    expected_names = set(peft.get_peft_model_state_dict(wrapped, save_embedding_layers=False))
    mismatched = {"missing": sorted(expected_names - names), "unknown": sorted(names - expected_names)}
    if names != expected_names:
        differences = " and ".join(
            f"{len(x)} tensors are {state} ({x[0]}, ...)" for state, x in mismatched.items() if x
        )
        raise ExportError(
            f"{folder.parent / ADAPTER_FILES[1]}: {differences}: expected the tensors that {ADAPTER_FILES[0]} asks for "
            "in this model; copy the adapter again, or load its base model."
        )
    return wrapped


def _merged(model: PeftModel, path: StrPath) -> PreTrainedModel:
    """Merge the adapter into the weights, and write its hash into the configuration."""
    digest = hashlib.sha256(read(local(path), ADAPTER_FILES[1])).hexdigest()
    merged: PreTrainedModel = model.merge_and_unload(safe_merge=True)
    setattr(merged.config, MERGED, digest)
    return merged


def save_adapter(path: StrPath, adapter: PeftModel, *, base_model: str = "") -> None:
    """Write a LoRA adapter without gates to ``path/adapter``, completely or not at all.

    Args:
        path: folder to write, or to replace if it has only an adapter.
        adapter: the model with a LoRA adapter named ``default``.
        base_model: hub id or folder of the base model, for PEFT.

    Raises:
        ExportError: the folder has other files, a weight is not finite, or the disk refuses.
    """
    target = Path(path).resolve()
    check_replaceable(target, {ADAPTER}, ADAPTER)
    with staged(target) as folder:
        write_adapter(adapter, folder, base_model)


def write_adapter(adapter: PeftModel, folder: Path, base_model: str) -> dict[str, str]:
    """Write ``folder/adapter``; returns the hashes of its files by name."""
    check_adapter(folder, adapter)
    adapter.save_pretrained(str(folder / ADAPTER), selected_adapters=[ADAPTER_NAME], save_embedding_layers=False)
    (folder / ADAPTER / "README.md").unlink()  # PEFT's template
    config, weights = ADAPTER_FILES
    content = json.loads(read(folder, config)) | {"base_model_name_or_path": base_model or None}
    raw = read(folder, weights)
    parse(folder / weights, raw)
    digest = write(folder / config, json.dumps(content, indent=2).encode())
    return {config: digest, weights: hashlib.sha256(raw).hexdigest()}


def check_adapter(target: Path, adapter: PeftModel) -> None:
    """Refuse a model whose adapter is not LoRA, or with trained parameters or adapters that PEFT does not write."""
    from peft import get_peft_model_state_dict  # loads bitsandbytes, which only some models need

    if ADAPTER_NAME not in adapter.peft_config:
        raise ExportError(f"{target.name}: adapters {list(adapter.peft_config)}: expected one named {ADAPTER_NAME!r}.")
    peft_type: Any = adapter.peft_config[ADAPTER_NAME].peft_type
    check_type(f"{target.name}: the adapter {ADAPTER_NAME!r}", peft_type.value)
    check_written(target, adapter)
    written = {x.data_ptr() for x in get_peft_model_state_dict(adapter, save_embedding_layers=False).values()}
    unwritten = [name for name, x in adapter.named_parameters() if x.requires_grad and x.data_ptr() not in written]
    if unwritten:
        raise ExportError(
            f"{target.name}: {unwritten[0]} is trained, and PEFT does not write it with the adapter "
            f"({len(unwritten)} such parameters): expected LoRA on linear layers; name these, as "
            "lora.targets=[q_proj,k_proj,v_proj,o_proj]."
        )


def save_merged(model: PeftModel, path: StrPath, tokenizer: PreTrainedTokenizerBase, source: StrPath) -> None:
    """Write a full copy of the base model with the adapter merged into it, completely or not at all.

    The adapter is merged into ``model`` itself, which cannot be trained afterwards. The copy's configuration has the
    hash of the adapter.

    Args:
        model: base model with its adapter.
        path: folder to write; it must not exist, or be empty.
        tokenizer: saved beside the weights.
        source: export, or folder of :func:`save_adapter`, with this adapter.

    Raises:
        ExportError: the base is quantised, the folder is not empty, or the disk refuses.
    """
    target = Path(path).resolve()
    check_mergeable(target, model)
    check_replaceable(target, frozenset(), "")
    with staged(target) as folder:
        _merged(model, source).save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def is_merged(path: StrPath, model: str, revision: str | None = None) -> bool:
    """Whether the adapter of an export is merged into a model, by the model's configuration."""
    try:
        values, _ = PretrainedConfig.get_config_dict(models.resolve(model, revision), revision=revision)
    except OSError:
        return False
    return bool(values.get(MERGED) == read_info(path)["sha256"][ADAPTER_FILES[1]])


def check_mergeable(target: Path, model: PeftModel) -> None:
    """Refuse a quantised base model."""
    if getattr(model.get_base_model().config, "quantization_config", None) is not None:
        raise ExportError(
            f"{target}: the base model is quantised: expected full-precision weights to merge into; "
            "set export.merge=false, or load the base with model.quantization=none."
        )

"""Folders of exports, local and on the hub: written completely or not at all, read with their hashes."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled
from safetensors import SafetensorError
from torch import Tensor
from transformers import PretrainedConfig

from ag.config.exports import StrPath, export_folder, hidden_sibling, missing_export_error, on_hub
from ag.errors import first_line
from ag.files import fsync
from ag.gates.foreign import MODEL_CONFIG, detect_foreign, weights_of
from ag.gates.manifest import ADAPTER, CARD, CONFIG, FIGURE, WEIGHTS, ExportError, validate
from ag.model.geometry import fingerprint

MEGABYTE = 1 << 20
HUB_ERRORS = (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, LocalTokenNotFoundError, OSError)


def local(path: StrPath) -> Path:
    """Return the folder of an export: a local folder, the folder of shipped gates, or a download from the hub.

    An existing folder takes precedence. A single name, for example ``smollm2``, then means shipped gates. ``ORG/NAME``
    and ``ORG/NAME:REVISION`` mean the hub, unless a folder ``ORG`` exists.

    Raises:
        ExportError: the export is not on the hub, or the hub cannot be reached.
    """
    hub_id = on_hub(path)
    return export_folder(path) if hub_id is None else download(hub_id["repository"], hub_id["revision"])


@functools.cache
def download(repository: str, revision: str | None) -> Path:
    """Download an export of the hub once; returns the local folder. A ``revision`` of None means the newest one."""
    wanted = [WEIGHTS, CONFIG, CARD, FIGURE, MODEL_CONFIG, f"{ADAPTER}/*"]
    try:
        folder = Path(snapshot_download(repository, revision=revision, allow_patterns=wanted))
        if (weights := weights_of(folder)) is not None:  # only now: elsewhere this file may be a language model
            folder = Path(snapshot_download(repository, revision=revision, allow_patterns=[*wanted, weights]))
        return folder
    except HUB_ERRORS as error:
        at = "" if revision is None else f" at {revision}"
        raise ExportError(
            f"{repository}{at}: no such folder, and not on the hub ({first_line(error)}): expected the folder of an "
            "export, or ORG/NAME or ORG/NAME:REVISION of one on the hub."
        ) from error


def read_info(path: StrPath) -> dict[str, Any]:
    """Return the validated content of ``gate_config.json``; for gates of another project, its keys.

    Raises:
        ExportError: the file is missing, damaged, or of another schema.
    """
    folder = local(path)
    if (foreign := detect_foreign(folder)) is not None:
        return foreign.info()
    if message := missing_export_error(folder):
        raise ExportError(message)
    file, raw = folder / CONFIG, read(folder, CONFIG, limit=MEGABYTE)
    try:
        info = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ExportError(f"{file}: not JSON ({error}): expected the file as exported; copy it again.") from error
    return validate(file, info)


def check_base(folder: Path, info: dict[str, Any], model_config: PretrainedConfig) -> None:
    """Refuse a model whose geometry differs from the export's."""
    gate_geometry, model_geometry = info["base_model"]["fingerprint"], fingerprint(model_config)
    differing = [name for name in gate_geometry if gate_geometry[name] != model_geometry[name]]
    if differing:
        expected, actual = (
            {name: geometry[name] for name in differing} for geometry in (gate_geometry, model_geometry)
        )
        name = info["base_model"]["name"] or "a model"
        raise ExportError(
            f"{folder}: made for {name} with {expected}, this model has {actual}: load the base of the gates."
        )


def check_replaceable(target: Path, allowed: Set[str], required: str) -> None:
    """Refuse a folder with files that are not ``allowed``, or with files but without the ``required`` one."""
    if not target.exists():
        return
    names = {entry.name for entry in target.iterdir()} if target.is_dir() else {target.name}
    if names and (required not in names or names - allowed):
        foreign = ", ".join(sorted(names - allowed or names)[:3])
        raise ExportError(
            f"{target}: has files that are not of an export ({foreign}): move them away, or choose another path."
        )


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """Yield a hidden folder beside ``target``. It replaces ``target`` after the block, once its files are on disk."""
    new, old = hidden_sibling(target, "new"), hidden_sibling(target, "old")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _restore(old, target)
        for leftover in (new, old):
            if leftover.exists():
                shutil.rmtree(leftover)
        new.mkdir()
        yield new
        for entry in (*new.rglob("*"), new):
            fsync(entry)
        if target.exists():
            os.rename(target, old)
        os.rename(new, target)
        fsync(target.parent)
    except (OSError, SafetensorError) as error:
        raise ExportError(
            f"{target}: the export could not be written ({error}): expected a disk with room and permission; "
            "free some, or choose another path."
        ) from error
    finally:
        _restore(old, target)
        shutil.rmtree(new, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def _restore(old: Path, target: Path) -> None:
    """Restore the name of an earlier export if the process failed between the two renames."""
    if old.exists() and not target.exists():
        os.rename(old, target)


def write(file: Path, data: bytes) -> str:
    """Write a file; returns the sha256 of its content."""
    file.write_bytes(data)
    return hashlib.sha256(data).hexdigest()


def read(folder: Path, name: str, sha256: str | None = None, limit: int | None = None) -> bytes:
    """Read a file of a folder.

    Raises:
        ExportError: the file is missing, has another hash or more than ``limit`` bytes, or is a link out of the folder.
    """
    file = folder / name
    try:
        if not file.is_file():
            raise ExportError(f"{file}: no such file: expected a whole export; copy the folder again.")
        real, size, inside = file.resolve(), file.stat().st_size, folder.resolve()
        blobs = inside.parents[1] / "blobs" if inside.parent.name == "snapshots" else inside  # files of the hub's cache
        if not real.is_relative_to(inside) and not real.is_relative_to(blobs):
            raise ExportError(f"{file}: a link to {real}: expected a file inside the export; copy it there.")
        if limit is not None and size > limit:
            raise ExportError(f"{file}: {size} bytes: expected at most {limit}; copy the file again.")
        raw = file.read_bytes()
    except OSError as error:
        raise ExportError(f"{file}: cannot be read ({error}): expected a readable file; check it.") from error
    if sha256 is not None and (digest := hashlib.sha256(raw).hexdigest()) != sha256:
        raise ExportError(f"{file}: sha256 {digest}: expected {sha256}; the file was damaged, copy it again.")
    return raw


def parse(file: Path, raw: bytes) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, and refuse numbers that are not finite."""
    try:
        tensors = safetensors.torch.load(raw)
    except (SafetensorError, KeyError) as error:
        raise ExportError(
            f"{file}: not safetensors ({error}): expected the file as exported; copy it again."
        ) from error
    check_finite(file, tensors)
    return tensors


def check_finite(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors with a number that is not finite."""
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise ExportError(f"{file}: {name} has NaN or infinite values: expected finite weights; train again.")

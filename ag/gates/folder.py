"""Folders of exports, local and on the hub: written whole or not at all, read with their hashes."""

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

from ag.config.exports import StrPath, absence, here, on_hub, sibling
from ag.errors import first_line
from ag.files import fsync
from ag.gates.foreign import MODEL_CONFIG, recognise, weights_of
from ag.gates.manifest import ADAPTER, CARD, CONFIG, FIGURE, WEIGHTS, ExportError, validate
from ag.model.geometry import fingerprint

MEGABYTE = 1 << 20
REFUSALS = (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, LocalTokenNotFoundError, OSError)  # of the hub


def local(path: StrPath) -> Path:
    """Return the folder of an export: the path, that of shipped gates, or the download of an export of the hub.

    A single name, such as ``smollm2``, means shipped gates if there is no such folder. ``ORG/NAME`` and
    ``ORG/NAME:REVISION`` are of the hub if there is neither such a folder nor a folder ``ORG``.

    Raises:
        ExportError: the hub has no such export, or cannot be reached.
    """
    found = on_hub(path)
    return here(path) if found is None else download(found["repository"], found["revision"])


@functools.cache
def download(repository: str, revision: str | None) -> Path:
    """Download an export of the hub once, in its newest revision by default; returns the local folder."""
    wanted = [WEIGHTS, CONFIG, CARD, FIGURE, MODEL_CONFIG, f"{ADAPTER}/*"]
    try:
        folder = Path(snapshot_download(repository, revision=revision, allow_patterns=wanted))
        if (weights := weights_of(folder)) is not None:  # elsewhere they may be those of a language model
            folder = Path(snapshot_download(repository, revision=revision, allow_patterns=[*wanted, weights]))
        return folder
    except REFUSALS as error:
        at = "" if revision is None else f" at {revision}"
        raise ExportError(
            f"{repository}{at}: no such folder, and not on the hub ({first_line(error)}): expected the folder of an "
            "export, or ORG/NAME or ORG/NAME:REVISION of one on the hub."
        ) from error


def read_info(path: StrPath) -> dict[str, Any]:
    """Return the validated content of ``gate_config.json``, or the same keys for gates of another project.

    Raises:
        ExportError: when it is missing, damaged, or of another schema.
    """
    folder = local(path)
    if (other := recognise(folder)) is not None:
        return other.info()
    if said := absence(folder):
        raise ExportError(said)
    file, raw = folder / CONFIG, read(folder, CONFIG, limit=MEGABYTE)
    try:
        info = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ExportError(f"{file}: not JSON ({error}): expected the file as exported; copy it again.") from error
    return validate(file, info)


def check_base(folder: Path, info: dict[str, Any], model_config: PretrainedConfig) -> None:
    """Refuse a model whose geometry differs from that of the export."""
    theirs, ours = info["base_model"]["fingerprint"], fingerprint(model_config)
    wrong = [name for name in theirs if theirs[name] != ours[name]]
    if wrong:
        base, this = ({name: side[name] for name in wrong} for side in (theirs, ours))
        name = info["base_model"]["name"] or "a model"
        raise ExportError(f"{folder}: made for {name} with {base}, this model has {this}: load the base of the gates.")


def check_replaceable(target: Path, known: Set[str], needed: str) -> None:
    """Refuse a folder with files outside of ``known``, or with files but without ``needed``."""
    if not target.exists():
        return
    names = {entry.name for entry in target.iterdir()} if target.is_dir() else {target.name}
    if names and (needed not in names or names - known):
        foreign = ", ".join(sorted(names - known or names)[:3])
        raise ExportError(f"{target}: has files that are not of an export ({foreign}): choose another path.")


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """Yield a hidden folder beside ``target`` that takes its name once it is filled and on disk."""
    new, old = sibling(target, "new"), sibling(target, "old")
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
    """Restore the name of an earlier export after a failure or a kill between the two renames."""
    if old.exists() and not target.exists():
        os.rename(old, target)


def write(file: Path, data: bytes) -> str:
    """Write a file; returns the sha256 of its content."""
    file.write_bytes(data)
    return hashlib.sha256(data).hexdigest()


def read(folder: Path, name: str, sha256: str | None = None, limit: int | None = None) -> bytes:
    """Read a file of a folder.

    Raises:
        ExportError: when it is missing, has another hash or more than ``limit`` bytes, or is a link to another place.
    """
    file = folder / name
    try:
        if not file.is_file():
            raise ExportError(f"{file}: no such file: expected a whole export; copy the folder again.")
        real, size, inside = file.resolve(), file.stat().st_size, folder.resolve()
        blobs = inside.parents[1] / "blobs" if inside.parent.name == "snapshots" else inside  # of the hub's cache
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
    """Return the tensors of a safetensors file, whose numbers are finite."""
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

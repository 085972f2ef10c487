"""Exported gates: a folder that is whole or absent, and that is checked from end to end when it loads.

- ``gates.safetensors``: the weights, float32, or eight bits (ag.gates.packed);
- ``gate_config.json``: schema, versions, base model, gate configuration, measurements, hashes (ag.gates.manifest);
- ``adapter/``: the LoRA adapter in PEFT's own format, where one was trained;
- ``README.md``: a model card (ag.gates.card), with ``figure.png`` where one was drawn.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ag.config.gate import GateConfig
from ag.config.keys import nearest
from ag.config.recipes import RECIPES
from ag.files import fsync
from ag.gates import adapted, packed
from ag.gates.adapted import Adapter
from ag.gates.calibration import Calibration
from ag.gates.card import merged_card, model_card
from ag.gates.download import download
from ag.gates.manifest import (
    ADAPTER,
    ADAPTER_FILES,
    BEFORE_1_2,
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
from ag.model import base as models
from ag.model.geometry import fingerprint
from ag.model.quiet import quiet
from ag.versions import versions

if TYPE_CHECKING:
    from peft import PeftModel

__all__ = [
    "ExportError",
    "adapter_path",
    "check",
    "is_merged",
    "load",
    "load_adapter",
    "local",
    "read_info",
    "save",
    "save_adapter",
    "save_merged",
]

VERSIONS = versions("ag", "torch", "transformers", "peft", "safetensors")
FILES = frozenset({WEIGHTS, CONFIG, CARD, FIGURE, ADAPTER})
MEGABYTE = 1 << 20
SHIPPED = RECIPES / "gates"
HUB_ID = re.compile(r"(?P<repository>\w[\w.-]*/\w[\w.-]*)(:(?P<revision>\S+))?")

StrPath = str | os.PathLike[str]


class Gates(nn.Module):
    """What is exported: modules of the gates, their configuration and the geometry of their model."""

    config: GateConfig
    fingerprint: dict[str, Any]
    adapter: Adapter | None
    calibration: Calibration | None


G = TypeVar("G", bound=Gates)


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
    _check_replaceable(target, FILES, CONFIG)
    picture = None if figure is None else Path(figure).read_bytes()
    tensors = {name: tensor.detach().float().cpu().contiguous() for name, tensor in gates.state_dict().items()}
    _check_finite(target / WEIGHTS, tensors)
    written = packed.pack(tensors) if weights == "int8" else tensors
    with _staged(target) as folder:
        sha256 = {WEIGHTS: _write(folder / WEIGHTS, safetensors.torch.save(written))}
        if adapter is not None:
            sha256 |= _save_adapter(adapter, folder, base_model)
        if picture is not None:
            _write(folder / FIGURE, picture)
        base = {"name": base_model, "revision": base_revision, "fingerprint": gates.fingerprint}
        info = _info(target, gates, adapter, base_model=base, metrics=metrics or {}, sha256=sha256, weights=weights)
        _write(folder / CARD, model_card(info, FIGURE if picture else None).encode())
        _write(folder / CONFIG, (json.dumps(info, indent=2) + "\n").encode())


def _info(
    target: Path,
    gates: Gates,
    adapter: PeftModel | None,
    *,
    base_model: dict[str, Any],
    metrics: Mapping[str, float],
    sha256: dict[str, str],
    weights: str,
) -> dict[str, Any]:
    """Return the content of ``gate_config.json``, checked as a reader will."""
    measured = {name: float(value) for name, value in metrics.items()}
    numbers = {name: value if math.isfinite(value) else None for name, value in measured.items()}
    info = {
        "schema_version": SCHEMA_VERSION,
        "versions": VERSIONS,
        "base_model": base_model,
        "gate": asdict(gates.config),
        "keep_rate": numbers.pop("kept", None),
        "metrics": numbers,
        "sha256": sha256,
        "adapter": [] if adapter is None else adapted.record(adapter),
        CALIBRATION: None if gates.calibration is None else gates.calibration.record(),
        PRECISION: weights,
    }
    info["checksum"] = checksum(info)
    validate(target / CONFIG, info)
    return info


def check(gates: Gates | None, adapter: PeftModel | None, *, path: StrPath | None = None, merge: bool = False) -> None:
    """Refuse what :func:`save`, :func:`save_adapter` or :func:`save_merged` would refuse, before it is trained.

    Args:
        gates: the gates; None: an adapter alone.
        adapter: the model with its LoRA adapter, or None.
        path: folder that will be written or replaced; None: a new one.
        merge: whether a copy of the model with the adapter merged into it is wanted.

    Raises:
        ExportError: naming what cannot be exported.
    """
    target = Path("export" if path is None else path).resolve()
    if path is not None:
        _check_replaceable(target, *((FILES, CONFIG) if gates is not None else ({ADAPTER}, ADAPTER)))
    if gates is not None:
        base = {"name": "", "revision": None, "fingerprint": gates.fingerprint}
        sha256 = dict.fromkeys((WEIGHTS, *(() if adapter is None else ADAPTER_FILES)), "")
        _info(target, gates, adapter, base_model=base, metrics={}, sha256=sha256, weights="float32")
    if adapter is not None:
        _check_adapter(target, adapter)
    if merge and adapter is not None:
        _check_mergeable(target, adapter)


def load(
    path: StrPath, make: Callable[[Mapping[str, Any], GateConfig], G], model_config: PretrainedConfig | None = None
) -> G:
    """Read gates, strictly, in evaluation mode and on the CPU.

    Args:
        path: folder of an export.
        make: from the geometry of a model and a configuration to gates, whose weights are then read.
        model_config: configuration of the model they are for; None skips that comparison.

    Raises:
        ExportError: for anything that is not a whole and unchanged export, or one for another base model.
    """
    folder = local(path)
    info, file = read_info(folder), folder / WEIGHTS
    if model_config is not None:
        _check_base(folder, info, model_config)
    with torch.device("meta"):
        try:
            gates = make(info["base_model"]["fingerprint"], GateConfig(**info["gate"]))
        except ValueError as error:
            raise ExportError(f"{folder / CONFIG}: {error}") from error
    expected = gates.state_dict()
    biases = [name for name in expected if name.endswith(".bias")]
    before = gates.config.kind == "mlp" and minor(info["schema_version"]) < 3  # without biases, which is with 0
    unwritten = {name: torch.zeros(expected.pop(name).shape) for name in biases} if before else {}
    plain = {name: (torch.float32, tuple(tensor.shape)) for name, tensor in expected.items()}
    stored = packed.shapes(expected) if info.get(PRECISION) == "int8" else plain
    size = sum(dtype.itemsize * math.prod(shape) for dtype, shape in stored.values())
    raw = _read(folder, WEIGHTS, size + MEGABYTE)
    whole = 8 + int.from_bytes(raw[:8], "little") + size  # size of the header, header, weights
    if len(raw) < whole:
        raise ExportError(f"{file}: {len(raw)} bytes: expected {whole}; it was truncated, copy it again.")
    _check_hash(file, raw, info["sha256"][WEIGHTS])
    tensors = _parse(file, raw)
    check_keys(file, tensors, stored)
    for name, tensor in tensors.items():
        found, wanted = (tensor.dtype, tuple(tensor.shape)), stored[name]
        if found != wanted:
            raise ExportError(f"{file}: {name} is {found}: expected {wanted} from {CONFIG}; export the gates again.")
    _check_finite(file, tensors)
    gates.load_state_dict(packed.unpack(tensors) | unwritten, assign=True)
    gates.adapter = _adapter(folder, info)
    gates.calibration = None if info.get(CALIBRATION) is None else Calibration(**info[CALIBRATION])
    return gates.eval()


def _adapter(folder: Path, info: dict[str, Any]) -> Adapter | None:
    """Read the export's record of its adapter, and the adapter's weights."""
    name = ADAPTER_FILES[1]
    if name not in info["sha256"]:
        return None
    raw = _read(folder, name)
    _check_hash(folder / name, raw, info["sha256"][name])
    try:
        return adapted.read(str(folder), info["sha256"][name], info.get(ADAPTER, []), _parse(folder / name, raw))
    except KeyError as error:
        raise ExportError(
            f"{folder / CONFIG}: adapter names {error}, which {name} lacks; copy the folder again."
        ) from None


def local(path: StrPath) -> Path:
    """Return the folder of an export: the path, a shipped one, or where an export of the hub was downloaded to.

    A single name, such as ``smollm2``, is that of shipped gates where there is no such folder. ``ORG/NAME`` and
    ``ORG/NAME:REVISION`` are of the hub where there is neither such a folder nor a folder ``ORG``.

    Raises:
        ExportError: the hub has no such export, or cannot be reached.
    """
    folder, found = Path(path), HUB_ID.fullmatch(str(path))
    if folder.exists():
        return folder
    if (SHIPPED / str(path) / CONFIG).is_file() and len(folder.parts) == 1:
        return SHIPPED / str(path)
    if found is None or Path(found["repository"]).parent.exists():
        return folder
    return download(found["repository"], found["revision"])


def shipped() -> list[str]:
    """Return the names of the exports that come with the package."""
    return sorted(entry.parent.name for entry in SHIPPED.glob(f"*/{CONFIG}"))


def read_info(path: StrPath) -> dict[str, Any]:
    """Return the validated content of ``gate_config.json``.

    Raises:
        ExportError: when it is missing, damaged, or of another schema.
    """
    folder = local(path)
    file = folder / CONFIG
    if not folder.is_dir():
        old = _sibling(folder.resolve(), "old")
        hint = f"; a killed export left the earlier one in {old}: rename it back" if old.is_dir() else ""
        hint += nearest(folder.name, shipped()) if len(folder.parts) == 1 else ""
        raise ExportError(f"{folder}: no such folder: expected an export with {WEIGHTS} and {CONFIG}{hint}.")
    raw = _read(folder, CONFIG, MEGABYTE)
    try:
        info = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ExportError(f"{file}: not JSON ({error}): expected the file as exported; copy it again.") from error
    validate(file, info)
    return {**info, "gate": BEFORE_1_2 | info["gate"]}


def is_adapter(path: StrPath) -> bool:
    """Whether a folder holds a LoRA adapter and no gates, as :func:`save_adapter` writes it."""
    folder = local(path)
    return folder.is_dir() and [entry.name for entry in folder.iterdir()] == [ADAPTER]


def adapter_checksum(path: StrPath) -> str:
    """Return a hash of an export, or of the folder of :func:`save_adapter`: other weights have another one.

    Raises:
        ExportError: when something is missing or damaged.
    """
    if not is_adapter(path):
        return str(read_info(path)["checksum"])
    return hashlib.sha256(b"".join(_read(local(path), name) for name in ADAPTER_FILES)).hexdigest()


def adapter_path(path: StrPath) -> Path | None:
    """Return the folder of an export's LoRA adapter, its files verified; None when it has none.

    Of a folder of :func:`save_adapter`, which has no hashes, the files are not verified.

    Raises:
        ExportError: when the export or its adapter is damaged.
    """
    if is_adapter(path):
        return local(path) / ADAPTER
    sha256 = read_info(path)["sha256"]
    if len(sha256) == 1:
        return None
    for name in ADAPTER_FILES:
        _check_hash(local(path) / name, _read(local(path), name), sha256[name])
    return local(path) / ADAPTER


def load_adapter(model: PreTrainedModel, path: StrPath, *, merge: bool = False) -> PeftModel | PreTrainedModel:
    """Put an export's LoRA adapter on its base model, frozen.

    Args:
        model: the base model; it is changed in place.
        path: folder of an export, or one of :func:`save_adapter`.
        merge: return the plain model with the adapter merged into its weights.

    Raises:
        ExportError: when the export has no adapter, is damaged, or belongs to another base model.
        UserError: when the model has the adapter already.
    """
    import peft  # loads bitsandbytes, which only some models need

    folder = adapter_path(path)
    if folder is None:
        raise ExportError(f"{path}: the export has no {ADAPTER} folder: expected one trained with train=gates+lora.")
    if not is_adapter(path):
        info = read_info(path)
        _check_base(local(path), info, model.config)
        if adapter := _adapter(local(path), info):
            adapter.check(model, times=0)
    try:
        with quiet():
            wrapped = peft.PeftModel.from_pretrained(model, str(folder)).eval()
    except (RuntimeError, ValueError) as error:  # other shapes, or none of the layers
        raise ExportError(
            f"{folder}: it does not fit this model ({str(error).splitlines()[0]}): expected the base model that the "
            "adapter was trained on; load that one."
        ) from error
    return wrapped.merge_and_unload(safe_merge=True) if merge else wrapped


def save_merged(model: PeftModel, path: StrPath, tokenizer: PreTrainedTokenizerBase, source: StrPath) -> None:
    """Write a full copy of the base model with the adapter merged into it; whole or absent, as :func:`save`.

    The adapter is merged into ``model`` itself, which cannot be trained afterwards. The copy names its adapter: in its
    configuration by hash, in its README in words.

    Args:
        model: base model with its adapter.
        path: folder to write; it must not exist, or be empty.
        tokenizer: saved beside the weights.
        source: the export, or the folder of :func:`save_adapter`, that holds the same adapter.

    Raises:
        ExportError: for a quantised base, a folder that is not empty, or a disk that refuses.
    """
    target = Path(path).resolve()
    _check_mergeable(target, model)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ExportError(
            f"{target}: the path exists: expected a new or empty folder; remove it or choose another path."
        )
    digest = hashlib.sha256(_read(Path(source), ADAPTER_FILES[1])).hexdigest()
    with _staged(target) as folder:
        merged = model.merge_and_unload(safe_merge=True)
        setattr(merged.config, adapted.MERGED, digest)
        merged.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        _write(folder / CARD, merged_card(Path(source).resolve().name, digest).encode())


def is_merged(path: StrPath, model: str, revision: str | None = None) -> bool:
    """Whether the configuration of a model says that the adapter of an export is merged into it.

    Args:
        path: folder of an export with an adapter.
        model: hub id, folder or alias.
        revision: git revision of a hub model.
    """
    try:
        values, _ = PretrainedConfig.get_config_dict(models.resolve(model, revision), revision=revision)
    except OSError:
        return False
    return bool(values.get(adapted.MERGED) == read_info(path)["sha256"][ADAPTER_FILES[1]])


def save_adapter(path: StrPath, adapter: PeftModel, *, base_model: str = "") -> None:
    """Write a LoRA adapter without gates, into ``path/adapter``; whole or absent, as :func:`save`.

    Args:
        path: folder to write, or to replace when it holds nothing but an adapter.
        adapter: the model with a LoRA adapter named ``default``.
        base_model: hub id or folder of the base model, for PEFT.

    Raises:
        ExportError: when something else is in the way, a weight is not finite, or the disk refuses.
    """
    target = Path(path).resolve()
    _check_replaceable(target, {ADAPTER}, ADAPTER)
    with _staged(target) as folder:
        _save_adapter(adapter, folder, base_model)


def _check_mergeable(target: Path, model: PeftModel) -> None:
    if getattr(model.get_base_model().config, "quantization_config", None) is not None:
        raise ExportError(
            f"{target}: the base model is quantised: expected full-precision weights to merge into; "
            "set export.merge=false, or load the base with model.quantization=none."
        )


def _check_adapter(target: Path, adapter: PeftModel) -> None:
    """Refuse a model of which something is trained that PEFT does not write."""
    from peft import get_peft_model_state_dict  # loads bitsandbytes, which only some models need

    if "default" not in adapter.peft_config:
        raise ExportError(f"{target.name}: adapters {list(adapter.peft_config)}: expected one named 'default'.")
    written = {x.data_ptr() for x in get_peft_model_state_dict(adapter, save_embedding_layers=False).values()}
    lost = [name for name, x in adapter.named_parameters() if x.requires_grad and x.data_ptr() not in written]
    if lost:
        raise ExportError(
            f"{target.name}: {lost[0]} is trained, and PEFT does not write it with the adapter ({len(lost)} such "
            "parameters): expected LoRA on linear layers; name these, as lora.targets=[q_proj,k_proj,v_proj,o_proj]."
        )


def _save_adapter(adapter: PeftModel, folder: Path, base_model: str) -> dict[str, str]:
    _check_adapter(folder, adapter)
    adapter.save_pretrained(str(folder / ADAPTER), selected_adapters=["default"], save_embedding_layers=False)
    (folder / ADAPTER / "README.md").unlink()  # PEFT's template; the model card is one level up
    config, weights = (folder / name for name in ADAPTER_FILES)
    content = json.loads(config.read_bytes()) | {"base_model_name_or_path": base_model or None}
    raw = weights.read_bytes()
    _check_finite(weights, _parse(weights, raw))
    digests = (_write(config, json.dumps(content, indent=2).encode()), hashlib.sha256(raw).hexdigest())
    return dict(zip(ADAPTER_FILES, digests, strict=True))


def _write(file: Path, data: bytes) -> str:
    file.write_bytes(data)
    return hashlib.sha256(data).hexdigest()


def _sibling(target: Path, role: str) -> Path:
    return target.with_name(f".{target.name}.ag-{role}")


def _check_replaceable(target: Path, known: Set[str], needed: str) -> None:
    if not target.exists():
        return
    names = {entry.name for entry in target.iterdir()} if target.is_dir() else {target.name}
    if names and (needed not in names or names - known):
        foreign = ", ".join(sorted(names - known or names)[:3])
        raise ExportError(
            f"{target}: contains files that are not of an export ({foreign}): expected an "
            "export to replace, an empty folder or none; choose another path."
        )


@contextmanager
def _staged(target: Path) -> Iterator[Path]:
    """Yield a hidden folder beside ``target`` that takes its name once it is filled and on disk."""
    new, old = _sibling(target, "new"), _sibling(target, "old")
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
    """Give an earlier export its name back when a failure or a kill came between the two renames."""
    if old.exists() and not target.exists():
        os.rename(old, target)


def _read(folder: Path, name: str, limit: int | None = None) -> bytes:
    file = folder / name
    try:
        if not file.is_file():
            raise ExportError(f"{file}: no such file: expected it in an export; copy the whole folder again.")
        real, size = file.resolve(), file.stat().st_size
        inside = folder.resolve()
        blobs = inside.parents[1] / "blobs" if inside.parent.name == "snapshots" else inside  # of the hub's cache
        if not real.is_relative_to(inside) and not real.is_relative_to(blobs):
            raise ExportError(f"{file}: a link to {real}: expected a file inside the export; copy it there.")
        if limit is not None and size > limit:
            raise ExportError(f"{file}: {size} bytes: expected at most {limit}; copy the file again.")
        return file.read_bytes()
    except OSError as error:
        raise ExportError(f"{file}: cannot be read ({error}): expected a readable file; check it.") from error


def _parse(file: Path, raw: bytes) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load(raw)
    except (SafetensorError, KeyError) as error:
        raise ExportError(
            f"{file}: not safetensors ({error}): expected the file as exported; copy it again."
        ) from error


def _check_hash(file: Path, raw: bytes, expected: str) -> None:
    digest = hashlib.sha256(raw).hexdigest()
    if digest != expected:
        raise ExportError(f"{file}: sha256 {digest}: expected {expected}; the file was damaged, copy it again.")


def _check_finite(file: Path, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise ExportError(f"{file}: {name} has NaN or infinite values: expected finite weights; train again.")


def _check_base(folder: Path, info: dict[str, Any], model_config: PretrainedConfig) -> None:
    theirs, ours = info["base_model"]["fingerprint"], fingerprint(model_config)
    wrong = [name for name in theirs if theirs[name] != ours[name]]
    if wrong:
        base, this = ({name: side[name] for name in wrong} for side in (theirs, ours))
        name = info["base_model"]["name"] or "a model"
        raise ExportError(
            f"{folder}: made for {name} with {base}, this model has {this}: expected the base model that the "
            "gates were trained on; load that one."
        )

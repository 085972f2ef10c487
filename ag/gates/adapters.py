"""LoRA adapters that were trained with gates: on disk, on a model, merged into it, and whether a model has one.

Gates need their adapter exactly once: beside the weights, in PEFT's layers, or merged into them. A merged model says so
in its configuration (MERGED: the hash of the adapter's weights).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ag.config.exports import StrPath
from ag.errors import UserError, first_line
from ag.gates.folder import check_base, check_replaceable, local, parse, read, read_info, staged, write
from ag.gates.manifest import ADAPTER, ADAPTER_FILES, CARD, ExportError, minor
from ag.model import base as models
from ag.model.quiet import quiet

if TYPE_CHECKING:
    from peft import PeftModel

MERGED = "merged_adapter"  # in the config.json of a merged model
_README = """\
# A base model with a LoRA adapter merged into it

The adapter is that of `{source}` beside this folder (sha256 of its weights: `{digest}`), which was trained
together with gates if that folder has some. The gates run on this model without the adapter:

```sh
python -m ag.generate gates=../{source} model=. adapter=false prompt="Once upon a time"
```
"""


@dataclass(frozen=True)
class Adapter:
    """The adapter of an export."""

    source: str  # folder of the export, for messages
    sha256: str  # of its weights
    name: str  # one of its tensors that is not zero, as PEFT calls it
    tensor: Tensor  # its values; another adapter has others

    def times_in(self, model: nn.Module) -> int:
        """Return how often a model has the adapter: merged, as its configuration says, and in PEFT's active layers."""
        config: Any = getattr(model, "config", None)
        return int(getattr(config, MERGED, None) == self.sha256) + sum(map(self._is, _active(model)))

    def _is(self, state: Mapping[str, Tensor]) -> bool:
        found = state.get(self.name)
        return found is not None and torch.equal(found.detach().cpu(), self.tensor.to(found.dtype))

    def check(self, model: nn.Module, times: int) -> None:
        """Raise ``UserError`` when a model, plain or PEFT-wrapped, has the adapter another number of times.

        It is 1 to run with the gates of the export, 0 to put the adapter on.
        """
        found = self.times_in(model)
        if found < times:
            raise UserError(
                f"The gates of {self.source} were trained together with a LoRA adapter, which this model lacks: put it "
                f"on with ag.gates.export.load_adapter(model, {self.source!r}), or load the model that it is merged "
                f"into (commands: gates= or adapter={self.source}). Where you merged it yourself, say so: "
                f"model.config.{MERGED} = {self.sha256!r}."
            )
        if found > times:
            raise UserError(
                f"This model has the LoRA adapter of {self.source} already, and would have it twice: use the gates "
                "without it (commands: adapter=false, for ag.compare no adapter=; Python: no load_adapter), or name "
                "the base model that it was trained on."
            )


def _active(model: Any) -> list[dict[str, Tensor]]:
    """Return the weights of each adapter of a model that is on, by PEFT's names."""
    if not hasattr(model, "peft_config"):
        return []
    from peft import get_model_status, get_peft_model_state_dict  # loads bitsandbytes, which only some models need

    status = get_model_status(model)
    names = set(status.active_adapters) if status.enabled else set()
    return [get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False) for name in names]


def adapter_of(folder: Path, info: Mapping[str, Any]) -> Adapter | None:
    """Read the adapter of an export; None: it has none, or one that changes nothing, or is of schema 1.0.

    Raises:
        ExportError: when its weights are missing or damaged.
    """
    name = ADAPTER_FILES[1]
    if name not in info["sha256"]:
        return None
    tensors = parse(folder / name, read(folder, name, info["sha256"][name]))
    known = {key: tensor for key, tensor in tensors.items() if "lora_B" in key and bool(tensor.any())}
    if not known or minor(info["schema_version"]) < 1:
        return None
    key = min(known)
    return Adapter(str(folder), info["sha256"][name], key, known[key])


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
    return hashlib.sha256(b"".join(read(local(path), name) for name in ADAPTER_FILES)).hexdigest()


def adapter_path(path: StrPath) -> Path | None:
    """Return the folder of an export's LoRA adapter, its files verified; None when it has none.

    Of a folder of :func:`save_adapter`, which has no hashes, the files are not verified.

    Raises:
        ExportError: when the export or its adapter is damaged.
    """
    if is_adapter(path):
        return local(path) / ADAPTER
    sha256 = read_info(path)["sha256"]
    files = [name for name in ADAPTER_FILES if name in sha256]
    for name in files:
        read(local(path), name, sha256[name])
    return local(path) / ADAPTER if files else None


def load_adapter(model: PreTrainedModel, path: StrPath, *, merge: bool = False) -> PeftModel | PreTrainedModel:
    """Put an export's LoRA adapter on its base model, frozen.

    Args:
        model: the base model; it is changed in place.
        path: folder of an export, or one of :func:`save_adapter`.
        merge: return the plain model with the adapter merged into its weights, and its hash in the configuration.

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
        check_base(local(path), info, model.config)
        if adapter := adapter_of(local(path), info):
            adapter.check(model, times=0)
    try:
        with quiet():
            wrapped = peft.PeftModel.from_pretrained(model, str(folder)).eval()
    except (RuntimeError, ValueError) as error:  # other shapes, or none of the layers
        raise ExportError(
            f"{folder}: it does not fit this model ({first_line(error)}): expected the base model that the "
            "adapter was trained on; load that one."
        ) from error
    return _merged(wrapped, path) if merge else wrapped


def _merged(model: PeftModel, path: StrPath) -> PreTrainedModel:
    """Merge the adapter of a model, that of the export, into its weights, and name it in the configuration."""
    digest = hashlib.sha256(read(local(path), ADAPTER_FILES[1])).hexdigest()
    merged: PreTrainedModel = model.merge_and_unload(safe_merge=True)
    setattr(merged.config, MERGED, digest)
    return merged


def save_adapter(path: StrPath, adapter: PeftModel, *, base_model: str = "") -> None:
    """Write a LoRA adapter without gates, into ``path/adapter``; whole or absent, as an export.

    Args:
        path: folder to write, or to replace when it holds nothing but an adapter.
        adapter: the model with a LoRA adapter named ``default``.
        base_model: hub id or folder of the base model, for PEFT.

    Raises:
        ExportError: when something else is in the way, a weight is not finite, or the disk refuses.
    """
    target = Path(path).resolve()
    check_replaceable(target, {ADAPTER}, ADAPTER)
    with staged(target) as folder:
        write_adapter(adapter, folder, base_model)


def write_adapter(adapter: PeftModel, folder: Path, base_model: str) -> dict[str, str]:
    """Write ``folder/adapter``; returns the hashes of its files by name."""
    check_adapter(folder, adapter)
    adapter.save_pretrained(str(folder / ADAPTER), selected_adapters=["default"], save_embedding_layers=False)
    (folder / ADAPTER / "README.md").unlink()  # PEFT's template; the model card is one level up
    config, weights = ADAPTER_FILES
    content = json.loads(read(folder, config)) | {"base_model_name_or_path": base_model or None}
    raw = read(folder, weights)
    parse(folder / weights, raw)
    digest = write(folder / config, json.dumps(content, indent=2).encode())
    return {config: digest, weights: hashlib.sha256(raw).hexdigest()}


def check_adapter(target: Path, adapter: PeftModel) -> None:
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
    check_mergeable(target, model)
    check_replaceable(target, frozenset(), CARD)
    with staged(target) as folder:
        merged = _merged(model, source)
        merged.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        text = _README.format(source=Path(source).resolve().name, digest=getattr(merged.config, MERGED))
        write(folder / CARD, text.encode())


def is_merged(path: StrPath, model: str, revision: str | None = None) -> bool:
    """Whether the configuration of a model, of any name, says that the adapter of an export is merged into it."""
    try:
        values, _ = PretrainedConfig.get_config_dict(models.resolve(model, revision), revision=revision)
    except OSError:
        return False
    return bool(values.get(MERGED) == read_info(path)["sha256"][ADAPTER_FILES[1]])


def check_mergeable(target: Path, model: PeftModel) -> None:
    """Refuse a quantised base."""
    if getattr(model.get_base_model().config, "quantization_config", None) is not None:
        raise ExportError(
            f"{target}: the base model is quantised: expected full-precision weights to merge into; "
            "set export.merge=false, or load the base with model.quantization=none."
        )

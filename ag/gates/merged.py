"""Full copies of a base model with an adapter merged into it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from ag.gates.adapters import MERGED, merge_adapter
from ag.gates.card import merged_card
from ag.gates.folder import StrPath, read_info, staged, write
from ag.gates.manifest import ADAPTER_FILES, CARD, ExportError
from ag.model import base as models

if TYPE_CHECKING:
    from peft import PeftModel


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
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ExportError(
            f"{target}: the path exists: expected a new or empty folder; remove it or choose another path."
        )
    with staged(target) as folder:
        merged = merge_adapter(model, source)
        merged.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        write(folder / CARD, merged_card(Path(source).resolve().name, getattr(merged.config, MERGED)).encode())


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
    return bool(values.get(MERGED) == read_info(path)["sha256"][ADAPTER_FILES[1]])


def check_mergeable(target: Path, model: PeftModel) -> None:
    """Refuse a quantised base."""
    if getattr(model.get_base_model().config, "quantization_config", None) is not None:
        raise ExportError(
            f"{target}: the base model is quantised: expected full-precision weights to merge into; "
            "set export.merge=false, or load the base with model.quantization=none."
        )

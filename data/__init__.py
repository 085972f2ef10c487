"""Training and validation data: supervised tasks, plain documents, generated facts and worked problems."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ag.data import facts, own, sft, text, worked
from ag.data.module import DataModule
from ag.data.problems import ANY
from ag.data.problems import KINDS as PROBLEMS
from ag.data.sources import DataError
from ag.data.templates import WITH_CONTEXT, find_task, is_own

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ag.config import Config
    from ag.config.sections import DataConfig

__all__ = ["DataError", "DataModule", "build", "check"]

_BUILDERS = {"sft": sft.build, "text": text.build, "facts": facts.build, "worked": worked.build}


def check(data: DataConfig) -> None:
    """Refuse a name that nothing here knows, before anything is loaded.

    Raises:
        DataError: naming what there is.
    """
    if data.kind == "sft" and not is_own(data):
        find_task(data.name)
    if data.question == "after" and data.kind == "sft" and data.name not in WITH_CONTEXT:
        raise DataError(
            f"data.question=after with data.name={data.name}: expected a task whose text comes before the question "
            f"({', '.join(WITH_CONTEXT)}), or data.kind=facts; leave it out"
        )
    if data.kind == "worked" and data.name not in (ANY, *PROBLEMS):
        raise DataError(f"data.name={data.name} with data.kind=worked: expected {ANY} or one of {', '.join(PROBLEMS)}")


def build(config: Config, tokenizer: PreTrainedTokenizerBase, context: int) -> DataModule:
    """Read, tokenise and batch what ``config.data`` names.

    Args:
        config: the run; ``data`` and ``seed`` are read.
        tokenizer: the model's tokenizer.
        context: the model's longest input in tokens.

    Returns:
        The data module; its batches are described at :class:`ag.data.collate.Collator`.

    Raises:
        DataError: the data cannot be used; the message names the place and the fix.
    """
    reads = own.build if config.data.kind == "sft" and is_own(config.data) else _BUILDERS[config.data.kind]
    return reads(config, tokenizer, context)

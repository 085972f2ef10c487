"""Training and validation data: supervised tasks, plain documents, generated facts and worked problems."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ag.data.facts import Facts
from ag.data.module import DataKind, DataModule
from ag.data.problems import Worked
from ag.data.sft import Supervised
from ag.data.sources import DataError
from ag.data.text import Text
from ag.plugins import part

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ag.config import Config
    from ag.config.sections import DataConfig

__all__ = ["KINDS", "DataError", "DataKind", "DataModule", "build", "check"]

#: The kinds of data by the name that ``data.kind`` gives them.
KINDS: dict[str, type[DataKind]] = {"sft": Supervised, "text": Text, "facts": Facts, "worked": Worked}


def check(data: DataConfig) -> None:
    """Raise a ``UserError`` for an unknown kind or name, before anything is loaded."""
    _kind(data).check(data)


def build(config: Config, tokenizer: PreTrainedTokenizerBase, context: int) -> DataModule:
    """Read, tokenise and batch the data of a run; see :meth:`ag.data.module.DataKind.build`."""
    return _kind(config.data).build(config, tokenizer, context)


def _kind(data: DataConfig) -> DataKind:
    made: DataKind = part("ag.data_kinds", "data.kind", data.kind, DataKind)()
    return made

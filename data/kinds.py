"""The kinds of data by name, and the data module of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ag.data.collate import Row
from ag.data.facts import Facts
from ag.data.module import DataKind, DataModule
from ag.data.problems import WorkedProblems
from ag.data.sft import Supervised
from ag.data.sources import DataError, dataset_name
from ag.data.text import Text
from ag.plugins import part

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ag.config import Config, DataConfig

#: The kinds of data by the name that ``data.kind`` gives them.
KINDS: dict[str, type[DataKind]] = {"sft": Supervised, "text": Text, "facts": Facts, "worked": WorkedProblems}


def check(data: DataConfig) -> None:
    """Raise a ``UserError`` for an unknown kind or name, before anything is loaded."""
    _kind(data).check(data)


def build(config: Config, tokenizer: PreTrainedTokenizerBase, context: int) -> DataModule:
    """Read, tokenise and batch the data of a run; see :meth:`ag.data.module.DataKind.build`."""
    module = _kind(config.data).build(config, tokenizer, context)
    if config.loss.replay and not any(_has_second_token(row) for row in module.train_rows):
        raise DataError(
            f"loss.replay=true: no training row of {dataset_name(config.data)} has a second token with loss after its "
            "prompt, and the first one precedes eviction: expected longer responses, or set loss.replay=false."
        )
    return module


def _has_second_token(row: Row) -> bool:
    """Whether the second token after the prompt, or a later one, carries loss."""
    second = (row.prompt_length or 0) + 1
    return len(row.tokens) > second if row.loss is None else bool(row.loss[second:].any())


def _kind(data: DataConfig) -> DataKind:
    data_kind: DataKind = part("ag.data_kinds", "data.kind", data.kind, DataKind)()
    return data_kind

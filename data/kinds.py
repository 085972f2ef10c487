"""The kinds of data by name, and the rows of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ag.data.facts import Facts
from ag.data.problems import WorkedProblems
from ag.data.sft import Supervised
from ag.data.sources import DataError, dataset_name
from ag.data.splits import DataKind, Splits
from ag.data.text import Text
from ag.plugins import part

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ag.config import DataConfig

#: The kinds of data by the name that ``data.kind`` gives them.
KINDS: dict[str, type[DataKind]] = {"sft": Supervised, "text": Text, "facts": Facts, "worked": WorkedProblems}


def check(data: DataConfig) -> None:
    """Raise a ``UserError`` for an unknown kind or name, before anything is loaded."""
    _kind(data).check(data)


def read(data: DataConfig, seed: int, tokenizer: PreTrainedTokenizerBase, context: int) -> Splits:
    """Read and tokenise the rows of a run; see :meth:`ag.data.splits.DataKind.read`.

    Raises:
        DataError: a split is empty.
    """
    splits = _kind(data).read(data, seed, tokenizer, context)
    for split, rows in (("training", splits.train), ("validation", splits.validation)):
        if not rows:
            skipped = splits.counts.of(split == "validation").skipped
            reason = f": {skipped} were left out, {splits.counts.remedy}" if skipped else ""
            raise DataError(f"the {split} split of {dataset_name(data)} has no rows{reason}")
    return splits


def _kind(data: DataConfig) -> DataKind:
    data_kind: DataKind = part("ag.data_kinds", "data.kind", data.kind, DataKind)()
    return data_kind

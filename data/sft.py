"""Supervised data: a prompt and a response, with the loss on the response only.

A response ends with the answer, without EOS unless ``data.eos`` asks for it; choices are then compared without EOS.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ag.config.data import QuestionConfig, SftConfig
from ag.data import custom_sft
from ag.data.encode import encode, truncate_prompt, truncation_remedies
from ag.data.rows import Row
from ag.data.sources import DataError, Source, local_folder
from ag.data.splits import Counts, DataKind, SplitCounts, Splits
from ag.data.templates import TASKS, WITH_CONTEXT, Example, examples, find_task, is_own
from ag.data.tokens import end_tokens, start_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ag.config import DataConfig

#: Keys that only rows of your own read.
OWN_KEYS = (
    "subset", "revision", "text_field", "prompt_field", "response_field", "messages_field", *custom_sft.CUT_KEYS,
)  # fmt: skip


class Supervised(DataKind):
    """Prompts with responses: a task of the table, or rows of your own."""

    def check(self, data: DataConfig) -> None:
        """Refuse a task that is not in the table, keys that it does not read, and a question that no text precedes."""
        assert isinstance(data, SftConfig)
        if not is_own(data):
            find_task(data)
            reader = f"data.name={data.name}: a task of the table does"
            custom_sft.refuse_unread(data, OWN_KEYS, reader, "leave it out, or give rows of your own")
        if data.question == "after" and not (data.name in TASKS and TASKS[data.name].context):
            raise DataError(
                f"data.question=after with data.name={data.name}: expected a task with a text before its question "
                f"({', '.join(WITH_CONTEXT)}), or data.kind=facts; leave it out"
            )

    def read(self, data: DataConfig, seed: int, tokenizer: PreTrainedTokenizerBase, context: int) -> Splits:
        """Read and tokenise the task ``data.name``, or rows of that folder or hub id (custom_sft.py).

        Raises:
            DataError: unknown task, missing folder, split or field, or a response that does not fit.
        """
        assert isinstance(data, SftConfig)
        if is_own(data):
            return custom_sft.read(data, seed, tokenizer, context)
        task = find_task(data)
        folder: Path | None = local_folder(data.root, task.folder) if data.root else None
        source = Source(task.hub, task.subset, task.revision, folder)

        def read(split: str, limit: int | None) -> list[Example]:
            return list(itertools.islice(examples(task, source.read(split), source.where(split)), limit))

        train, validation = read("train", data.train_samples), read("validation", data.val_samples)
        return from_examples(data, tokenizer, context, train, validation)


def from_examples(
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    context: int,
    train: Sequence[Example],
    validation: Sequence[Example],
) -> Splits:
    """Tokenise two lists of questions.

    Training sees the right answer of each question, validation all its choices.

    Raises:
        DataError: a response does not fit.
    """
    counts, start = Counts(), start_tokens(tokenizer)
    assert isinstance(data, QuestionConfig)
    ends = isinstance(data, SftConfig) and data.eos
    end, limit = end_tokens(tokenizer) if ends else [], min(data.max_length, context)
    _, counts.cut_remedy = truncation_remedies(data, context)

    def rows(split: str, questions: Sequence[Example], every_choice: bool, counts: SplitCounts) -> Iterator[list[Row]]:
        groups = encode(tokenizer, questions, end=end, question=data.question, every_choice=every_choice)
        for number, group in enumerate(groups, start=1):
            fits = [fit for row in group if (fit := truncate_prompt(row, limit, start, counts)) is not None]
            if len(fits) < len(group):
                longest = max(len(row.tokens) - row.response_start for row in group)
                raise DataError(
                    f"the response of {split} row {number} has {longest} tokens, too many for a row of {limit} with "
                    "some of its prompt: raise data.max_length, or use a model with a longer context"
                )
            yield fits

    train_rows = [row for [row] in rows("train", train, every_choice=False, counts=counts.train)]
    groups = list(rows("validation", validation, every_choice=True, counts=counts.validation))
    return Splits(train_rows, groups, counts)

"""Rows of worked problems (:mod:`ag.data.problems`) to train on; the loss is on the solution, which ends with EOS."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ag.data import reasoning
from ag.data.collate import Collator, Row, end_tokens, padding_token
from ag.data.encode import Encoder
from ag.data.kinds import DataKind
from ag.data.module import Counts, DataModule
from ag.data.problems import GROUPS, KINDS, Problem, generate, needs_package
from ag.data.sources import DataError
from ag.data.templates import Example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ag.config import Config, DataConfig

TRAIN_ROWS = 4000
VALIDATION_ROWS = 200


def encode(tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem], limit: int) -> list[Row]:
    """Tokenise problems; a row ends with the end-of-sequence token, after which nothing comes.

    Raises:
        DataError: one has more tokens than ``limit``, or the tokenizer has no end-of-sequence token.
    """
    examples = [Example(problem.prompt, [problem.solution], 0) for problem in problems]
    encoder = Encoder(tokenizer, sys.maxsize, end=end_tokens(tokenizer))
    rows = [row for [row] in encoder.encode(examples, "worked", every_choice=False)]
    longest = max((len(row.tokens) for row in rows), default=0)
    if longest > limit:
        raise DataError(
            f"a worked problem has {longest} tokens, more than a row of {limit}: raise data.max_length, lower "
            "data.solution_max, or use a model with a longer context"
        )
    return rows


class Worked(DataKind):
    """Generated problems with a written-out solution."""

    def check(self, data: DataConfig) -> None:
        """Refuse a name that no kind of problem has, or whose package is not installed."""
        if data.name not in (known := (*GROUPS, *KINDS)):
            raise DataError(f"data.name={data.name} with data.kind=worked: expected one of {', '.join(known)}")
        if needs_package(data.name):
            reasoning.version(data.name)

    def build(self, config: Config, tokenizer: PreTrainedTokenizerBase, context: int) -> DataModule:
        """Generate and tokenise problems; the loss is on the solution.

        ``data.train_samples`` and ``data.val_samples`` say how many (default 4000 and 200).

        Raises:
            DataError: a problem does not fit.
        """
        data = config.data

        def rows(split: str, number: int) -> list[Row]:
            made = [
                generate(config.seed, split, i, data.solution_min, data.solution_max, data.name) for i in range(number)
            ]
            return encode(tokenizer, made, min(data.max_length, context))

        train = rows("train", data.train_samples or TRAIN_ROWS)
        validation = rows("validation", data.val_samples or VALIDATION_ROWS)
        collator = Collator(padding_token(tokenizer))
        return DataModule(train, [[row] for row in validation], collator, data, config.seed, Counts())

"""Prompts and answers as rows of tokens.

The prompt is tokenised by itself, so that training sees the prompt tokens that serving feeds; the response as a text
that continues another one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ag.data.collate import Answer, Row, start_tokens, tokenize, tokenize_after
from ag.data.module import Counts
from ag.data.sources import DataError
from ag.data.templates import Example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Encoder:
    """Turns prompts and answers into rows of at most ``limit`` tokens."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        limit: int,
        before: str = " ",
        end: Sequence[int] = (),
        question: str = "before",
    ) -> None:
        """Keep the tokenizer.

        ``before`` is between a prompt and its answer, and the tokens ``end`` behind that. With ``question="after"`` a
        row's prompt is its context alone; the question follows it, and carries no loss.
        """
        self.tokenizer, self.limit, self.before, self.end = tokenizer, limit, before, list(end)
        self.question = question
        self.start = start_tokens(tokenizer)
        self.counts = Counts()

    def encode(self, questions: Sequence[Example], split: str, *, every_choice: bool) -> list[list[Row]]:
        """Encode the questions of a split: a list of rows each, of every choice, marked, or of the right one.

        Raises:
            DataError: a response does not fit with one token of the prompt before it.
        """
        asked = [
            (number, choice)
            for number, question in enumerate(questions)
            for choice in (range(len(question.choices)) if every_choice else [question.target])
        ]
        prompts = tokenize(self.tokenizer, [question.prompt for question in questions])
        borders: list[int | None] = [None] * len(questions)
        if self.question == "after":
            contexts = tokenize(self.tokenizer, [question.context for question in questions])
            borders = [len(divided(context, prompt)[0]) for context, prompt in zip(contexts, prompts, strict=True)]
        answers = [self.before + questions[number].choices[choice] for number, choice in asked]
        groups: list[list[Row]] = [[] for _ in questions]
        for (number, choice), response in zip(asked, tokenize_after(self.tokenizer, answers), strict=True):
            row = self._row(prompts[number], borders[number], response + self.end, f"{split} row {number + 1}")
            answer = Answer(number, choice, questions[number].target) if every_choice else None
            groups[number].append(row._replace(answer=answer))
        return groups

    def _row(self, prompt: list[int], border: int | None, response: list[int], place: str) -> Row:
        room = self.limit - len(self.start) - len(response)
        if room < 1:
            raise DataError(
                f"the response of {place} has {len(response)} tokens, too many for a row of {self.limit} "
                "with some of its prompt: raise data.max_length, or use a model with a longer context"
            )
        lost = max(0, len(prompt) - room)
        self.counts.truncated += lost > 0
        self.counts.truncated_tokens += lost
        head = self.start + prompt[lost:]
        tokens = np.array(head + response, dtype=np.int32)
        if border is None:
            return Row(tokens, len(head))
        read = max(1, border - lost + len(self.start))
        return Row(tokens, read, loss=np.arange(len(tokens)) >= len(head))


def divided(context: list[int], whole: list[int]) -> tuple[list[int], list[int]]:
    """Divide the tokens of a text where those of its beginning end.

    What is read is the same wherever the border is: a token that reaches over it belongs to the second part.
    """
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(context, whole[:-1], strict=False))
    border = max(1, sum(1 for _ in same))
    return whole[:border], whole[border:]

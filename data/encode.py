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
from ag.data.module import SplitCounts
from ag.data.templates import Example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ag.config import DataConfig


def encode(
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    *,
    before: str = " ",
    end: Sequence[int] = (),
    question: str = "before",
    every_choice: bool = False,
) -> list[list[Row]]:
    """Tokenise questions; returns a list of rows of any length for each.

    Args:
        tokenizer: its start comes before each prompt.
        examples: the questions.
        before: text between a prompt and its answer.
        end: tokens behind the answer.
        question: ``after`` makes the context alone the prompt; the question follows it, and carries no loss.
        every_choice: make a marked row for each choice, instead of one for the right answer.
    """
    start = start_tokens(tokenizer)
    prompts = tokenize(tokenizer, [example.prompt for example in examples])
    contexts = tokenize(tokenizer, [example.context for example in examples] if question == "after" else [])
    asked = [
        (number, choice)
        for number, example in enumerate(examples)
        for choice in (range(len(example.choices)) if every_choice else [example.target])
    ]
    answers = tokenize_after(tokenizer, [before + examples[number].choices[choice] for number, choice in asked])
    groups: list[list[Row]] = [[] for _ in examples]
    for (number, choice), answer in zip(asked, answers, strict=True):
        head = start + prompts[number]
        tokens = np.array([*head, *answer, *end], dtype=np.int32)
        row = Row(tokens, len(head), Answer(number, choice, examples[number].target) if every_choice else None)
        if contexts:
            read = len(start) + len(divided(contexts[number], prompts[number])[0])
            row = row._replace(prompt_length=read, loss=np.arange(len(tokens)) >= len(head))
        groups[number].append(row)
    return groups


def fitted(row: Row, limit: int, start: list[int], counts: SplitCounts) -> Row | None:
    """Cut a prompt, behind its start, so that the row has at most ``limit`` tokens; None if no token of it would stay.

    The row is counted, and what it lost.
    """
    first = len(start) if row.tokens[: len(start)].tolist() == start else 0
    size, lost = len(row.tokens), max(0, len(row.tokens) - limit)
    fits = row.response_start - first > lost
    counts.add(size)
    counts.keep(size - lost if fits else 0, size)
    if not fits or not lost:
        return row if fits else None
    cut = np.s_[first : first + lost]
    return row._replace(
        tokens=np.delete(row.tokens, cut),
        prompt_length=max(1, (row.prompt_length or 0) - lost),
        loss=None if row.loss is None else np.delete(row.loss, cut),
    )


def left_of_prompts(data: DataConfig, context: int) -> tuple[str, str]:
    """Return the keys that let longer rows in, and with them what a row that is too long loses."""
    limited = data.max_length < context
    longer = f"use a higher data.max_length={data.max_length}" if limited else "use a model with a longer context"
    return longer, f"the left of their prompts; {longer}"


def divided(context: list[int], whole: list[int]) -> tuple[list[int], list[int]]:
    """Divide the tokens of a text where those of its beginning end; a token across the border is of the second part."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(context, whole[:-1], strict=False))
    border = max(1, sum(1 for _ in same))
    return whole[:border], whole[border:]

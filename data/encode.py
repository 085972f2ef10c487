"""Prompts and answers as rows of tokens.

The prompt is tokenised alone: training then reads the prompt tokens that serving feeds. The response is tokenised as a
text that continues another one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ag.data.rows import Answer, Row
from ag.data.splits import SplitCounts
from ag.data.templates import Example
from ag.data.tokens import start_tokens, tokenize, tokenize_after

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ag.config import DataConfig


def encode(
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    *,
    separator: str = " ",
    end: Sequence[int] = (),
    question: str = "before",
    every_choice: bool = False,
) -> list[list[Row]]:
    """Tokenise questions; returns a list of rows for each, which are not cut.

    Args:
        tokenizer: each prompt begins with its start tokens.
        examples: the questions.
        separator: text between a prompt and its answer.
        end: tokens after the answer.
        question: ``after`` makes the context alone the prompt; the question follows it and carries no loss.
        every_choice: make a row with an ``answer`` for each choice, not one row for the right choice.
    """
    start = start_tokens(tokenizer)
    prompts = tokenize(tokenizer, [example.prompt for example in examples])
    contexts = tokenize(tokenizer, [example.context for example in examples] if question == "after" else [])
    choices = [
        (number, choice)
        for number, example in enumerate(examples)
        for choice in (range(len(example.choices)) if every_choice else [example.target])
    ]
    answers = tokenize_after(tokenizer, [separator + examples[number].choices[choice] for number, choice in choices])
    groups: list[list[Row]] = [[] for _ in examples]
    for (number, choice), answer in zip(choices, answers, strict=True):
        head = start + prompts[number]
        tokens = np.array([*head, *answer, *end], dtype=np.int32)
        row = Row(tokens, len(head), Answer(number, choice, examples[number].target) if every_choice else None)
        if contexts:
            prompt_length = len(start) + len(divided(contexts[number], prompts[number])[0])
            row = row._replace(prompt_length=prompt_length, loss=np.arange(len(tokens)) >= len(head))
        groups[number].append(row)
    return groups


def truncate_prompt(row: Row, limit: int, start: list[int], counts: SplitCounts) -> Row | None:
    """Cut a prompt after its start tokens until the row has at most ``limit`` tokens.

    None: the whole prompt would be lost. The row and its lost tokens are counted.
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
        # the cut may take the whole prompt and a part of the question after it; what is left then begins with a
        # prompt of one token, as a model cannot read a prompt without tokens
        prompt_length=max(1, (row.prompt_length or 0) - lost),
        loss=None if row.loss is None else np.delete(row.loss, cut),
    )


def truncation_remedies(data: DataConfig, context: int) -> tuple[str, str]:
    """Return for messages the key that lets longer rows in, and the part that a row loses, with this key."""
    limited = data.max_length < context
    longer = f"use a higher data.max_length={data.max_length}" if limited else "use a model with a longer context"
    return longer, f"the left of their prompts; {longer}"


def divided(context: list[int], tokens: list[int]) -> tuple[list[int], list[int]]:
    """Divide a text's tokens where its beginning ``context`` ends; a token across the border is in the second part."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(context, tokens[:-1], strict=False))
    border = max(1, sum(1 for _ in same))
    return tokens[:border], tokens[border:]

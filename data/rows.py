"""Rows of tokens: what data are made into, and what the collator makes batches of."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]


class Answer(NamedTuple):
    """Indices of a row's question, of its choice and of the right choice."""

    question: int
    choice: int
    target: int


class Row(NamedTuple):
    """One sequence.

    Attributes:
        tokens: the tokens ``[T]``, with BOS if the tokenizer adds it.
        prompt_length: number of prompt tokens, which carry no loss; a question after eviction does not belong to the
            prompt. None: plain text, in which all tokens carry loss.
        answer: set in the validation rows of multiple-choice tasks.
        loss: ``[T]``, True on tokens that carry loss. None: all tokens after the prompt do.
        copied: index of the first token that the response repeats, and one past the last. None: it repeats no chunk.
        context_length: number of the first tokens that a model reads at once for several rows; the prompt is the first
            part of them, or all of them. None: it reads the prompt alone.
    """

    tokens: Tokens
    prompt_length: int | None = None
    answer: Answer | None = None
    loss: npt.NDArray[np.bool_] | None = None
    copied: tuple[int, int] | None = None
    context_length: int | None = None

    @property
    def response_start(self) -> int:
        """Index of the first token with loss: after the prompt, or after the question that follows the prompt."""
        prompt = self.prompt_length or 0
        return prompt if self.loss is None else prompt + int(self.loss[prompt:].argmax())

    @property
    def response_end(self) -> int:
        """Index one past the last token with loss."""
        return len(self.tokens) if self.loss is None else len(self.tokens) - int(self.loss[::-1].argmax())

    def loss_mask(self, on_prompt: bool = False) -> npt.NDArray[np.bool_]:
        """Return ``[T]``, True on tokens that carry loss.

        Args:
            on_prompt: whether prompts of rows without ``loss`` carry loss too.
        """
        first = 0 if on_prompt else self.prompt_length or 0
        return np.arange(len(self.tokens)) >= first if self.loss is None else self.loss

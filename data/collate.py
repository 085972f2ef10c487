"""Rows of tokens, and how they become a batch."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ag.data.sources import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100
LEADS = "\n" + string.punctuation  # texts before others that are tokenised; the first that does not merge is taken
Tokens = npt.NDArray[np.int32]


class Answer(NamedTuple):
    """The question of a row, its choice, and the right one."""

    question: int
    choice: int
    target: int


class Row(NamedTuple):
    """One sequence.

    Attributes:
        tokens: the tokens ``[T]``, with BOS where the tokenizer adds one.
        prompt_length: tokens of the prompt, which carries no loss; a question after eviction is not part of it. None
            means plain text, where all tokens carry loss.
        answer: set in the validation rows of multiple-choice tasks.
        loss: ``[T]``, True on tokens that carry loss; None means all behind the prompt.
        copied: the first token that the response repeats, and one past the last; None means no chunk of the prompt.
    """

    tokens: Tokens
    prompt_length: int | None = None
    answer: Answer | None = None
    loss: npt.NDArray[np.bool_] | None = None
    copied: tuple[int, int] | None = None

    @property
    def response_start(self) -> int:
        """Index of the first token with loss: behind the prompt, or behind the question after it."""
        prompt = self.prompt_length or 0
        return prompt if self.loss is None else prompt + int(self.loss[prompt:].argmax())


@dataclass(frozen=True)
class Collator:
    """Pads rows on the right and stacks them.

    The batch (B rows, T tokens in the longest):

    - ``input_ids`` ``[B, T]`` int64, ``attention_mask`` ``[B, T]`` bool (True on real tokens),
    - ``labels`` ``[B, T]`` int64: ``input_ids`` where the token carries loss, else -100 (the loss shifts),
    - ``prompt_length`` ``[B]`` int64: absent for packed plain text,
    - ``copied`` ``[B, 2]`` int64: with repeated chunks only, the first column that is repeated and one past the last,
    - ``document_start`` ``[B, T]`` int64: with ``end`` only, the column where the document of each token begins. The
      first token of a document carries no loss then, as the tokens before it belong to another document,
    - ``question``, ``choice``, ``target`` ``[B]`` int64: validation of multiple-choice tasks only. All
      choices of a question are in one batch; the rows with ``choice == target`` give the language-model loss.

    Every rank runs the same number of validation batches, because metrics synchronise. A rank without rows gets a
    filler row: one padding token, no loss, and ``question == target == -1`` (no choice is right).

    Attributes:
        pad_id: padding token, of any value, as the attention mask excludes it.
        end: the token that ends a document; None means that a row is one document.
        whole: whether prompts carry loss too.
    """

    pad_id: int
    end: int | None = None
    whole: bool = False

    def __call__(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        """Collate B rows of one kind."""
        longest = max(len(row.tokens) for row in rows)
        ids = np.full((len(rows), longest), self.pad_id, dtype=np.int64)
        mask = np.zeros((len(rows), longest), dtype=np.bool_)
        labels = np.full((len(rows), longest), IGNORED, dtype=np.int64)
        for i, row in enumerate(rows):
            n, start = len(row.tokens), 0 if self.whole else row.prompt_length or 0
            ids[i, :n] = row.tokens
            mask[i, :n] = True
            labels[i, start:n] = row.tokens[start:]
            if row.loss is not None:
                labels[i, :n][~row.loss] = IGNORED
        batch = {
            "input_ids": torch.from_numpy(ids),
            "attention_mask": torch.from_numpy(mask),
            "labels": torch.from_numpy(labels),
        }
        if self.end is not None:
            starts = np.zeros_like(mask)
            starts[:, 1:] = (ids[:, :-1] == self.end) & mask[:, 1:]
            batch["labels"][torch.from_numpy(starts)] = IGNORED
            columns = np.where(starts, np.arange(longest), 0)
            batch["document_start"] = torch.from_numpy(np.maximum.accumulate(columns, axis=1))
        if rows[0].prompt_length is not None:
            batch["prompt_length"] = torch.tensor([row.prompt_length for row in rows])
        if rows[0].copied is not None:
            batch["copied"] = torch.tensor([row.copied for row in rows])
        if rows[0].answer is not None:
            answers = torch.tensor([row.answer for row in rows])
            batch |= dict(zip(Answer._fields, answers.unbind(dim=1), strict=True))
        return batch

    def filler(self, like: Row) -> Row:
        """Return a row of the same kind that no loss or metric counts: its only token has no predecessor."""
        answer = None if like.answer is None else Answer(question=-1, choice=0, target=-1)
        copied, prompt = None if like.copied is None else (0, 0), None if like.prompt_length is None else 1
        return Row(np.array([self.pad_id], dtype=np.int32), prompt, answer, copied=copied)


def padding_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id of the padding token, or of EOS for a tokenizer without one.

    Raises:
        DataError: the tokenizer has neither.
    """
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    raise DataError(
        f"the tokenizer {tokenizer.name_or_path} has neither a padding nor an end-of-sequence token: "
        "set tokenizer.pad_token"
    )


def end_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens at the end of a response, ``[EOS]``.

    Raises:
        DataError: the tokenizer has no end-of-sequence token.
    """
    if tokenizer.eos_token_id is None:
        raise DataError(f"the tokenizer {tokenizer.name_or_path} has no end-of-sequence token: set tokenizer.eos_token")
    return [int(tokenizer.eos_token_id)]


def start_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that the tokenizer puts before a text: ``[BOS]`` for Llama-2, none for SmolLM2."""
    first: list[int] = tokenizer("a")["input_ids"][:1]
    return first if first == [tokenizer.bos_token_id] else []


def tokenize(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Tokenise texts in one call, without special tokens."""
    if not texts:
        return []
    ids: list[list[int]] = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def tokenize_after(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Tokenise texts that continue others, without special tokens.

    A tokenizer that puts a space before a text, as SentencePiece does, gets each behind another text, whose tokens are
    cut off.
    """
    found, left = tokenize(tokenizer, texts), list(range(len(texts)))
    [word] = tokenize(tokenizer, ["a"])
    if tokenizer.decode(word + word) == 2 * str(tokenizer.decode(word)):
        return found
    for lead in LEADS:
        if not left:
            break
        before, word, *both = tokenize(tokenizer, [lead, f"{lead}a", *(lead + texts[i] for i in left)])
        if word[: len(before)] == before and str(tokenizer.decode(word)).endswith(f"{lead}a"):
            apart = {i: ids[len(before) :] for i, ids in zip(left, both, strict=True) if ids[: len(before)] == before}
            found = [apart.get(i, ids) for i, ids in enumerate(found)]
            left = [i for i in left if i not in apart]
    return found

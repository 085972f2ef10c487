"""Rows of tokens, and the collator that makes a batch of them."""

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
#: Put before a text that continues another one; the first character that does not merge with the text is used.
LEADING_CHARACTERS = "\n" + string.punctuation
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
    """

    tokens: Tokens
    prompt_length: int | None = None
    answer: Answer | None = None
    loss: npt.NDArray[np.bool_] | None = None
    copied: tuple[int, int] | None = None

    @property
    def response_start(self) -> int:
        """Index of the first token with loss: after the prompt, or after the question that follows the prompt."""
        prompt = self.prompt_length or 0
        return prompt if self.loss is None else prompt + int(self.loss[prompt:].argmax())


@dataclass(frozen=True)
class Collator:
    """Pads rows on the right and stacks them.

    The batch (B rows, T tokens in the longest):

    - ``input_ids`` ``[B, T]`` int64, ``attention_mask`` ``[B, T]`` bool (True on real tokens),
    - ``labels`` ``[B, T]`` int64: the token if it carries loss, else -100; not shifted, as the loss shifts them,
    - ``prompt_length`` ``[B]`` int64: absent for packed plain text,
    - ``copied`` ``[B, 2]`` int64: with repeated chunks only, the first column that is repeated and one past the last,
    - ``document_start`` ``[B, T]`` int64: with ``end`` only, the column where the token's document begins. A document's
      first token then carries no loss, as the tokens before it belong to another document,
    - ``question``, ``choice``, ``target`` ``[B]`` int64: validation of multiple-choice tasks only. A batch holds all
      choices of its questions; the rows with ``choice == target`` give the language-model loss.

    All ranks run equally many validation batches, because metrics synchronise. A rank without rows gets a filler row:
    one padding token, no loss, and ``question == target == -1`` (no choice is right).

    Attributes:
        pad_id: padding token; the attention mask excludes it, so any token will do.
        end: the token that ends a document. None: a row is one document.
        loss_on_prompt: whether prompts carry loss too.
    """

    pad_id: int
    end: int | None = None
    loss_on_prompt: bool = False

    def __call__(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        """Collate B rows of one kind."""
        longest = max(len(row.tokens) for row in rows)
        ids = np.full((len(rows), longest), self.pad_id, dtype=np.int64)
        mask = np.zeros((len(rows), longest), dtype=np.bool_)
        labels = np.full((len(rows), longest), IGNORED, dtype=np.int64)
        for i, row in enumerate(rows):
            n, start = len(row.tokens), 0 if self.loss_on_prompt else row.prompt_length or 0
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
        """Return a row with the fields of ``like`` that no loss or metric counts: its only token has no predecessor."""
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

    SentencePiece and others put a space before a text. Such a tokenizer gets a leading character and the text, and the
    character's tokens are cut off.
    """
    token_ids, remaining = tokenize(tokenizer, texts), list(range(len(texts)))
    [word] = tokenize(tokenizer, ["a"])
    if tokenizer.decode(word + word) == 2 * str(tokenizer.decode(word)):
        return token_ids
    for lead in LEADING_CHARACTERS:
        if not remaining:
            break
        lead_ids, word, *prefixed_ids = tokenize(tokenizer, [lead, f"{lead}a", *(lead + texts[i] for i in remaining)])
        if word[: len(lead_ids)] == lead_ids and str(tokenizer.decode(word)).endswith(f"{lead}a"):
            pairs = zip(remaining, prefixed_ids, strict=True)
            separated = {i: ids[len(lead_ids) :] for i, ids in pairs if ids[: len(lead_ids)] == lead_ids}
            token_ids = [separated.get(i, ids) for i, ids in enumerate(token_ids)]
            remaining = [i for i in remaining if i not in separated]
    return token_ids

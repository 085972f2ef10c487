"""The collator, which makes a batch of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ag.data.rows import Answer, Row

IGNORED = -100


@dataclass(frozen=True)
class Collator:
    """Pads rows on the right and stacks them.

    The batch (B rows, T tokens in the longest):

    - ``input_ids`` ``[B, T]`` int64, ``attention_mask`` ``[B, T]`` bool (True on real tokens),
    - ``labels`` ``[B, T]`` int64: the token if it carries loss, else -100; not shifted, as the loss shifts them,
    - ``prompt_length`` ``[B]`` int64: absent for packed plain text,
    - ``context_length`` ``[B]`` int64: with contexts that several rows share only,
    - ``copied`` ``[B, 2]`` int64: with repeated chunks only, the first column that is repeated and one past the last,
    - ``document_start`` ``[B, T]`` int64: with ``end`` only, the column where the token's document begins. A document's
      first token then carries no loss, as the tokens before it belong to another document,
    - ``question``, ``choice``, ``target`` ``[B]`` int64: validation of multiple-choice tasks only. A batch holds all
      choices of its questions; the rows with ``choice == target`` give the language-model loss.

    All ranks run equally many validation batches, because metrics synchronise. A rank without rows gets a filler row:
    one padding token, no loss, and ``question == target == -1`` (no choice is right).

    Attributes:
        pad_id: padding token; the attention mask excludes it, so any token will do.
        end: the token that ends a document, if tokens see only their own document. None: they see their whole row.
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
            n = len(row.tokens)
            ids[i, :n] = row.tokens
            mask[i, :n] = True
            labels[i, :n] = np.where(row.loss_mask(self.loss_on_prompt), row.tokens, IGNORED)
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
        if rows[0].context_length is not None:
            batch["context_length"] = torch.tensor([row.context_length for row in rows])
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
        context = None if like.context_length is None else 1
        return Row(np.array([self.pad_id], dtype=np.int32), prompt, answer, copied=copied, context_length=context)

"""Checks that attention masks and protected spans fit the tokens that a cache has read or will read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ag.engine.token_ids import HOW_TO_CONTINUE
from ag.errors import UserError
from ag.model.rope import RopeByText

LAST_PROTECTED = 2**24  # token indices of protected spans end here: each takes a byte, and no text is as long


def check_mask_width(num_given: int, columns: int, num_seen: int) -> None:
    """Refuse numbers of tokens and of columns of their mask that do not go on from the columns seen."""
    if num_given not in (columns, columns - num_seen):
        raise UserError(
            f"model.generate was given {num_given} tokens and an attention_mask of {columns} columns, and this cache "
            f"has seen {num_seen}: expected a mask of {num_given} columns for the whole text, or of "
            f"{num_seen + num_given} where these are the new tokens alone."
        )
    if num_seen and columns <= num_seen:
        raise UserError(
            f"model.generate was given {columns} tokens, and this cache has seen {num_seen}: {HOW_TO_CONTINUE}."
        )


def check_past(mask: Tensor, read: Tensor) -> None:
    """Refuse a mask ``[B, T]`` that differs from the mask ``[B, num_read]`` of the columns read so far."""
    num_read = read.shape[1]
    if not num_read:
        return
    if len(mask) != len(read):
        raise UserError(
            f"attention_mask {tuple(mask.shape)}: this cache holds {len(read)} sequences; for another text call "
            "cache.reset() first."
        )
    changed = mask[:, :num_read].bool() != read.to(mask.device)
    if bool(changed.any()):
        row, column = changed.nonzero()[0].tolist()
        old_text, new_text = ("a token", "padding") if read[row, column] else ("padding", "a token")
        raise UserError(
            f"attention_mask: column {column} of sequence {row} came as {old_text}, and is {new_text} now: "
            "expected the mask to go on from cache.valid. cache.crop([n, ...]) takes the newest n tokens of each "
            "sequence back, such as the padding after a shorter answer; for another text call cache.reset() first."
        )


def check_announced(prompt: Tensor, new: Tensor, num_read: int) -> None:
    """Refuse an empty prompt ``[B, T]``, and other padding in its columns ``[B, w]`` after ``num_read`` columns."""
    if not bool((has_token := prompt.any(1)).all()):
        raise UserError(
            f"attention_mask: sequence {int((~has_token).long().argmax())} of the prompt is padding alone: expected at "
            "least one token; leave the sequence out."
        )
    announced = prompt[:, num_read : num_read + new.shape[1]]
    if not torch.equal(announced, new[:, : announced.shape[1]]):
        raise UserError(
            f"attention_mask: columns {num_read} to {num_read + announced.shape[1] - 1} of the prompt have other "
            "padding than was announced; give model.generate the attention_mask, or cache.expect the one that comes."
        )


def check_frequencies(rope: RopeByText, state: Any, new: Tensor, counts: Tensor, model: str) -> None:
    """Refuse new columns ``[B, T]`` bool, with ``counts`` ``[B]`` tokens, that outgrow the frequencies of its keys.

    Nothing changes then. ``state`` are the lengths of the sequences (:class:`ag.engine.sequences.SequenceState`).
    """
    old_text, tokens = rope.set_of(state.text_len), state.num_tokens + counts
    outgrows = rope.outgrows(state.text_len, tokens)
    if not state.ready:  # the unread part of a prompt may be replaced
        outgrows |= (rope.set_of(state.prompt_len) != old_text) & (state.num_tokens > 0)
    if bool(outgrows.any()):
        row, read = int(outgrows.long().argmax()), state.num_tokens.tolist()
        state.undo_extend(new)
        raise UserError(
            f"{model}: its RoPE has other frequencies for texts of more than {rope.changes} tokens, and sequence {row} "
            f"of this cache, of which {read[row]} tokens were read, began as a text of {int(state.text_len[row])}: "
            "expected a text that keeps its frequencies; call cache.reset() and give the whole text (a prompt in parts "
            "is announced by cache.expect), or generate less."
        )


def marked(spans: Sequence[Any]) -> Tensor:
    """Return ``[L]`` bool, which own tokens lie in spans ``(first, after the last)``; refuse something else."""
    for span in spans:
        is_pair = isinstance(span, tuple) and len(span) == 2 and all(type(x) is int for x in span)
        if not is_pair or not 0 <= span[0] < span[1] <= LAST_PROTECTED:
            raise UserError(
                f"protect: {span!r}: expected pairs (index of the first token, index after the last), such as (0, 40), "
                f"up to {LAST_PROTECTED}, or for each sequence a list of such pairs."
            )
    marks = torch.zeros(max((end for _, end in spans), default=0), dtype=torch.bool)
    for first, end in spans:
        marks[first:end] = True
    return marks


def check_protected(marks: Tensor, old_marks: Tensor | None, decided: Tensor) -> None:
    """Refuse new marks on tokens about which an eviction was already decided.

    Args:
        marks: ``[B, L]`` bool, the new marks.
        old_marks: ``[B, L']`` bool, the marks at that time. None: no token was protected.
        decided: ``[B]``, how many first tokens of each sequence were decided on.
    """
    late = marks & (torch.arange(marks.shape[1]) < decided[:, None])
    if old_marks is not None:
        width = min(marks.shape[1], old_marks.shape[1])
        late[:, :width] &= ~old_marks[:, :width]
    if bool(late.any()):
        row, token = late.nonzero()[0].tolist()
        raise UserError(
            f"protect: what to keep of the first {int(decided[row])} tokens of sequence {row} was decided while token "
            f"{token} was not protected: expected later tokens, or protected ones; call cache.reset(), protect, and "
            "read the text again."
        )


def of_each(marks: Tensor, count: int) -> Tensor:
    """Return the marks ``[B, L]`` of ``count`` sequences: each prompt's for its beams, or one prompt's for all."""
    if count % len(marks):
        raise UserError(f"protect: spans for {len(marks)} sequences: expected one list of spans, or {count} lists.")
    return marks.repeat_interleave(count // len(marks), 0)

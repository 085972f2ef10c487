"""The passes of a forward pass, and in which of them something may go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ag.engine.history import History
from ag.engine.layer import EvictionLayer
from ag.engine.passes import Pass, Tokens
from ag.engine.policy import Policy
from ag.engine.positions import Original
from ag.gates.gate import AttentionGates


class Schedule:
    """Makes the passes of one cache.

    Args:
        policy: of the cache.
        gates: of the model; None without gates.
        rotation: what keys are rotated by.
        layers: of the cache.
    """

    def __init__(
        self, policy: Policy, gates: AttentionGates | None, rotation: Original, layers: Sequence[EvictionLayer]
    ) -> None:
        self.policy, self.gates, self.rotation, self.layers = policy, gates, rotation, layers
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._number = 0
        # Own tokens [B, n] of each sequence when something could last go: at the end of the prompt, and at each later
        # decision that crop may take back; for these the columns seen before the forward pass and after it.
        self._decided = torch.empty(0, 1, dtype=torch.long)
        self._decisions: tuple[tuple[int, int], ...] = ()

    def whole(self, tokens: Tokens, history: History, *, padded: bool) -> Pass:
        """Make the pass of all tokens of a forward pass; ``padded`` says whether some are not real."""
        return self._made(tokens, history, padded=padded, reading=history.before < history.prompt_columns)

    def parts(self, whole: Pass, history: History) -> Iterator[Pass] | None:
        """Cut a prompt into the blocks of the schedule, and what comes with it (a draft) off; None: it stays whole."""
        if not whole.reading:
            return None
        prompt, rest = whole.split(history.prompt_columns - history.before)
        blocks = prompt.blocks(self.policy.block)
        return self._one_by_one(blocks, rest, history) if len(blocks) > 1 or rest.ranks.shape[1] else None

    def _one_by_one(self, blocks: list[Tokens], rest: Tokens, history: History) -> Iterator[Pass]:
        for number, part in enumerate(blocks, 1):
            padded = not bool(part.real.all())
            yield self._made(part, history, padded=padded, reading=True, last=number == len(blocks))
        if rest.ranks.shape[1]:
            yield self._made(rest, history, padded=not bool(rest.real.all()), reading=False)

    def _made(self, tokens: Tokens, history: History, *, padded: bool, reading: bool, last: bool = True) -> Pass:
        """Make the pass of the next tokens.

        Args:
            tokens: which these are.
            history: what has gone by, the whole forward pass included.
            padded: whether some of them are not real.
            reading: whether they are of the prompt.
            last: whether they are the last ones of the forward pass, or of its part of the prompt.
        """
        ends, later = last and history.seen >= history.prompt_columns, self.policy.asks_later(self.gates)
        stores = [layer.store for layer in self.layers if layer.store is not None]
        due = self._due(tokens, history, reading)
        self._number += 1
        return Pass(
            **vars(tokens),
            number=self._number,
            reading=reading,
            ends_prompt=ends,
            padded=padded,
            left_padded=padded and not bool(tokens.real[:, 0].all()),
            seen=history.seen,
            prompt_columns=history.prompt_columns,
            prompt_lengths=history.prompt_lengths,
            lengths=tokens.counts,
            due=due,
            every_due=due is not None and bool(due.all()),
            positions=self.rotation.positions(tokens, history.seen, stores),
            at_least=0 if reading else max(0, history.unpadded - tokens.ranks.shape[1]),
            judged=self.gates is not None and (reading or later),
            remember=self.gates is not None and (later or (reading and not ends)),
        )

    def _due(self, tokens: Tokens, history: History, reading: bool) -> Tensor | None:
        """Return ``[B]`` bool, the sequences of which something may go after these tokens; None: of none.

        In a prompt those which it, or a block of it, ends; later those that have grown by the steps of the schedule.
        """
        policy = self.policy
        if policy.budget is None or policy.rereads or not (reading or policy.steps is not None):
            return None
        seen = history.valid.sum(1)
        if reading:
            count = tokens.counts
            ends = count == history.prompt_lengths
            due = (count > 0) & (ends if policy.block is None else ends | (count % policy.block == 0))
            self._decided, self._decisions = seen.minimum(history.prompt_lengths)[:, None], ()
        else:
            due = self._grown(seen)
        if not bool(due.any()):
            return None
        if not reading:
            self._forget_what_crop_cannot_reach()
            self._note(seen, due, history.before, history.seen)
        return due

    def _grown(self, seen: Tensor) -> Tensor:
        """Return ``[B]`` bool, which sequences, of ``seen`` ``[B]`` own tokens, have grown by the schedule's steps."""
        self._decided = self._decided.to(seen.device)
        return seen - self._decided[:, -1] >= (self.policy.steps or 0)

    def _note(self, seen: Tensor, due: Tensor, before: int, after: int) -> None:
        """Note a decision after the prompt, in a forward pass between two numbers of columns."""
        self._decided = torch.cat([self._decided, seen.where(due, self._decided[:, -1])[:, None]], 1)
        self._decisions = *self._decisions, (before, after)

    def _forget_what_crop_cannot_reach(self) -> None:
        evicted_at = max(layer.evicted_at for layer in self.layers)
        passed = sum(after <= evicted_at for _, after in self._decisions)
        self._decided, self._decisions = self._decided[:, passed:], self._decisions[passed:]

    # ---- going back, other sequences

    def crop(self, history: History) -> None:
        """Take decisions back that belong to columns which ``history`` has no longer; nothing went in them."""
        gone = sum(after > history.seen for _, after in self._decisions)
        if not gone:
            return
        before, _ = self._decisions[-gone]
        self._decided, self._decisions = self._decided[:, :-gone], self._decisions[:-gone]
        seen = history.valid.sum(1)
        due = self._grown(seen)
        if before < history.seen and bool(due.any()):  # the rest of that forward pass brings one about too
            self._note(seen, due, before, history.seen)

    def join(self, other: Schedule) -> None:
        """Append the sequences of another one of the same policy; no decision before is taken back."""
        mine = self._decided[:, -1:]
        self._decided, self._decisions = torch.cat([mine, other._decided[:, -1:].to(mine.device)]), ()

    def select_sequences(self, indices: Tensor) -> None:
        """Make the sequences those at ``indices``."""
        self._decided = self._decided[indices.to(self._decided.device)] if len(self._decided) else self._decided

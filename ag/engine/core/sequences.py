"""Lengths of the sequences of a batch, and the passes that their next tokens make."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ag.engine.passes import marked
from ag.engine.policy import Policy
from ag.errors import UserError


@dataclass(frozen=True, kw_only=True, eq=False)
class ForwardBatch:
    """The next tokens of each sequence on their way through the layers, left-aligned: column j is the j-th new one.

    Attributes:
        ranks: ``[B, T]`` long on the device, the place of each token in its sequence; -1 where there is none.
        columns: ``[B, T]`` long, the column of each among the tokens of the model's call, -1 where there is none; None
            means that both are the same.
        counts: ``[B]`` long on the host, new tokens.
        num_tokens: ``[B]`` long on the host, tokens of each sequence, these included.
        prompt_len: ``[B]`` long on the host, tokens of each prompt.
        protected: ``[B, L]`` bool on the host, which tokens the caller protects, by rank; None means none.
        is_prefill: whether the tokens belong to the prompt.
        ends_prompt: whether every prompt is read after them.
        fresh: whether nothing was held before.
        evict: ``[B]`` bool on the host, the sequences to evict from after these tokens; None means none.
        step: whether it is one token of each sequence behind its prompt, in memory that is the same at each step.
        memo: what layers worked out that is the same for all of them.
    """

    ranks: Tensor
    columns: Tensor | None
    counts: Tensor
    num_tokens: Tensor
    prompt_len: Tensor
    protected: Tensor | None
    is_prefill: bool
    ends_prompt: bool
    fresh: bool
    evict: Tensor | None = None
    step: bool = False
    memo: dict[Any, Any] = field(default_factory=dict)

    @property
    def padded(self) -> bool:
        """Whether some sequence has fewer new tokens than another."""
        return bool((self.counts < self.ranks.shape[1]).any())


class SequenceState:
    """Per sequence, on the host: tokens seen, prompt length, the length at the last eviction, tokens held.

    The attention mask of a forward pass becomes ranks here and nowhere else. ``num_held`` is what the schedule counts:
    tokens per KV head, on average.

    Args:
        policy: of the cache.
    """

    VECTORS = "num_tokens", "prompt_len", "evicted_at", "num_held"

    num_tokens: Tensor
    prompt_len: Tensor
    #: Tokens of each sequence at its last eviction; shorter it cannot become again.
    evicted_at: Tensor
    num_held: Tensor

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        for name in self.VECTORS:
            setattr(self, name, torch.zeros(0, dtype=torch.long))
        self.mask = torch.zeros(0, 0, dtype=torch.bool)  # [B, columns seen], which of them were tokens
        self.next_ranks = torch.zeros(0, 1, dtype=torch.long)  # [B, 1] on the device, counted on in place by steps
        self.own_positions = False  # whether columns no longer tell positions: sequences were added or cropped apart
        #: Which tokens the caller protects, ``[B, L]`` bool on the host, by rank; None means none.
        self.protected: Tensor | None = None
        self._expected: Tensor | None = None  # [B, T] bool, the announced prompt

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.num_tokens)

    @property
    def columns(self) -> int:
        """Columns of the input that went by."""
        return self.mask.shape[1]

    @property
    def ready(self) -> bool:
        """Whether every prompt is read."""
        return self.columns > 0 and bool((self.num_tokens >= self.prompt_len).all())

    def capacity(self) -> Tensor:
        """Return the tokens per KV head ``[B]`` that the budget allows, on average over layers."""
        return self.policy.capacity(self.prompt_len)

    def expect(self, mask: Tensor) -> None:
        """Take note of a prompt ``[B, T]`` bool that may come in several forward passes."""
        self._expected = mask

    def protect(self, spans: Sequence[Any]) -> None:
        """Let tokens stay whatever the policy says; see :meth:`ag.engine.core.cache.EvictionCache.protect`."""
        each = spans if any(isinstance(x, list) for x in spans) else [spans]
        marks = pad_sequence([marked(x) for x in each], batch_first=True)
        self.protected = _of_each(marks, len(self)) if self.columns else marks

    # ---- a forward pass

    def extend(self, mask: Tensor | None, batch: int, length: int, device: torch.device) -> Tensor:
        """Add the columns of a forward pass, and return which of them are tokens, ``[B, length]`` bool.

        Args:
            mask: ``[B, seen + length]``, nonzero on tokens; None means that all columns are.
            batch: number of sequences.
            length: columns of the pass.
            device: of the model's input.

        Raises:
            UserError: when the mask does not fit what was seen.
        """
        seen = self.columns
        if seen and batch != len(self):
            raise UserError(
                f"This cache holds {len(self)} sequences, not {batch}; for another text call cache.reset() first."
            )
        new = torch.ones(batch, length, dtype=torch.bool, device=device)
        if mask is not None:
            if mask.ndim != 2 or mask.shape != (batch, seen + length):
                raise UserError(
                    f"attention_mask {tuple(mask.shape)}: expected {(batch, seen + length)}, one entry for each token "
                    "seen and coming; for another text call cache.reset() first."
                )
            new = mask[:, seen:].bool()
            changed = mask[:, :seen].bool() != self.mask.to(mask.device) if seen else torch.zeros(1, 0)
            if bool(changed.any()):
                row, column = changed.nonzero()[0].tolist()
                raise UserError(
                    f"attention_mask: column {column} of sequence {row} was {int(self.mask[row, column])} when this "
                    f"cache read it and is {int(mask[row, column] != 0)} now: expected the mask of earlier passes to "
                    "stay; take tokens back with cache.crop, or call cache.reset() first."
                )
        if not seen:
            self._start(new)
        self.mask = new if not seen else torch.cat([self.mask.to(new.device), new], 1)
        return new

    def take_back(self, new: Tensor) -> None:
        """Undo :meth:`extend` for columns ``[B, T]`` of which no pass was made."""
        self.mask = self.mask[:, : self.columns - new.shape[1]]

    def _start(self, new: Tensor) -> None:
        whole, self._expected = self._expected, None
        if whole is None or whole.shape[1] <= new.shape[1]:
            whole = new
        if len(whole) != len(new):  # beams: each prompt comes several times
            whole = whole.repeat_interleave(len(new) // len(whole), 0)
        for name in self.VECTORS:
            setattr(self, name, torch.zeros(len(new), dtype=torch.long))
        self.prompt_len = whole.sum(1).cpu()
        self.protected = None if self.protected is None else _of_each(self.protected, len(new))
        self.next_ranks = torch.full((len(new), 1), -1, device=new.device)

    def step(self) -> ForwardBatch:
        """Count one token of each sequence; its ranks stand in the same memory at each step."""
        self.next_ranks += 1
        return self._made(self.next_ranks, None, torch.ones_like(self.num_tokens), is_prefill=False, step=True)

    def batches(self, new: Tensor) -> Iterator[ForwardBatch]:
        """Cut the new tokens of a forward pass into chunks of the prompt and what follows it.

        Args:
            new: ``[B, T]`` bool, which columns are tokens.
        """
        lengths, before = new.sum(1).cpu(), self.num_tokens
        width, device = new.shape[1], new.device
        order = None if bool((lengths == width).all()) else (~new).int().argsort(dim=1, stable=True)
        for first, end, is_prefill in self._parts(before, before + lengths):
            counts = end - first
            places = torch.arange(max(int(counts.max()), 1))
            there = (places < counts[:, None]).to(device)
            ranks = (first[:, None] + places).to(device).where(there, -1)
            columns = ((first - before)[:, None] + places).clamp_max(width - 1).to(device)
            if order is not None:
                columns = order.gather(1, columns)
            same = order is None and len(places) == width
            batch = self._made(ranks, None if same else columns.where(there, -1), counts, is_prefill=is_prefill)
            self.next_ranks = self.num_tokens[:, None].to(device) - 1
            yield batch

    def _parts(self, before: Tensor, end: Tensor) -> Iterator[tuple[Tensor, Tensor, bool]]:
        """Yield from which ranks to which ``[B]`` each part goes, and whether it belongs to the prompt."""
        prompt, size = self.prompt_len, self.policy.block
        in_prompt = end.minimum(prompt).maximum(before)
        if bool((in_prompt > before).any()):
            chunk = int(in_prompt.max()) if size is None else size
            for number in range(int(before.min()) // chunk, -(-int(in_prompt.max()) // chunk)):
                first, last = before.maximum(torch.tensor(number * chunk)), in_prompt.clamp_max((number + 1) * chunk)
                if bool((last > first).any()):
                    yield first, last.maximum(first), True
        if bool((end > in_prompt).any()) or not bool((end > before).any()):
            yield in_prompt, end, False

    def _made(
        self, ranks: Tensor, columns: Tensor | None, counts: Tensor, *, is_prefill: bool, step: bool = False
    ) -> ForwardBatch:
        fresh = not bool(self.num_tokens.any())
        self.num_tokens = self.num_tokens + counts
        evict = self._should_evict(counts, is_prefill)
        self.num_held = self.num_held + counts
        if evict is not None:
            self.num_held = self.num_held.where(~evict, self.num_held.minimum(self.capacity()))
            self.evicted_at = self.evicted_at.where(~evict, self.num_tokens)
        return ForwardBatch(
            ranks=ranks,
            columns=columns,
            counts=counts,
            num_tokens=self.num_tokens,
            prompt_len=self.prompt_len,
            protected=self.protected,
            is_prefill=is_prefill,
            ends_prompt=is_prefill and bool((self.num_tokens >= self.prompt_len).all()),
            fresh=fresh,
            evict=evict,
            step=step,
        )

    def _should_evict(self, counts: Tensor, is_prefill: bool) -> Tensor | None:
        """Return the sequences to evict from after so many new tokens of each, ``[B]`` bool; None means none.

        The schedule is one rule: at the end of a prompt, or of a chunk of it, a sequence is evicted down to its budget.
        Behind the prompt that happens whenever it holds its budget and an interval more.
        """
        policy = self.policy
        if policy.budget is None or policy.rereads or not (is_prefill or policy.steps):
            return None
        held = self.num_held + counts
        if is_prefill:
            ends = self.num_tokens == self.prompt_len
            if policy.block is not None:
                ends |= self.num_tokens % policy.block == 0
            evict = (counts > 0) & ends
        else:
            evict = (counts > 0) & (held >= self.capacity() + (policy.steps or 0))
        return evict if bool(evict.any()) else None

    # ---- going back, other sequences

    def crop(self, tokens: Tensor) -> None:
        """Forget the newest tokens, ``[B]`` long on the CPU of each sequence.

        Raises:
            UserError: when a sequence would be shorter than at its last eviction.
        """
        left = self.num_tokens - tokens
        if bool((left < self.evicted_at).any()):
            row = int((left < self.evicted_at).long().argmax())
            raise UserError(
                f"crop: sequence {row} would have {int(left[row])} tokens, and some of its first "
                f"{int(self.evicted_at[row])} were evicted, which cannot come back: crop at most "
                f"{int(self.num_tokens[row] - self.evicted_at[row])}, or call cache.reset()."
            )
        self.num_tokens, self.num_held = left, self.num_held - tokens
        self.prompt_len = self.prompt_len.minimum(left)
        self.next_ranks = left[:, None].to(self.next_ranks.device) - 1
        own = self.mask.cumsum(1)
        kept = self.mask & (own <= left[:, None].to(own.device))
        width = int(kept.any(0).nonzero()[-1]) + 1 if bool(kept.any()) else 0
        self.own_positions = self.own_positions or bool((tokens != tokens[:1]).any())
        self.mask = kept[:, :width]

    def select(self, indices: Tensor) -> None:
        """Make the sequences those at ``indices``."""
        for name in (*self.VECTORS, "mask", "next_ranks", "protected"):
            x = getattr(self, name)
            setattr(self, name, None if x is None else x[indices.to(x.device)])

    def add(self, other: SequenceState) -> None:
        """Append the sequences of another state; what both have read cannot be cropped."""
        columns = max(self.columns, other.columns)
        masks = [torch.nn.functional.pad(x.mask.to(self.mask.device), (columns - x.columns, 0)) for x in (self, other)]
        for name in (*self.VECTORS, "next_ranks"):
            setattr(self, name, torch.cat([getattr(self, name), getattr(other, name)]))
        if self.protected is not None or other.protected is not None:
            none = torch.zeros(0, dtype=torch.bool)
            rows = [[none] * len(x) if x.protected is None else [*x.protected] for x in (self, other)]
            self.protected = pad_sequence([*rows[0], *rows[1]], batch_first=True)
        self.mask, self.own_positions = torch.cat(masks), True


def _of_each(marks: Tensor, count: int) -> Tensor:
    """Return the marks ``[B, L]`` of so many sequences: each prompt's for its beams, or one prompt's for all."""
    if count % len(marks):
        raise UserError(f"protect: spans for {len(marks)} sequences: expected one list of spans, or {count} lists.")
    return marks.repeat_interleave(count // len(marks), 0)

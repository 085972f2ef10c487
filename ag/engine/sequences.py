"""Lengths of the sequences of a batch, and the passes that their next tokens make."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ag.engine.forward_batch import ForwardBatch, Prompts
from ag.engine.masks import check_announced, check_mask_width, check_past, check_protected, marked, of_each
from ag.engine.pass_split import cut, in_turn
from ag.engine.policy import Policy
from ag.engine.token_ids import TokenIds
from ag.errors import UserError


class SequenceState:
    """Lengths of each sequence, ``[B]`` long on the host; only here a mask becomes token indices.

    Args:
        policy: of the cache.
        chunk: tokens of the chunks within which some layers attend, which no pass crosses; None means no chunks.
        goes_on: whether layers go on from the states that they keep in a pass of several tokens; None means that no
            layer keeps states.
    """

    VECTORS = "num_tokens", "prompt_len", "text_len", "evicted_at", "num_committed", "num_held"

    #: Tokens seen.
    num_tokens: Tensor
    prompt_len: Tensor
    text_len: Tensor  # length by which RoPE chooses frequencies: of the prompt, as announced with its first part
    #: Tokens at the last eviction, or at the last removal of hidden tokens; :meth:`crop` goes back no further.
    evicted_at: Tensor
    #: Length of the prefix that :meth:`crop` cannot remove once a layer freed hidden tokens: the prompt, and every pass
    #: before the last. If a sequence had no token in the last pass, this is its whole length.
    num_committed: Tensor
    #: Tokens held per KV head, on average, as the schedule counts them.
    num_held: Tensor

    def __init__(self, policy: Policy, chunk: int | None = None, goes_on: bool | None = None) -> None:
        self.policy, self.chunk, self.goes_on = policy, chunk, goes_on
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        for name in self.VECTORS:
            setattr(self, name, torch.zeros(0, dtype=torch.long))
        self.mask = torch.zeros(0, 0, dtype=torch.bool)  # [B, columns seen], which of them were tokens
        self.step_token_indices = torch.zeros(0, 1, dtype=torch.long)  # [B, 1] on the device; a step adds 1 in place
        self.own_positions = False  # True after add, or a crop of unequal numbers: positions are then token indices
        self.by_column = False  # whether the newest tokens were rotated by their columns, padding included
        self.ids = TokenIds()
        #: Tokens that the caller protects, ``[B, L]`` bool on the host, by token index; None: no token.
        self.protected: Tensor | None = None
        self._expected: Tensor | None = None  # [B, T] bool, the announced text, until a pass begins with it
        self._prompt: Tensor | None = None  # [B, T] bool, the prompt that is being read, or was
        self._prompts: Prompts | None = None

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.num_tokens)

    @property
    def columns(self) -> int:
        """Columns of the input that went by."""
        return self.mask.shape[1]

    @property
    def announced(self) -> int:
        """Columns of the text that was announced; 0 without one."""
        return 0 if self._expected is None else self._expected.shape[1]

    @property
    def ready(self) -> bool:
        """Whether every prompt is read."""
        return self.columns > 0 and bool((self.num_tokens >= self.prompt_len).all())

    def expect(self, mask: Tensor, tokens: Tensor | None) -> None:
        """Note the text ``[B, T]`` bool to come; see :meth:`ag.engine.cache.EvictionCache.expect`."""
        num_columns, columns = self.columns, mask.shape[1]
        if len(self) > len(mask) and len(self) % len(mask) == 0:  # beams or samples of a text that was read once
            repeats = len(self) // len(mask)
            mask = mask.repeat_interleave(repeats, 0)
            tokens = None if tokens is None else tokens.repeat_interleave(repeats, 0)
        num_given = columns if tokens is None else tokens.shape[1]
        check_mask_width(num_given, columns, num_columns)
        check_past(mask, self.mask)
        self.ids.announce(tokens if num_given == columns else None, num_columns)
        self._expected = mask

    def end_generation(self, tokens: Tensor | None, broken_off: bool) -> None:
        """Note the text ``[B, T]`` after generation, which an error may have ended; None means that it is not known."""
        self._expected = None
        self.ids.end(tokens, len(self), broken_off)

    def protect(self, spans: Sequence[Any]) -> None:
        """Protect tokens; see :meth:`ag.engine.cache.EvictionCache.protect`."""
        each = spans if any(isinstance(x, list) for x in spans) else [spans]
        marks = pad_sequence([marked(x) for x in each], batch_first=True)
        if self.columns:
            marks = of_each(marks, len(self))
            check_protected(marks, self.protected, self._decided)
        self.protected = marks if bool(marks.any()) else None

    @property
    def _decided(self) -> Tensor:
        """``[B]``: how many first tokens were decided on: some of them may be evicted, or have their flags."""
        if self.policy.budget is None:
            return self.num_tokens * self.policy.by_gates
        return self.evicted_at.where(self.num_held < self.num_tokens, 0)

    # ---- a forward pass

    def extend(self, mask: Tensor | None, batch: int, length: int, device: torch.device) -> Tensor:
        """Add the columns of a forward pass, and return which of them are tokens, ``[B, length]`` bool.

        The mask ``[B, seen + length]`` is nonzero on tokens; None means that all new columns are.
        """
        num_columns = self.columns
        if num_columns and batch != len(self.mask):
            raise UserError(
                f"This cache holds {len(self)} sequences, not {batch}; for another text call cache.reset() first."
            )
        new = torch.ones(batch, length, dtype=torch.bool, device=device)
        if mask is not None:
            if mask.ndim != 2 or mask.shape != (batch, num_columns + length):
                raise UserError(
                    f"attention_mask {tuple(mask.shape)}: expected {(batch, num_columns + length)}, one entry for each "
                    "token seen and coming; for another text call cache.reset() first."
                )
            check_past(mask, self.mask)
            new = mask[:, num_columns:].bool().to(device)
        ready = self.ready
        if not ready:
            self._read(new)
        self._expected = None
        if self.ids.announced is not None:
            self.ids.begin()
        elif ready and self.ids.ids is not None:  # the next tokens may differ from the generated ones
            self.ids.cut(num_columns)
        self.mask = new if not num_columns else torch.cat([self.mask.to(new.device), new], 1)
        return new

    def _read(self, new: Tensor) -> None:
        """Find the lengths of prompts whose columns ``[B, T]`` come: of the announced text, else of these columns."""
        num_columns, announced = self.columns, self._expected
        if announced is None or announced.shape[1] <= num_columns:
            announced = self._prompt if num_columns else new
        assert announced is not None
        prompt = announced.to(new.device)
        if len(prompt) != len(new) and len(new) % len(prompt) == 0:  # beams: each prompt comes several times
            prompt = prompt.repeat_interleave(len(new) // len(prompt), 0)
        check_announced(prompt, new, num_columns)
        if not num_columns:
            marks = None if self.protected is None else of_each(self.protected, len(new))
            for name in self.VECTORS:
                setattr(self, name, torch.zeros(len(new), dtype=torch.long))
            self.protected, self.step_token_indices = marks, torch.full((len(new), 1), -1, device=new.device)
        self.prompt_len, self._prompt = prompt.sum(1).cpu(), prompt
        self.text_len = self.text_len if num_columns else self.prompt_len

    def undo_extend(self, new: Tensor) -> None:
        """Undo :meth:`extend` for columns ``[B, T]`` that no pass has read."""
        self.mask = self.mask[:, : self.columns - new.shape[1]]

    def step(self) -> ForwardBatch:
        """Count one token of each sequence; its token indices lie at one address at each step."""
        self.step_token_indices += 1
        return self._count_and_schedule(
            self.step_token_indices, None, torch.ones_like(self.num_tokens), is_prefill=False, step=True
        )

    def split_into_passes(self, new: Tensor) -> Iterator[ForwardBatch]:
        """Cut new columns ``[B, T]`` bool, True on tokens, into chunks of the prompt and what follows it."""
        lengths, start = new.sum(1).cpu(), self.num_tokens
        width, device = new.shape[1], new.device
        order = None if bool((lengths == width).all()) else (~new).int().argsort(dim=1, stable=True)
        for first, end, is_prefill in in_turn(self._parts(start, start + lengths), self.goes_on):
            counts = end - first
            offsets = torch.arange(max(int(counts.max()), 1))
            valid = (offsets < counts[:, None]).to(device)
            token_indices = (first[:, None] + offsets).to(device).where(valid, -1)
            columns = ((first - start)[:, None] + offsets).clamp_max(width - 1).to(device)
            if order is not None:
                columns = order.gather(1, columns)
            same = order is None and bool((counts == width).all())
            batch = self._count_and_schedule(
                token_indices, None if same else columns.where(valid, -1), counts, is_prefill=is_prefill
            )
            self.step_token_indices = self.num_tokens[:, None].to(device) - 1
            yield batch

    def _parts(self, start: Tensor, end: Tensor) -> Iterator[tuple[Tensor, Tensor, bool]]:
        """Yield the first token index and the end ``[B]`` of each part, and whether the part belongs to the prompt."""
        in_prompt = end.minimum(self.prompt_len).maximum(start)
        for first, last in cut(start, in_prompt, self.policy.block, self.chunk):
            yield first, last, True
        for first, last in cut(in_prompt, end, self.chunk):
            yield first, last, False
        if not bool((end > start).any()):
            yield start, end, False

    def _count_and_schedule(
        self, token_indices: Tensor, columns: Tensor | None, counts: Tensor, *, is_prefill: bool, step: bool = False
    ) -> ForwardBatch:
        is_first_pass, old_tokens = not bool(self.num_tokens.any()), self.num_tokens
        prompts = self._prompts
        if prompts is None or prompts.lengths is not self.prompt_len or prompts.protected is not self.protected:
            prompts = self._prompts = self._prompt_facts(token_indices.device)
        evicting = self._should_evict(counts, is_prefill, prompts.capacity)
        self.num_tokens, self.num_held = old_tokens + counts, self.num_held + counts
        self.num_committed = self.num_tokens if is_prefill else old_tokens
        if evicting is not None and prompts.capacity is not None:
            self.note_eviction(evicting, prompts.capacity)
        return ForwardBatch(
            token_indices=token_indices,
            columns=columns,
            counts=counts,
            num_tokens=self.num_tokens,
            max_length=int(self.num_tokens.max()),
            num_committed=self.num_committed,
            prompts=prompts,
            is_prefill=is_prefill,
            ends_prompt=is_prefill and bool((self.num_tokens >= self.prompt_len).all()),
            is_first_pass=is_first_pass,
            evicting=evicting,
            step=step,
        )

    def _prompt_facts(self, device: torch.device) -> Prompts:
        policy = self.policy
        capacity = None if policy.budget is None else policy.capacity(self.prompt_len)
        limits = None if capacity is None or policy.scorer is None else policy.scorer.limits(capacity)
        marks = None if self.protected is None else self.protected.to(device)
        return Prompts(self.prompt_len, self.protected, capacity, limits, self.prompt_len.to(device), marks)

    def note_eviction(self, evicting: Tensor, capacity: Tensor) -> None:
        """Note that these sequences ``[B]`` bool are evicted from, down to a capacity ``[B]``."""
        self.num_held = self.num_held.where(~evicting, self.num_held.minimum(capacity))
        self.evicted_at = self.evicted_at.where(~evicting, self.num_tokens)

    def may_evict(self, counts: Tensor) -> bool:
        """Return whether these numbers of new tokens ``[B]`` make an eviction due."""
        capacity = None if self.policy.budget is None else self.policy.capacity(self.prompt_len)
        return not self.ready or self._should_evict(counts, False, capacity) is not None

    def _should_evict(self, counts: Tensor, is_prefill: bool, capacity: Tensor | None) -> Tensor | None:
        """Return the sequences to evict from after ``counts`` ``[B]`` new tokens, ``[B]`` bool; None means none.

        The schedule is one rule: at the end of a prompt, or of a chunk of it, a sequence is evicted down to its budget.
        After the prompt that happens whenever it holds its budget and an interval more.
        """
        policy = self.policy
        if capacity is None or policy.reconstruction_scorer is not None or not (is_prefill or policy.steps):
            return None
        if is_prefill:
            tokens = self.num_tokens + counts
            ends = tokens == self.prompt_len
            if policy.block is not None:
                ends |= tokens % policy.block == 0
            evicting = (counts > 0) & ends
        else:
            evicting = (counts > 0) & (self.num_held + counts >= capacity + (policy.steps or 0))
        return evicting if bool(evicting.any()) else None

    # ---- going back, other sequences

    def equal_columns(self, remove: int | Sequence[int]) -> int | None:
        """Return how many columns :meth:`crop` takes from all sequences; None means unequal numbers of tokens."""
        if not isinstance(remove, int):
            return None if any(remove) else 0
        num_removed, own = self.mask[:, self.columns - min(remove, self.columns) :].sum(1), self.mask.sum(1)
        return remove if bool(((num_removed == remove) | (num_removed == own)).all()) else None

    def crop(self, remove: int | Sequence[int]) -> Tensor:
        """Forget the newest tokens, and return how many of each sequence, ``[B]`` long on the CPU.

        Args:
            remove: columns of all sequences; or of each sequence how many of its tokens.

        Raises:
            UserError: when a sequence would be shorter than at its last eviction, or loses a part of a prompt that is
                still to be evicted from; nothing changes then.
        """
        own = self.mask.sum(1).cpu()
        kept = self._mask_without(remove, own)
        left = kept.sum(1).cpu()
        tokens = self.num_tokens - left
        self._check_crop(own, left, tokens)
        if not isinstance(remove, int):
            self.check_positions_skip_padding(f"crop({[*remove]})")
            self.own_positions, self.by_column = True, False
            self.ids.forget()
        if not kept.shape[1]:
            self.ids = TokenIds()
        self.mask, self.num_tokens, self.num_held = kept, left, self.num_held - tokens
        self.prompt_len, self.num_committed = self.prompt_len.minimum(left), self.num_committed.minimum(left)
        self.step_token_indices = left[:, None].to(self.step_token_indices.device) - 1
        return tokens

    def _mask_without(self, remove: int | Sequence[int], own: Tensor) -> Tensor:
        """Return the mask ``[B, columns left]`` without the removed tokens; sequences have ``own`` ``[B]`` tokens."""
        if isinstance(remove, int):
            return self.mask[:, : max(self.columns - remove, 0)]
        if len(remove) != len(own) or not all(0 <= n <= had for n, had in zip(remove, own.tolist(), strict=True)):
            raise UserError(
                f"crop({[*remove]}): expected for each of {len(own)} sequences a number of its own tokens, which "
                f"has {own.tolist()}."
            )
        left = (own - torch.tensor([*remove])).to(self.mask.device)
        kept = self.mask & (self.mask.cumsum(1) <= left[:, None])
        kept_columns = kept.any(0).nonzero()
        return kept[:, : int(kept_columns[-1]) + 1 if len(kept_columns) else 0]

    def _check_crop(self, own: Tensor, left: Tensor, tokens: Tensor) -> None:
        """Refuse to remove ``tokens`` ``[B]`` of a prompt, tokens that were decided on, and recorded queries."""
        scorer = self.policy.scorer
        in_prompt = (self.num_tokens < self.prompt_len) & (tokens > 0)
        if scorer is not None and bool(in_prompt.any()):
            row = int(in_prompt.long().argmax())
            raise UserError(
                f"crop: {int(own[row])} of the {int(self.prompt_len[row])} tokens of sequence {row}'s prompt were read "
                f"so far, and {self.policy!r} evicts after all of them: expected tokens after the prompt; call "
                "cache.reset(), and read another prompt."
            )
        too_far = left < self.evicted_at
        all_goes = self.policy.budget is None and not bool(left.any())  # the next text is a prompt again
        if bool(too_far.any()) and not all_goes:
            row = int(too_far.long().argmax())
            raise UserError(
                f"crop: sequence {row} would have {int(left[row])} tokens, and which of its first "
                f"{int(self.evicted_at[row])} stay was decided, which cannot be taken back: crop at most "
                f"{int(own[row] - self.evicted_at[row])}, or call cache.reset()."
            )
        noted = scorer is not None and (scorer.needs.every_query or scorer.needs.lookback)
        if self.policy.steps is not None and noted and bool(tokens.any()):
            raise UserError(
                f"crop: {self.policy!r} has recorded the queries of the tokens to remove; use the schedule "
                "prefill, or make a new cache."
            )

    def check_positions_skip_padding(self, operation: str) -> None:
        """Refuse to go on at the sequences' lengths where the positions so far count padding."""
        if self.by_column and not bool(self.mask.all()):
            raise UserError(
                f"{operation}: the text was read under padding and without position_ids: its positions count the "
                "padding: give position_ids=(attention_mask.cumsum(1) - 1).clamp_min(0) from the prompt on, as "
                "model.generate does."
            )

    def select(self, indices: Tensor) -> None:
        """Make the sequences those at ``indices``."""
        self.ids.select(indices, len(self))
        for name in (*self.VECTORS, "mask", "step_token_indices", "protected", "_prompt"):
            x = getattr(self, name)
            setattr(self, name, None if x is None else x[indices.to(x.device)])

    def add(self, other: SequenceState) -> None:
        """Append the sequences of another state, whose columns end where these end."""
        columns = max(self.columns, other.columns)
        masks = [torch.nn.functional.pad(x.mask.to(self.mask.device), (columns - x.columns, 0)) for x in (self, other)]
        if self.protected is not None or other.protected is not None:
            none = torch.zeros(0, dtype=torch.bool)
            rows = [[none] * len(x) if x.protected is None else [*x.protected] for x in (self, other)]
            self.protected = pad_sequence([*rows[0], *rows[1]], batch_first=True)
        for name in (*self.VECTORS, "step_token_indices"):
            setattr(self, name, torch.cat([getattr(self, name), getattr(other, name)]))
        mask = torch.cat(masks)
        self.mask = mask[:, int(mask.any(0).long().argmax()) :]  # without columns of texts that left
        self.own_positions, self.by_column = True, False
        self.ids.forget()
        self.ids.reordered |= other.ids.reordered
        self._expected = self._prompt = None

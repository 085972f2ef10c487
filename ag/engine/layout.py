"""Where the rows of a ragged store lie in its buffer."""

from __future__ import annotations

import torch
from torch import Tensor

SPARE_SLOTS = 16  # spare slots that a row gets at least when the buffer is laid out
SPARE_SHARE = 16  # and one more for each so many tokens that it holds
LOOSE_SHARE = 32  # a buffer is loose when more than one slot for each so many held tokens is neither held nor spare
LOOSE_PROMPT_SHARE = 64  # that of a prompt, which has no spare slots


class Layout:
    """Starts, lengths and limits of R rows.

    Row r owns the slots from ``starts[r]`` to before ``limits[r]``; rows follow one another and do not overlap. Its
    tokens fill ``lengths[r]`` slots from ``starts[r]`` on without gaps, in the order of their ranks; the others are
    free and hold anything.

    All three lie on the CPU, where the host decides by them whether rows fit, without asking a device. Starts and
    lengths lie on the device of the keys too (``rows``), for kernels and indices. Both copies always say the same:
    :meth:`settle` sends what the host knows, and :meth:`grow` adds the same number on both sides, so that neither waits
    for the other. On a CPU they are the same tensors.

    A buffer that is laid out anew gives each row ``max(16, length // 16)`` spare slots behind its tokens. That happens
    when a row is full, or when tokens went and the buffer is loose: larger than what is held, its spare slots, and
    1/32. A prompt gets none: the first token behind it finds its row full.

    Args:
        rows: number of rows R, all empty.
        device: that of the keys.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.device = device
        none = torch.zeros(rows, dtype=torch.long)
        self.settle(none, none, none)

    def settle(self, starts: Tensor, lengths: Tensor, limits: Tensor | None = None) -> None:
        """Take note of where the rows are now, ``[R]`` long on the CPU each; limits: None when they stay."""
        self.starts, self._lengths, self._behind = starts, lengths, False
        if limits is not None:
            #: Where rows end, ``[R]`` long on the CPU, and slots of the buffer.
            self.limits, self.size = limits, int(limits[-1])
        #: Starts and lengths on the device of the keys, ``[R]`` long each.
        self.rows = sent(starts, self.device), sent(lengths, self.device)
        self._sizes: tuple[int, int] | None = None
        #: Tokens that every row can still take; it may take more after a :meth:`push`.
        self.count_room()
        first, count = starts.tolist(), lengths.tolist()  # rows are few
        steps = {b - a for a, b in zip(first, first[1:], strict=False)} or {self.size}
        #: Slots from one row to the next where rows are equally long and evenly spaced, else None.
        self.step = steps.pop() if len(steps) == len(set(count)) == 1 else None

    def grow(self, more: int) -> None:
        """Take note that each row has ``more`` tokens more, which had room; nothing waits for the device."""
        self._lengths = self.lengths + more
        on_device = self._lengths if self.device.type == "cpu" else self.rows[1] + more
        self.rows = self.rows[0], on_device
        self.room -= more
        if self._sizes is not None:
            self._sizes = self._sizes[0] + more * len(self._lengths), self._sizes[1] + more

    def push(self, grew: bool) -> None:
        """Take note that a kernel wrote one token to each row and changed the lengths in ``rows``; nothing waits.

        Args:
            grew: whether every row has become longer by one token; else each may have, and on another device than the
                CPU only that one knows, until somebody asks.
        """
        self.room -= 1
        self._sizes = None
        if self.rows[1] is self._lengths:
            self.step = None
        elif grew and not self._behind:
            self._lengths = self._lengths + 1
        else:
            self.step, self._behind = None, True

    @property
    def lengths(self) -> Tensor:
        """Tokens of each row, ``[R]`` long on the CPU; after a :meth:`push` the host waits for them."""
        if self._behind:
            self._lengths, self._behind = self.rows[1].cpu(), False
        return self._lengths

    @property
    def total(self) -> int:
        """Tokens of all rows; after a :meth:`push` the host waits for them."""
        return self._counted()[0]

    @property
    def longest(self) -> int:
        """Tokens of the longest row; after a :meth:`push` the host waits for them."""
        return self._counted()[1]

    def _counted(self) -> tuple[int, int]:
        if self._sizes is None:
            counts: list[int] = self.lengths.tolist()
            self._sizes = sum(counts), max(counts)
        return self._sizes

    def count_room(self) -> int:
        """Return how many tokens every row can still take, which :attr:`room` may be below."""
        places = [*zip(*(x.tolist() for x in (self.starts, self.lengths, self.limits)), strict=True)]
        self.room = int(min(limit - start - count for start, count, limit in places))
        #: Slots of the row that has most of them: no row exceeds it, and the host need not ask a device.
        self.widest = int(max(limit - start for start, _, limit in places))
        return self.room

    def fits(self, lengths: Tensor) -> bool:
        """Tell whether rows of these lengths fit where the rows start."""
        return bool((self.starts + lengths <= self.limits).all())

    def loose(self, lengths: Tensor, *, spare: bool = True) -> bool:
        """Tell whether a buffer for rows of these lengths, with spare slots or without, would be noticeably smaller."""
        counts: list[int] = lengths.tolist()
        held = sum(counts)
        if not spare:
            return self.size > held + held // LOOSE_PROMPT_SHARE
        return self.size > held + sum(map(spare_slots, counts)) + held // LOOSE_SHARE

    def index(self, longest: int) -> tuple[Tensor, Tensor]:
        """Return the slots ``[R, N]`` of all tokens (clamped where a row is shorter) and their validity."""
        offset = torch.arange(longest, device=self.device)
        lengths = self.rows[1][:, None]
        valid = offset < lengths
        index = self.rows[0][:, None] + offset.where(valid, lengths.clamp_min(1) - 1)
        return index.clamp_max(max(self.size - 1, 0)), valid

    def tokens(self) -> Tensor:
        """Return the slots of all tokens, row after row; nothing waits for the device."""
        total, (starts, held) = self.total, self.rows
        first = torch.repeat_interleave(starts - (held.cumsum(0) - held), held, output_size=total)
        return first + torch.arange(total, device=self.device)


def spare_slots(tokens: int) -> int:
    """Return the spare slots that a row of so many tokens gets when it is laid out."""
    return max(tokens // SPARE_SHARE, SPARE_SLOTS)


def sent(x: Tensor, device: torch.device) -> Tensor:
    """Copy from the CPU to a device without waiting for it: pageable memory is staged before the call returns."""
    return x.to(device, non_blocking=device.type == "cuda")

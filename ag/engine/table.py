"""Which pages of a pool the rows of a layer have: the host's account, and the table that kernels read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ag.engine.pool import PAGE, Pool, listed, pages_for


class PageTable:
    """The pages of R rows, each row's in the order of its slots.

    Several rows, of this table or of others, may hold one page; who writes into it takes a copy first.

    Args:
        rows: R.
        pool: where pages are from.
    """

    def __init__(self, rows: int, pool: Pool) -> None:
        self.pool = pool
        #: ``[R, most]`` int32 on the CPU; behind a row's last page 0.
        self.pages = torch.zeros(rows, 0, dtype=torch.int32)
        #: Pages of each row, ``[R]`` long on the CPU.
        self.counts = torch.zeros(rows, dtype=torch.long)
        #: Whether somebody else may hold some page.
        self.shared = False
        #: Whether nobody else holds the pages that the next tokens come into.
        self.open = True
        self._changed()
        pool.enlist(self)

    def copy(self) -> PageTable:
        """Return another table of the same pages."""
        new = PageTable(len(self.counts), self.pool)
        new.pages, new.counts = self.pages.clone(), self.counts.clone()
        self.pool.share(self.numbers())
        for table in (self, new):
            table.shared, table.open = True, False
        new._changed()
        return new

    def drop(self) -> None:
        """Give all pages back; nothing is computed, as the garbage collector calls it."""
        self.pool.drop(self.pages, self.counts)

    def numbers(self) -> Tensor:
        """Return the numbers of the pages, row after row, ``[n]`` long on the CPU; shared ones several times."""
        return listed(self.pages, self.counts)

    def taken(self) -> int:
        """Return how many pages there are; one that several rows hold counts once."""
        numbers = self.numbers()
        return len(numbers.unique()) if self.shared else len(numbers)

    def room(self, lengths: Tensor) -> int:
        """Return the free slots that each row has at least, when rows hold so many tokens ``[R]``."""
        return int((self.counts * PAGE - lengths).min())

    def renumber(self, numbers: Tensor) -> None:
        """Take note that page p has become page ``numbers[p]``."""
        self.pages = numbers[self.pages.long()].int().masked_fill(~self._there(self.counts), 0)
        self._changed()

    def _changed(self) -> None:
        """Give the device the table that the host knows."""
        device = self.pool.keys.device
        #: The same for kernels.
        self.on_device = self.pages if device.type == "cpu" else self.pages.to(device, non_blocking=True)
        #: Slots of the longest row.
        self.slots = int(self.counts.max()) * PAGE
        self._runs: dict[int, tuple[int, int] | None] = {}  # what run() found, by pages
        self._index: Tensor | None = None  # what index() returned last

    def _there(self, counts: Tensor, first: Tensor | int = 0) -> Tensor:
        """Return which places of the table ``[R, most]`` are from ``first`` on and before ``counts`` ``[R]``."""
        places = torch.arange(self.pages.shape[1])
        return (places < counts[:, None]) & (places >= torch.as_tensor(first).view(-1, 1))

    # ---- where tokens lie

    def run(self, length: int) -> tuple[int, int] | None:
        """Return where the first row starts and how far rows are apart, in tokens, if one step says it; else None."""
        used = -(-length // PAGE)
        if used not in self._runs:  # pages stay for many steps
            self._runs[used] = self._find_run(used)
        return self._runs[used]

    def _find_run(self, used: int) -> tuple[int, int] | None:
        if not used:
            return None
        pages = self.pages[:, :used].long()
        starts = pages[:, 0]
        steps = starts.diff()
        if not bool((pages == starts[:, None] + torch.arange(used)).all() and (steps == steps[:1]).all()):
            return None
        step = int(steps[0]) if len(steps) else used
        return (int(starts[0]) * PAGE, step * PAGE) if step >= 0 else None

    def in_run(self, column: Tensor, run: tuple[int, int], length: int) -> Tensor:
        """Return rows ``[R, length, ...]`` of a column of the pool that lie in a :meth:`run`, as a view."""
        place, (start, step) = column.stride(1), run
        shape = len(self.counts), length, *column.shape[2:]
        return column.flatten(0, 1).as_strided(shape, (step * place, *column.stride()[1:]), start * place)

    def index(self, length: int) -> Tensor:
        """Return where in the pool the first slots are, ``[R, length]``."""
        if self._index is None or self._index.shape[1] != length:  # pages stay for many steps
            offset = torch.arange(length, device=self.on_device.device)
            self._index = self.on_device.long()[:, offset // PAGE] * PAGE + offset % PAGE
        return self._index

    def places(self, slots: Tensor) -> Tensor:
        """Return where in the pool slots ``[R, n]`` lie; anywhere for those that a row does not have."""
        most = self.on_device.shape[1]
        if not most:
            return slots
        pages = self.on_device.long().gather(1, (slots // PAGE).clamp(0, most - 1))
        return pages * PAGE + slots % PAGE

    # ---- pages come and go

    def take(self, lengths: Tensor, more: Tensor, *, everywhere: bool = False) -> None:
        """Take pages for ``more`` tokens ``[R]`` behind ``lengths``, and copies of shared ones that are written then.

        ``everywhere``: something may be written in any slot.

        Raises:
            PoolFullError: when the pool has too few; nothing has changed then.
        """
        wanted, copied = self._wanted(lengths, more, everywhere)
        fresh = self.pool.take(int(wanted.sum()) + len(copied))
        if len(copied):
            rows, places = copied.unbind(1)
            mine, fresh = fresh[: len(copied)], fresh[len(copied) :]
            old = self.pages[rows, places].long()
            self.pool.copy(old, mine)
            self.pool.give(old)
            self.pages[rows, places] = mine.int()
        if len(fresh):
            counts = self.counts + wanted
            self._widen(int(counts.max()))
            self.pages[self._there(counts, self.counts)] = fresh.int()
            self.counts = counts
        if len(copied) or len(fresh):
            self._changed()
        self.look()

    def look(self) -> bool:
        """Return whether somebody else may hold some page, after a look at who does."""
        self.shared = self.shared and bool((self.pool.references(self.numbers()) > 1).any())
        return self.shared

    def demand(self, lengths: Tensor, tokens: int, *, evicting: bool) -> int:
        """Return the most pages that so many more tokens of each row may take, or ``evicting`` others."""
        self.look()
        wanted, copied = self._wanted(lengths, torch.full_like(lengths, tokens), everywhere=evicting)
        return int(wanted.sum()) + len(copied)

    def _wanted(self, lengths: Tensor, more: Tensor, everywhere: bool) -> tuple[Tensor, Tensor]:
        """Return how many pages each row wants ``[R]``, and which (row, place) of its pages it wants copies of."""
        wanted = (pages_for(lengths + more) - self.counts).clamp_min(0)
        if not self.shared:
            return wanted, torch.zeros(0, 2, dtype=torch.long)
        written = self._there(self.counts)
        if not everywhere:
            written = self._there(self.counts, lengths // PAGE) & (more > 0)[:, None]
        return wanted, self._not_mine(written)

    def _not_mine(self, written: Tensor) -> Tensor:
        """Return the places ``[n, 2]`` among those ``written`` ``[R, most]`` whose pages somebody else holds."""
        at = written.nonzero()
        pages = self.pages[at[:, 0], at[:, 1]].long()
        # of rows that hold a page together all but one copy it, unless somebody else holds it too
        order = pages.argsort(stable=True)
        same = pages[order]
        nth = torch.arange(len(same)) - torch.searchsorted(same, same) + 1  # of my rows that write into it
        return at[order[nth < self.pool.references(same)]]

    def _widen(self, width: int) -> None:
        if width > self.pages.shape[1]:
            wider = self.pages.new_zeros(len(self.pages), width + width // 16)
            wider[:, : self.pages.shape[1]] = self.pages
            self.pages = wider

    def keep(self, needed: Tensor) -> None:
        """Give pages back that rows have beyond those ``needed`` ``[R]``."""
        if bool((self.counts > needed).any()):
            spare = self._there(self.counts, needed)
            self.pool.give(self.pages[spare].long())
            self.pages = self.pages.masked_fill(spare, 0)
            self.counts = self.counts.minimum(needed)
            self._changed()

    def renew(self, needed: Tensor) -> None:
        """Have so many pages a row ``[R]``, of its own, whose content is to be written: no more than it has.

        Raises:
            PoolFullError: when pages are shared and the pool has too few others; nothing has changed then.
        """
        if self.look():
            rows, places = self._not_mine(self._there(needed)).unbind(1)
            fresh = self.pool.take(len(rows))
            self.pool.give(self.pages[rows, places].long())
            self.pages[rows, places] = fresh.int()
            self.shared = False
            self._changed()
        self.keep(needed)

    # ---- rows

    def select(self, rows: Tensor) -> None:
        """Make the rows those at ``rows`` ``[n]``, some of them several times, which share their pages then."""
        old = self.numbers()
        self.pages, self.counts = self.pages[rows], self.counts[rows]
        self.pool.share(self.numbers())
        self.pool.give(old)
        self.shared, self.open = self.shared or len(rows.unique()) < len(rows), False
        self._changed()

    def join(self, other: PageTable) -> None:
        """Append the rows of another table of the same pool, which holds their pages too until it is dropped."""
        self._widen(other.pages.shape[1])
        theirs = other.pages.new_zeros(len(other.pages), self.pages.shape[1])
        theirs[:, : other.pages.shape[1]] = other.pages
        self.pool.share(other.numbers())
        self.pages, self.counts = torch.cat([self.pages, theirs]), torch.cat([self.counts, other.counts])
        for table in (self, other):
            table.shared, table.open = True, False
        self._changed()

    def step_key(self) -> tuple[Any, ...] | None:
        """Return where the next token of each row comes, see :class:`ag.engine.step.NextToken`; None: pages change."""
        if self.shared and not self.open:
            return None
        return self.on_device.data_ptr(), self.on_device.shape, self.slots

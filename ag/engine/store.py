"""What one layer holds: a row of tokens for each (sequence, KV head), in the pages of a pool.

Row ``b * Hkv + h`` is KV head h of sequence b. A row fills its pages in the order of the text at first. Later a token
that goes leaves a slot which the row's last token takes, or the one that comes in the same step: slots have no order
then, ranks say it. Sequences that are selected several times share their pages; one that is shared is copied when
something is written into it.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ag.engine.pool import PAGE, Pool, pages_for
from ag.engine.records import Records, fit
from ag.engine.select import closing_order
from ag.engine.table import PageTable
from ag.kernels.pages import New, Pages, Reach, coded, decoded
from ag.kernels.pool_append import pool_append

FEW = 4  # tokens of a row that go at once by filling their slots; more are closed up in order

COLUMNS = "keys", "values", "ranks", "gate"  # of each token, in the order of :attr:`PagedStore.rows`


class Rows(NamedTuple):
    """What a store holds, rows padded to the longest one, N tokens."""

    keys: Tensor  # [R, N, D]
    values: Tensor  # [R, N, D]
    ranks: Tensor  # [R, N], rank of each token among its sequence's own tokens
    valid: Tensor | None  # [R, N] bool; None when every row has N tokens
    gate: Tensor | None = None  # [R, N], what the gate said of each token; None: nothing


class PagedStore:
    """Keys and values of one layer.

    Args:
        batch: sequences B.
        kv_heads: KV heads Hkv.
        pool: where its pages are from.
        gate: type of what a gate says of each token, which is stored beside it; None: there is no gate.
        in_order: whether :meth:`retain` leaves slots in the order of ranks.
    """

    def __init__(
        self, batch: int, kv_heads: int, pool: Pool, gate: torch.dtype | None = None, *, in_order: bool = False
    ) -> None:
        self.batch, self.kv_heads, self.gate_type = batch, kv_heads, gate
        self._in_order = in_order
        rows, device = batch * kv_heads, pool.keys.device
        #: The pages of the rows.
        self.table = PageTable(rows, pool)
        self._lengths = torch.zeros(rows, dtype=torch.int32, device=device)
        self._counted: Tensor | None = torch.zeros(rows, dtype=torch.long)  # the same on the host; None: only there
        self._since = 0  # tokens that came to each row since then
        #: Whether slots are in the order of ranks.
        self.ordered = True
        self._ahead = False  # whether it made room ahead since tokens were last laid out
        self._reserved = False  # whether the host is to look rarely
        self._numbers = torch.empty(0, device=device)  # what _taken compared with last
        self._room = 0  # free slots that each row has at least, as far as the host knows
        self._ones: Tensor | None = None  # what a gate says of new tokens that it was not asked about
        #: The tokens of a prompt that is not written yet.
        self._prompt: Rows | None = None
        #: Slots [R, V] int32 of tokens that go when the next one comes, and the records that go with them.
        self._going: tuple[Tensor, Records] | None = None
        self._slots_going: Tensor | None = None  # the memory of those slots, the same at each step
        weakref.finalize(self, self.table.drop).atexit = False

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedStore:
        """Return a store of the same tokens, which shares the pages."""
        self.write()
        new = copy(self)
        memo[id(self)] = new
        new.table, new._lengths, new._slots_going = self.table.copy(), self._lengths.clone(), None
        weakref.finalize(new, new.table.drop).atexit = False
        return new

    # ---- what it holds

    @property
    def pool(self) -> Pool:
        """Where its pages are from."""
        return self.table.pool

    @property
    def rows(self) -> Pages:
        """The rows as kernels take them."""
        pool, gate = self.pool, self.gate_type
        column = None if gate is None else pool.gate(gate)
        rows = self.table.on_device, self._lengths
        return Pages(pool.keys, pool.values, pool.ranks, column, *rows, pool.format)

    @property
    def lengths(self) -> Tensor:
        """Tokens of each row, ``[R]`` long on the CPU; the host waits for them where some went on the device alone."""
        if self._prompt is not None:
            rows = self._prompt
            if rows.valid is None:
                return torch.full((len(rows.ranks),), rows.ranks.shape[1])
            return rows.valid.sum(1).cpu()
        self._go()
        return self._count()

    @property
    def present(self) -> Tensor:
        """Tokens that lie in the pages of each row, ``[R]`` int32 where the pool is, those that wait to go too."""
        return self._lengths if self._prompt is None else self.lengths.int()

    @property
    def _known(self) -> Tensor | None:
        """Tokens of each row, ``[R]`` long on the CPU; None: the device alone knows."""
        if self._since and self._counted is not None:
            self._counted, self._since = self._counted + self._since, 0
        return self._counted

    @_known.setter
    def _known(self, lengths: Tensor | None) -> None:
        self._counted, self._since = lengths, 0

    @property
    def width(self) -> int:
        """Slots that :meth:`padded` gives: of the longest row, or of as many as the host knows it to have at most."""
        if self._prompt is not None:
            return self._prompt.ranks.shape[1]
        return self.table.slots if self._known is None else int(self._known.max())

    @property
    def nbytes(self) -> int:
        """Bytes of the pages taken, one that several rows share counts once."""
        if self._prompt is not None:
            return self._prompt.keys.nbytes + self._prompt.values.nbytes
        return self.table.taken() * self.pool.page_nbytes(self.gate_type)

    @property
    def unwritten(self) -> bool:
        """Whether it holds the tokens of a prompt as they came, in no page."""
        return self._prompt is not None

    def padded(self, width: int | None = None) -> Rows:
        """Return everything stored, slot by slot, so many slots wide (None: as :attr:`width` says).

        Rows that are equally long and lie in evenly spaced runs of pages are a view of the pool; others are gathered,
        so that the memory of one layer is needed for a moment; so it is where codes become numbers.
        """
        if self._prompt is not None:
            return self._prompt
        parts, valid = self._gathered(self.rows.columns, width)
        keys, values, ranks, *gate = parts
        keys, values = decoded(self.rows, keys, values)
        return Rows(keys, values, ranks, valid, *gate)

    def ledger(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the ranks, ``valid`` and gate of :meth:`padded`, for which no key or value is read."""
        if self._prompt is not None:
            return self._prompt[2:]
        (ranks, *gate), valid = self._gathered(self.rows.columns[2:])
        return ranks, valid, gate[0] if gate else None

    def _gathered(self, columns: list[Tensor], width: int | None = None) -> tuple[list[Tensor], Tensor | None]:
        """Return columns of the pool by slot, ``[R, N, ...]``, and which slots hold a token; None: all."""
        self._go()
        longest, known = self.width if width is None else width, self._known
        even = known is not None and bool((known == longest).all())
        run = self.table.run(longest) if even else None
        if run is not None:
            return [self.table.in_run(x, run, longest) for x in columns], None
        index = self.table.index(longest)
        return [x.flatten(0, 1)[index] for x in columns], None if even else self._taken(longest)

    def kept(self) -> list[Tensor]:
        """Return the ranks of what each row holds, ascending."""
        ranks, valid, _ = self.ledger()
        there = torch.ones_like(ranks, dtype=torch.bool) if valid is None else valid
        return [row[held].sort().values for row, held in zip(ranks, there, strict=True)]

    def _taken(self, longest: int) -> Tensor:
        """Return which of the first slots hold a token, ``[R, N]`` bool."""
        if len(self._numbers) != longest:  # for many steps
            self._numbers = torch.arange(longest, dtype=torch.int32, device=self._lengths.device)
        return self._numbers < self._lengths[:, None]

    # ---- tokens come

    def append(
        self,
        k: Tensor,
        v: Tensor,
        ranks: Tensor,
        keep: Tensor | None,
        gate: Tensor | None = None,
        reach: Reach | None = None,
        records: Records | None = None,
    ) -> None:
        """Add tokens behind those of the rows; one of each row may come in place of what it no longer sees.

        The tokens of a prompt are not copied before it is known which of them stay: until :meth:`write`.

        Args:
            k: keys ``[B, Hkv, T, D]``.
            v: values ``[B, Hkv, T, D]``.
            ranks: ``[B, T]``.
            keep: ``[B, Hkv or 1, T]`` bool, which of them to store; None: all.
            gate: ``[B, Hkv, T]``, what the gate says of them; None: 1 of each.
            reach: what the queries see, where one token of each row comes; what they no longer do goes. None: nothing.
            records: as for :meth:`retain`, of what goes.

        Raises:
            PoolFullError: when the pool has no room for them; nothing is stored then.
        """
        shape = k.shape[:3]
        gate = self._said(gate, shape)
        if shape[2] == 1 and (keep is None or keep.shape[1] == 1):
            self._push(k, v, ranks if keep is None else ranks.masked_fill(~keep[:, 0], -1), gate, reach, records)
            if keep is not None:
                self._known = None
            return
        assert reach is None
        new = Rows(
            keys=k.flatten(0, 1),
            values=v.flatten(0, 1),
            ranks=ranks[:, None].expand(shape).flatten(0, 1),
            valid=None if keep is None else keep.expand(shape).flatten(0, 1),
            gate=None if gate is None else gate.flatten(0, 1),
        )
        if not bool(self.table.counts.any()) and self._prompt is None:
            self._prompt = _to_front(new)
        else:
            self.write()
            self._add(new)

    def _said(self, gate: Tensor | None, shape: torch.Size) -> Tensor | None:
        """Return what is stored of a gate beside new tokens ``[B, Hkv, T]``; where it was not asked 1 of each."""
        if self.gate_type is None:
            return None
        if gate is not None:
            return gate.to(self.gate_type)
        if self._ones is not None and self._ones.shape == shape:
            return self._ones
        ones = torch.ones(shape, dtype=self.gate_type, device=self._lengths.device)
        self._ones = ones if shape[2] == 1 else None
        return ones

    def _push(
        self,
        k: Tensor,
        v: Tensor,
        ranks: Tensor,
        gate: Tensor | None,
        reach: Reach | None,
        records: Records | None,
    ) -> None:
        """Add one new token of each sequence, none where its rank is below 0."""
        if self._prompt is not None:
            self.write()
        evicting, victims = reach is not None or self._going is not None, None
        # what goes is known to the device alone, so that the host looks where a page may have ended
        ahead = reach is not None or (evicting and (self._reserved or k.device.type != "cpu"))
        self.make_room(1, everywhere=evicting, ahead=PAGE if ahead else 0)
        if self._going is not None:
            (victims, records), self._going = self._going, None
        new = New(k[:, :, 0], v[:, :, 0], ranks[:, 0], None if gate is None else gate[:, :, 0])
        pool_append(self.rows, new, victims, self._noted(records) if evicting else [], reach)
        self._room -= 1
        if evicting:
            self.ordered, self._known = False, None
        else:
            self._since += 1

    def movable(self, records: Records) -> bool:
        """Tell whether a token can be moved with what a scorer recorded of it, by :func:`pool_append`."""
        return all(x.dtype == torch.float32 for x in records.values())

    def _noted(self, records: Records | None) -> list[Tensor]:
        """Return records ``[R, C, S]`` with room for all slots, which replace those in the dictionary."""
        if not records:
            return []
        width = max(self.table.slots, *(x.shape[-1] for x in records.values()))
        fit(records, width)
        for name, x in records.items():
            records[name] = x.contiguous()
        return [x.view(len(self._lengths), -1, width) for x in records.values()]

    def _count(self) -> Tensor:
        """Return what :attr:`lengths` does, those that wait to go among them."""
        if self._known is None:
            self._known = self._lengths.long().cpu()
        return self._known

    def _go(self) -> None:
        """Let the tokens go that wait for the next one to come."""
        if self._going is not None:
            (slots, records), self._going = self._going, None
            self.evict(slots, records)

    def write(self) -> None:
        """Write the tokens of a prompt into pages, and free those of tokens that are to go."""
        self._go()
        if self._prompt is not None:
            new, self._prompt = self._prompt, None
            try:
                self._add(new)
            except BaseException:
                self._prompt = new
                raise

    def _add(self, new: Rows) -> None:
        """Write tokens ``[R, T]`` behind those of the rows."""
        count, length = new.ranks.shape
        before = self.lengths
        more = torch.full((count,), length) if new.valid is None else new.valid.sum(1).cpu()
        self.table.take(before, more)
        device, columns = self._lengths.device, self.rows.columns
        fresh = [*coded(self.rows, new.keys, new.values), new.ranks, *(() if new.gate is None else (new.gate,))]
        run = self.table.run(length) if new.valid is None and not bool(before.any()) else None
        if run is not None:  # a prompt of rows in one run
            for column, x in zip(columns, fresh, strict=True):
                self.table.in_run(column, run, length).copy_(x)
        else:
            every = torch.ones(count, length, dtype=torch.bool, device=device) if new.valid is None else new.valid
            tokens = self.table.places(self._lengths.long()[:, None] + every.cumsum(1) - 1)
            chosen = every.nonzero(as_tuple=True)
            places = tokens[chosen]
            for column, x in zip(columns, fresh, strict=True):
                x = x.to(column.dtype) if column.dtype != x.dtype and not column.is_floating_point() else x
                column.view(-1, *column.shape[2:]).index_copy_(0, places, x[chosen])
        self._lengths += more.to(device)
        self._known = before + more
        self._room = self.table.room(self._known)
        self._ahead = False

    def make_room(self, tokens: int, *, everywhere: bool = False, ahead: int = 0) -> None:
        """Give every row pages for so many more tokens, and copies of its own of shared pages that are written then.

        Where it has to look, a pool that grows has pages ``ahead`` for so many tokens, so that the host does so rarely;
        ``everywhere``: something may be written in any slot.

        Raises:
            PoolFullError: when the pool has too few pages; nothing has changed then.
        """
        mine = not self.table.shared or (self.table.open and not everywhere)
        if self._room >= tokens and mine and (self._ahead or not ahead):
            return
        self._ahead = ahead > 0
        lengths, tokens = self._count(), tokens if self.pool.fixed else max(tokens, ahead)
        if not self.table.look():  # first what is spare, which others may need
            self.table.keep(pages_for(lengths + tokens))
            self._room = self.table.room(lengths)
        self.table.take(lengths, torch.full_like(lengths, tokens), everywhere=everywhere)
        self.table.open = True
        self._room = self.table.room(lengths)

    def reserve(self, tokens: int) -> None:
        """Take pages for so many more tokens of each row, so that nothing grows while they come.

        Raises:
            PoolFullError: when the pool has too few pages; nothing has changed then.
        """
        self.write()
        self._reserved = True
        self.make_room(tokens, ahead=PAGE)

    def step_key(self) -> tuple[Any, ...] | None:
        """Return where the next token of each row and what it works on lie; None: it takes or writes pages anew."""
        pages = self.table.step_key()
        if self._prompt is not None or self._room < 1 or pages is None:
            return None
        columns = (x.data_ptr() for x in (*self.rows.columns, self._lengths))
        return *columns, *pages, self._going is None, self._counted is None

    def stepped(self) -> None:
        """Take note of a token of each row that came in a replayed step; where others went the device alone counts."""
        self._room -= 1
        self._since += 1

    def demand(self, tokens: int, *, evicting: bool) -> int:
        """Return the most pages that so many more tokens of each row may take, or ``evicting`` others."""
        if self._room >= tokens and (not self.table.shared or (self.table.open and not evicting)):
            return 0
        return self.table.demand(self._count(), tokens, evicting=evicting)

    # ---- tokens go

    def retain(self, keep: Tensor, records: Records | None = None, *, in_order: bool = False) -> bool:
        """Keep what is in ``keep`` ``[R, N]``, laid out as :meth:`padded`; free the rest, if there is any.

        What a scorer recorded by slot, ``records`` ``[B, H, ..., N]``, goes with the tokens; the dictionary is changed.
        With ``in_order`` slots are in the order of ranks afterwards, however few go. Returns whether any did.
        """
        records = {} if records is None else records
        self._go()
        if self._prompt is not None:
            there = self._prompt.valid
            keep = keep if there is None else keep & there
            if bool((keep if there is None else keep | ~there).all()):
                return False
            self._close_records(keep, records)
            self._prompt = self._prompt._replace(valid=keep)
            self.write()
            return True
        there = self._taken(keep.shape[1])
        goes = there > keep  # held, and not kept
        counts = goes.sum(1).tolist()
        most = max(counts)
        if not most:
            return False
        lengths = self.lengths
        few = not (in_order or self._in_order) and most <= FEW and sum(counts) * PAGE <= int(lengths.sum())
        if few and self.movable(records):
            self._fill(goes, most, records)
            self._known = lengths - torch.tensor(counts)
            self._room += min(counts)
        else:
            self._close(keep & there, records)
        return True

    def _fill(self, goes: Tensor, most: int, records: Records) -> None:
        """Let the last tokens of rows take the slots of the few that go, ``[R, N]``, at most so many of a row."""
        if most == 1:
            goes, victims = goes.max(1, keepdim=True)
            victims = victims.int().masked_fill_(~goes, -1)
        else:
            slots = torch.arange(goes.shape[1], device=goes.device, dtype=torch.int32)
            victims = torch.where(goes, slots, -1).topk(most, 1).values
        self.evict(victims, records)

    def going(self, most: int) -> Tensor:
        """Return where to write which slots ``[B, Hkv, most]`` :meth:`leave` frees; the same memory at each step."""
        if self._slots_going is None or self._slots_going.shape != (self.batch, self.kv_heads, most):
            self._slots_going = self._lengths.new_empty(self.batch, self.kv_heads, most)
        return self._slots_going

    def leave(self, slots: Tensor, records: Records) -> None:
        """Free the tokens in slots ``[B, Hkv, V]`` int32, -1 for none, when the next token comes or somebody looks.

        So a new token takes the place of one that goes, and nothing moves.

        Raises:
            PoolFullError: when copies of shared pages find no room; nothing has changed then.
        """
        self.make_room(0, everywhere=True)
        self._going = slots.flatten(0, 1), records
        self.ordered, self._known = False, None

    def evict(self, victims: Tensor, records: Records | None = None) -> None:
        """Free the tokens in slots ``[R, V]`` int32, -1 for none; the last tokens of their rows take these slots."""
        self.make_room(0, everywhere=True)
        pool_append(self.rows, None, victims, self._noted(records))
        self.ordered, self._known = False, None

    def _close(self, keep: Tensor, records: Records) -> None:
        """Write what stays, ``[R, N]``, anew, in the order of ranks."""
        index, there = self.table.index(keep.shape[1]), self._taken(keep.shape[1])
        order = None
        if not self.ordered:
            ranks = self.pool.ranks.flatten()[index].masked_fill(~there, torch.iinfo(torch.int32).max)
            order = ranks.argsort(1)
            index, keep = index.gather(1, order), keep.gather(1, order)
        self._close_records(keep, records, order)
        chosen = index[keep]
        moved = [x.flatten(0, 1)[chosen] for x in self.rows.columns]
        lengths = keep.sum(1)
        known = lengths.cpu()
        self.table.renew(pages_for(known))
        self._known, self._room, self._ahead = known, self.table.room(known), False
        tokens = self.table.places(keep.cumsum(1) - 1)
        for column, x in zip(self.rows.columns, moved, strict=True):
            column.view(-1, *column.shape[2:]).index_copy_(0, tokens[keep], x)
        self._lengths.copy_(lengths)
        self.ordered = True
        self.pool.trim()

    def _close_records(self, keep: Tensor, records: Records, order: Tensor | None = None) -> None:
        """Close records up as the tokens in ``keep`` ``[R, N]`` are, whose slots ``order`` gives; None: as they lie."""
        if not records:
            return
        kept = keep.unflatten(0, (self.batch, self.kv_heads))
        closing = closing_order(kept)
        held = kept.gather(-1, closing)
        if order is not None:
            closing = order.unflatten(0, (self.batch, self.kv_heads)).gather(-1, closing)
        fit(records, keep.shape[1])
        for name, x in records.items():
            slots, there = (y.repeat_interleave(x.shape[1] // self.kv_heads, 1) for y in (closing, held))
            while slots.ndim < x.ndim:
                slots, there = slots.unsqueeze(2), there.unsqueeze(2)
            records[name] = x.gather(-1, slots.expand(*x.shape[:-1], -1)).masked_fill(~there, 0)

    def settle(
        self,
        first: Tensor,
        recent: int | None,
        window: int | None,
        records: Records | None = None,
        *,
        in_order: bool = False,
    ) -> None:
        """Free what no query sees from ranks ``first`` ``[B]`` on; the rest is as for :meth:`retain`."""
        ranks, _, gate = self.ledger()
        next_rank = first.to(ranks.device).repeat_interleave(self.kv_heads)[:, None]
        keep = torch.ones_like(ranks, dtype=torch.bool)
        if recent is not None:
            assert gate is not None
            keep = gate.bool() | (ranks > next_rank - recent)
        if window is not None:
            keep = keep & (ranks > next_rank - window)
        self.retain(keep, records, in_order=in_order)

    def crop(self, counts: Tensor, records: Records | None = None) -> None:
        """Drop the tokens whose rank is not below ``counts[b]`` ``[B]``; ``records`` as for :meth:`retain`."""
        held, *_ = self.ledger()
        limit = counts.to(held.device).repeat_interleave(self.kv_heads)[:, None]
        self.retain(held < limit, records)

    def trim(self) -> None:
        """Give pages back that no row needs, and memory where there is much of it that nobody needs."""
        self.write()
        if not self.table.shared:
            self.table.keep(pages_for(self.lengths))
            self._room = self.table.room(self.lengths)
        self.pool.trim()

    # ---- sequences

    def select(self, indices: Tensor) -> None:
        """Replace the sequences by those at ``indices`` (beam search, repeated inputs); pages are shared."""
        self.write()
        rows = (indices.cpu()[:, None] * self.kv_heads + torch.arange(self.kv_heads)).flatten()
        self.table.select(rows)
        self.batch = len(indices)
        self._lengths = self._lengths[rows.to(self._lengths.device)]
        self._known = None if self._known is None else self._known[rows]

    def join(self, other: PagedStore) -> None:
        """Append the sequences of another store of the same pool, which shares their pages until it is dropped."""
        self.write()
        other.write()
        self.table.join(other.table)
        self._known = torch.cat([self.lengths, other.lengths])
        self._lengths = torch.cat([self._lengths, other._lengths])
        self.batch += other.batch
        self.ordered, self._room = self.ordered and other.ordered, min(self._room, other._room)

    # ---- saved

    def state_dict(self) -> dict[str, Any]:
        """Return what is held, ``[n, ...]`` of each token, row after row, slot by slot, and the rows' lengths ``[R]``.

        It goes on bit by bit as this one does.
        """
        self.trim()  # the one that is loaded has no page to spare either
        lengths = self.lengths
        index, there = self.table.index(int(lengths.max())), self._taken(int(lengths.max()))
        keys, values, ranks, *gate = (x.flatten(0, 1)[index[there]].detach() for x in self.rows.columns)
        held = {"keys": keys, "values": values, "ranks": ranks, "gate": gate[0] if gate else None}
        token = {} if self.pool.format is None else {"token": self.pool.token}
        return {**held, **token, "lengths": lengths, "ordered": self.ordered}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the state of another store over; this one is empty. See :class:`ag.stateful.Stateful`."""
        names = {*COLUMNS, "lengths", "ordered", *(() if self.pool.format is None else ("token",))}
        if state.keys() != names:
            raise KeyError(*(state.keys() ^ names))
        columns = [state[name] for name in COLUMNS[: 3 + (self.gate_type is not None)]]
        lengths, ordered = state["lengths"].cpu(), state["ordered"]
        wanted = [(x.dtype, (len(columns[2]), *x.shape[2:])) for x in self.rows.columns]
        if [(x.dtype, x.shape) for x in columns] != wanted or (self.gate_type is None and state["gate"] is not None):
            raise ValueError("columns")
        if lengths.dtype != torch.long or lengths.shape != self.lengths.shape:
            raise ValueError("lengths")
        if type(ordered) is not bool or (self._in_order and not ordered):
            raise ValueError("ordered")
        _check_rows(columns[2].cpu(), lengths, ordered=ordered)
        self.table.take(torch.zeros_like(lengths), lengths)
        self._lengths.copy_(lengths)
        self._known, self.ordered = lengths, ordered
        index, there = self.table.index(int(lengths.max())), self._taken(int(lengths.max()))
        for column, x in zip(self.rows.columns, columns, strict=True):
            column.view(-1, *column.shape[2:]).index_copy_(0, index[there], x)
        self._room = self.table.room(lengths)


def _check_rows(ranks: Tensor, lengths: Tensor, *, ordered: bool) -> None:
    """Refuse rows of so many ``lengths`` ``[R]`` that do not hold tokens of these ``ranks`` ``[n]``, each once."""
    if not ((lengths >= 0) & (lengths <= len(ranks))).all() or int(lengths.sum()) != len(ranks):
        raise ValueError("lengths")
    places = torch.repeat_interleave(lengths) * 2**31 + ranks
    if not (ranks >= 0).all() or len(places.unique()) != len(places) or (ordered and not (places.diff() > 0).all()):
        raise ValueError("ranks")


def _to_front(rows: Rows) -> Rows:
    """Return rows whose free slots come last, as they do in pages: those of padding on the left come first."""
    if rows.valid is None or not bool((rows.valid[:, 1:] & ~rows.valid[:, :-1]).any()):
        return rows
    order = (~rows.valid).int().argsort(dim=1, stable=True)
    keys, values = (x.gather(1, order[:, :, None].expand_as(x)) for x in (rows.keys, rows.values))
    gate = None if rows.gate is None else rows.gate.gather(1, order)
    return Rows(keys, values, rows.ranks.gather(1, order), rows.valid.gather(1, order), gate)

"""What all layers of a cache hold: a block table and a length for each row, a row being (layer, sequence, KV head)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ag.engine.core.block_pool import BLOCK, BlockPool, blocks_for, finalizer
from ag.kernels.kv_append import kv_append
from ag.kernels.kv_compact import Worst, kv_compact
from ag.kernels.pages import Pages

Records = dict[str, Tensor]


class KVStore:
    """Rows of tokens in the blocks of a pool, of all layers at once.

    Slots of a row have no order: the rank that is stored with each token says which one it is. ``held`` counts the
    tokens of each row on the host, and ``lengths`` on the device.

    Args:
        pool: where blocks come from.
        layers: number of layers, L.
        kv_heads: KV heads of each, Hkv.
        gate: type of the gate output that is stored with each token; None stores none.
    """

    def __init__(self, pool: BlockPool, layers: int, kv_heads: int, gate: torch.dtype | None = None) -> None:
        self.pool, self.layers, self.kv_heads, self.gate_type = pool, layers, kv_heads, gate
        #: What a scorer noted of each layer's tokens, float32 ``[B, C.., S]`` by slot, 0 on free slots.
        self.records: list[Records] = [{} for _ in range(layers)]
        self._begin(0)

    def _begin(self, batch: int) -> None:
        shape = self.layers, batch, self.kv_heads
        self.table = torch.zeros(*shape, 0, dtype=torch.int32, device=self.pool.device)  # [L, B, Hkv, W]
        self.lengths = torch.zeros(shape, dtype=torch.int32, device=self.pool.device)  # [L, B, Hkv]
        self.held = torch.zeros(shape, dtype=torch.long)  # [L, B, Hkv]
        self.owned = torch.zeros(shape, dtype=torch.long)  # blocks of each row
        self._shared = False  # whether some block may have several references
        self._pages: dict[int, Pages] = {}
        self._version = self.pool.version
        self._holder = [self.table, self.owned]
        finalizer(self, self.pool, self._holder)

    def start(self, batch: int) -> None:
        """Begin with so many empty sequences."""
        self.select(torch.zeros(0, dtype=torch.long))
        for name in ("table", "lengths", "held", "owned"):
            x = getattr(self, name)
            setattr(self, name, x.new_zeros(self.layers, batch, *x.shape[2:]))
        self.records = [{} for _ in range(self.layers)]
        self._moved()

    def fork(self) -> KVStore:
        """Return a store of the same tokens, which shares all blocks until one of the two writes."""
        new = KVStore(self.pool, self.layers, self.kv_heads, self.gate_type)
        for name in ("table", "lengths", "held", "owned"):
            setattr(new, name, getattr(self, name).clone())
        new.records = [{name: x.clone() for name, x in records.items()} for records in self.records]
        self.pool.share(self.blocks())
        self._shared = new._shared = True
        new._moved()
        return new

    def _moved(self) -> None:
        """Take note that tables lie in other memory."""
        self._pages.clear()
        self._holder[:] = self.table, self.owned

    # ---- what is held

    @property
    def slots(self) -> int:
        """Slots that the table has room for, free ones included."""
        return self.table.shape[-1] * BLOCK

    def pages(self, layer: int) -> Pages:
        """Return a layer's rows as kernels take them."""
        if self._version != self.pool.version:
            self._pages.clear()
            self._version = self.pool.version
        if layer not in self._pages:
            pool, gate = self.pool, None if self.gate_type is None else self.pool.gate(self.gate_type)
            table, lengths = self.table[layer].flatten(0, 1), self.lengths[layer].flatten()
            self._pages[layer] = Pages(pool.keys, pool.values, pool.ranks, gate, table, lengths, pool.format)
        return self._pages[layer]

    def blocks(self) -> Tensor:
        """Return the blocks that rows refer to, ``[n]`` long on the CPU; a shared one as often as rows share it."""
        return self.table.cpu()[self._places(0, self.owned)].long()

    def num_blocks(self) -> int:
        """Return the number of different blocks that rows refer to."""
        return len(self.blocks().unique())

    def index(self, layer: int, slots: int) -> Tensor:
        """Return where in the pool the first so many slots of a layer lie, ``[B, Hkv, N]`` long."""
        at = torch.arange(slots, device=self.table.device)
        return self.table[layer].long()[..., at // BLOCK] * BLOCK + at % BLOCK

    def ledger(self, layer: int, slots: int | None = None) -> tuple[Tensor, Tensor]:
        """Return where each slot of a layer lies in the pool, and its token's rank, ``[B, Hkv, N]`` long each.

        Args:
            layer: index of the layer.
            slots: N; None means that of the longest row.

        Returns:
            Places in the pool's columns, and ranks, which are -1 on free slots.
        """
        slots = int(self.held[layer].max()) if slots is None else slots
        index = self.index(layer, slots)
        free = torch.arange(slots, device=index.device) >= self.lengths[layer][..., None]
        return index, self.pool.ranks.flatten()[index].long().masked_fill(free, -1)

    # ---- tokens come

    def make_room(self, layers: slice, tokens: Tensor, ahead: int = 0) -> None:
        """Give the rows of some layers blocks for more tokens, and copies of their own of blocks that these go into.

        Args:
            layers: which.
            tokens: ``[B]`` long on the CPU, tokens that come to each row of a sequence.
            ahead: tokens for which rows that need a block get room beyond that.

        Raises:
            PoolFullError: when the pool is too small; nothing changes then.
        """
        wide = tokens[:, None].expand(-1, self.kv_heads)
        owned, held = self.owned[layers], self.held[layers]
        need = (blocks_for(held + wide) - owned).clamp_min(0)
        if bool(need.any()):
            need = (blocks_for(held + wide + ahead) - owned).clamp_min(0).where(need > 0, 0)
            fresh = self.pool.allocate(int(need.sum()))
            self._widen(int((owned + need).max()))
            table = self.table[layers]
            table[self._places(owned, owned + need).to(table.device)] = fresh.int().to(table.device)
            owned += need
        if self._shared:
            self._unshare(layers, held // BLOCK, blocks_for(held + wide).where(wide > 0, 0))

    def demand(self, tokens: Tensor) -> int:
        """Return the most blocks that a pass takes of so many tokens ``[B]`` of each sequence, before anything goes."""
        wide = tokens[:, None].expand(-1, self.kv_heads)
        fresh = (blocks_for(self.held + wide) - self.owned).clamp_min(0)
        copied = (self.held % BLOCK > 0) & (wide > 0) if self._shared else torch.zeros(1, dtype=torch.bool)
        return int(fresh.sum()) + int(copied.sum())

    def append(self, layer: int, k: Tensor, v: Tensor, ranks: Tensor, gate: Tensor | None = None) -> None:
        """Store new tokens; see :func:`ag.kernels.kv_append.kv_append`. ``held`` is counted by the caller."""
        kv_append(self.pages(layer), k, v, ranks, gate)

    def _widen(self, blocks: int) -> None:
        """Give the table room for so many blocks a row, and records as many slots."""
        width = self.table.shape[-1]
        if blocks <= width:
            return
        self.table = F.pad(self.table, (0, max(blocks - width, width // 8, 8)))
        self._moved()
        for records in self.records:
            fit(records, self.slots)

    def _places(self, first: Tensor | int, end: Tensor) -> Tensor:
        """Return which places of the table lie in ``[first, end)`` of each row, bool on the CPU."""
        places = torch.arange(self.table.shape[-1])
        return (places < end[..., None]) & (places >= torch.as_tensor(first)[..., None])

    def _unshare(self, layers: slice, first: Tensor | int, end: Tensor) -> None:
        """Give rows copies of their own of the shared blocks in ``[first, end)``, before they are written."""
        table = self.table[layers]
        at = self._places(first, end).nonzero(as_tuple=True)
        blocks = table.cpu()[at].long()
        order = blocks.argsort(stable=True)  # of rows that share a block with no row elsewhere, the last one keeps it
        nth = torch.arange(len(order)) - torch.searchsorted(blocks[order], blocks[order])
        copied = order[nth + 1 < self.pool.references(blocks[order])]
        if len(copied):
            fresh = self.pool.allocate(len(copied))
            self.pool.copy(blocks[copied], fresh)
            self.pool.release(blocks[copied])
            table[tuple(x[copied].to(table.device) for x in at)] = fresh.int().to(table.device)

    def put_records(self, layer: int, noted: Records) -> None:
        """Take over what a scorer noted of a layer's first slots, ``[B, C.., N]`` by name."""
        records = self.records[layer]
        for name, x in noted.items():
            if name not in records or records[name].shape[:-1] != x.shape[:-1]:
                records[name] = F.pad(x, (0, self.slots - x.shape[-1])).contiguous()
            elif records[name].data_ptr() != x.data_ptr():
                records[name][..., : x.shape[-1]] = x

    # ---- tokens go

    def compact(self, layer: int, keep: Tensor | Worst, kept: Tensor, spare: int = BLOCK) -> None:
        """Drop tokens of a layer; see :func:`ag.kernels.kv_compact.kv_compact`.

        Args:
            layer: index of the layer.
            keep: ``[B, Hkv, N]`` bool by slot, or the worst tokens.
            kept: ``[B, Hkv]`` long on the CPU, tokens that are left of each row.
            spare: tokens for which free blocks stay with a row.
        """
        one, records = slice(layer, layer + 1), self.records[layer]
        if self._shared:
            self._unshare(one, 0, blocks_for(kept).where(kept < self.held[layer], 0)[None])
        noted = _rows(records, self)
        kv_compact(self.pages(layer), keep if isinstance(keep, Worst) else keep.flatten(0, 1), noted)
        self.set_held(one, kept[None], spare)

    def set_held(self, layers: slice, kept: Tensor, spare: int = BLOCK) -> None:
        """Take note of the lengths ``[L', B, Hkv]`` after tokens went, and free the blocks behind them."""
        self.held[layers] = kept
        wanted, owned = blocks_for(kept + spare), self.owned[layers]
        if bool((wanted < owned).any()):
            self.pool.release(self.table[layers].cpu()[self._places(wanted, owned)].long())
            self.owned[layers] = owned.minimum(wanted)
        if self._shared:
            self._shared = bool((self.pool.references(self.blocks()) > 1).any())

    def truncate(self, tokens: Tensor) -> None:
        """Drop the newest tokens of each sequence, ``[B]`` long on the CPU, which lie last in their rows."""
        kept = (self.held - tokens[:, None]).clamp_min(0)
        self.lengths.copy_(kept)
        for layer, records in enumerate(self.records):
            free = torch.arange(self.slots, device=self.lengths.device) >= self.lengths[layer][..., None]
            for x in records.values():
                rows = x.view(*free.shape[:2], -1, x.shape[-1])
                rows.masked_fill_(free[:, :, None, : x.shape[-1]], 0.0)
        self.set_held(slice(None), kept)

    # ---- sequences

    def select(self, indices: Tensor) -> None:
        """Make the sequences those at ``indices`` ``[n]``; repeated ones share their blocks."""
        before = self.blocks()
        for name in ("table", "lengths", "held", "owned"):
            x = getattr(self, name)
            setattr(self, name, x.index_select(1, indices.to(x.device)))
        self.records = [
            {name: x.index_select(0, indices.to(x.device)) for name, x in records.items()} for records in self.records
        ]
        self._moved()
        self.pool.share(self.blocks())
        self.pool.release(before)
        self._shared = self._shared or len(indices.unique()) < len(indices)

    def add(self, other: KVStore) -> None:
        """Append the sequences of another store of the same pool, which is empty then; no key is copied."""
        width = max(self.table.shape[-1], other.table.shape[-1])
        batches = self.held.shape[1], other.held.shape[1]
        for store in (self, other):
            store.table = F.pad(store.table, (0, width - store.table.shape[-1]))
        self.records = [
            _joined(mine, theirs, batches, width * BLOCK)
            for mine, theirs in zip(self.records, other.records, strict=True)
        ]
        for name in ("table", "lengths", "held", "owned"):
            x, y = getattr(self, name), getattr(other, name)
            setattr(self, name, torch.cat([x, y], 1))
            setattr(other, name, y[:, :0])
        other.records = [{} for _ in range(self.layers)]
        self._shared = self._shared or other._shared
        self._moved()
        other._moved()


def fit(records: Records, slots: int) -> None:
    """Give records so many slots; those that come are 0."""
    for name, x in records.items():
        records[name] = F.pad(x, (0, slots - x.shape[-1]))


def _rows(records: Records, store: KVStore) -> list[Tensor]:
    """Return records as ``[R, C, S]``, contiguous; they replace those in the dictionary where they were not."""
    rows = store.held.shape[1] * store.kv_heads
    for name, x in records.items():
        records[name] = x.contiguous()
    return [x.view(rows, -1, x.shape[-1]) for x in records.values()]


def _joined(mine: Records, theirs: Records, batches: tuple[int, int], slots: int) -> Records:
    """Return the records of two batches together; what one of the two lacks is 0."""
    fit(mine, slots)
    fit(theirs, slots)
    found: Records = {}
    for name in {**mine, **theirs}:
        like = mine.get(name, theirs.get(name))
        assert like is not None
        parts = [
            records[name] if name in records else like.new_zeros(batch, *like.shape[1:])
            for records, batch in zip((mine, theirs), batches, strict=True)
        ]
        found[name] = torch.cat(parts)
    return found

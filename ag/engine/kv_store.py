"""Keys and values: a block table and a length for each row, a row being (layer, sequence, KV head)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ag import retention
from ag.engine.block_pool import BLOCK, BlockPool, table_indices
from ag.engine.positions import KeyRotation
from ag.engine.records import Records, check_record, concat_records, fit
from ag.kernels.kv_compact import kv_compact
from ag.kernels.pages import Pages
from ag.model.geometry import KVHeads

SPARE_BLOCKS = 8  # free columns of a block table, which is allocated anew only when they are used up
#: Names of the contents of each row, ``[L, B, Hkv, ...]``.
ROWS = "lengths_cpu", "block_counts", "shared_block_counts", "block_table", "lengths"


class KVStore:
    """Block tables of all layers with equal number and size of KV heads; one row is one (layer, sequence, KV head).

    Slots of a row have no order: each token is stored with its index. ``lengths_cpu`` counts the tokens of each row on
    the host, and ``lengths`` on the device. In models whose layers differ the rows of other layers stay empty.

    Args:
        pool: where blocks come from.
        heads: KV heads of each layer of the model.
        head_shape: KV heads of the layers that are held here.
        gate: type of the gate output that is stored with each token; None stores none.
        rotation: rotates keys again after evictions. None: they stay as the model rotated them.
    """

    def __init__(
        self,
        pool: BlockPool,
        heads: Sequence[KVHeads],
        head_shape: KVHeads,
        gate: torch.dtype | None = None,
        rotation: KeyRotation | None = None,
    ) -> None:
        self.rotation, self.heads, self.head_shape = rotation, heads, head_shape
        self.pool, self.num_layers, self.kv_heads, self.gate_type = pool, len(heads), head_shape.number, gate
        self.size = pool.sizes.index((head_shape.key, head_shape.value))
        #: Tokens of a block.
        self.block_size = pool.tokens[self.size]
        #: ``[L, 1, 1]`` long, 1 for layers that are held here, else 0.
        self.layer_mask = torch.tensor([layer == head_shape for layer in heads]).long()[:, None, None]
        #: The scorer's records of each layer's tokens, float32 ``[B, C.., S]`` by slot, 0 on free slots.
        self.records: list[Records] = [{} for _ in heads]
        self._begin(0)

    def _begin(self, batch: int) -> None:
        shape = self.num_layers, batch, self.kv_heads
        self.block_table = torch.zeros(*shape, 0, dtype=torch.int32, device=self.pool.device)  # [L, B, Hkv, W]
        self.lengths = torch.zeros(shape, dtype=torch.int32, device=self.pool.device)  # [L, B, Hkv]
        self.lengths_cpu = torch.zeros(shape, dtype=torch.long)  # [L, B, Hkv]
        self.block_counts = torch.zeros(shape, dtype=torch.long)  # blocks of each row
        #: First blocks of each row that other rows may refer to.
        self.shared_block_counts = torch.zeros(shape, dtype=torch.long)
        self._pages: dict[int | None, Pages] = {}
        self._stacks: dict[str, Tensor] = {}  # [L, ...], each record of all layers
        #: Whether the records of each layer are views of these.
        self.stacked = False
        #: A new object whenever tables, lengths or records move to other memory.
        self.memory = object()
        self._holder = [self.block_table, self.block_counts, self._pages]
        self.pool.serve(self, self._holder)

    def start_batch(self, batch: int) -> None:
        """Begin with a number of empty sequences."""
        self.select(torch.zeros(0, dtype=torch.long))
        for name in ROWS:
            x = getattr(self, name)
            setattr(self, name, x.new_zeros(self.num_layers, batch, *x.shape[2:]))
        self.records = [{} for _ in range(self.num_layers)]
        self._moved()

    def fork(self) -> KVStore:
        """Return a copy that shares all blocks until one of the two writes."""
        new = KVStore(self.pool, self.heads, self.head_shape, self.gate_type, self.rotation)
        self.shared_block_counts = self.block_counts.clone()
        for name in ROWS:
            setattr(new, name, getattr(self, name).clone())
        new.records = [{name: x.clone() for name, x in records.items()} for records in self.records]
        self.pool.share(self.blocks())
        new._moved()
        return new

    def _moved(self) -> None:
        """Forget what refers to tables and records, which lie in other memory now."""
        self._pages.clear()
        self.stacked = False
        self.memory = object()
        self._holder[:] = self.block_table, self.block_counts, self._pages

    # ---- contents

    @property
    def slots(self) -> int:
        """Slots of each row in the table, free ones included."""
        return self.block_table.shape[-1] * self.block_size

    def pages(self, layer: int | None = None) -> Pages:
        """Return a layer's rows as kernels take them. None: the rows of all layers."""
        if layer not in self._pages:
            layers = slice(None) if layer is None else layer
            table, lengths = self.block_table[layers].flatten(0, -2), self.lengths[layers].flatten()
            columns, coded = self.pool.views(self.size, self.gate_type), self.pool.formats[self.size]
            self._pages[layer] = Pages(*columns, table, lengths, coded)
        return self._pages[layer]

    def blocks(self) -> Tensor:
        """Return the blocks that rows refer to, ``[n]`` long on the CPU; a shared one as often as rows share it."""
        return self.block_table.cpu()[table_indices(0, self.block_counts)].long()

    def num_blocks(self) -> int:
        """Return the number of different blocks that rows refer to."""
        return len(self.blocks().unique())

    def ledger(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return :meth:`pool_indices` and :meth:`token_indices` of a layer."""
        return self.pool_indices(layer), self.token_indices(layer)

    def pool_indices(self, layer: int, *, all_slots: bool = False) -> Tensor:
        """Return where each slot of a layer lies in the pool's columns, ``[B, Hkv, N]`` long.

        N is the tokens of the longest row, or with ``all_slots`` the slots of the table, which no step changes.
        """
        blocks, count = self._table(layer, all_slots)
        indices = blocks[..., None] * self.block_size + torch.arange(self.block_size, device=blocks.device)
        return indices.flatten(-2)[..., :count]

    def token_indices(self, layer: int, *, all_slots: bool = False) -> Tensor:
        """Return the token index of each slot, ``[B, Hkv, N]`` long, -1 on free slots; see :meth:`pool_indices`."""
        blocks, count = self._table(layer, all_slots)
        by_block = self.pages(layer).token_indices[blocks]  # a block is copied at once
        return by_block.flatten(-2)[..., :count].long().masked_fill_(self.free_slots(layer, count), -1)

    def free_slots(self, layer: int, count: int) -> Tensor:
        """Return which of a layer's first ``count`` slots hold no token, ``[B, Hkv, count]`` bool."""
        lengths = self.lengths[layer]
        return torch.arange(count, device=lengths.device) >= lengths[..., None]

    def gate_outputs(self, layer: int, pool_index: Tensor) -> Tensor:
        """Return the gate outputs of a layer's tokens at :meth:`pool_indices`."""
        gate = self.pages(layer).gate
        assert gate is not None
        return gate.flatten()[pool_index]

    def _table(self, layer: int, all_slots: bool) -> tuple[Tensor, int]:
        """Return the blocks ``[B, Hkv, W']`` long of a layer's slots, and the number of these slots."""
        table = self.block_table[layer]
        count = self.slots if all_slots else max([0, *self.lengths_cpu[layer].flatten().tolist()])
        return table[..., : -(-count // self.block_size)].long(), count

    # ---- tokens come

    def make_room(self, layers: slice, tokens: Tensor) -> None:
        """Count more tokens in the rows of some layers, and give these blocks, and copies of shared ones, for them.

        Args:
            layers: of which layers.
            tokens: ``[B]`` long on the CPU, tokens that come to each row of a sequence.

        Raises ``PoolFullError``, and changes nothing, when the pool is too small.
        """
        wide = tokens[:, None] * self.layer_mask[layers]
        owned, lengths, block = self.block_counts[layers], self.lengths_cpu[layers], self.block_size
        need = (-(-(lengths + wide) // block) - owned).clamp_min(0)
        if bool(need.any()):
            self.allocate(layers, need)
        self._unshare(layers, lengths // block, self.shared_block_counts[layers].where(wide > 0, 0))
        lengths += wide  # a view of self.lengths_cpu; kv_append counts in self.lengths, on the device

    def allocate(self, layers: slice, need: Tensor) -> None:
        """Give rows ``need`` ``[L', B, Hkv]`` more blocks."""
        owned = self.block_counts[layers]
        self._widen(int((owned + need).max()))
        new_blocks = self.pool.allocate(int(need.sum()))
        _write_table(self.block_table[layers], table_indices(owned, owned + need), new_blocks)
        owned += need

    def blocks_needed(self, tokens: Tensor, evicts: bool = False, uneven: bool = False) -> int:
        """Return the most blocks that a pass of ``tokens`` ``[B]`` new tokens takes before its eviction.

        Args:
            tokens: ``[B]`` long on the CPU.
            evicts: whether an eviction is due; then shared blocks are copied.
            uneven: whether earlier evictions of the pass may leave some rows more tokens than now, and others fewer.
        """
        wide = tokens[:, None] * self.layer_mask
        lengths, block_counts = self.lengths_cpu + wide, self.block_counts
        if uneven:  # at worst the last block of each row has one token
            lengths, block_counts = (x.sum((0, 2)) for x in (lengths, block_counts))
            lengths += int(self.layer_mask.sum()) * self.kv_heads * (self.block_size - 1)
            new_blocks = (lengths // self.block_size - block_counts).clamp_min(0)
        else:
            new_blocks = (-(-lengths // self.block_size) - block_counts).clamp_min(0)
        _, copied = self._copied(
            slice(None),
            0 if evicts else self.lengths_cpu // self.block_size,
            self.shared_block_counts.where(wide > 0, 0),
        )
        return int(new_blocks.sum()) + len(copied)

    def _widen(self, blocks: int) -> None:
        """Give the table room for a number of blocks a row, and the records for their slots."""
        width = self.block_table.shape[-1]
        if blocks <= width:
            return
        self.block_table = F.pad(self.block_table, (0, max(blocks - width, width // 8, SPARE_BLOCKS)))
        self._moved()
        for records in self.records:
            fit(records, self.slots)

    def narrow(self) -> None:
        """Shorten the table and the records if rows need less than half of them: steps read all of their slots."""
        width = int(self.block_counts.max()) + SPARE_BLOCKS
        if 2 * width < self.block_table.shape[-1]:
            self.block_table = self.block_table[..., :width].contiguous()
            self._moved()
            for records in self.records:
                fit(records, self.slots)

    def _unshare(self, layers: slice, first: Tensor | int, end: Tensor) -> None:
        """Replace the shared blocks in ``[first, end)`` of rows by copies, before they are written."""
        table, shared = self.block_table[layers], self.shared_block_counts[layers]
        first, end = torch.as_tensor(first).minimum(shared), end.minimum(shared)
        if not bool((first < end).any()):
            return
        at, copied = self._copied(layers, first, end)
        if len(copied):
            new_blocks = self.pool.replace(copied)
            _write_table(table, at, new_blocks)
        # if the last shared block was copied, those before `first` alone are still shared
        self.shared_block_counts[layers] = first.where(end == shared, shared)

    def _copied(self, layers: slice, first: Tensor | int, end: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return where blocks in ``[first, end)`` lie in the layers' table that others refer to, and these blocks."""
        if not bool((torch.as_tensor(first) < end).any()):  # asked on the CPU: the table may be on a card
            return (), torch.zeros(0, dtype=torch.long)
        at = table_indices(first, end)
        blocks = self.block_table[layers].cpu()[at].long()
        order = blocks.argsort(stable=True)
        ordered = blocks[order]
        occurrence = torch.arange(len(ordered)) - torch.searchsorted(ordered, ordered)  # 0, 1, ... of each block
        # a block with r references is copied at most r - 1 times: the row with its last reference keeps it
        copied = order[occurrence + 1 < self.pool.references(ordered)]
        return tuple(x[copied] for x in at), blocks[copied]

    def copy_shared_blocks(self, layer: int, sequences: Tensor) -> None:
        """Replace all shared blocks of some sequences ``[B]`` bool of a layer by copies."""
        self._unshare(slice(layer, layer + 1), 0, self.shared_block_counts[layer].where(sequences[:, None], 0)[None])

    def put_records(self, layer: int, noted: Records) -> None:
        """Store a scorer's records of a layer's first slots, ``[B, C.., N]`` by name."""
        records = self.records[layer]
        for name, x in noted.items():
            if name not in records or records[name].shape[:-1] != x.shape[:-1]:
                check_record(name, x, self.lengths_cpu.shape[1], self.kv_heads)
                records[name], self.stacked = F.pad(x, (0, self.slots - x.shape[-1])).contiguous(), False
            elif records[name].data_ptr() != x.data_ptr():
                records[name][..., : x.shape[-1]] = x

    # ---- tokens go

    def keep(self, masks: Mapping[int, Tensor]) -> None:
        """Keep the tokens in masks ``[B, Hkv, N]`` bool by slot, by layer, and evict others; see :meth:`compact`."""
        lengths = {layer: mask.sum(-1).cpu() for layer, mask in masks.items()}
        masks = {layer: mask for layer, mask in masks.items() if bool((lengths[layer] < self.lengths_cpu[layer]).any())}
        if masks:
            kept = self.lengths_cpu[min(masks) : max(masks) + 1].clone()
            for layer in masks:
                kept[layer - min(masks)] = lengths[layer]
            self.compact(masks, kept)

    def compact(
        self, scores: Mapping[int, Tensor], kept: Tensor, spare: int = 0, nonfinite: Tensor | None = None
    ) -> None:
        """Evict tokens of some layers; see :func:`ag.kernels.kv_compact.kv_compact`.

        Args:
            scores: by layer, ``[B, Hkv, N]`` by slot: a keep mask (bool), or float32 of
                :func:`ag.retention.eviction_score`.
            kept: ``[L', B, Hkv]`` long on the CPU, tokens that each row keeps, from the first of these layers to the
                last.
            spare: a row keeps free blocks for this many further tokens.
            nonfinite: ``[B, Hkv]`` int32, set to 1 for rows with a score of NaN; None: nobody asks.
        """
        layers, rotation = slice(min(scores), max(scores) + 1), self.rotation
        old_orders = {layer: None if rotation is None else rotation.before_eviction(self, layer) for layer in scores}
        self.unshare_for_eviction(layers, kept)
        for layer, score in scores.items():
            if score.dtype == torch.bool:
                score = torch.full_like(score, -retention.INF, dtype=torch.float32).masked_fill_(score, retention.INF)
            counts, records = kept[layer - layers.start].flatten().int(), self.records[layer]
            for name, x in records.items():
                records[name] = x.contiguous()
            noted = [x.view(len(counts), -1, x.shape[-1]) for x in records.values()]
            kv_compact(self.pages(layer), score, counts.to(score.device), noted, nonfinite)
        self.shrink_to(layers, kept, spare)
        for layer, old_order in old_orders.items():
            if rotation is not None:
                rotation.after_eviction(self, layer, old_order)

    def unshare_for_eviction(self, layers: slice, kept: Tensor) -> None:
        """Replace the shared blocks that change when ``kept`` ``[L', B, Hkv]`` tokens stay by copies."""
        self._unshare(layers, 0, (-(-kept // self.block_size)).where(kept < self.lengths_cpu[layers], 0))

    def compact_all_layers(self, score: Tensor, keep_count: Tensor, nonfinite: Tensor) -> None:
        """Do the device's part of :meth:`compact` for all layers at once.

        ``score`` is ``[L, B, Hkv, S]``, ``keep_count`` ``[L B Hkv]`` int32, and ``nonfinite`` ``[L, B, Hkv]`` int32.
        """
        rows = keep_count.numel()
        if not self.stacked:
            self.stack_records()
        noted = [x.view(rows, -1, x.shape[-1]) for x in self._stacks.values()]
        kv_compact(self.pages(), score.flatten(0, 1), keep_count, noted, nonfinite)

    def stack_records(self) -> None:
        """Move each record of all layers into one tensor ``[L, ...]``, before a step evicts from all layers at once."""
        self.stacked, self._stacks, self.memory = True, {}, object()
        for name in dict.fromkeys(name for records in self.records for name in records):
            by_layer = {layer: records[name] for layer, records in enumerate(self.records) if name in records}
            first = next(iter(by_layer.values()))
            stack = self._stacks[name] = first.new_zeros(self.num_layers, *first.shape)
            for layer, record in by_layer.items():
                self.records[layer][name] = stack[layer].copy_(record)

    def shrink_to(self, layers: slice, kept: Tensor, spare: int = BLOCK) -> None:
        """Shorten rows to the lengths ``[L', B, Hkv]`` after an eviction, and free the blocks that no row needs.

        Rows keep blocks for ``spare`` more tokens, so that the next step need not take them again: 0 after a prompt, 16
        after a step or a crop, at most 1 in a fixed pool.
        """
        self.lengths_cpu[layers] = kept
        spare = min(spare, 1) if self.pool.fixed else spare  # the next token's block stays, which would be taken again
        wanted, owned = -(-(kept + spare) // self.block_size), self.block_counts[layers]
        if bool((wanted < owned).any()):
            self.pool.release(self.block_table[layers].cpu()[table_indices(wanted, owned)].long())
            self.block_counts[layers] = owned.minimum(wanted)
        self.shared_block_counts[layers] = self.shared_block_counts[layers].minimum(self.block_counts[layers])

    def truncate(self, tokens: Tensor, layers: slice = slice(None), spare: int = BLOCK) -> None:
        """Drop the ``tokens`` ``[B]`` newest tokens of each sequence, which lie last in their rows.

        Rows keep free blocks for ``spare`` tokens.
        """
        self.shorten(layers, (self.lengths_cpu[layers] - tokens[:, None]).clamp_min(0), spare)

    def shorten(self, layers: slice, kept: Tensor, spare: int = BLOCK) -> None:
        """Keep the first tokens of rows alone, ``kept`` ``[L', B, Hkv]`` of them; see :meth:`truncate`."""
        self.lengths[layers].copy_(kept)
        for layer in range(*layers.indices(len(self.records))):
            free = self.free_slots(layer, self.slots)
            for x in self.records[layer].values():
                rows = x.view(*free.shape[:2], -1, x.shape[-1])
                rows.masked_fill_(free[:, :, None, : x.shape[-1]], 0.0)
        self.shrink_to(layers, kept, spare)

    # ---- sequences

    def select(self, indices: Tensor) -> None:
        """Make the sequences those at ``indices`` ``[n]``; repeated ones share their blocks."""
        old_blocks = self.blocks()
        for name in ROWS:
            x = getattr(self, name)
            setattr(self, name, x.index_select(1, indices.to(x.device)))
        self.records = [
            {name: x.index_select(0, indices.to(x.device)) for name, x in records.items()} for records in self.records
        ]
        self._moved()
        self.pool.share(self.blocks())
        self.pool.release(old_blocks)
        if len(indices.unique()) < len(indices):
            self.shared_block_counts = self.block_counts.clone()

    def add(self, other: KVStore) -> None:
        """Append the sequences of another store of this pool, which is empty then; no key is copied."""
        width = max(self.block_table.shape[-1], other.block_table.shape[-1])
        batches = self.lengths_cpu.shape[1], other.lengths_cpu.shape[1]
        for store in (self, other):
            store.block_table = F.pad(store.block_table, (0, width - store.block_table.shape[-1]))
            for records in store.records:
                fit(records, store.slots)
        pairs = zip(self.records, other.records, strict=True)
        self.records = [concat_records(records, added, *batches) for records, added in pairs]
        for name in ROWS:
            x, y = getattr(self, name), getattr(other, name)
            setattr(self, name, torch.cat([x, y], 1))
            setattr(other, name, y[:, :0])
        other.records = [{} for _ in range(self.num_layers)]
        self._moved()
        other._moved()


def stores_of(
    pool: BlockPool, heads: Sequence[KVHeads], gate: torch.dtype | None, rotation: KeyRotation | None
) -> list[KVStore]:
    """Return the store of each layer of a model, one for all whose KV heads are alike; see :class:`KVStore`."""
    stores = {shape: KVStore(pool, heads, shape, gate, rotation) for shape in dict.fromkeys(heads)}
    return [stores[shape] for shape in heads]


def _write_table(table: Tensor, table_index: tuple[Tensor, ...], blocks: Tensor) -> None:
    """Write blocks into places of a table, both from the host, which does not wait for the device."""
    on_device = tuple(x.to(table.device, non_blocking=True) for x in table_index)
    table[on_device] = blocks.int().to(table.device, non_blocking=True)

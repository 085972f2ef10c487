"""Memory for keys and values: blocks of 16 tokens of one KV head, shared by layers, sequences and caches.

All blocks have equal bytes: where layers have heads of several sizes, a block of smaller heads has more tokens.
"""

from __future__ import annotations

import math
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, get_args

import torch
from torch import Tensor, nn

from ag.errors import UserError
from ag.kernels.codes import Format, KVDtype
from ag.model.geometry import KVHeads, fingerprint, kv_heads
from ag.model.structure import decoder_of, device_of

BLOCK = 16  # tokens of a block; more where other heads of the model are larger
FIRST = 256  # blocks with which a pool that grows by copying begins
RESERVES = sys.platform == "linux"
NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux: address space for which no memory is set aside


class PoolFullError(UserError):
    """A pool of fixed size has fewer free blocks than are needed.

    Of a forward pass nothing was written, and nothing is lost; a text that :meth:`EvictionCache.expect` announced is to
    be announced again. A cache that had no room to crop is to be reset.
    """

    #: Needed blocks.
    blocks: int = 0


class BlockPool:
    """Columns of P blocks of keys, values, token indices and gate outputs, with a reference count for each block.

    A pool of fixed size takes its memory at once. A growing one reserves address space on a CPU under Linux, whose
    pages the system provides when they are first written; elsewhere, and where address space is limited, its columns
    are copied into larger ones.

    Args:
        heads: of the layers whose keys and values it holds.
        like: a tensor of their type and device.
        kv_dtype: ``float`` stores keys and values in that type, ``int8`` stores codes of 8 bits.
        nbytes: size of a fixed pool; None makes a pool that grows.

    Raises:
        UserError: for heads whose keys differ in size by another factor than their values.
    """

    def __init__(
        self, heads: Sequence[KVHeads], like: Tensor, kv_dtype: KVDtype = "float", nbytes: int | None = None
    ) -> None:
        self.kv_dtype, self.dtype, self.device, self.fixed = kv_dtype, like.dtype, like.device, nbytes is not None
        #: Sizes of heads: numbers of a key and of a value.
        self.sizes = sizes = [*dict.fromkeys((layer.key, layer.value) for layer in heads)]
        #: Encode keys and values, by size of heads; None means that they are stored in the model's type.
        self.formats = [Format.of(kv_dtype, *(like.new_empty(0, size) for size in pair)) for pair in sizes]
        stored = sizes if kv_dtype == "float" else [(x[0].nbytes, x[1].nbytes) for x in self.formats if x is not None]
        common_multiple = math.lcm(*(key for key, _ in stored))
        #: Tokens of a block, by size of heads.
        self.tokens = [common_multiple // key * -(-BLOCK * max(stored)[0] // common_multiple) for key, _ in stored]
        (keys, values), *different_sizes = {
            (n * key, n * value) for n, (key, value) in zip(self.tokens, stored, strict=True)
        }
        if different_sizes:
            raise UserError(f"Layers have keys and values of the sizes {sizes}: expected one ratio of the two.")
        kind = self.dtype if kv_dtype == "float" else torch.uint8
        self._shapes = {"keys": (keys, kind), "values": (values, kind)}  # numbers of a block in each column
        self._shapes |= {f"token_indices {n}": (tokens, torch.int32) for n, tokens in enumerate(self.tokens)}
        self._reserved = not self.fixed and RESERVES and self.device.type == "cpu"
        self._maps: dict[str, mmap.mmap] = {}
        self._columns: dict[str, Tensor] = {}
        if nbytes is None and self._reserved:
            nbytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self.capacity = FIRST if nbytes is None else nbytes // self.block_nbytes()
        try:
            self._lay_out(self.capacity)
        except OSError:  # address space is limited, as by `ulimit -v` or vm.overcommit_memory=2
            self._reserved, self.capacity, self._maps, self._columns = False, FIRST, {}, {}
            self._lay_out(self.capacity)
        with torch.inference_mode(False):  # the next text may be read outside of it
            self._references = torch.zeros(FIRST, dtype=torch.int32)  # of each block so far, on the host
        self._used_below = 0  # no block from here on is taken
        self._holes = 0  # free blocks before that
        self._holders: dict[int, list[Any]] = {}  # by id: table, block counts and pages of each store
        self._dropped: list[int] = []  # stores that are gone, whose blocks are not released yet
        #: Caches whose blocks may be dropped: ``drop()`` frees some, and returns whether it did.
        self.spares: weakref.WeakSet[Any] = weakref.WeakSet()
        #: Changes whenever columns move to other memory.
        self.version = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockPool:
        """Return this pool itself: copies of a cache share their blocks until one of them writes."""
        return self

    # ---- columns

    def views(self, size: int, gate: torch.dtype | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return views of the columns for the heads whose index in :attr:`sizes` is ``size``.

        These are keys ``[P, n, D]`` and values ``[P, n, Dv]``, or bytes of codes, token indices ``[P, n]`` int32, and
        gate outputs ``[P, n]`` of a type, whose column is made at the first call; None without a type.
        """
        tokens, name = self.tokens[size], f"{gate} {size}"
        if gate is not None and name not in self._columns:
            self._shapes[name] = tokens, gate
            self._columns[name] = self._column(name, self.capacity)
        keys, values = (self._columns[x].unflatten(1, (tokens, -1)) for x in ("keys", "values"))
        return keys, values, self._columns[f"token_indices {size}"], None if gate is None else self._columns[name]

    def columns(self) -> list[Tensor]:
        """Return the columns ``[P, n]`` of keys, values, token indices, and gate outputs of each type that is held."""
        return [*self._columns.values()]

    def _lay_out(self, blocks: int) -> None:
        for name in self._shapes:
            self._columns[name] = self._column(name, blocks, self._columns.get(name))

    def _column(self, name: str, blocks: int, old_column: Tensor | None = None) -> Tensor:
        """Return memory for a column, with what another one of fewer blocks holds."""
        numbers, dtype = self._shapes[name]
        with torch.inference_mode(False):
            if self._reserved:
                size, flags = blocks * self._nbytes(name), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
                self._maps[name] = memory = mmap.mmap(-1, size, flags=flags)
                return torch.frombuffer(memory, dtype=dtype).view(blocks, numbers)
            column = torch.zeros(blocks, numbers, dtype=dtype, device=self.device)
        if old_column is not None:
            column[: self.capacity] = old_column[: self.capacity]  # longer if memory ran out as the pool grew
        return column

    def _nbytes(self, name: str) -> int:
        """Return the bytes of a block in a column."""
        numbers, dtype = self._shapes[name]
        return numbers * dtype.itemsize

    def block_nbytes(self, gate: torch.dtype | None = None) -> int:
        """Return the bytes of a block: keys, values, token indices, and gate outputs of a type where one is given."""
        own = sum(self._nbytes(name) for name in self._shapes if name.startswith(("keys", "values", "token_indices")))
        return own + (0 if gate is None else sum(self.tokens) * gate.itemsize)

    @property
    def nbytes(self) -> int:
        """Bytes of a fixed pool, free blocks included; of a pool that grows, the bytes of the blocks that are taken."""
        return (self.num_used if self._reserved else self.capacity) * sum(map(self._nbytes, self._shapes))

    # ---- blocks

    @property
    def num_used(self) -> int:
        """Blocks that some row refers to."""
        self._collect()
        return self._used_below - self._holes

    @property
    def free(self) -> int:
        """Blocks that no row refers to; a pool that grows can make more."""
        return self.capacity - self.num_used

    def has(self, needed: Callable[[], int]) -> bool:
        """Return whether ``needed()`` blocks are free; spare ones are released until they are, and it counts anew."""
        count = needed()
        for spare in [*self.spares] if self.fixed else []:
            while self.free < count and spare.drop():
                count = needed()
        return not self.fixed or self.free >= count

    def allocate(self, count: int) -> Tensor:
        """Return ``count`` blocks ``[count]`` long on the CPU with one reference each, the lowest free numbers first.

        Raises ``PoolFullError``, and changes nothing, when the pool cannot have them.
        """
        self._collect()
        self.has(lambda: count)
        free_blocks = torch.empty(0, dtype=torch.long)
        if count and self._holes:
            free_blocks = (self._references[: self._used_below] == 0).nonzero()[:count, 0]
        end = self._used_below + count - len(free_blocks)
        if end > self.capacity:
            self._grow(end, count)
        if end > len(self._references):
            with torch.inference_mode(False):
                self._references = torch.cat([self._references, self._references.new_zeros(max(end, 64))])
        self._holes -= len(free_blocks)
        free_blocks = torch.cat([free_blocks, torch.arange(self._used_below, end)])
        self._used_below = end
        self._references[free_blocks] = 1
        return free_blocks

    def reserve(self, count: int) -> None:
        """Make room for ``count`` more blocks at once, in a pool that grows by copying."""
        if not (self.fixed or self._reserved) and count > self.free:
            self._grow(self._used_below - self._holes + count, count)

    def _grow(self, blocks: int, needed: int) -> None:
        if self.fixed or self._reserved:
            raise self.full("tokens of a layer need", needed)
        self._moved()  # first: each column before is freed as soon as the larger one is made
        capacity = max(blocks, self.capacity * 9 // 8)
        self._lay_out(capacity)
        self.capacity = capacity  # last: without memory for every column the pool keeps its size

    def _moved(self) -> None:
        """Let stores forget references to columns, which lie in other memory now."""
        self.version += 1
        for _, _, pages in self._holders.values():
            pages.clear()

    def full(self, needed_by: str, blocks: int) -> PoolFullError:
        """Return the error for something that needs this number of blocks."""
        error = PoolFullError(
            f"The pool is full: {needed_by} {blocks * self.block_nbytes()} bytes ({blocks} blocks), and "
            f"{self.free * self.block_nbytes()} of {self.capacity * self.block_nbytes()} are free; remove sequences, "
            "reset a cache, keep less, or make a larger pool."
        )
        error.blocks = blocks
        return error

    def share(self, blocks: Tensor) -> None:
        """Add a reference to each of these blocks ``[n]``; one that is listed twice gets two."""
        self._references.index_add_(0, blocks, torch.ones_like(blocks, dtype=torch.int32))

    def release(self, blocks: Tensor) -> None:
        """Drop a reference of each of these blocks ``[n]``; blocks without a reference are free."""
        self._references.index_add_(0, blocks, torch.full_like(blocks, -1, dtype=torch.int32))
        self._holes += int((self._references[blocks.unique()] == 0).sum())

    def references(self, blocks: Tensor) -> Tensor:
        """Return the reference counts of blocks ``[n]``, int32 on the CPU."""
        self._collect()
        return self._references[blocks]

    def serve(self, store: Any, holder: list[Any]) -> None:
        """Register a store, whose blocks are free when it is gone.

        ``holder`` has at each time its table ``[..., W]``, the numbers of blocks that each row owns, and a dict of
        references to columns, which is emptied when these move.
        """
        self._holders[id(holder)] = holder
        # the garbage collector may call it in any operation, so that it computes nothing
        weakref.finalize(store, self._dropped.append, id(holder)).atexit = False

    def _collect(self) -> None:
        """Release the blocks of stores that are gone."""
        while self._dropped:
            table, owned, _ = self._holders.pop(self._dropped.pop())
            self.release(table.cpu()[table_indices(0, owned)].long())

    def replace(self, blocks: Tensor) -> Tensor:
        """Return copies of these blocks ``[n]``, whose references become theirs; changes nothing when it raises."""
        copies = self.allocate(len(blocks))
        source, target = blocks.to(self.device), copies.to(self.device)
        try:
            for column in self.columns():
                column[target] = column[source]
        except BaseException:  # no table lists them yet
            self.release(copies)
            raise
        self.release(blocks)
        return copies

    def trim(self) -> None:
        """Give the memory of free blocks back, where the pool is not of fixed size."""
        self._collect()
        if not (self.fixed or self._reserved):
            self._close_up()
        used = self._references[: self._used_below] > 0
        last = used.nonzero()[-1:, 0]
        self._used_below = int(last[0]) + 1 if len(last) else 0
        self._holes = self._used_below - int(used.sum())
        if not self._reserved:
            return
        free = torch.cat([torch.zeros(1, dtype=torch.bool), ~used, torch.zeros(1, dtype=torch.bool)]).int().diff()
        runs = list(zip((free == 1).nonzero()[:, 0].tolist(), (free == -1).nonzero()[:, 0].tolist(), strict=True))
        for name, memory in self._maps.items():
            size = self._nbytes(name)
            for first, end in runs:
                start, stop = -(-first * size // mmap.PAGESIZE), end * size // mmap.PAGESIZE
                if stop > start:
                    memory.madvise(mmap.MADV_DONTNEED, start * mmap.PAGESIZE, (stop - start) * mmap.PAGESIZE)

    def _close_up(self) -> None:
        """Move the blocks that are taken together, into columns for no more, where a twentieth or more is free."""
        used = (self._references[: self._used_below] > 0).nonzero()[:, 0]
        if not len(used) or 20 * (self.capacity - len(used)) < self.capacity:
            return
        number = torch.zeros(len(self._references), dtype=torch.int32)  # of each block afterwards
        number[used] = torch.arange(len(used), dtype=torch.int32)
        used_on_device, number_on_device = used.to(self.device), number.to(self.device)
        self._moved()  # first: each column before is freed as soon as the smaller one is made
        with torch.inference_mode(False):  # the next text may be read outside of it
            for name, x in self._columns.items():
                self._columns[name] = x[used_on_device]
            self._references = self._references[used]
        for table, _, _ in self._holders.values():
            table.copy_(number_on_device[table.long()])
        self.capacity = len(used)


class Pool(BlockPool):
    """Blocks of fixed number, for all layers of any number of caches of one model.

    Args:
        model: causal language model, whose keys and values it holds; its layers lie on one device.
        nbytes: bytes of keys, values and token indices, which are taken at once; outputs of gates come on top.
        kv_dtype: ``float`` holds keys and values as the model makes them, ``int8`` holds codes of 8 bits.

    Raises:
        UserError: for another ``kv_dtype``, or fewer bytes than one block has.
    """

    def __init__(self, model: nn.Module, nbytes: int, kv_dtype: KVDtype = "float") -> None:
        if kv_dtype not in get_args(KVDtype):
            raise UserError(f"Pool: kv_dtype={kv_dtype!r}: expected {' or '.join(get_args(KVDtype))}.")
        decoder = decoder_of(model)
        #: The model's geometry.
        self.geometry = _geometry(decoder)
        like = torch.empty(0, dtype=decoder.dtype, device=device_of(decoder))
        super().__init__(kv_heads(decoder.config), like, kv_dtype, nbytes)
        if self.capacity < 1:
            raise UserError(
                f"Pool: nbytes={nbytes}: expected at least {self.block_nbytes()}, which is one block of "
                f"{self.tokens[0]} tokens of a KV head; give more."
            )

    def check(self, decoder: Any) -> None:
        """Refuse a model, by its stack of layers, of another geometry, type or device than the pool was made for."""
        for name, value in _geometry(decoder).items():
            if self.geometry[name] != value:
                raise UserError(
                    f"Pool: it was made for a model with {name}={self.geometry[name]}, and this one has {value}; make "
                    "one with ag.Pool(model, nbytes)."
                )
        devices = {device_of(layer) for layer in decoder.layers}
        if devices != {self.device}:
            raise UserError(
                f"Pool: it is on {self.device}, and layers of the model on {', '.join(sorted(map(str, devices)))}: "
                "expected one device; make one with ag.Pool(model, nbytes) where the model is, or leave pool out."
            )


def table_indices(first: Tensor | int, end: Tensor) -> tuple[Tensor, ...]:
    """Return the indices of the places ``[first, end)`` in each row of a block table.

    Args:
        first: ``[L, B, Hkv]`` long on the CPU, or a number for all rows.
        end: ``[L, B, Hkv]`` long on the CPU.
    """
    first = torch.as_tensor(first).expand_as(end)
    counts = (end - first).clamp_min(0).flatten()
    rows = torch.arange(len(counts)).repeat_interleave(counts)
    nth = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows]
    return *torch.unravel_index(rows, end.shape), first.flatten()[rows] + nth


def _geometry(decoder: Any) -> dict[str, Any]:
    config = decoder.config
    return fingerprint(config) | {"dtype": decoder.dtype, "kv_heads": [tuple(layer) for layer in kv_heads(config)]}

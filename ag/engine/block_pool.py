"""Memory for keys and values: blocks of 16 tokens of one KV head, shared by layers, sequences and caches."""

from __future__ import annotations

import math
import mmap
import os
import sys
import weakref
from typing import Any, get_args

import torch
from torch import Tensor, nn

from ag.errors import UserError
from ag.kernels.codes import Format, KVDtype
from ag.model.geometry import entry_sizes, fingerprint
from ag.model.hooks import decoder_of, device_of

BLOCK = 16  # tokens
FIRST = 256  # blocks with which a pool that grows by copying begins
RESERVES = sys.platform == "linux"
NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux: address space for which no memory is set aside


class PoolFullError(UserError):
    """A pool of fixed size has fewer free blocks than are needed; nothing was written, and nothing is lost.

    Attributes:
        blocks: needed ones.
    """

    blocks: int = 0


class BlockPool:
    """Columns ``[P, 16, ...]`` of keys, values, ranks and gate outputs, with a reference count for each block.

    A pool of fixed size takes its memory at once. A growing one reserves address space on a CPU under Linux, whose
    pages the system provides when they are first written; elsewhere its columns are copied into larger ones.

    Args:
        key: a key as the model makes it, ``[..., D]``: type, size and device count.
        value: a value, ``[..., Dv]``, likewise.
        kv_dtype: ``float`` stores keys and values in the model's type, ``int8`` stores codes of 8 bits.
        nbytes: size of a fixed pool; None makes a pool that grows.
    """

    def __init__(self, key: Tensor, value: Tensor, kv_dtype: KVDtype = "float", nbytes: int | None = None) -> None:
        #: A key and a value of no tokens, ``[0, D]`` and ``[0, Dv]``.
        self.token = key.new_empty(0, key.shape[-1]), value.new_empty(0, value.shape[-1])
        self.kv_dtype, self.device, self.fixed = kv_dtype, key.device, nbytes is not None
        #: Encodes keys and values; None means that they are stored in the model's type.
        self.format = coded = Format.of(kv_dtype, key, value)
        self._shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}  # of a token in each column
        for name, x, codes in zip(("keys", "values"), self.token, (coded or (None, None))[:2], strict=True):
            width, dtype = (x.shape[1], x.dtype) if codes is None else (codes.nbytes, torch.uint8)
            self._shapes[name] = (width,), dtype
        self._shapes["ranks"] = (), torch.int32
        self._reserved = not self.fixed and RESERVES and self.device.type == "cpu"
        self._maps: dict[str, mmap.mmap] = {}
        self._columns: dict[str, Tensor] = {}
        if nbytes is None and self._reserved:
            nbytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self.capacity = FIRST if nbytes is None else nbytes // self.block_nbytes()
        self._lay_out(self.capacity)
        self._references = torch.zeros(FIRST, dtype=torch.int32)  # of each block so far, on the host
        self._used_below = 0  # no block from here on is taken
        self._holes = 0  # free blocks before that
        self._holders: dict[int, list[Any]] = {}  # what stores take, also those just below
        self._dropped: list[int] = []  # stores that are gone
        #: Holders of blocks that can be made anew: ``drop()`` releases some, and returns whether there were any.
        self.spares: weakref.WeakSet[Any] = weakref.WeakSet()
        #: Changes whenever columns move to other memory.
        self.version = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockPool:
        """Return the same pool: copies of a cache share their blocks until one of them writes."""
        return self

    # ---- columns

    @property
    def keys(self) -> Tensor:
        """``[P, 16, D]``, or bytes of codes ``[P, 16, n]``."""
        return self._columns["keys"]

    @property
    def values(self) -> Tensor:
        """``[P, 16, Dv]``, or bytes of codes."""
        return self._columns["values"]

    @property
    def ranks(self) -> Tensor:
        """``[P, 16]`` int32."""
        return self._columns["ranks"]

    def gate(self, kind: torch.dtype) -> Tensor:
        """Return the column of gate outputs of a type, ``[P, 16]``; it is made at the first call."""
        if (name := str(kind)) not in self._columns:
            self._shapes[name] = (), kind
            self._columns[name] = self._column(name, self.capacity)
        return self._columns[name]

    def columns(self) -> list[Tensor]:
        """Return keys, values, ranks, and gate outputs of each type that is held."""
        return [*self._columns.values()]

    def _lay_out(self, blocks: int) -> None:
        for name in self._shapes:
            self._columns[name] = self._column(name, blocks, self._columns.get(name))

    def _column(self, name: str, blocks: int, before: Tensor | None = None) -> Tensor:
        """Return memory for a column, with what another one of fewer blocks holds."""
        shape, dtype = self._shapes[name]
        if self._reserved:
            size, flags = blocks * self._nbytes(name), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
            self._maps[name] = memory = mmap.mmap(-1, size, flags=flags)
            return torch.frombuffer(memory, dtype=dtype).view(blocks, BLOCK, *shape)
        with torch.inference_mode(False):  # the next text may be read outside of it
            column = torch.zeros(blocks, BLOCK, *shape, dtype=dtype, device=self.device)
        if before is not None:
            column[: len(before)] = before
        return column

    def _nbytes(self, name: str) -> int:
        """Return the bytes of a block in a column."""
        shape, dtype = self._shapes[name]
        return BLOCK * dtype.itemsize * math.prod(shape)

    def block_nbytes(self, gate: torch.dtype | None = None) -> int:
        """Return the bytes of a block: keys, values, ranks, and gate outputs of a type where one is given."""
        own = sum(map(self._nbytes, ("keys", "values", "ranks")))
        return own + (0 if gate is None else BLOCK * gate.itemsize)

    @property
    def token_nbytes(self) -> int:
        """Bytes of a key and a value as the model makes them."""
        return sum(x.shape[1] * x.element_size() for x in self.token)

    @property
    def nbytes(self) -> int:
        """Bytes of a fixed pool, free blocks included; of a pool that grows, those of the blocks that are taken."""
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

    def has(self, count: int) -> bool:
        """Return whether ``count`` blocks are free; spare ones are released until they are."""
        for spare in [*self.spares] if self.fixed else []:
            while self.free < count and spare.drop():
                pass
        return not self.fixed or self.free >= count

    def allocate(self, count: int) -> Tensor:
        """Return ``count`` blocks ``[count]`` long on the CPU with one reference each, the lowest free numbers first.

        Raises ``PoolFullError``, and changes nothing, when the pool cannot have them.
        """
        self._collect()
        self.has(count)
        found = torch.empty(0, dtype=torch.long)
        if count and self._holes:
            found = (self._references[: self._used_below] == 0).nonzero()[:count, 0]
        end = self._used_below + count - len(found)
        if end > self.capacity:
            self._grow(end, count)
        if end > len(self._references):
            self._references = torch.cat([self._references, self._references.new_zeros(max(end, 64))])
        self._holes -= len(found)
        found = torch.cat([found, torch.arange(self._used_below, end)])
        self._used_below = end
        self._references[found] = 1
        return found

    def _grow(self, blocks: int, needed: int) -> None:
        if self.fixed or self._reserved:
            raise self.full("tokens of a layer need", needed)
        self.capacity = max(blocks, self.capacity * 5 // 4)
        self._lay_out(self.capacity)
        self._moved()

    def _moved(self) -> None:
        """Let stores forget references to columns, which lie in other memory now."""
        self.version += 1
        for _, _, pages in self._holders.values():
            pages.clear()

    def full(self, what: str, blocks: int) -> PoolFullError:
        """Return the error for something that needs this number of blocks."""
        error = PoolFullError(
            f"The pool is full: {what} {blocks * self.block_nbytes()} bytes ({blocks} blocks of {BLOCK} tokens), and "
            f"{self.free * self.block_nbytes()} of {self.capacity * self.block_nbytes()} are free; remove sequences, "
            "reset a cache, keep less, or make a larger pool."
        )
        error.blocks = blocks
        return error

    def share(self, blocks: Tensor) -> None:
        """Add a reference to each of these blocks ``[n]``; one that is listed twice gets two."""
        self._references.index_add_(0, blocks, torch.ones_like(blocks, dtype=torch.int32))

    def release(self, blocks: Tensor) -> None:
        """Drop a reference of each of these blocks ``[n]``; those that have none left are free."""
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
            places = torch.arange(table.shape[-1])
            self.release(table.cpu()[places < owned[..., None]].long())

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy the contents of blocks ``[n]`` to others."""
        source, target = source.to(self.device), target.to(self.device)
        for column in self.columns():
            column[target] = column[source]

    def trim(self) -> None:
        """Give the memory of free blocks back, where the pool is not of fixed size."""
        self._collect()
        if not (self.fixed or self._reserved):
            self._close_up()
        used = self._references[: self._used_below] > 0
        last = used.nonzero()[-1:, 0]
        behind, self._used_below = self._used_below, int(last[0]) + 1 if len(last) else 0
        self._holes = self._used_below - int(used.sum())
        if not self._reserved:
            return
        free = torch.cat([torch.zeros(1, dtype=torch.bool), ~used, torch.zeros(1, dtype=torch.bool)]).int().diff()
        runs = list(zip((free == 1).nonzero()[:, 0].tolist(), (free == -1).nonzero()[:, 0].tolist(), strict=True))
        assert not runs or runs[-1][1] <= behind
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
        here, there = used.to(self.device), number.to(self.device)
        with torch.inference_mode(False):  # the next text may be read outside of it
            for name, x in self._columns.items():
                self._columns[name] = x[here]
        for table, _, _ in self._holders.values():
            table.copy_(there[table.long()])
        self._references, self.capacity = self._references[used], len(used)
        self._moved()


class Pool(BlockPool):
    """Blocks of fixed number, for all layers of any number of caches of one model.

    Args:
        model: causal language model, whose keys and values it holds; its layers lie on one device.
        nbytes: most that it may take; it takes that at once.
        kv_dtype: ``float`` holds keys and values as the model makes them, ``int8`` holds codes of 8 bits.

    Raises:
        UserError: for another ``kv_dtype``, or fewer bytes than one block has.
    """

    def __init__(self, model: nn.Module, nbytes: int, kv_dtype: KVDtype = "float") -> None:
        if kv_dtype not in get_args(KVDtype):
            raise UserError(f"Pool: kv_dtype={kv_dtype!r}: expected {' or '.join(get_args(KVDtype))}.")
        decoder = decoder_of(model)
        #: Of the model.
        self.geometry = fingerprint(decoder.config)
        key, value = (
            torch.empty(0, size, dtype=decoder.dtype, device=device_of(decoder)) for size in entry_sizes(decoder.config)
        )
        super().__init__(key, value, kv_dtype, nbytes)
        if self.capacity < 1:
            raise UserError(
                f"Pool: nbytes={nbytes}: expected at least {self.block_nbytes()}, which is one block of {BLOCK} tokens "
                "of a KV head; give more."
            )

    def check(self, decoder: Any) -> None:
        """Refuse a model, by its stack of layers, of another geometry, type or device than the pool was made for."""
        mine = self.geometry | {"dtype": self.token[0].dtype}
        for name, value in (fingerprint(decoder.config) | {"dtype": decoder.dtype}).items():
            if mine[name] != value:
                raise UserError(
                    f"Pool: it was made for a model with {name}={mine[name]}, and this one has {value}; make one with "
                    "ag.Pool(model, nbytes)."
                )
        devices = {device_of(layer) for layer in decoder.layers}
        if devices != {self.device}:
            raise UserError(
                f"Pool: it is on {self.device}, and layers of the model on {', '.join(sorted(map(str, devices)))}: "
                "expected one device; make one with ag.Pool(model, nbytes) where the model is, or leave pool out."
            )

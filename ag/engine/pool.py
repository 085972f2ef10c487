"""Pages of keys and values: the memory that rows of tokens take, share and give back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args
from weakref import WeakSet

import torch
from torch import Tensor, nn

from ag.errors import UserError
from ag.kernels.codes import Format, KVDtype
from ag.model.geometry import fingerprint
from ag.model.hooks import decoder_of, device_of

PAGE = 16  # tokens of a page
LOOSE_SHARE = 32  # a pool that grows is loose when more than one page for each so many taken ones is free


class PoolFullError(UserError):
    """A pool of fixed size has fewer free pages than are asked for; nothing was written, and nothing is lost.

    Attributes:
        pages: that were asked for; 0 where it is not known.
    """

    pages: int = 0

    @classmethod
    def of(cls, what: str, pages: int, pool: Pool) -> PoolFullError:
        """Return the error that says what needs so many pages of a pool."""
        error = cls(
            f"The pool is full: {what} {pages * pool.page_nbytes()} bytes ({pages} pages of {PAGE} tokens), and "
            f"{pool.free * pool.page_nbytes()} of {pool.nbytes} are free; release sequences, reset a cache, keep less, "
            "or make a larger pool."
        )
        error.pages = pages
        return error


def pages_for(tokens: Tensor) -> Tensor:
    """Return the pages that rows of so many tokens need."""
    return (tokens + PAGE - 1) // PAGE


def listed(pages: Tensor, counts: Tensor) -> Tensor:
    """Return the first ``counts`` ``[R]`` of each row of ``pages`` ``[R, most]``, row after row, ``[n]`` long."""
    return pages[torch.arange(pages.shape[1]) < counts[:, None]].long()


class Pool:
    """Pages of 16 tokens each, one tensor for each column of a token; a free page may go to any row.

    A pool of fixed size is for all layers of any number of caches, one that grows (:meth:`growing`) for one layer.

    Args:
        model: causal language model, whose keys and values it holds; all layers have one geometry, and lie on one
            device.
        nbytes: most that it may take; it takes that at once.
        kv_dtype: ``float``: keys and values as the model makes them; ``int8``: codes of 8 bits, see
            :class:`ag.kernels.codes.Codes`.

    Raises:
        UserError: when ``nbytes`` is less than one page.
    """

    keys: Tensor  # [P, 16, D], or bytes of codes [P, 16, n]
    values: Tensor  # [P, 16, Dv], likewise
    ranks: Tensor  # [P, 16] int32

    def __init__(self, model: nn.Module, nbytes: int, kv_dtype: KVDtype = "float") -> None:
        if kv_dtype not in get_args(KVDtype):
            raise UserError(f"Pool: kv_dtype={kv_dtype!r}: expected {' or '.join(get_args(KVDtype))}.")
        decoder = decoder_of(model)
        #: Of the model whose keys and values it holds; None: it grows, for one layer.
        self.geometry: dict[str, Any] | None = fingerprint(decoder.config)
        token = torch.empty(0, self.geometry["head_dim"], dtype=decoder.dtype, device=device_of(decoder))
        self._make(token, token, kv_dtype)
        pages = nbytes // self.page_nbytes()
        if pages < 1:
            raise UserError(
                f"Pool: nbytes={nbytes}: expected at least {self.page_nbytes()}, which is one page of {PAGE} tokens of "
                "a KV head; give more."
            )
        self._resize(pages)
        self.fixed = True

    @classmethod
    def growing(cls, key: Tensor, value: Tensor, kv_dtype: KVDtype = "float") -> Pool:
        """Return a pool that grows, for keys and values like these ``[..., D]`` and ``[..., Dv]``."""
        pool: Pool = object.__new__(cls)
        pool.geometry = None
        pool._make(key, value, kv_dtype)
        return pool

    def _make(self, key: Tensor, value: Tensor, kv_dtype: KVDtype) -> None:
        self.fixed, self.kv_dtype = False, kv_dtype
        #: A key and a value as the model makes them, of no tokens: ``[0, D]`` and ``[0, Dv]``.
        self.token = key.new_empty(0, key.shape[-1]), value.new_empty(0, value.shape[-1])
        #: How they are written; None: as they are.
        self.format = Format.of(kv_dtype, key, value)
        self.keys, self.values = (x.new_empty(0, PAGE, x.shape[1]) for x in self.token)
        if self.format is not None:
            self.keys, self.values = (
                torch.empty(0, PAGE, codes.nbytes, dtype=torch.uint8, device=key.device)
                for codes in (self.format.keys, self.format.values)
            )
        self.ranks = torch.empty(0, PAGE, dtype=torch.int32, device=key.device)
        #: What gates say of each token, ``[P, 16]`` by type; made when a cache first asks.
        self.gates: dict[torch.dtype, Tensor] = {}
        self._references = torch.zeros(0, dtype=torch.int32)  # of each page, on the host
        self._free: list[int] = []  # a stack
        self._dropped: list[tuple[Tensor, Tensor]] = []  # pages of stores that are gone
        self._tables: WeakSet[Any] = WeakSet()  # of class ag.engine.table.PageTable

    def __deepcopy__(self, memo: dict[int, Any]) -> Pool:
        """Return the same one: copies of a cache share its pages until one of them writes."""
        return self

    def check(self, decoder: Any) -> None:
        """Refuse a model, by its stack of layers, whose keys and values it was not made for.

        Raises:
            UserError: when geometry, type or device differ.
        """
        here: dict[str, Any] = fingerprint(decoder.config) | {"dtype": decoder.dtype}
        mine = (self.geometry or {}) | {"dtype": self.dtype}
        devices = {device_of(layer) for layer in decoder.layers}
        for name, value in here.items():
            if mine.get(name) != value:
                raise UserError(
                    f"Pool: it was made for a model with {name}={mine.get(name)}, and this one has {value}; make one "
                    "with ag.Pool(model, nbytes)."
                )
        if devices != {self.keys.device}:
            raise UserError(
                f"Pool: it is on {self.keys.device}, and layers of the model on "
                f"{', '.join(sorted(map(str, devices)))}: expected one device; make one with ag.Pool(model, nbytes) "
                "where the model is, or leave pool out."
            )

    def check_tokens(self, key: Tensor, value: Tensor) -> None:
        """Refuse keys and values of another type, as autocast makes them.

        Raises:
            UserError: when types differ.
        """
        if (key.dtype, value.dtype) != tuple(x.dtype for x in self.token):
            raise UserError(
                f"Pool: it holds {self.dtype}, and the model computed keys of {key.dtype} and values of "
                f"{value.dtype}; use the cache without torch.autocast, or without pool."
            )

    # ---- its size

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values as the model makes them."""
        return self.token[0].dtype

    @property
    def token_nbytes(self) -> int:
        """Bytes of a key and a value as the model makes them."""
        return sum(x.shape[1] * x.element_size() for x in self.token)

    @property
    def size(self) -> int:
        """Pages, free ones included."""
        return len(self.keys)

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        self._collect()
        return len(self._free)

    @property
    def nbytes(self) -> int:
        """Bytes allocated, free pages included."""
        return sum(x.nbytes for x in self._columns())

    def page_nbytes(self, gate: torch.dtype | None = None) -> int:
        """Return the bytes of one page: keys, values, ranks, and what a gate says in this type."""
        wide = (x.shape[2] * x.element_size() for x in (self.keys, self.values))
        return PAGE * (sum(wide) + self.ranks.element_size() + (0 if gate is None else gate.itemsize))

    def gate(self, kind: torch.dtype) -> Tensor:
        """Return the column of what gates say in a type, ``[P, 16]``."""
        if kind not in self.gates:
            self.gates[kind] = torch.zeros(self.size, PAGE, dtype=kind, device=self.keys.device)
        return self.gates[kind]

    def _columns(self) -> list[Tensor]:
        return [self.keys, self.values, self.ranks, *self.gates.values()]

    # ---- pages

    def enlist(self, table: Any) -> None:
        """Take note of a table of pages, which is told when they are renumbered, for as long as it lives."""
        self._tables.add(table)

    def take(self, count: int) -> Tensor:
        """Return the numbers of so many free pages, ``[count]`` long on the CPU, in runs where there are such.

        Raises:
            PoolFullError: when a pool of fixed size has fewer.
        """
        if self.fixed and count > self.free:
            raise PoolFullError.of("tokens of a layer need", count, self)
        if count > self.free:
            self._resize(self.size + count - self.free + self.size // LOOSE_SHARE)
        taken = self._free[self.free - count :][::-1]
        del self._free[self.free - count :]
        pages = torch.tensor(taken, dtype=torch.long)
        self._references[pages] = 1
        return pages

    def share(self, pages: Tensor) -> None:
        """Take note of one more holder of each of these pages ``[n]``."""
        self._references.index_add_(0, pages, torch.ones(len(pages), dtype=torch.int32))

    def drop(self, pages: Tensor, counts: Tensor) -> None:
        """Take note of the pages of a store that is gone, ``[R, most]`` and how many each row has.

        The garbage collector calls it in the midst of anything, a ``with torch.device("meta")`` among that: nothing is
        computed here.
        """
        self._dropped.append((pages, counts))

    def _collect(self) -> None:
        """Take back what stores held that are gone."""
        while self._dropped:
            self.give(listed(*self._dropped.pop()))

    def give(self, pages: Tensor) -> None:
        """Take pages ``[n]`` back from a holder; those that nobody else holds are free."""
        self._references.index_add_(0, pages, torch.full((len(pages),), -1, dtype=torch.int32))
        unheld = pages[self._references[pages] == 0].unique()
        self._free += unheld.flip(0).tolist()  # the next ones that are taken ascend

    def references(self, pages: Tensor) -> Tensor:
        """Return how many rows hold each of these pages, ``[n]`` int32 on the CPU."""
        self._collect()
        return self._references[pages]

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy pages ``[n]`` to others."""
        source, target = source.to(self.keys.device), target.to(self.keys.device)
        for column in self._columns():
            column[target] = column[source]

    def trim(self) -> None:
        """Give memory of free pages back where there is much of it, and put pages in the order of rows again."""
        if self.fixed or self.free <= (self.size - self.free) // LOOSE_SHARE + 1:
            return
        held = torch.cat([torch.zeros(0).long(), *(table.numbers() for table in self._tables)])
        order, first = held.unique(return_inverse=True)
        places = torch.full((len(order),), len(held)).scatter_reduce_(0, first, torch.arange(len(held)), "amin")
        order = order[places.argsort()]  # by the first row that holds them
        numbers = torch.zeros(self.size, dtype=torch.long)
        numbers[order] = torch.arange(len(order))
        self._references = self._references[order]
        self._replace(lambda column: column[order.to(column.device)])
        self._free = []
        for table in self._tables:
            table.renumber(numbers)

    def _resize(self, size: int) -> None:
        """Make more pages."""
        before = self.size

        def grown(column: Tensor) -> Tensor:
            larger = column.new_zeros(size, *column.shape[1:])
            larger[:before] = column
            return larger

        self._replace(grown)
        self._references = torch.cat([self._references, torch.zeros(size - before, dtype=torch.int32)])
        self._free = [*range(size - 1, before - 1, -1), *self._free]

    def _replace(self, change: Callable[[Tensor], Tensor]) -> None:
        self.keys, self.values, self.ranks = (change(x) for x in (self.keys, self.values, self.ranks))
        self.gates = {kind: change(x) for kind, x in self.gates.items()}

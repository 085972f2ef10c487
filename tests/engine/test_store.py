"""Stores in pools against lists: what they hold, and whose pages are whose."""

import copy
import gc

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ag.engine.pool import PAGE, Pool, PoolFullError
from ag.engine.store import PagedStore
from ag.kernels.pages import Reach

DIM, HEADS, ROOM = 3, 2, 40


def made(batch, kv_heads, key, value, gate=None, **options):
    """A store with a pool of its own."""
    return PagedStore(batch, kv_heads, Pool.growing(key, value), gate, **options)


def tokens(batch, heads, length, dim=8):
    return torch.randn(batch, heads, length, dim)


class Lists:
    """The oracle of a store: for each row a list of (identity, rank, gate), slot by slot; tokens seen by sequence."""

    def __init__(self, batch):
        self.seen, self.rows = [0] * batch, [[] for _ in range(batch * HEADS)]

    def copied(self):
        new = Lists(0)
        new.seen, new.rows = list(self.seen), [list(row) for row in self.rows]
        return new

    def select(self, chosen):
        self.rows = [list(self.rows[b * HEADS + h]) for b in chosen for h in range(HEADS)]
        self.seen = [self.seen[b] for b in chosen]


class Stores(RuleBasedStateMachine):
    """Any number of stores in one pool, of fixed size or growing; every operation is done to lists too."""

    @initialize(fixed=st.booleans(), batch=st.integers(1, 3), kv_dtype=st.sampled_from(["float", "int8"]))
    def begin(self, fixed, batch, kv_dtype):
        key = torch.empty(1, DIM)
        self.pool = Pool.growing(key, key, kv_dtype)
        if fixed:  # as for a model of such keys
            self.pool._resize(ROOM)
            self.pool.fixed = True
        self.identity = 0
        self.stores = [(PagedStore(batch, HEADS, self.pool, torch.float32), Lists(batch))]

    def new_tokens(self, lists, length, draw, absent):
        """Draw tokens ``[B, Hkv, T]``; returns the arguments of ``append``, and what the lists get."""
        batch = len(lists.seen)
        valid = torch.rand(batch, length, generator=draw) >= (0.3 if absent else 0)
        gate = torch.rand(batch, HEADS, length, generator=draw)
        ranks = valid.cumsum(1) - 1 + torch.tensor(lists.seen)[:, None]
        k, new = torch.zeros(batch, HEADS, length, DIM), [[] for _ in lists.rows]
        for b in range(batch):
            for h in range(HEADS):
                for t in range(length):
                    self.identity = self.identity % 1000 + 1  # which codes hold exactly, and a half more too
                    k[b, h, t] = self.identity
                    if valid[b, t]:
                        new[b * HEADS + h].append((self.identity, int(ranks[b, t]), float(gate[b, h, t])))
        return (k, k + 0.5, ranks, valid[:, None] if absent else None, gate), new, valid.sum(1).tolist()

    def add(self, number, call, new, counts):
        """Append to a store and its lists, or to neither where the pool is full."""
        _, lists = self.stores[number % len(self.stores)]
        try:
            call()
        except PoolFullError:
            assert self.pool.fixed
            return
        for row, more in zip(lists.rows, new, strict=True):
            row += more
        lists.seen = [n + more for n, more in zip(lists.seen, counts, strict=True)]

    @rule(number=st.integers(0, 9), length=st.integers(1, 40), absent=st.booleans(), seed=st.integers(0, 2**16))
    def append(self, number, length, absent, seed):
        store, lists = self.stores[number % len(self.stores)]
        arguments, new, counts = self.new_tokens(lists, length, torch.Generator().manual_seed(seed), absent)

        def call():
            store.append(*arguments)
            try:
                store.write()
            except PoolFullError:
                store._prompt = None
                raise

        self.add(number, call, new, counts)

    @rule(number=st.integers(0, 9), seed=st.integers(0, 2**16), window=st.integers(1, 20))
    def push(self, number, seed, window):
        """One token of each row in place of what leaves its window."""
        store, lists = self.stores[number % len(self.stores)]
        arguments, new, counts = self.new_tokens(lists, 1, torch.Generator().manual_seed(seed), absent=seed % 2 == 0)
        gone = torch.full((len(lists.rows), 1), -1, dtype=torch.int32)
        for r, row in enumerate(lists.rows):
            for _, rank, _ in new[r]:
                gone[r, 0] = next((slot for slot, x in enumerate(row) if x[1] == rank - window), -1)
        before = list(lists.seen)
        self.add(number, lambda: store.append(*arguments, Reach(window=window)), new, counts)
        if lists.seen != before:
            self.fill(lists, gone)

    def fill(self, lists, victims):
        for row, gone in zip(lists.rows, victims.tolist(), strict=True):
            for at in sorted((x for x in gone if x >= 0), reverse=True):
                last = row.pop()
                if at < len(row):
                    row[at] = last

    @rule(number=st.integers(0, 9), seed=st.integers(0, 2**16), most=st.integers(1, 2), comes=st.booleans())
    def leave(self, number, seed, most, comes):
        """Some tokens go when the next one comes, or when somebody looks."""
        store, lists = self.stores[number % len(self.stores)]
        draw = torch.Generator().manual_seed(seed)
        gone = torch.full((len(lists.rows), most), -1, dtype=torch.int32)
        for r, row in enumerate(lists.rows):
            chosen = torch.randperm(len(row), generator=draw)[: int(torch.randint(0, most + 1, (), generator=draw))]
            gone[r, : len(chosen)] = chosen.int()
        try:
            store.leave(gone.clone().view(-1, HEADS, most), {})
        except PoolFullError:  # what is shared would have been copied
            assert self.pool.fixed
            return
        if comes:
            arguments, new, counts = self.new_tokens(lists, 1, draw, absent=seed % 2 == 0)
            self.add(number, lambda: store.append(*arguments), new, counts)
        self.fill(lists, gone)

    @rule(number=st.integers(0, 9), share=st.floats(0, 1), seed=st.integers(0, 2**16))
    def retain(self, number, share, seed):
        """Many go: what stays is closed up in the order of ranks; few: the last ones take their slots."""
        store, lists = self.stores[number % len(self.stores)]
        longest, draw = max(map(len, lists.rows)), torch.Generator().manual_seed(seed)
        keep = torch.rand(len(lists.rows), longest, generator=draw) >= (share if seed % 3 else share / 20)
        gone = [[t for t in range(len(row)) if not keep[r, t]] for r, row in enumerate(lists.rows)]
        record = torch.zeros(len(lists.seen), HEADS, 2, longest)
        for r, row in enumerate(lists.rows):
            for t, (identity, _, _) in enumerate(row):
                record[r // HEADS, r % HEADS, :, t] = identity
        records = {"noted": record}
        try:
            assert store.retain(keep, records) == any(gone)
        except PoolFullError:  # what is shared would have been copied
            assert self.pool.fixed
            return
        held = [{row[t] for t in range(len(row)) if keep[r, t]} for r, row in enumerate(lists.rows)]
        ranks = [store.pool.ranks.flatten()[index].tolist() for index in self.index(store)]
        lists.rows = [[{x[1]: x for x in kept}[rank] for rank in row] for kept, row in zip(held, ranks, strict=True)]
        assert [set(row) for row in lists.rows] == held
        for r, row in enumerate(lists.rows):
            noted = records["noted"][r // HEADS, r % HEADS]
            assert noted[:, : len(row)].tolist() == [[float(x) for x, _, _ in row]] * 2
            assert not noted[:, len(row) :].any() or not any(gone)

    def index(self, store):
        index = store.table.index(int(store.lengths.max()))
        return [places[:length] for places, length in zip(index, store.lengths.tolist(), strict=True)]

    @rule(number=st.integers(0, 9), back=st.integers(0, 30))
    def crop(self, number, back):
        store, lists = self.stores[number % len(self.stores)]
        seen = [max(0, n - back) for n in lists.seen]
        try:
            store.crop(torch.tensor(seen))
        except PoolFullError:
            assert self.pool.fixed
            return
        lists.seen = seen
        kept = [{x for x in row if x[1] < seen[r // HEADS]} for r, row in enumerate(lists.rows)]
        ranks = [store.pool.ranks.flatten()[index].tolist() for index in self.index(store)]
        lists.rows = [[{x[1]: x for x in row}[rank] for rank in order] for row, order in zip(kept, ranks, strict=True)]
        assert [set(row) for row in lists.rows] == kept

    @rule(number=st.integers(0, 9), chosen=st.lists(st.integers(0, 9), min_size=1, max_size=4))
    def select(self, number, chosen):
        """Beams and releases: some sequences, repeats among them."""
        store, lists = self.stores[number % len(self.stores)]
        chosen = [x % len(lists.seen) for x in chosen]
        store.select(torch.tensor(chosen))
        lists.select(chosen)

    @rule(number=st.integers(0, 9))
    def copy(self, number):
        if len(self.stores) < 4:
            store, lists = self.stores[number % len(self.stores)]
            self.stores.append((copy.deepcopy(store), lists.copied()))

    @rule(number=st.integers(0, 9), other=st.integers(0, 9))
    def join(self, number, other):
        number, other = number % len(self.stores), other % len(self.stores)
        if number != other and len(self.stores[number][1].seen) + len(self.stores[other][1].seen) <= 6:
            (store, lists), (theirs, more) = self.stores[number], self.stores[other]
            store.join(theirs)
            lists.rows, lists.seen = lists.rows + more.copied().rows, lists.seen + more.seen

    @rule(number=st.integers(0, 9))
    def drop(self, number):
        if len(self.stores) > 1:
            del self.stores[number % len(self.stores)]
            gc.collect()

    @rule(number=st.integers(0, 9))
    def save_and_load(self, number):
        number %= len(self.stores)
        store, lists = self.stores[number]
        new = PagedStore(store.batch, HEADS, self.pool, torch.float32)
        try:
            new.load_state_dict(store.state_dict())
        except PoolFullError:
            return
        self.stores[number] = new, lists

    @rule()
    def trim(self):
        self.pool.trim()

    @invariant()
    def stores_equal_lists(self):
        for store, lists in self.stores:
            assert store.batch == len(lists.seen)
            assert store.lengths.tolist() == [len(row) for row in lists.rows]
            held = store.padded()
            if held.valid is None:
                assert len({len(row) for row in lists.rows}) == 1
            for i, row in enumerate(lists.rows):
                mine = slice(0, len(row))
                assert held.keys[i, mine].tolist() == [[float(x)] * DIM for x, _, _ in row]
                assert held.values[i, mine].tolist() == [[x + 0.5] * DIM for x, _, _ in row]
                assert held.ranks[i, mine].tolist() == [rank for _, rank, _ in row]
                assert held.gate[i, mine].tolist() == [gate for _, _, gate in row]
                if store.ordered:
                    assert [rank for _, rank, _ in row] == sorted(rank for _, rank, _ in row)
            assert [x.tolist() for x in store.kept()] == [sorted(rank for _, rank, _ in row) for row in lists.rows]
            assert torch.equal(store.rows.table.long(), store.table.pages.long())

    @invariant()
    def pages_are_counted(self):
        """None is lost, none is free and held, and the number of holders is that of rows that name it."""
        held = torch.cat([store.table.numbers() for store, _ in self.stores])
        assert self.pool.free == len(self.pool._free)
        assert self.pool._references.tolist() == held.bincount(minlength=self.pool.size).tolist()
        free = self.pool._free
        assert len(set(free)) == len(free) and not set(free) & set(held.tolist())
        assert len(free) + len(held.unique()) == self.pool.size
        for store, _ in self.stores:
            assert store.nbytes == len(store.table.numbers().unique()) * self.pool.page_nbytes(torch.float32)

    @invariant()
    def no_page_is_spare_for_long(self):
        for store, lists in self.stores:
            assert all(PAGE * count >= len(row) for count, row in zip(store.table.counts, lists.rows, strict=True))


TestStores = Stores.TestCase
TestStores.settings = settings(max_examples=20, stateful_step_count=15, deadline=None)


@pytest.mark.slow
class TestManyStores(TestStores):
    settings = settings(max_examples=200, stateful_step_count=30, deadline=None)


# ---- memory


def test_memory_is_at_most_a_tenth_more_than_what_is_kept():
    torch.manual_seed(0)
    store = made(2, 3, torch.empty(1, 8), torch.empty(1, 8, dtype=torch.bfloat16))
    k, ranks = tokens(2, 3, 1500), torch.arange(1500).expand(2, -1)
    keep = torch.rand(2, 3, 1500) > torch.tensor([0.1, 0.5, 0.8])[:, None]
    store.append(k, k.bfloat16(), ranks, keep)
    store.write()
    token = 8 * (4 + 2) + 4
    for step in range(300):
        kept = int(store.lengths.sum()) * token
        assert int(store.lengths.min()) >= 256
        assert kept <= store.nbytes <= 1.1 * kept
        assert store.pool.nbytes <= 1.1 * kept
        k = tokens(2, 3, 1)
        store.append(k, k.bfloat16(), torch.full((2, 1), 1500 + step), None)
    before = store.nbytes
    store.retain(torch.rand(6, int(store.lengths.max())) > 0.05)
    kept = int(store.lengths.sum()) * token
    assert store.nbytes < before
    assert kept <= store.nbytes <= 1.1 * kept


@pytest.mark.parametrize("gone", [[], [1]])
def test_free_slots_are_not_kept(gone):
    """Rows that are equally long, below the width of ``keep``, which is True there."""
    store = made(1, 2, torch.empty(1, 2), torch.empty(1, 2))
    ranks = torch.arange(6)[None]
    k = ranks[:, None, :, None].expand(1, 2, 6, 2).float()
    store.append(k, k, ranks, None)
    store.write()
    store.crop(torch.tensor([4]))
    assert store.lengths.tolist() == [4, 4]
    keep = torch.ones(2, 6, dtype=torch.bool)
    keep[:, gone] = False
    assert store.retain(keep) == bool(gone)
    assert [row.tolist() for row in store.kept()] == [[x for x in range(4) if x not in gone]] * 2


def test_appending_rarely_copies_the_pool():
    """A copy buys 1/32 of the pages, at least those that are asked for: 32 pages of 16 tokens become 96."""
    store = made(1, 2, torch.empty(1, 8), torch.empty(1, 8))
    store.append(tokens(1, 2, 256), tokens(1, 2, 256), torch.arange(256)[None], None)
    store.write()
    places = {store.pool.keys.data_ptr()}
    for step in range(512):
        store.append(tokens(1, 2, 1), tokens(1, 2, 1), torch.full((1, 1), 256 + step), None)
        places.add(store.pool.keys.data_ptr())
    assert store.lengths.tolist() == [768] * 2
    assert len(places) - 1 <= 512 // PAGE  # twice 32 pages, two at a time and one more


def test_rows_of_equal_length_are_read_without_a_copy():
    store = made(2, 2, torch.empty(1, 8), torch.empty(1, 8))
    keep = torch.arange(40).expand(2, 2, 40) % 2 == 0
    store.append(tokens(2, 2, 40), tokens(2, 2, 40), torch.arange(40).expand(2, -1), keep)
    store.write()
    stored = store.padded()
    assert stored.valid is None
    assert stored.keys.data_ptr() == store.pool.keys.data_ptr()
    assert stored.values.data_ptr() == store.pool.values.data_ptr()


def test_what_stands_for_a_gate_of_a_prompt_takes_no_memory_behind_it():
    k = tokens(1, 2, 40)
    store = made(1, 2, k, k, torch.float32)
    store.append(k, k, torch.arange(40)[None], None)
    store.write()
    assert store._ones is None and torch.equal(store.padded().gate, torch.ones(2, 40))
    store.append(k[:, :, :1], k[:, :, :1], torch.tensor([[40]]), None)
    assert store._ones.shape == (1, 2, 1)

"""The ragged store against a list of lists."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gates_for import gates_for
from hypothesis import given, settings
from hypothesis import strategies as st

import ag
from ag.engine.storage import RaggedStore

DIM = 3
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["append", "append", "retain", "evict", "evict", "crop", "select"]),
        st.integers(0, 2**16),
    ),
    max_size=12,
)


class Lists:
    """The oracle: for each row a list of (identity, rank, gate); for each sequence how many tokens it has seen."""

    def __init__(self, batch, heads):
        self.heads, self.seen = heads, [0] * batch
        self.rows = [[] for _ in range(batch * heads)]
        self.identity = 0

    def append(self, store, generator):
        batch, length = len(self.seen), int(torch.randint(1, 8, (), generator=generator))
        draw = lambda *shape: torch.rand(shape, generator=generator)  # noqa: E731
        padded, shared, everything = (draw() < 0.3 for _ in range(3))
        valid = draw(batch, length) > (0.3 if padded else -1)
        keep = valid[:, None] & (draw(batch, 1 if shared else self.heads, length) > 0.4)
        gate = draw(batch, self.heads, length)
        if everything:
            valid, keep = torch.ones_like(valid), None
        k = torch.zeros(batch, self.heads, length, DIM)
        ranks = valid.cumsum(1) - 1 + torch.tensor(self.seen)[:, None]
        for b in range(batch):
            for h in range(self.heads):
                for t in range(length):
                    self.identity += 1
                    k[b, h, t] = self.identity
                    if keep is None or keep[b, h if keep.shape[1] > 1 else 0, t]:
                        token = (self.identity, int(ranks[b, t]), float(gate[b, h, t]))
                        self.rows[b * self.heads + h].append(token)
            self.seen[b] += int(valid[b].sum())
        store.append(k, k + 0.5, ranks, keep, gate)

    def retain(self, store, generator):
        longest = max(map(len, self.rows))
        keep = torch.rand(len(self.rows), longest, generator=generator) > 0.4
        self.rows = [[x for x, wanted in zip(row, keep[i], strict=False) if wanted] for i, row in enumerate(self.rows)]
        store.retain(keep)

    def evict(self, store, generator):
        """One token of each row that has any, all of them near the start or near the end."""
        keep = torch.ones(len(self.rows), max(map(len, self.rows)), dtype=torch.bool)
        early = torch.rand((), generator=generator) < 0.5
        for i, row in enumerate(self.rows):
            if row:
                at = int(torch.randint(0, min(3, len(row)), (), generator=generator))
                at = at if early else len(row) - 1 - at
                keep[i, at] = False
                del row[at]
        assert store.retain(keep) == (not bool(keep.all()))

    def crop(self, store, generator):
        self.seen = [int(torch.randint(0, seen + 1, (), generator=generator)) for seen in self.seen]
        limits = [seen for seen in self.seen for _ in range(self.heads)]
        self.rows = [[x for x in row if x[1] < limit] for row, limit in zip(self.rows, limits, strict=True)]
        store.crop(torch.tensor(self.seen))

    def select(self, store, generator):
        count = int(torch.randint(1, 4, (), generator=generator))
        chosen = torch.randint(0, len(self.seen), (count,), generator=generator)
        self.rows = [list(self.rows[b * self.heads + h]) for b in chosen.tolist() for h in range(self.heads)]
        self.seen = [self.seen[b] for b in chosen.tolist()]
        store.select_sequences(chosen)

    def check(self, store):
        assert store.batch == len(self.seen)
        assert store.lengths.tolist() == [len(row) for row in self.rows]
        stored = store.padded()
        starts, lengths = store.rows
        for i, row in enumerate(self.rows):
            assert store.keys[starts[i] : starts[i] + lengths[i], 0].tolist() == [float(x) for x, _, _ in row]
        if stored.valid is None:
            assert len({len(row) for row in self.rows}) == 1
        for i, row in enumerate(self.rows):
            mine = slice(0, len(row))
            if stored.valid is not None:
                assert stored.valid[i].tolist() == [t < len(row) for t in range(stored.valid.shape[1])]
            assert stored.keys[i, mine].tolist() == [[float(x)] * DIM for x, _, _ in row]
            assert stored.values[i, mine].tolist() == [[x + 0.5] * DIM for x, _, _ in row]
            assert stored.ranks[i, mine].tolist() == [rank for _, rank, _ in row]
            assert stored.gate[i, mine].tolist() == [gate for _, _, gate in row]
            assert stored.ranks[i, mine].tolist() == sorted({rank for _, rank, _ in row})


@settings(max_examples=120)
@given(batch=st.integers(1, 3), heads=st.integers(1, 3), operations=OPERATIONS)
def test_any_sequence_of_operations_equals_lists(batch, heads, operations):
    oracle = Lists(batch, heads)
    store = RaggedStore(batch, heads, torch.empty(1, DIM), torch.empty(1, DIM), torch.float32)
    for name, seed in [("append", 0), *operations]:
        getattr(oracle, name)(store, torch.Generator().manual_seed(seed))
        oracle.check(store)


def tokens(batch, heads, length, dim=8):
    return torch.randn(batch, heads, length, dim)


def test_memory_is_at_most_a_tenth_more_than_what_is_kept():
    torch.manual_seed(0)
    store = RaggedStore(2, 3, torch.empty(1, 8), torch.empty(1, 8, dtype=torch.bfloat16))
    k, ranks = tokens(2, 3, 1500), torch.arange(1500).expand(2, -1)
    keep = torch.rand(2, 3, 1500) > torch.tensor([0.1, 0.5, 0.8])[:, None]
    store.append(k, k.bfloat16(), ranks, keep)
    token = 8 * (4 + 2)
    for step in range(300):
        kept = int(store.lengths.sum()) * token
        assert int(store.lengths.min()) >= 256
        assert kept <= store.nbytes <= 1.1 * kept
        k = tokens(2, 3, 1)
        store.append(k, k.bfloat16(), torch.full((2, 1), 1500 + step), None)
    before = store.nbytes
    store.retain(torch.rand(6, int(store.lengths.max())) > 0.05)
    kept = int(store.lengths.sum()) * token
    assert store.nbytes < before
    assert kept <= store.nbytes <= 1.1 * kept


CHANGES = st.lists(
    st.tuples(st.sampled_from(["append", "retain", "retain", "crop"]), st.floats(0, 1), st.integers(0, 2**16)),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60)
@given(even=st.booleans(), changes=CHANGES)
def test_memory_is_at_most_a_tenth_more_than_what_is_kept_whatever_happens(even, changes):
    """For rows of 256 tokens and more, as soon as something was evicted."""
    store = RaggedStore(1, 2, torch.empty(1, 4), torch.empty(1, 4))
    keep = None if even else torch.rand(1, 2, 2000, generator=torch.Generator().manual_seed(1)) > 0.3
    store.append(tokens(1, 2, 2000, 4), tokens(1, 2, 2000, 4), torch.arange(2000)[None], keep)
    seen = 2000
    for name, share, seed in changes:
        longest = int(store.lengths.max())
        if name == "append":
            more = 1 + int(40 * share)
            ranks = torch.arange(seen, seen + more)[None]
            store.append(tokens(1, 2, more, 4), tokens(1, 2, more, 4), ranks, None)
            seen += more
        elif name == "retain":
            share = share if seed % 2 else share / 40  # one in many, or nothing, or many
            store.retain(torch.rand(2, longest, generator=torch.Generator().manual_seed(seed)) >= share)
        else:
            seen -= int(share * 60)
            store.crop(torch.tensor([seen]))
        kept = 2 * 4 * 4 * int(store.lengths.sum())
        assert kept <= store.nbytes
        if int(store.lengths.min()) >= 256:
            assert store.nbytes <= 1.1 * kept


@pytest.mark.parametrize("length", [1, 5, 9])
def test_passes_of_several_tokens_stay_in_their_rows(length):
    store = RaggedStore(1, 2, torch.empty(1, 2), torch.empty(1, 2))
    k = torch.arange(240.0).view(1, 2, 60, 2)
    for start in range(0, 60 - length, length):
        passed = k[:, :, start : start + length]
        store.append(passed, -passed, torch.arange(start, start + length)[None], None)
        stored = store.padded()
        assert torch.equal(stored.keys, k[0, :, : start + length])
        assert torch.equal(stored.values, -k[0, :, : start + length])


def test_a_fifth_of_8k_tokens_takes_less_than_022_of_all():
    """Heads as uneven as can be, and equal ones."""
    ranks = torch.arange(8192)[None]
    k = tokens(1, 3, 8192)
    for shares in ([0.2, 0.2, 0.2], [0.05, 0.2, 0.35], [0.0, 0.0, 0.6]):
        store = RaggedStore(1, 3, k, k)
        store.append(k, k, ranks, None)
        store.retain(torch.arange(8192) < (torch.tensor(shares) * 8192).long()[:, None])
        assert 0.199 * 2 * k.nbytes <= store.nbytes <= 0.22 * 2 * k.nbytes


RESIDENT = """
import os, sys, torch
from pathlib import Path
from ag.engine.storage import RaggedStore

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def peak(keep):
    before, most, layers = resident(), 0, []
    for _ in range(12):
        k = torch.ones(1, 2, 16384, 64)
        store = RaggedStore(1, 2, k, k)
        store.append(k, k, torch.arange(16384)[None], None)
        if keep < 1:
            store.retain(torch.arange(16384).expand(2, -1) < keep * 16384)
        layers.append(store)
        most = max(most, resident() - before)
    print(most, sum(store.nbytes for store in layers), flush=True)

for keep in map(float, sys.argv[1:]):
    child = os.fork()  # each has a memory of its own
    if child == 0:
        peak(keep)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux to tell the memory of the process")
@pytest.mark.slow
def test_the_process_gives_memory_back():
    """Layer after layer of 17 MB is stored and cut to a fifth: the peak is far below that of all of them."""

    # in processes of their own, whose malloc gives large pieces back at once and keeps none for later
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**17)}
    command = [sys.executable, "-c", RESIDENT, "0.2", "1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    evicted, held, full, everything = map(int, done.stdout.split())
    assert held <= 0.22 * everything
    assert full >= 0.9 * everything
    assert evicted <= 0.6 * full  # one whole layer on the way


@pytest.mark.parametrize(
    ("where", "most", "uneven"),
    [
        ("oldest", 1000 // 32 + 1, False),
        ("oldest", 1000 // 32 + 1, True),
        ("newest", 1, True),
        ("middle", 1, False),
        ("anywhere", 1000 // 32 + 1, True),
    ],
)
def test_one_in_one_out_rarely_lays_the_buffer_out_anew(where, most, uneven):
    """1,000 decode steps: the sinks move up behind what was the oldest token, until the 32 spare slots are used."""
    store = RaggedStore(1, 2, torch.empty(1, 2), torch.empty(1, 2))
    lengths = [512, 600] if uneven else [512, 512]
    prompt = torch.arange(600)[None]
    k = prompt[:, None, :, None].expand(1, 2, 600, 2).float()
    store.append(k, k, prompt, torch.arange(600) < torch.tensor(lengths)[None, :, None])
    expected = [list(range(length)) for length in lengths]
    generator = torch.Generator().manual_seed(0)
    layouts, place = 0, store.keys.data_ptr()
    for step in range(600, 1600):
        k = torch.full((1, 2, 1, 2), float(step))
        store.append(k, k, torch.full((1, 1), step), None)
        keep = torch.ones(2, int(store.lengths.max()), dtype=torch.bool)
        for i, row in enumerate(expected):
            row.append(step)
            anywhere = int(torch.randint(0, len(row), (), generator=generator))
            at = {"oldest": 4, "newest": len(row) - 2, "middle": 400, "anywhere": anywhere}[where]
            keep[i, at] = False
            del row[at]
        store.retain(keep)
        layouts, place = layouts + (store.keys.data_ptr() != place), store.keys.data_ptr()
        assert store.lengths.tolist() == lengths
    assert layouts <= most
    for i, row in enumerate(expected):
        held = slice(int(store.rows[0][i]), int(store.rows[0][i]) + lengths[i])
        assert store.ranks[held].tolist() == row
        assert store.keys[held, 0].tolist() == store.values[held, 1].tolist() == [float(x) for x in row]
    assert (store.padded().valid is None) != uneven


@pytest.mark.parametrize("gone", [[], [1]])
def test_free_slots_are_not_kept(gone):
    """Rows that are equally long and evenly spaced, below the width of ``keep``, which is True there."""
    store = RaggedStore(1, 2, torch.empty(1, 2), torch.empty(1, 2))
    ranks = torch.arange(6)[None]
    k = ranks[:, None, :, None].expand(1, 2, 6, 2).float()
    store.append(k, k, ranks, None)
    store.crop(torch.tensor([4]))
    assert store.layout.step is not None and store.lengths.tolist() == [4, 4]
    keep = torch.ones(2, 6, dtype=torch.bool)
    keep[:, gone] = False
    assert store.retain(keep) == bool(gone)
    assert [row.tolist() for row in store.kept()] == [[x for x in range(4) if x not in gone]] * 2


@pytest.mark.parametrize(("prompt", "steps", "most"), [(0, 100, 7), (256, 512, 20)])
def test_appending_rarely_copies_the_buffer(prompt, steps, most):
    """A copy buys 1/16 of a row, at least 16 tokens: log(768 / 256) / log(1 + 1/16) = 18.1 copies for 512 tokens.

    The first token behind a prompt, which has no spare slots, brings some.
    """
    store = RaggedStore(1, 2, torch.empty(1, 8), torch.empty(1, 8))
    if prompt:
        store.append(tokens(1, 2, prompt), tokens(1, 2, prompt), torch.arange(prompt)[None], None)
    places = [store.keys.data_ptr()]
    for step in range(steps):
        store.append(tokens(1, 2, 1), tokens(1, 2, 1), torch.full((1, 1), prompt + step), None)
        if store.keys.data_ptr() != places[-1]:
            places.append(store.keys.data_ptr())
    assert store.lengths.tolist() == [prompt + steps] * 2
    assert 1 <= len(places) - 1 <= most


READ = {
    "full": ("full", None, "prefill", {}, None),
    "snapkv": ("snapkv", 0.25, "prefill", {"window": 8}, None),
    "cake": ("cake", 0.25, "prefill", {"window": 8}, None),
    "nearly all": ("h2o", 0.97, "prefill", {}, None),
    "kvzip": ("kvzip", 0.3, "prefill", {"chunk": 200}, None),
    "blocks": ("h2o@heads", 0.25, "blocks:64+every", {}, None),
    "flags": ("gates", None, "prefill", {}, {}),
    "dense flags": ("gates", None, "prefill", {}, {"prefill": "dense", "recent_tokens": 9}),
    "ring": ("gates", None, "prefill", {}, {"covers": "all", "recent_tokens": 9}),
    "ranked": ("gates", 0.3, "every", {}, {}),
}


@pytest.mark.parametrize("chunk", [600, 170], ids=["whole", "chunks"])
@pytest.mark.parametrize("name", READ)
def test_a_prompt_is_held_without_spare_slots(tiny_llama, name, chunk):
    """At most 2 % beside its tokens and what is known of each; 1/16 and 16 slots a row once tokens follow."""
    spec, budget, schedule, options, gates = READ[name]
    model = tiny_llama(max_position_embeddings=1024)
    if gates is not None:
        ag.attach(model, gates_for(model, **gates))
    cache = ag.EvictionCache(model, spec, budget, schedule, **options)
    ids = torch.randint(3, 128, (2, 620), generator=torch.Generator().manual_seed(0))
    cache.expect(torch.ones(2, 600, dtype=torch.bool))
    stores = []

    def allocated():
        stores[:] = [layer.store for layer in cache.evicting_layers]
        everything = [x for store in stores for x in (*store.columns, *store.layout.rows, store.layout.limits)]
        held = sum(int(store.counts().sum()) for store in stores)
        rest = sum(layer.gate_memory.nbytes for layer in cache.evicting_layers)
        token = 2 * 16 * 4
        known = 4 + {None: 0, torch.bool: 1, torch.float32: 4}[None if stores[0].gate is None else stores[0].gate.dtype]
        return held, cache.nbytes - rest, sum(x.untyped_storage().nbytes() for x in everything), token, known

    with torch.no_grad():
        for part in ids[:, :600].split(chunk, 1):
            model(part, past_key_values=cache, logits_to_keep=1)
        held, nbytes, everything, token, known = allocated()
        assert held * token <= nbytes <= 1.02 * held * token
        assert everything <= 1.02 * held * (token + known) + 3 * 4 * 3 * 8
        model(ids[:, 600:601], past_key_values=cache)
        held, nbytes, *_ = allocated()
        assert 1.05 * held * token <= nbytes <= 17.5 / 16 * held * token + 3 * 4 * 17 * token
        places = [store.keys.data_ptr() for store in stores]
        for at in range(601, 612):
            model(ids[:, at : at + 1], past_key_values=cache)
        assert places == [layer.store.keys.data_ptr() for layer in cache.evicting_layers]


def test_rows_of_equal_length_are_read_without_a_copy():
    store = RaggedStore(2, 2, torch.empty(1, 8), torch.empty(1, 8))
    keep = torch.arange(40).expand(2, 2, 40) % 2 == 0
    store.append(tokens(2, 2, 40), tokens(2, 2, 40), torch.arange(40).expand(2, -1), keep)
    stored = store.padded()
    assert stored.valid is None
    assert stored.keys.data_ptr() == store.keys.data_ptr()
    assert stored.values.data_ptr() == store.values.data_ptr()


def test_a_row_that_kept_nothing():
    store = RaggedStore(1, 2, torch.empty(1, 8), torch.empty(1, 8))
    k = tokens(1, 2, 5)
    store.append(k, k, torch.arange(5)[None], torch.tensor([[[False] * 5, [True, False, True, False, True]]]))
    stored = store.padded()
    assert stored.valid.tolist() == [[False] * 3, [True] * 3]
    assert torch.equal(stored.keys[1], k[0, 1, ::2])
    store.append(k[:, :, :1], k[:, :, :1], torch.full((1, 1), 5), None)
    assert store.lengths.tolist() == [1, 4]
    assert store.padded().ranks[0, :1].tolist() == [5]

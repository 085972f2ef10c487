"""Random operations on stores that share a pool, against lists of tokens; the references of blocks are counted."""

import copy
import itertools
import math
import random

import pytest
import torch

from ag.engine.block_pool import BlockPool, PoolFullError
from ag.engine.kv_store import KVStore
from ag.kernels.kv_append import kv_append
from ag.model.geometry import KVHeads

LAYERS = 3
ALIKE = [KVHeads(2, 4, 4)] * LAYERS
UNLIKE = [KVHeads(2, 4, 4), KVHeads(3, 6, 6), KVHeads(2, 4, 4)]  # in blocks of 24 and of 16 tokens


class Lists:
    """What a store holds: ``rows[layer][sequence][head]`` is a list of (token index, number, noted)."""

    def __init__(self, store):
        self.store, self.rows, self.seen, self.mark = store, [], [], []
        self.layers = [layer for layer, heads in enumerate(store.heads) if heads == store.head_shape]

    def each(self):
        return itertools.product(self.layers, range(len(self.seen)), range(self.store.kv_heads))

    def select(self, chosen):
        self.rows = [[copy.deepcopy(layer[b]) for b in chosen] for layer in self.rows]
        self.seen, self.mark = ([x[b] for b in chosen] for x in (self.seen, self.mark))


class Machine:
    def __init__(self, seed, kind, heads):
        self.draw, self.heads = random.Random(seed), heads
        self.pool = BlockPool(heads, torch.empty(0), nbytes=400 * 1024 if kind == "fixed" else None)
        assert self.pool._reserved == (kind == "reserving")
        self.numbers = itertools.count(1)
        self.everyone = [Lists(KVStore(self.pool, heads, heads[n % 2], torch.float32)) for n in (0, 1, 2, 3)]

    def feed(self, one, most):
        """Append up to ``most`` tokens to each sequence."""
        store, draw = one.store, self.draw
        if not one.seen:
            batch = draw.randint(1, 3)
            store.start_batch(batch)
            one.seen, one.mark = [0] * batch, [0] * batch
            one.rows = [[[[] for _ in range(store.kv_heads)] for _ in range(batch)] for _ in range(LAYERS)]
        counts = torch.tensor([draw.randint(0, most) for _ in one.seen])
        width = max(int(counts.max()), 1)
        token_indices = torch.full((len(counts), width), -1)
        for b, count in enumerate(counts.tolist()):
            columns = sorted(draw.sample(range(width), count))
            token_indices[b, columns] = torch.arange(one.seen[b], one.seen[b] + count)
        try:
            store.make_room(slice(None), counts)
        except PoolFullError:
            assert self.pool.fixed
            return
        for layer in one.layers:
            shape = len(counts), store.kv_heads, width
            number = torch.tensor([next(self.numbers) for _ in range(math.prod(shape))]).float().view(shape)
            k = number[..., None].expand(*shape, store.head_shape.key).contiguous()
            kv_append(store.pages(layer), k, -k, token_indices, number)
            for b, h, t in itertools.product(*map(range, shape)):
                if token_indices[b, t] >= 0:
                    one.rows[layer][b][h].append((int(token_indices[b, t]), float(number[b, h, t]), 0.0))
        one.seen = [n + int(count) for n, count in zip(one.seen, counts, strict=True)]
        self.note(one)

    def note(self, one):
        """Write a number of each token into a record of one layer."""
        layer, store = self.draw.choice(one.layers), one.store
        if not store.slots:
            return
        record = store.records[layer].setdefault("sums", torch.zeros(len(one.seen), 2 * store.kv_heads, store.slots))
        _, token_indices = store.ledger(layer)
        for b, h in itertools.product(range(len(one.seen)), range(store.kv_heads)):
            to_token_index = {}
            for slot, token_index in enumerate(token_indices[b, h].tolist()):
                if token_index >= 0:
                    to_token_index[token_index] = noted = float(next(self.numbers))
                    record[b, 2 * h : 2 * h + 2, slot] = noted
            one.rows[layer][b][h] = [(r, n, to_token_index[r]) for r, n, _ in one.rows[layer][b][h]]

    def compact(self, one):
        """Drop random tokens of one layer, or those of the lowest token indices."""
        layer, store = self.draw.choice(one.layers), one.store
        _, token_indices = store.ledger(layer)
        try:
            if self.draw.random() < 0.5:
                generator = torch.Generator().manual_seed(next(self.numbers))
                keep = torch.rand(token_indices.shape, generator=generator) < 0.7
                kept = (keep & (token_indices >= 0)).sum(-1)
                stays = [
                    {int(n) for n in token_indices[b, h][keep[b, h]]}
                    for b, h in itertools.product(*map(range, kept.shape))
                ]
                store.compact({layer: keep}, kept[None])
            else:
                kept = store.lengths_cpu[layer].clamp_max(self.draw.randint(0, 30))
                stays = [
                    set(sorted(x.tolist())[len(x) - n :])
                    for x, n in zip(token_indices.flatten(0, 1), kept.flatten(), strict=True)
                ]
                store.compact({layer: token_indices.float()}, kept[None])
        except PoolFullError:
            assert self.pool.fixed
            return
        for (b, h), stay in zip(itertools.product(range(len(one.seen)), range(store.kv_heads)), stays, strict=True):
            one.rows[layer][b][h] = [token for token in one.rows[layer][b][h] if token[0] in stay]
        one.mark = list(one.seen)

    def truncate(self, one):
        drop = [self.draw.randint(0, n - mark) for n, mark in zip(one.seen, one.mark, strict=True)]
        one.store.truncate(torch.tensor(drop))
        one.seen = [n - x for n, x in zip(one.seen, drop, strict=True)]
        for layer, b, h in one.each():
            one.rows[layer][b][h] = [token for token in one.rows[layer][b][h] if token[0] < one.seen[b]]

    def step(self):
        draw, one = self.draw, self.draw.choice(self.everyone)
        count = len(one.seen)
        what = draw.choice(["feed", "feed", "one", "one", "compact", "truncate", "select", "add", "fork", "trim"])
        if what == "feed" and count < 9:
            self.feed(one, 40)
        elif what == "one" and count:
            for _ in range(draw.randint(1, 20)):
                self.feed(one, 1)
        elif what == "compact" and count:
            self.compact(one)
        elif what == "truncate" and count:
            self.truncate(one)
        elif what == "select" and count:
            chosen = [draw.randrange(count) for _ in range(draw.randint(0, min(count + 2, 8)))]
            one.store.select(torch.tensor(chosen, dtype=torch.long))
            one.select(chosen)
        elif what == "add":
            other = draw.choice(
                [x for x in self.everyone if x is not one and x.store.head_shape == one.store.head_shape]
            )
            if count and other.seen and count + len(other.seen) < 12:
                one.store.add(other.store)
                one.rows = [x + y for x, y in zip(one.rows, other.rows, strict=True)]
                one.seen, one.mark = one.seen + other.seen, one.mark + other.mark
                self.everyone[self.everyone.index(other)] = Lists(other.store)
        elif what == "fork":
            at = draw.choice([n for n, x in enumerate(self.everyone) if x.store.head_shape == one.store.head_shape])
            new = Lists(one.store.fork())
            new.rows, new.seen, new.mark = copy.deepcopy(one.rows), list(one.seen), list(one.mark)
            self.everyone[at] = new
        elif what == "trim":
            self.pool.trim()
            if self.pool.num_used and not (self.pool.fixed or self.pool._reserved):
                assert self.pool.free < self.pool.capacity / 20

    def check(self):
        assert {len(column) for column in self.pool.columns()} == {self.pool.capacity}
        references = torch.zeros(self.pool.num_used + 10_000, dtype=torch.long)
        for one in self.everyone:
            store = one.store
            blocks = store.blocks()
            references.index_add_(0, blocks, torch.ones_like(blocks))
            assert torch.equal(store.lengths_cpu, store.lengths.long())
            for layer in one.layers if one.seen else ():
                (index, token_indices), pages, count = store.ledger(layer), store.pages(layer), store.kv_heads
                keys, values, gates = (x.flatten(0, 1)[index] for x in (pages.keys, pages.values, pages.gate))
                record = store.records[layer].get("sums", torch.zeros(len(one.seen), 2 * count, max(store.slots, 1)))
                for b, h in itertools.product(range(len(one.seen)), range(store.kv_heads)):
                    there = token_indices[b, h] >= 0
                    noted = record[b, 2 * h : 2 * h + 2, : len(there)][:, there]
                    columns = token_indices[b, h][there], keys[b, h][there][:, 3], noted[0]
                    got = sorted(zip(*(x.tolist() for x in columns), strict=True))
                    assert got == sorted(one.rows[layer][b][h])
                    assert torch.equal(noted[0], noted[1])
                    assert torch.equal(keys[b, h][there], -values[b, h][there])
                    assert torch.equal(keys[b, h][there][:, 0], gates[b, h][there])
                    assert not bool(record[b, 2 * h : 2 * h + 2, len(got) :].any())
                    assert int(store.block_counts[layer, b, h]) * store.block_size >= len(got)
        known = self.pool.references(torch.arange(0, len(self.pool._references))).long()
        assert torch.equal(references[: len(known)], known) and not bool(references[len(known) :].any())
        assert self.pool.num_used == int((references > 0).sum())


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=[pytest.mark.slow, pytest.mark.nightly]) for seed in (1, 2))]
)
@pytest.mark.parametrize(("kind", "heads"), [("reserving", ALIKE), ("copying", UNLIKE), ("fixed", UNLIKE)])
def test_random_operations_equal_lists(seed, kind, heads, monkeypatch):
    monkeypatch.setattr("ag.engine.block_pool.RESERVES", kind == "reserving")
    machine = Machine(seed, kind, heads)
    for _ in range(60):
        machine.step()
        machine.check()
    machine.everyone.clear()
    assert machine.pool.num_used == 0

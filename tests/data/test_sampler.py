import itertools
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from ag.data.collate import Row
from ag.data.sampler import FILLER, Shard, Stream, TrainOrder, ValidationOrder
from ag.data.sources import DataError
from tests.support.refused import refuses


def rows(n):
    return [Row(np.array([i], dtype=np.int32)) for i in range(n)]


def ids(batches):
    return [[int(row.tokens[0]) for row in batch] for batch in batches]


def join(ranks):
    """Global batches: the ranks' batches one after another."""
    return [list(itertools.chain.from_iterable(batches)) for batches in zip(*ranks, strict=True)]


@given(st.integers(8, 60), st.integers(1, 4), st.integers(0, 3), st.integers(0, 5))
def test_two_ranks_see_the_global_batches_of_one(size, batch, seed, epoch):
    one = list(TrainOrder(size, Shard(2 * batch), seed, epoch))
    two = [list(TrainOrder(size, Shard(batch, rank, 2), seed, epoch)) for rank in (0, 1)]
    assert join(two) == one
    seen = list(itertools.chain.from_iterable(one))
    assert len(set(seen)) == len(seen) == size // (2 * batch) * 2 * batch
    assert set(seen) <= set(range(size))
    order = TrainOrder(size, Shard(2 * batch), seed)
    order.set_epoch(epoch)
    assert list(order) == one


def test_too_few_rows_for_one_batch():
    with refuses(DataError, "7 training rows", "batch of 8", "data.batch_size 4"):
        TrainOrder(7, Shard(4, 0, 2), 0)
    with refuses(DataError, "streamed"):
        stream(0)


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 3))
def test_validation_gives_each_row_once_in_equal_numbers_of_batches(size, batch, world):
    ranks = [list(ValidationOrder(size, Shard(batch, rank, world))) for rank in range(world)]
    assert len({len(r) for r in ranks}) == 1
    assert len(ranks[0]) == len(ValidationOrder(size, Shard(batch, 0, world)))
    seen = [i for batches in ranks for ids in batches for i in ids if i != FILLER]
    assert sorted(seen) == list(range(size))
    assert all(batches for r in ranks for batches in r)


def stream(n=23, workers=0, limit=12, **options):
    loader = DataLoader(
        Stream(rows(n), **({"shard": Shard(2), "seed": 0, "buffer": 7} | options)),
        batch_size=None,
        num_workers=workers,
        collate_fn=list,
    )
    return ids(itertools.islice(loader, limit))


def test_stream_gives_every_row_once_a_pass_in_a_new_order():
    seen = list(itertools.chain.from_iterable(stream(24, limit=36)))
    passes = [seen[:24], seen[24:48], seen[48:]]
    assert all(sorted(p) == list(range(24)) for p in passes)
    assert passes[0] != passes[1] != list(range(24))
    assert seen[:24] != list(itertools.chain.from_iterable(stream(24, seed=1)))


def test_stream_workers_and_ranks_share_without_overlap():
    one = stream(shard=Shard(4))
    assert stream(workers=2, shard=Shard(4)) == one
    assert join([stream(workers=workers, shard=Shard(2, rank, 2)) for rank, workers in ((0, 2), (1, 0))]) == one
    assert Counter(itertools.chain.from_iterable(one)).most_common(1)[0][1] <= 48 // 23 + 1

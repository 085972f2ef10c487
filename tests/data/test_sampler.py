import itertools

from hypothesis import given
from hypothesis import strategies as st

from ag.data.sampler import FILLER, Shard, TrainOrder, ValidationOrder
from ag.data.sources import DataError
from tests.support.refused import refuses


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


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 3))
def test_validation_gives_each_row_once_in_equal_numbers_of_batches(size, batch, world):
    ranks = [list(ValidationOrder(size, Shard(batch, rank, world))) for rank in range(world)]
    assert len({len(r) for r in ranks}) == 1
    assert len(ranks[0]) == len(ValidationOrder(size, Shard(batch, 0, world)))
    seen = [i for batches in ranks for ids in batches for i in ids if i != FILLER]
    assert sorted(seen) == list(range(size))
    assert all(batches for r in ranks for batches in r)

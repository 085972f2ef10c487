"""Pools of fixed size: what fits, and that nothing happens where it does not."""

import copy
import gc

import pytest
import torch
from refused import refuses

from ag.engine.pool import PAGE, Pool, PoolFullError
from ag.engine.store import PagedStore
from ag.errors import UserError

TOKEN = 16 * 2 * 4 + 4  # bytes of a token of tiny_llama: key, value, rank


def tokens(length, first=0):
    """Keys, values and ranks of one sequence with two heads."""
    k = torch.arange(first, first + length).float()[None, None, :, None].expand(1, 2, length, 16)
    return k, -k, torch.arange(first, first + length)[None]


def test_as_many_pages_as_the_bytes_hold(tiny_llama):
    pool = Pool(tiny_llama(), 10 * PAGE * TOKEN + PAGE * TOKEN - 1)
    assert (pool.size, pool.free, pool.page_nbytes(), pool.nbytes) == (10, 10, PAGE * TOKEN, 10 * PAGE * TOKEN)
    with refuses(UserError, "nbytes=100", str(PAGE * TOKEN)):
        Pool(tiny_llama(), 100)


def test_a_full_pool_takes_nothing_and_loses_nothing(tiny_llama):
    """Two stores share six pages: what does not fit is refused, and fits once the other one gave its pages back."""
    pool = Pool(tiny_llama(), 6 * PAGE * TOKEN)
    one, other = (PagedStore(1, 2, pool) for _ in range(2))
    for store in (one, other):
        store.append(*tokens(16), None)
        store.write()
    assert (pool.free, one.nbytes) == (2, 2 * PAGE * TOKEN)
    with refuses(PoolFullError, str(4 * PAGE * TOKEN), str(2 * PAGE * TOKEN)):
        one.append(*tokens(17, 16), None)
    one.append(*tokens(1, 16), None)
    with pytest.raises(PoolFullError):
        other.append(*tokens(1, 16), None)
    assert [rows.tolist() for rows in one.kept()] == [[*range(17)]] * 2
    assert [rows.tolist() for rows in other.kept()] == [[*range(16)]] * 2
    assert pool.free == 0
    del store, one
    gc.collect()  # errors hold what they came from
    other.append(*tokens(1, 16), None)
    assert torch.equal(other.padded().keys[:, :, 0], torch.arange(17.0).expand(2, -1)) and pool.free == 2


def test_a_prompt_that_does_not_fit_can_be_cut_first(tiny_llama):
    """Nothing is written before it is known what stays."""
    pool = Pool(tiny_llama(), 4 * PAGE * TOKEN)
    store = PagedStore(1, 2, pool)
    store.append(*tokens(100), None)
    assert pool.free == 4
    with pytest.raises(PoolFullError):
        store.write()
    assert store.retain(torch.arange(100).expand(2, -1) % 4 == 0)
    assert pool.free == 0 and store.lengths.tolist() == [25, 25]
    assert torch.equal(store.padded().values[1, :, 3], -4.0 * torch.arange(25))


def test_beams_share_what_they_had_and_write_apart():
    """Eight of 2,041 tokens hold a page a row beside those of one."""
    pool = Pool.growing(*tokens(1)[:2])
    store = PagedStore(1, 2, pool)
    store.append(*tokens(2040), None)
    store.write()
    alone = store.nbytes
    store.select_sequences(torch.zeros(8, dtype=torch.long))
    assert store.nbytes == alone
    k = torch.arange(16.0).view(8, 2, 1, 1).expand(8, 2, 1, 16)
    store.append(k, k, torch.full((8, 1), 2040), None)
    assert store.nbytes == alone + 7 * 2 * PAGE * TOKEN <= 1.1 * alone
    rows = store.padded()
    assert rows.keys[:, 2040, 0].tolist() == [float(x) for x in range(16)]
    assert torch.equal(rows.keys[:, :2040, 5], torch.arange(2040.0).expand(16, -1))


def test_a_copy_shares_pages_until_one_of_both_writes(tiny_llama):
    store = PagedStore(1, 2, Pool(tiny_llama(), 20 * PAGE * TOKEN))
    store.append(*tokens(40), None)
    store.write()
    copied = copy.deepcopy(store)
    assert store.pool.free == 20 - 6
    copied.append(*tokens(1, 40), None)
    assert store.pool.free == 20 - 6 - 2  # the last page of each of two rows
    assert store.lengths.tolist() == [40, 40] and copied.lengths.tolist() == [41, 41]
    del copied
    assert store.pool.free == 20 - 6


def test_gradients_concern_no_other_store(tiny_llama):
    """A store through which gradients go takes its tokens out of the pool."""
    pool = Pool(tiny_llama(), 20 * PAGE * TOKEN)
    one, other = (PagedStore(1, 2, pool) for _ in range(2))
    for store in (one, other):
        store.append(*tokens(20), None)
        store.write()
    one.leave_pool()
    assert one.pool is not pool and pool.free == 20 - 4
    k, v, ranks = tokens(1, 20)
    k = k.clone().requires_grad_()
    one.append(k, v, ranks, None)
    (gradient,) = torch.autograd.grad(one.padded().keys.square().sum(), k)
    assert torch.equal(gradient, 2 * k.detach())
    assert not pool.keys.requires_grad

"""The move of what stays of a prompt, over pages as vLLM makes them; without vLLM."""

import functools

import pytest
import torch

from ag.errors import UserError
from ag.vllm.pages import Pages, measured_offsets
from tests.support.refused import refuses

LAYERS, BLOCKS, HEADS, SIZE, DIM = 3, 12, 2, 4, 6


def kernel(keys, values, cache, slots, order):
    """Stores tokens ``[T, H, D]`` as vLLM's kernels do, the numbers of a mini in this order."""
    for token, slot in enumerate(slots.tolist()):
        block, place = divmod(slot, SIZE)
        for head in range(keys.shape[1]):
            mini = cache[block, head].view(-1)
            mini[order[place * 2 * DIM : place * 2 * DIM + DIM]] = keys[token, head]
            mini[order[place * 2 * DIM + DIM : (place + 1) * 2 * DIM]] = values[token, head]


@pytest.fixture(params=["as they lie", "mixed"])
def order(request):
    count = SIZE * 2 * DIM
    if request.param == "as they lie":
        return torch.arange(count)
    return torch.randperm(count, generator=torch.Generator().manual_seed(0))


def pages_of(order, logits=True):
    regions = LAYERS + logits
    flat = torch.zeros(regions, BLOCKS, HEADS, SIZE, 2 * DIM)
    caches = [*flat]
    offsets = measured_offsets(functools.partial(kernel, order=order), SIZE, DIM, torch.float32)
    return caches, Pages(caches[:LAYERS], caches[LAYERS] if logits else None, offsets)


def test_offsets_are_those_of_the_kernel(order):
    offsets = measured_offsets(functools.partial(kernel, order=order), SIZE, DIM, torch.bfloat16)
    assert torch.equal(offsets.flatten(), order)


def test_a_kernel_that_loses_numbers():
    with refuses(UserError, f"{SIZE}", "--block-size"):
        measured_offsets(lambda k, v, cache, slots: None, SIZE, DIM, torch.float32)


@pytest.mark.parametrize("apart", [False, True])
def test_rows_hold_what_stays_in_the_order_of_the_text(order, apart):
    caches, pages = pages_of(order)
    draw = torch.Generator().manual_seed(1)
    prompt, table = 18, torch.tensor([7, 2, 9, 4, 11, 1, 5, 3])
    keys, values = torch.randn(2, LAYERS, prompt, HEADS, DIM, generator=draw)
    slots = table[torch.arange(prompt) // SIZE] * SIZE + torch.arange(prompt) % SIZE
    for layer in range(LAYERS):
        kernel(keys[layer], values[layer], caches[layer], slots, order)
        assert torch.equal(pages.keys(layer, slots), keys[layer].transpose(0, 1))
    logits = torch.randn(LAYERS, HEADS, prompt, generator=draw)
    for layer in range(LAYERS):
        pages.write_logits(slots, layer, logits[layer].mT)
    assert torch.equal(pages.read_logits(slots), logits)
    keep = torch.rand(LAYERS, HEADS, prompt, generator=draw) < 0.3
    keep[0, 0] = True  # a row may hold the whole prompt
    keep[1, 1] = False  # or nothing
    packed = range(5, 8) if apart else range(0, 3)
    held, minis, taken = pages.pack(keep, table, packed)
    assert torch.equal(held, keep.sum(-1)) and torch.equal(taken, -(-held // SIZE))
    used = [int(x) for row, count in zip(minis.flatten(0, 1), taken.flatten(), strict=True) for x in row[:count]]
    own = {int(x) for x in (pages.all_minis + table[packed.start : packed.stop, None] * HEADS).flatten()}
    assert len(used) == len({*used}) and {*used} <= own
    for layer in range(LAYERS):
        for head in range(HEADS):
            index = torch.arange(int(held[layer, head]))
            found = pages.read(minis[layer, head, index // SIZE].long(), index % SIZE)
            kept = keep[layer, head]
            assert torch.equal(found, torch.cat([keys[layer, kept, head], values[layer, kept, head]], -1))
    if apart:  # the prompt's blocks stay for other requests, with their logits
        assert torch.equal(pages.read_logits(slots), logits)
        assert torch.equal(pages.keys(2, slots), keys[2].transpose(0, 1))


def test_no_logit_stays_where_rows_lie(order):
    """Half of a float32 number may be NaN as a number of 16 bits, and kernels read to the end of a mini."""
    _, pages = pages_of(order)
    table, keep = torch.arange(1, 7), torch.zeros(LAYERS, HEADS, 8, dtype=torch.bool)
    keep[..., :5] = True  # 12 minis of the 16 in two blocks, those of the logits too
    pages.minis[(pages.logits_minis + table[:, None] * HEADS).flatten()] = float("nan")
    _, minis, _ = pages.pack(keep, table, range(4, 6))
    used = minis[..., :2].flatten().long()
    assert len({*used.tolist()} & {*(pages.logits_minis + table[:, None] * HEADS).flatten().tolist()}) > 0
    assert pages.minis[used].isfinite().all()


def test_without_gates_there_are_no_logits(order):
    _, pages = pages_of(order, logits=False)
    assert pages.read_logits(torch.arange(4)) is None and len(pages.all_minis) == LAYERS * HEADS


def test_pages_that_do_not_follow_each_other(order):
    caches = [torch.zeros(BLOCKS, HEADS, SIZE, 2 * DIM) for _ in range(LAYERS)]
    with refuses(UserError, "VLLM_KV_CACHE_LAYOUT"):
        Pages(caches, None, order.view(SIZE, -1))


def test_logits_of_more_layers_than_a_page_has_room_for(order):
    many = torch.zeros(2 * DIM + 2, 2, HEADS, SIZE, 2 * DIM)
    with refuses(UserError, "layers"):
        Pages([*many[:-1]], many[-1], order.view(SIZE, -1))

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


def pages_of(order, logits=True, rows_take_logits=True):
    regions = LAYERS + logits
    flat = torch.zeros(regions, BLOCKS, HEADS, SIZE, 2 * DIM)
    caches = [*flat]
    offsets = measured_offsets(functools.partial(kernel, order=order), SIZE, DIM, torch.float32)
    return caches, Pages(
        caches[:LAYERS], caches[LAYERS] if logits else None, offsets, rows_take_logits=rows_take_logits
    )


def test_offsets_are_those_of_the_kernel(order):
    offsets = measured_offsets(functools.partial(kernel, order=order), SIZE, DIM, torch.bfloat16)
    assert torch.equal(offsets.flatten(), order)


def test_a_kernel_that_loses_numbers():
    with refuses(UserError, f"{SIZE}", "--block-size"):
        measured_offsets(lambda k, v, cache, slots: None, SIZE, DIM, torch.float32)


def text_in(pages, caches, table, tokens, order):
    """Keys, values and logits of a text of this length, which these write to the blocks of ``table``."""
    draw = torch.Generator().manual_seed(1)
    keys, values = torch.randn(2, LAYERS, tokens, HEADS, DIM, generator=draw)
    logits = torch.randn(LAYERS, HEADS, tokens, generator=draw)
    slots = table[torch.arange(tokens) // SIZE] * SIZE + torch.arange(tokens) % SIZE
    for layer in range(LAYERS):
        kernel(keys[layer], values[layer], caches[layer], slots, order)
        pages.write_logits(pages.slots_of(layer, slots), logits[layer].mT)
    return keys, values, logits


def held_by(pages, minis, count):
    """Keys, values and logits of the first tokens of all rows, ``[L, H, n, ..]``."""
    index = torch.arange(count)
    at = minis[..., index // SIZE].long()
    return *pages.read(at, index % SIZE).split(DIM, -1), pages.read_logits(at, index % SIZE)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("apart", [False, True])
def test_rows_hold_what_stays_in_the_order_of_the_text(order, apart, again):
    caches, pages = pages_of(order, rows_take_logits=not again)
    prompt, table = 18, torch.tensor([7, 2, 9, 4, 11, 1, 5, 3, 8])
    keys, values, logits = text_in(pages, caches, table, prompt, order)
    found = held_by(pages, pages.minis_of(table), prompt)
    assert torch.equal(found[0], keys.transpose(1, 2)) and torch.equal(found[2], logits)
    keep = torch.rand(LAYERS, HEADS, prompt, generator=torch.Generator().manual_seed(1)) < 0.3
    keep[0, 0] = True  # a row may hold the whole prompt
    keep[1, 1] = False  # or nothing
    packed = table[5:9] if apart else table[:4]
    held, minis, taken = pages.pack(keep, pages.minis_of(table), packed, in_place=not apart)
    check_rows(pages, keep, (held, minis, taken), packed, (keys, values, logits if again else None))
    if apart:  # the prompt's blocks stay for other requests, with their logits
        found = held_by(pages, pages.minis_of(table), prompt)
        assert torch.equal(found[0], keys.transpose(1, 2)) and torch.equal(found[2], logits)
    if again:  # rows that lie in their own blocks already
        left = torch.rand(keep.shape, generator=torch.Generator().manual_seed(2)) < 0.5
        slot = (keep.cumsum(-1) - 1).clamp_min(0)
        by_slot = torch.zeros(LAYERS, HEADS, int(held.max()), dtype=torch.bool)
        by_slot.scatter_reduce_(-1, slot, left & keep, "amax")
        rows = pages.pack(by_slot, minis.long(), packed, in_place=True)
        check_rows(pages, keep & left, rows, packed, (keys, values, logits))


def check_rows(pages, keep, rows, blocks, text):
    """Rows hold what stays of a text, each in minis of its own, of these blocks."""
    (held, minis, taken), (keys, values, logits) = rows, text
    assert torch.equal(held, keep.sum(-1)) and torch.equal(taken, -(-held // SIZE))
    used = [int(x) for row, count in zip(minis.flatten(0, 1), taken.flatten(), strict=True) for x in row[:count]]
    own = {int(x) for x in (pages.row_minis + blocks[:, None] * HEADS).flatten()}
    assert len(used) == len({*used}) and {*used} <= own
    for layer in range(LAYERS):
        for head in range(HEADS):
            kept = keep[layer, head]
            found = [x[layer, head] for x in held_by(pages, minis, int(held[layer, head]))]
            assert torch.equal(found[0], keys[layer, kept, head])
            assert torch.equal(found[1], values[layer, kept, head])
            assert logits is None or torch.equal(found[2], logits[layer, head, kept])


def test_no_logit_stays_where_rows_lie(order):
    """Half of a float32 number may be NaN as a number of 16 bits, and kernels read to the end of a mini."""
    _, pages = pages_of(order)
    table, keep = torch.arange(1, 7), torch.zeros(LAYERS, HEADS, 8, dtype=torch.bool)
    keep[..., :5] = True  # 12 minis of the 16 in two blocks, those of the logits too
    logits_minis = (pages.logits_minis + table[:, None] * HEADS).flatten()
    pages.minis[logits_minis] = float("nan")
    _, minis, _ = pages.pack(keep, pages.minis_of(table), table[4:6], in_place=False)
    used = minis[..., :2].flatten().long()
    assert {*used.tolist()} & {*logits_minis.tolist()}
    assert pages.minis[used].isfinite().all()


def test_without_gates_there_are_no_logits(order):
    _, pages = pages_of(order, logits=False)
    assert pages.read_logits(pages.first_mini, torch.tensor(0)) is None and len(pages.row_minis) == LAYERS * HEADS


def test_pages_that_do_not_follow_each_other(order):
    caches = [torch.zeros(BLOCKS, HEADS, SIZE, 2 * DIM) for _ in range(LAYERS)]
    with refuses(UserError, "VLLM_KV_CACHE_LAYOUT"):
        Pages(caches, None, order.view(SIZE, -1), rows_take_logits=True)


def test_logits_of_more_layers_than_a_page_has_room_for(order):
    many = torch.zeros(2 * DIM + 2, 2, HEADS, SIZE, 2 * DIM)
    with refuses(UserError, "layers"):
        Pages([*many[:-1]], many[-1], order.view(SIZE, -1), rows_take_logits=True)

"""Blocks that vLLM's scheduler counts are as many as rows can need, and no rows need more."""

import random

import pytest

from ag.vllm.placement import Geometry, kept_tokens, place
from ag.vllm.settings import Settings

GATES = Settings("gates:smollm2", 0.3)


def geometry(settings=GATES, block_size=16, **changes):
    values = {"kv_heads": 3, "layers": 30, "scored_layers": 30, "regions": 31, "apart": True} | changes
    return Geometry(settings, block_size, **values)


def minis(rows, block_size):
    return sum(-(-row // block_size) for row in rows)


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("prompt", [300, 601, 1000])
def test_blocks_suffice_for_every_division_of_the_budget(block_size, prompt):
    """The most minis come of rows that are one token longer than whole minis."""
    made = geometry(block_size=block_size)
    total, count = kept_tokens(made, prompt, 0) * 90, 90
    placement = place(made, prompt)
    room = len(placement.packed) * made.regions * made.kv_heads
    draw = random.Random(prompt)
    for _ in range(50):
        rows, left = [0] * count, total
        while left:
            row = draw.randrange(count)
            more = min(left, draw.choice([1, block_size, block_size + 1, prompt]), prompt - rows[row])
            rows[row], left = rows[row] + more, left - more
        assert minis(rows, block_size) <= room
    worst = [1 + (total // count - 1) // block_size * block_size] * count
    for index in range((total - sum(worst)) // block_size):
        worst[index % count] += block_size
    assert minis(worst, block_size) <= room
    fewer = (len(placement.packed) - 1) * made.regions * made.kv_heads
    assert minis(worst, block_size) > fewer - count  # a block less would not do, but for the rounding


def test_places_with_and_without_blocks_of_its_own():
    apart, within = place(geometry(), 600), place(geometry(apart=False), 600)
    kept = kept_tokens(geometry(), 600, 0)
    assert kept == 180  # 0.3 of 600
    blocks = -(-(90 * (kept + 15) // 16) // 93)
    assert (apart.packed, apart.tail, apart.freed) == (range(38, 38 + blocks), 38 + blocks, range(38))
    assert (within.packed, within.tail, within.freed) == (range(blocks), 37, range(blocks, 37))
    assert [apart.places(new, 16) - apart.tail for new in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_uniform_rows_lose_less_and_layers_without_gates_keep_all():
    even = place(geometry(Settings("gates:smollm2@uniform", 0.3)), 1000)
    assert len(even.packed) == -(-90 * 19 // 93) < len(place(geometry(), 1000).packed)
    some = place(geometry(scored_layers=20, regions=30), 600)
    assert len(some.packed) == -(-(60 * (180 + 15) // 16 + 30 * 38) // 90)


def test_what_stays_whole():
    assert place(geometry(), 33) is None  # no block would be free
    assert place(geometry(Settings("gates:smollm2", 1000)), 600) is None
    assert place(geometry(), 600, 590) is None
    assert kept_tokens(geometry(), 600, 400) == 400 + 45  # recents are a quarter of the budget
    assert kept_tokens(geometry(), 600, 10_000) == 600

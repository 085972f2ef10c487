"""Blocks that vLLM's scheduler counts are as many as rows can need, and no rows need more."""

import random
from types import SimpleNamespace

import pytest
import torch

import ag
from ag.engine.sequences import SequenceState
from ag.errors import UserError
from ag.vllm.placement import Geometry, kept_tokens, most_blocks, place, place_request
from ag.vllm.settings import Settings
from tests.support.refused import refuses

GATES = Settings("gates:smollm2", 0.3)


def geometry(settings=GATES, block_size=16, **changes):
    values = {"kv_heads": 3, "layers": 30, "scored_layers": 30, "longest": 2048, "apart": True} | changes
    return Geometry(settings, block_size, **values)


def minis(rows, block_size):
    return sum(-(-row // block_size) for row in rows)


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("prompt", [300, 601, 1000])
def test_blocks_suffice_for_every_division_of_the_budget(block_size, prompt):
    """The most minis come of rows that are one token longer than whole minis."""
    made = geometry(block_size=block_size)
    total, count = kept_tokens(made, prompt, 0, prompt) * 90, 90
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
    kept = kept_tokens(geometry(), 600, 0, 600)
    assert kept == 180  # 0.3 of 600
    blocks = -(-(90 * (kept + 15) // 16) // 93)
    assert (apart.packed, apart.tail, apart.freed) == (range(38, 38 + blocks), 38 + blocks, {600: range(38)})
    assert (within.packed, within.tail, within.freed) == (range(blocks), 37, {600: range(blocks, 37)})
    assert [apart.places(600 + new, 16) - apart.tail for new in (1, 16, 17)] == [1, 1, 2]
    assert apart.places(600, 16) == 38


def test_uniform_rows_lose_less_and_layers_without_gates_keep_all():
    even = place(geometry(Settings("gates:smollm2@uniform", 0.3)), 1000)
    assert len(even.packed) == -(-90 * 19 // 93) < len(place(geometry(), 1000).packed)
    some = place(geometry(Settings("knorm@global", 0.3), scored_layers=20), 600)
    assert len(some.packed) == -(-(60 * (180 + 15) // 16 + 30 * 38) // 90)


def test_what_stays_whole():
    assert place(geometry(), 33) is None  # no block would be free
    assert place(geometry(Settings("gates:smollm2", 1000)), 600) is None
    assert (
        place(geometry(Settings("knorm", 1.0)), 600) is None and place(geometry(Settings("knorm", 1)), 600) is not None
    )
    assert place(geometry(), 600, 590) is None
    assert kept_tokens(geometry(), 600, 400, 600) == 400 + 45  # recents are a quarter of the budget
    assert kept_tokens(geometry(), 600, 600, 600) == 600


SCHEDULES = ["blocks:16", "steps:7", "every", "blocks:32+steps:5", "blocks:50+every"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("budget", [0.3, 40, 90])
def test_evictions_are_due_when_they_are_in_the_cache(schedule, budget):
    for prompt in (5, 33, 64, 100):
        sequences, due = SequenceState(ag.policy("knorm", budget, schedule)), []
        new = sequences.extend(None, 1, prompt, torch.device("cpu"))
        passes = [*sequences.split_into_passes(new)]
        due = [int(x.num_tokens[0]) for x in passes if x.evicting is not None]
        for _ in range(80):
            sequences.extend(None, 1, 1, torch.device("cpu"))
            if sequences.step().evicting is not None:
                due.append(int(sequences.num_tokens[0]))
        made = geometry(Settings("knorm", budget, f'{{"schedule": "{schedule}"}}'))
        placement = place(made, prompt)
        if placement is None:  # nothing of the prompt goes, and nothing is due after it
            assert "steps" not in schedule and "every" not in schedule and max(due) <= kept_tokens(made, prompt, 0, 1)
            continue
        found = [tokens for tokens in range(1, prompt + 81) if placement.evicts_at(tokens)]
        assert found == [tokens for tokens in due if tokens >= placement.first]
        kept = kept_tokens(made, prompt, 0, prompt)
        assert all(tokens <= kept for tokens in due if tokens < placement.first)


@pytest.mark.parametrize(("schedule", "apart"), [*((x, False) for x in SCHEDULES), ("steps:7", True), ("every", True)])
@pytest.mark.parametrize("protected", [0, 60])
def test_blocks_suffice_at_every_token(schedule, apart, protected):
    """Places for all tokens are there, the list of blocks never shrinks, and no more blocks are taken than needed."""
    settings = Settings("gates:smollm2", 0.3, f'{{"schedule": "{schedule}"}}')
    made = geometry(settings, apart=apart)
    for prompt in (70, 200, 331):
        placement = place(made, prompt, protected)
        places = [placement.places(tokens, 16) for tokens in range(1, prompt + 200)]
        kept, evicted_at = kept_tokens(made, prompt, protected, prompt), 0
        for tokens, place_count in enumerate(places, 1):
            if tokens <= placement.first:
                assert place_count == -(-tokens // 16)
            else:
                evicted_at = tokens - 1 if placement.evicts_at(tokens - 1) else evicted_at
                assert place_count >= placement.tail + -(-(tokens - evicted_at) // 16)
        assert places == sorted(places)
        assert 90 * (kept + 15) // 16 <= len(placement.packed) * 90
        assert placement.packed.stop <= placement.tail
        freed = [place for places in placement.freed.values() for place in places]
        assert len({*freed}) == len(freed) and not {*freed} & {*placement.packed}
        # behind the prompt a request holds its rows' blocks, and those of the new tokens until the next eviction
        steps = settings.made_policy.steps
        if steps is not None:
            assert places[-1] - len(freed) == len(placement.packed) + -(-steps // 16)


def test_layers_that_share_a_total_outgrow_it_by_protected_tokens_alone():
    """At the end of a prompt that is protected its newest tokens are counted once, and later beside it."""
    made = geometry(Settings("gates:smollm2", 0.3, '{"schedule": "steps:8", "recent": 20}'))
    assert kept_tokens(made, 100, 100, 100) == 100 and kept_tokens(made, 100, 100, 160) == 120
    placement = place(made, 100, 100)
    assert placement.first == 100 + 24  # the first after which more than 20 new tokens are there
    assert len(placement.packed) == -(-(90 * (120 + 15) // 16) // 90)


@pytest.mark.parametrize(("schedule", "expected"), [("prefill", 128 + 39 + 1), ("steps:32", 128 + 40 + 1)])
def test_blocks_of_the_longest_request(schedule, expected):
    """2048 tokens in blocks of 16, of which 0.3 stay beside the prompt."""
    assert most_blocks(geometry(Settings("gates:smollm2", 0.3, f'{{"schedule": "{schedule}"}}'))) == expected


def blocks_needed(made, prompt, placement):
    """Of the longest text after a prompt; the last pass of the longest prompt is the one after it."""
    tokens = made.longest + (prompt == made.longest)
    return -(-made.longest // made.block_size) if placement is None else placement.places(tokens, made.block_size)


@pytest.mark.parametrize("budget", [0.3, 100, 0.9])
@pytest.mark.parametrize(
    ("policy", "schedule", "apart"),
    [
        ("knorm@global", "prefill", True),
        ("knorm@global", "prefill", False),
        ("knorm@uniform", "prefill", True),
        ("knorm@global", "steps:32", True),
        ("knorm@global", "steps:32", False),
        ("knorm@global", "blocks:64", False),
        ("knorm@global", "blocks:64+steps:16", False),
        ("knorm@uniform", "blocks:16+steps:64", False),
    ],
)
def test_no_prompt_needs_more_than_the_most_blocks(policy, schedule, apart, budget):
    """And one needs as many, so that no memory is asked for in vain."""
    settings = Settings(policy, budget, f'{{"schedule": "{schedule}"}}')
    made = geometry(settings, block_size=32, longest=500, apart=apart)
    needed = [blocks_needed(made, prompt, place(made, prompt)) for prompt in range(1, made.longest + 1)]
    assert max(needed) == most_blocks(made)


def asking(protected, max_tokens=None):
    return SimpleNamespace(extra_args={"ag_protect": protected}, max_tokens=max_tokens)


def test_a_request_whose_protected_tokens_need_more_blocks_than_there_are_stays_whole():
    """vLLM's cache may have no more than `most_blocks`, and a request that never fits stops the queue."""
    made = geometry(Settings("knorm@global", 0.3), block_size=32)
    most, dense = most_blocks(made), 2048 // 32
    assert place(made, 2000, 1200).places(2001, 32) > most >= dense
    for protected in (1200, 1800):
        assert place_request(made, asking(protected), 2000) is None
    assert place_request(made, asking(600), 2000) == place(made, 2000, 600)
    # the answer counts: a short one leaves room
    assert place_request(made, asking(1000), 1500) is None
    assert place_request(made, asking(1000, max_tokens=8), 1500) == place(made, 1500, 1000)
    assert place_request(made, None, 2000) == place(made, 2000)


def test_a_request_that_fits_neither_packed_nor_whole_is_refused():
    """With both schedules vLLM's cache may be smaller than the text."""
    made = geometry(Settings("knorm@global", 0.3, '{"schedule": "blocks:64+steps:16"}'), block_size=32)
    assert most_blocks(made) < 2000 // 32
    with refuses(UserError, "ag_protect=1800", "2000", f"at most {most_blocks(made)}", "protect fewer tokens"):
        place_request(made, asking(1800), 2000)

"""Time to read a prompt, scores and eviction included, over the full cache's."""

from __future__ import annotations

from functools import partial

import torch

from ag.bench.arena import Arena, kept
from ag.bench.contestants import FULL, PLAIN, Row, able, contestants
from ag.bench.measure import paired, seconds_of, spread

prepare = Arena.of


@torch.no_grad()
def measure(arena: Arena, context: int, batch: int) -> list[Row]:
    """Return a row for each contestant; they take turns, round by round."""
    config, ids = arena.config, arena.tokens(batch, context)
    plan, skipped = able(contestants(config), lambda one: arena.read(arena.cache(one), ids, one))
    seconds: dict[str, list[float]] = {one.name: [] for one in plan}
    held: dict[str, float] = {}
    for turn in range(config.warmup + config.rounds):
        for one in plan:
            cache = arena.cache(one)
            (time,) = seconds_of(arena.device, partial(arena.read, cache, ids, one))
            held[one.name] = kept(cache)
            del cache  # before the next one is filled
            if turn >= config.warmup:
                seconds[one.name].append(time)
    return skipped + [
        {
            "contestant": one.name,
            "kept": held[one.name],
            **spread("seconds", seconds[one.name]),
            "over full": paired(seconds[one.name], seconds[FULL.name]),
            "over transformers": paired(seconds[one.name], seconds[PLAIN.name]),
        }
        for one in plan
    ]

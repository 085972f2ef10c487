"""Time to read a prompt, scores and eviction included, over the full cache's."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ag.bench.contestants import FULL, PLAIN, Arena, able, contestants, kept
from ag.bench.measure import paired, quartiles, seconds_of
from ag.bench.models import build
from ag.commands.bench import BenchConfig

Row = dict[str, Any]


@torch.no_grad()
def measure(config: BenchConfig) -> list[Row]:
    """Return a row for each context, batch and contestant; contestants take turns, round by round."""
    every = contestants(config)
    arena = Arena(build(config.model, config.device, config.dtype, config.seed), config)
    rows: list[Row] = []
    for context in config.context:
        for batch in config.batch:
            ids = arena.tokens(batch, context)
            plan, skipped = able(every, lambda one, ids=ids: arena.read(arena.cache(one), ids, one))  # type: ignore[misc]
            rows += [{"context": context, "batch": batch} | row for row in skipped]
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
            for one in plan:
                median, low, high = quartiles(seconds[one.name])
                rows.append(
                    {
                        "context": context,
                        "batch": batch,
                        "contestant": one.name,
                        "kept": held[one.name],
                        "seconds": median,
                        "quartile 1": low,
                        "quartile 3": high,
                        "over full": paired(seconds[one.name], seconds[FULL.name]),
                        "over transformers": paired(seconds[one.name], seconds[PLAIN.name]),
                    }
                )
    return rows

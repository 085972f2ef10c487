"""Bytes of the cache and the peak of a process that reads a prompt and generates; a fresh process each."""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch

from ag.bench import worker
from ag.bench.contestants import FULL, Arena, Contestant, contestants, kept, kv_bytes
from ag.bench.measure import forget_peak, held_bytes, peak_bytes
from ag.bench.models import build
from ag.commands.bench import BenchConfig

Row = dict[str, Any]


def measure(config: BenchConfig) -> list[Row]:
    """Return a row for each context, batch and contestant."""
    plan = contestants(config)
    rows = []
    for context in config.context:
        for batch in config.batch:
            mine: list[Row] = [
                {"context": context, "batch": batch, "contestant": one.name}
                | worker.call("memory", config, context, batch, one)
                for one in plan
            ]
            full = next(row for row in mine if row["contestant"] == FULL.name)
            for row in mine:
                row["KV of full"] = row["KV bytes"] / full["KV bytes"]
                row["peak of full"] = row["peak over model"] / max(1, full["peak over model"])
            rows += mine
    return rows


@torch.no_grad()
def measure_one(config: BenchConfig, context: int, batch: int, one: Contestant) -> Row:
    """Run one contestant in this process."""
    arena = Arena(build(config.model, config.device, config.dtype, config.seed), config)
    ids = arena.tokens(batch, context)
    loaded = held_bytes(arena.device)
    arena.cache(one)  # makes the gates, if that is what it takes
    forget_peak(arena.device)
    cache = arena.cache(one)
    if config.fill:
        arena.fill(cache, batch, context)
    else:
        arena.read(cache, ids, one)
    row = {"kept": kept(cache), "KV bytes": kv_bytes(cache)}
    for _ in islice(arena.decode(cache, ids[:, :1], one), config.steps):
        pass
    return row | {"peak over model": max(0, peak_bytes(arena.device) - loaded)}

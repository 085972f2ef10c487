"""Bytes of the cache and the peak of a process that reads a prompt and generates; a fresh process each."""

from __future__ import annotations

from itertools import islice

import torch

from ag.bench import worker
from ag.bench.arena import Arena, kept, kv_bytes
from ag.bench.contestants import FULL, Contestant, Row, contestants
from ag.bench.measure import forget_peak, held_bytes, peak_bytes
from ag.commands.bench import BenchConfig


def prepare(config: BenchConfig) -> tuple[BenchConfig, list[Contestant]]:
    """Return who takes part; models are loaded in the processes that measure."""
    return config, contestants(config)


def measure(prepared: tuple[BenchConfig, list[Contestant]], context: int, batch: int) -> list[Row]:
    """Return a row for each contestant."""
    config, plan = prepared
    rows: list[Row] = [{"contestant": one.name} | worker.call(measure_one, config, context, batch, one) for one in plan]
    full = next(row for row in rows if row["contestant"] == FULL.name)
    for row in rows:
        row["KV of full"] = row["KV bytes"] / full["KV bytes"]
        row["peak of full"] = row["peak over model"] / max(1, full["peak over model"])
    return rows


@torch.no_grad()
def measure_one(config: BenchConfig, context: int, batch: int, one: Contestant) -> Row:
    """Run one contestant in this process."""
    arena = Arena.of(config)
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

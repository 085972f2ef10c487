"""Time per generated token, over the full cache and over plain transformers, and as a share of the roofline."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial

import torch

from ag.bench.arena import Arena, kept, kv_bytes
from ag.bench.contestants import FULL, PLAIN, Contestant, Row, able, contestants
from ag.bench.measure import drift, paired, seconds_of, spread
from ag.bench.models import token_bytes, weight_bytes

Held = tuple[float, int]  # the share of the tokens that a cache has, and its bytes
HELD_GIB = 60  # of memory for keys and values, of which a row says how many sequences it holds
FIRST = 3  # tokens that are generated before the clock starts


prepare = Arena.of


@torch.no_grad()
def measure(arena: Arena, context: int, batch: int) -> list[Row]:
    """Return a row for each contestant; round by round, each with a cache of its own in every round."""
    config = arena.config
    attempt = partial(_begun, arena, context=context, batch=batch)
    plan, skipped = able(contestants(config), attempt, every=config.fill is not False)
    seconds: dict[str, list[float]] = {one.name: [] for one in plan}
    drifts: dict[str, list[float]] = {one.name: [] for one in plan}
    held: dict[str, Held] = {}
    for turn in range(config.warmup + config.rounds):
        for name, (times, found) in _round(arena, plan, context, batch).items():
            held[name] = found
            if turn >= config.warmup:
                seconds[name].append(statistics.fmean(times))
                drifts[name].append(drift(times))
    weights, entry = weight_bytes(arena.model), token_bytes(arena.model)
    everything = weights + entry * context * batch
    rows = skipped
    for one in plan:
        share, size = held[one.name]
        faster, plain = (
            paired(seconds[name], seconds[one.name]) if name in seconds else None for name in (FULL.name, PLAIN.name)
        )
        own = share * entry * context * batch if one.kv_dtype == "float" else size
        roofline = everything / (weights + own)
        rows.append(
            {
                "contestant": one.name,
                "kept": share,
                **spread("ms/token", seconds[one.name], 1000),
                "tokens/s": batch / statistics.median(seconds[one.name]),
                "x full": faster,
                "x transformers": plain,
                "roofline": roofline,
                "of roofline": None if faster is None else faster / roofline,
                "last/first": statistics.median(drifts[one.name]),
                "KV bytes": size,
                f"held in {HELD_GIB} GiB": HELD_GIB * 2**30 * batch // size,
            }
        )
    return rows


def _round(arena: Arena, plan: list[Contestant], context: int, batch: int) -> dict[str, tuple[list[float], Held]]:
    """Return, by contestant, the seconds of each step, and what is held before the first."""
    number = arena.config.steps
    if not arena.config.interleaved:
        found = {}
        for one in plan:
            steps, held = _begun(arena, one, context, batch)
            found[one.name] = seconds_of(arena.device, partial(next, steps), number), held
            del steps  # and its cache, before the next one is filled
        return found
    begun = {one.name: _begun(arena, one, context, batch) for one in plan}
    times: dict[str, list[float]] = {name: [] for name in begun}
    for _ in range(number):
        for name, (steps, _) in begun.items():
            times[name] += seconds_of(arena.device, partial(next, steps))
    return {name: (times[name], held) for name, (_, held) in begun.items()}


def _begun(arena: Arena, one: Contestant, context: int, batch: int) -> tuple[Iterator[object], Held]:
    """Return steps that each generate a token over a new cache, the first behind them, and what it held before."""
    cache = arena.cache(one, batch, context + FIRST + arena.config.steps)
    if arena.config.fill is not False:
        arena.fill(cache, batch, context)
    else:
        arena.read(cache, arena.tokens(batch, context), one)
    held = kept(cache), kv_bytes(cache)
    steps = arena.decode(cache, arena.tokens(batch, 1), one)
    for _ in range(FIRST):
        next(steps)
    return steps, held

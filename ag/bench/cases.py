"""The five cases of ``python -m ag.bench``: each is a function that returns the rows of one context and batch.

Their times come from :func:`race`, in which contestants take turns round by round. The contestants of ``train`` and
``memory`` run in fresh processes, so that a peak of memory is that of one contestant.
"""

from __future__ import annotations

import copy
import gc
import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from multiprocessing import get_context
from typing import TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ag.bench.arena import Arena, gates_for, kept, kv_bytes, load, token_bytes, weight_bytes
from ag.bench.contestants import FULL, PLAIN, Contestant, Row, able, contestants
from ag.bench.measure import drift, forget_peak, held_bytes, paired, peak_bytes, seconds_of, spread
from ag.commands.bench import BenchConfig
from ag.config import Config
from ag.engine import EvictionCache, policy
from ag.errors import UserError, first_line
from ag.gates.gate import KINDS
from ag.model.base import add_lora
from ag.training.module import GatedLM

HELD_GIB = 60  # memory for keys and values; a row has the number of sequences that fit
FIRST = 40  # tokens that are generated before the clock starts: each row takes another block, so that the pool grows
TURN = 8  # tokens of a stream that a contestant generates in its turn
NEVER = -1e4  # gate bias with which every token is evicted
PLANS = ("lora", "gates", "gates+lora")  # trained parts

#: Seconds of each step by contestant and round, without the first rounds.
Times = dict[str, list[list[float]]]
T = TypeVar("T")


@torch.no_grad()
def decode(arena: Arena, context: int, batch: int) -> list[Row]:
    """Measure the time per generated token, over other caches and as a share of the roofline."""
    config = arena.config
    held: dict[str, tuple[float, int]] = {}  # kept share and bytes of each cache

    def begin(one: Contestant) -> Callable[[], object]:
        cache = arena.cache(one, batch, context + FIRST + config.steps)
        if config.fill is not False:
            arena.fill(cache, batch, context)
        else:
            arena.read(cache, arena.tokens(batch, context), one)
        held[one.name] = kept(cache), kv_bytes(cache)
        steps = arena.decode(cache, arena.tokens(batch, 1), one)
        for _ in range(FIRST):
            next(steps)
        return partial(next, steps)

    plan, rows = able(contestants(config), begin, every=config.fill is not False)
    turn = 1 if config.interleaved else None
    times = race(arena.device, config, plan, lambda name: begin(plan[name]), config.steps, turn)
    seconds = means(times)
    weights, entry = weight_bytes(arena.model), token_bytes(arena.model)
    everything = weights + entry * context * batch
    for name, one in plan.items():
        share, size = held[name]
        roofline = everything / (weights + (share * entry * context * batch if one.kv_dtype == "float" else size))
        faster = paired(seconds.get(FULL.name), seconds[name])
        rows.append(
            {
                "contestant": name,
                "kept": share,
                **spread("ms/token", seconds[name], 1000),
                "tokens/s": batch / statistics.median(seconds[name]),
                "x full": faster,
                "x transformers": paired(seconds.get(PLAIN.name), seconds[name]),
                "roofline": roofline,
                "of roofline": None if faster is None else faster / roofline,
                "last/first": statistics.median(map(drift, times[name])),
                "KV bytes": size,
                f"held in {HELD_GIB} GiB": HELD_GIB * 2**30 * batch // size,
            }
        )
    return rows


@torch.no_grad()
def stream(arena: Arena, context: int, batch: int) -> list[Row]:
    """Measure a step under gates that decide on every token, over a step with a full cache of the same size.

    The gates here keep the first tokens of the prompt and the recent window, together ``context`` tokens, and evict
    each generated token once it leaves the window. The full cache is cropped to ``context`` tokens after each turn.
    """
    config = arena.config
    if not config.kinds or not {*config.kinds} <= {*KINDS}:
        raise UserError(f"kinds={config.kinds}: expected some of {', '.join(KINDS)}.")
    if context <= config.recent:
        raise UserError(
            f"context={context}: expected more than the {config.recent} recent tokens; give a longer one, or recent=N."
        )
    ids = arena.tokens(batch, context)
    kinds: dict[str, str | None] = {FULL.name: None, **{f"gates, {kind}": kind for kind in config.kinds}}
    caches: dict[str, EvictionCache] = {}
    steps: dict[str, Iterator[Tensor]] = {}
    first: dict[str, int] = {}  # bytes of each cache, with the states of its gates, after the first turn

    def begin(name: str) -> Callable[[], object]:
        kind = kinds[name]
        cache = EvictionCache(arena.model, "full") if kind is None else _gated(arena, kind, context)
        arena.read(cache, ids)
        next(arena.decode(cache, ids[:, :1]))  # evicts the rest of the prompt
        caches[name] = cache
        pause(name)
        first.pop(name)
        return lambda: next(steps[name])

    def pause(name: str) -> None:
        if name == FULL.name:
            caches[name].crop(context - caches[name].seen_tokens)
        first.setdefault(name, kv_bytes(caches[name]))
        steps[name] = arena.decode(caches[name], ids[:, :1])

    times = race(arena.device, config, kinds, begin, config.steps, TURN, pause)
    starts = range(0, config.steps, TURN)
    turns = {name: [sum(one[at : at + TURN]) for one in rounds for at in starts] for name, rounds in times.items()}
    drifts = {name: [*map(drift, rounds)] for name, rounds in times.items()}
    return [
        {
            "contestant": name,
            "held": cache.kept_share() * int(cache.valid.sum()) / batch,  # the mean over sequences and KV heads
            **spread("ms/token", [*chain(*times[name])], 1000),
            "over full": paired(turns[name], turns[FULL.name]),
            "last/first": statistics.median(drifts[name]),
            "last/first over full": paired(drifts[name], drifts[FULL.name]),
            "KV bytes": first[name],
            "KV bytes at the end": kv_bytes(cache),
        }
        for name, cache in caches.items()
    ]


@torch.no_grad()
def prefill(arena: Arena, context: int, batch: int) -> list[Row]:
    """Measure the time to read a prompt, scores and eviction included, over the full cache's."""
    listed = contestants(arena.config)  # checked before a model is loaded
    ids = arena.tokens(batch, context)
    plan, rows = able(listed, lambda one: arena.read(arena.cache(one), ids, one))
    caches: dict[str, Cache] = {}
    held: dict[str, float] = {}

    def begin(name: str) -> Callable[[], object]:
        caches[name] = arena.cache(plan[name])
        return partial(arena.read, caches[name], ids, plan[name])

    def pause(name: str) -> None:
        held[name] = kept(caches.pop(name))

    seconds = means(race(arena.device, arena.config, plan, begin, pause=pause))
    return rows + [
        {
            "contestant": name,
            "kept": held[name],
            **spread("seconds", seconds[name]),
            "over full": paired(seconds[name], seconds.get(FULL.name)),
            "over transformers": paired(seconds[name], seconds.get(PLAIN.name)),
        }
        for name in plan
    ]


def train(arena: Arena, context: int, batch: int) -> list[Row]:
    """Measure time and memory of a training step with gates, over LoRA alone; peaks come from fresh processes."""
    config = arena.config
    base = load(config)
    steps = {plan: training_step(config, plan, context, batch, _twin(base))[0] for plan in PLANS}
    seconds = means(race(torch.device(config.device), config, PLANS, steps.__getitem__))
    del base, steps
    peaks = {plan: alone(trained, config, context, batch, plan) for plan in PLANS}
    return [
        {
            "contestant": plan,
            "trained of base": row["trained of base"],
            **spread("seconds", seconds[plan]),
            "time over lora": paired(seconds[plan], seconds["lora"]),
            "peak bytes": row["peak bytes"],
            "peak over lora": row["peak bytes"] / peaks["lora"]["peak bytes"],
            "peak over held": max(0, row["peak bytes"] - row["held"]),
        }
        for plan, row in peaks.items()
    ]


def memory(arena: Arena, context: int, batch: int) -> list[Row]:
    """Measure bytes of the cache, and the peak memory of a process that reads a prompt and generates."""
    rows: list[Row] = []
    for one in contestants(arena.config):
        rows.append({"contestant": one.name} | alone(generated, arena.config, context, batch, one))
    full = next((row for row in rows if row["contestant"] == FULL.name), rows[0])
    for row in rows:
        row["KV of full"] = row["KV bytes"] / full["KV bytes"]
        row["peak of full"] = row["peak over model"] / max(1, full["peak over model"])
    return rows


CASES = {case.__name__: case for case in (decode, stream, prefill, train, memory)}


def race(
    device: torch.device,
    config: BenchConfig,
    names: Iterable[str],
    begin: Callable[[str], Callable[[], object]],
    steps: int = 1,
    turn: int | None = None,
    pause: Callable[[str], object] = lambda name: None,
) -> Times:
    """Let contestants take turns, round by round, and return the times of all rounds but the first ones.

    Args:
        device: where they run.
        config: has the number of rounds.
        names: of the contestants.
        begin: returns the step of a contestant; called in each round.
        steps: number of steps in a round.
        turn: number of steps in a turn, with all contestants in memory at once. None means that each contestant takes
            all its steps at once, and is freed before the next one begins.
        pause: called after each turn with the name of the contestant; its time does not count.
    """
    listed, found = [*names], Times()
    for number in range(config.warmup + config.rounds):
        for together in [[name] for name in listed] if turn is None else [listed]:
            begun = {name: begin(name) for name in together}
            times: dict[str, list[float]] = {name: [] for name in together}
            for done in range(0, steps, turn or steps):
                for name in together:
                    times[name] += seconds_of(device, begun[name], min(turn or steps, steps - done))
                    pause(name)
            del begun  # with its caches, before others are made
            for name in together if number >= config.warmup else ():
                found.setdefault(name, []).append(times[name])
    return found


def means(times: Times) -> dict[str, list[float]]:
    """Return the mean seconds of a step by contestant and round."""
    return {name: [*map(statistics.fmean, rounds)] for name, rounds in times.items()}


def alone(
    measure: Callable[[BenchConfig, int, int, T], Row], config: BenchConfig, context: int, batch: int, one: T
) -> Row:
    """Measure a contestant in a fresh process; on a GPU, which counts allocations, in this one.

    Raises:
        UserError: the process failed; the message has the reason.
    """
    if config.device.startswith("cuda"):
        gc.collect()
        torch.cuda.empty_cache()
        return measure(config, context, batch, one)
    threads = config.threads or torch.get_num_threads()
    with ProcessPoolExecutor(1, get_context("spawn"), torch.set_num_threads, (threads,)) as pool:
        try:
            return pool.submit(measure, config, context, batch, one).result()
        except Exception as error:  # any error, or the end of the process
            case = f"{config.mode}, context={context}, batch={batch}, {one}"
            raise UserError(f"{case}: {type(error).__name__}: {first_line(error)}") from error


@torch.no_grad()
def generated(config: BenchConfig, context: int, batch: int, one: Contestant) -> Row:
    """Read a prompt and generate, in this process; returns kept share, bytes of the cache, and peak memory."""
    arena = Arena(config)
    ids = arena.tokens(batch, context)
    loaded = held_bytes(arena.device)
    arena.cache(one)  # makes the gates, if there are any
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


def trained(config: BenchConfig, context: int, batch: int, plan: str) -> Row:
    """Take two training steps in this process, of which the first makes the optimiser's state; returns the peak."""
    device = torch.device(config.device)
    step, share = training_step(config, plan, context, batch, load(config))
    forget_peak(device)
    step()
    step()
    return {"peak bytes": peak_bytes(device), "held": held_bytes(device), "trained of base": share}


def training_step(
    config: BenchConfig, plan: str, context: int, batch: int, base: PreTrainedModel
) -> tuple[Callable[[], None], float]:
    """Return a step of :class:`ag.training.module.GatedLM` with AdamW, and the trained share of the base's parameters.

    The rows are packed text with causal gates, the most expensive setting.
    """
    parameters = sum(parameter.numel() for parameter in base.parameters())
    torch.manual_seed(config.seed)
    gates = gates_for(base).to(config.device, torch.float32) if "gates" in plan else None
    recipe = Config()
    recipe.warmup.regress_steps = 0
    model: nn.Module = add_lora(base, recipe.lora) if "lora" in plan else base
    module = GatedLM(recipe, model.train(), gates)
    trained = [parameter for group in module.trainable().values() for parameter in group]
    optimizer = torch.optim.AdamW(trained, lr=1e-5)
    make = torch.Generator().manual_seed(config.seed)
    ids = torch.randint(0, base.config.get_text_config().vocab_size, (batch, context), generator=make)
    rows: dict[str, Tensor] = {"input_ids": ids, "attention_mask": torch.ones_like(ids).bool(), "labels": ids}
    rows = {name: x.to(config.device) for name, x in rows.items()}

    def step() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no trainer is there to log to
            with torch.autocast(base.device.type, getattr(torch, config.dtype), enabled=config.dtype != "float32"):
                loss = module.training_step(rows, 0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, sum(parameter.numel() for parameter in trained) / parameters


def _gated(arena: Arena, kind: str, context: int) -> EvictionCache:
    """Make an empty cache under random gates of a kind that evict all but the first tokens and the recent ones."""
    recent = arena.config.recent
    torch.manual_seed(arena.config.seed)
    own = {"kind": kind, "window": recent if kind == "attention" else 0, "covers": "all", "bias": NEVER}
    gates = gates_for(arena.model, **own, recent_tokens=recent, sink_tokens=context - recent)
    return EvictionCache(arena.model, replace(policy("flags"), gates=gates.to(arena.device)))


def _twin(base: PreTrainedModel) -> PreTrainedModel:
    """Copy a model's modules, which LoRA replaces, but not its weights."""
    return copy.deepcopy(base, {id(x): x for x in (*base.parameters(), *base.buffers())})

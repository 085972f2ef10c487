"""The five cases of ``python -m ag.bench``: functions that return the rows of one context and batch.

:func:`measure_in_turns` takes their times: the contestants take turns, round by round. The contestants of ``train`` and
``memory`` run in fresh processes, because the peak of memory is measured for the whole process.
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
from ag.bench.contestants import FULL, PLAIN, Contestant, Row, contestants, full_name, runnable_contestants
from ag.bench.measure import (
    forget_peak,
    late_over_early,
    median_ratio,
    peak_bytes,
    seconds_of,
    spread,
    trim_memory,
    used_bytes,
)
from ag.commands.bench import BenchConfig
from ag.config import Config
from ag.engine import EvictionCache, policy
from ag.errors import UserError, first_line
from ag.gates.gate import KINDS
from ag.model.base import add_lora
from ag.training.module import GatedLM

MAX_CACHE_GIB = 60  # a row says how many sequences fit into this memory for keys and values
WARM_UP_TOKENS = 40  # generated before the clock starts: each row takes another block, and the pool grows
TURN = 8  # tokens of a stream that a contestant generates in one turn
NEVER = -1e4  # gate bias that evicts every token
PLANS = ("lora", "gates", "gates+lora")  # trained parts

#: Seconds of each step by contestant and round, without the warm-up rounds.
Times = dict[str, list[list[float]]]
T = TypeVar("T")


@torch.no_grad()
def decode(arena: Arena, context: int, batch: int) -> list[Row]:
    """Measure the time per generated token, relative to other caches and to the roofline."""
    config = arena.config
    cache_sizes: dict[str, tuple[float, int]] = {}  # kept share and bytes of each cache

    def begin(contestant: Contestant) -> Callable[[], object]:
        cache = arena.cache(contestant, batch, context + WARM_UP_TOKENS + config.steps)
        if config.fill is not False:
            arena.fill(cache, batch, context)
        else:
            arena.read(cache, arena.tokens(batch, context), contestant)
        cache_sizes[contestant.name] = kept(cache), kv_bytes(cache)
        steps = arena.decode(cache, arena.tokens(batch, 1), contestant)
        for _ in range(WARM_UP_TOKENS):
            next(steps)
        return partial(next, steps)

    plan, rows = runnable_contestants(contestants(config), begin, every=config.fill is not False)
    turn = 1 if config.interleaved else None
    times = measure_in_turns(arena.device, config, plan, lambda name: begin(plan[name]), config.steps, turn)
    seconds = means(times)
    weights, all_tokens = weight_bytes(arena.model), token_bytes(arena.model) * context * batch
    read_bytes = {  # by a step
        name: weights + (cache_sizes[name][0] * all_tokens if plan[name].kv_dtype == "float" else cache_sizes[name][1])
        for name in plan
    }
    full = full_name(plan)
    for name in plan:
        share, size = cache_sizes[name]
        roofline = read_bytes.get(full, weights + all_tokens) / read_bytes[name]
        faster = median_ratio(seconds.get(full), seconds[name])
        rows.append(
            {
                "contestant": name,
                "kept": share,
                **spread("ms/token", seconds[name], 1000),
                "tokens/s": batch / statistics.median(seconds[name]),
                "x full": faster,
                "x transformers": median_ratio(seconds.get(PLAIN.name), seconds[name]),
                "roofline": roofline,
                "of roofline": None if faster is None else faster / roofline,
                "last/first": statistics.median(map(late_over_early, times[name])),
                "KV bytes": size,
                f"held in {MAX_CACHE_GIB} GiB": MAX_CACHE_GIB * 2**30 * batch // size,
            }
        )
    return rows


@torch.no_grad()
def stream(arena: Arena, context: int, batch: int) -> list[Row]:
    """Measure a step under gates that decide on every token, relative to a full cache with as many tokens.

    The gates keep the first tokens of the prompt and the recent window, together ``context`` tokens, and evict each
    generated token once it leaves the window. The full cache is cropped to ``context`` tokens after each turn.
    """
    config = arena.config
    if not config.kinds or not {*config.kinds} <= {*KINDS}:
        raise UserError(f"kinds={config.kinds}: expected some of {', '.join(KINDS)}.")
    ids = arena.tokens(batch, context)
    gate_kinds: dict[str, str | None] = {FULL.name: None, **{f"gates, {kind}": kind for kind in config.kinds}}
    caches: dict[str, EvictionCache] = {}
    steps: dict[str, Iterator[Tensor]] = {}
    first: dict[str, int] = {}  # bytes of each cache, with the states of its gates, after the first turn

    def begin(name: str) -> Callable[[], object]:
        kind = gate_kinds[name]
        cache = EvictionCache(arena.model, "full") if kind is None else _gated(arena, kind, context)
        arena.read(cache, ids)
        caches[name] = cache
        warm_up(name)
        return lambda: next(steps[name])

    def warm_up(name: str) -> None:
        """Begin steps, past those that a GPU runs one operation at a time and records, up to ``context`` tokens."""
        if name == FULL.name:
            caches[name].crop(context - WARM_UP_TOKENS - caches[name].seen_tokens)
        steps[name] = arena.decode(caches[name], ids[:, :1])
        for _ in range(WARM_UP_TOKENS):
            next(steps[name])

    def pause(name: str) -> None:
        if name == FULL.name:
            warm_up(name)
        first.setdefault(name, kv_bytes(caches[name]))

    times = measure_in_turns(arena.device, config, gate_kinds, begin, config.steps, TURN, pause)
    starts = range(0, config.steps, TURN)
    turns = {name: [sum(x[at : at + TURN]) for x in rounds for at in starts] for name, rounds in times.items()}
    drifts = {name: [*map(late_over_early, rounds)] for name, rounds in times.items()}
    return [
        {
            "contestant": name,
            "held": cache.kept_share() * int(cache.valid.sum()) / batch,  # the mean over sequences and KV heads
            **spread("ms/token", [*chain(*times[name])], 1000),
            "over full": median_ratio(turns[name], turns[FULL.name]),
            "last/first": statistics.median(drifts[name]),
            "last/first over full": median_ratio(drifts[name], drifts[FULL.name]),
            "KV bytes": first[name],
            "KV bytes at the end": kv_bytes(cache),
        }
        for name, cache in caches.items()
    ]


@torch.no_grad()
def prefill(arena: Arena, context: int, batch: int) -> list[Row]:
    """Measure the time to read a prompt, with scores and eviction, relative to a full cache."""
    listed = contestants(arena.config)  # checked before a model is loaded
    ids = arena.tokens(batch, context)
    plan, rows = runnable_contestants(listed, lambda contestant: arena.read(arena.cache(contestant), ids, contestant))
    caches: dict[str, Cache] = {}
    kept_shares: dict[str, float] = {}

    def begin(name: str) -> Callable[[], object]:
        caches[name] = arena.cache(plan[name])
        return partial(arena.read, caches[name], ids, plan[name])

    def pause(name: str) -> None:
        kept_shares[name] = kept(caches.pop(name))

    seconds = means(measure_in_turns(arena.device, arena.config, plan, begin, pause=pause))
    full = full_name(plan)
    return rows + [
        {
            "contestant": name,
            "kept": kept_shares[name],
            **spread("seconds", seconds[name]),
            "over full": median_ratio(seconds[name], seconds.get(full)),
            "over transformers": median_ratio(seconds[name], seconds.get(PLAIN.name)),
        }
        for name in plan
    ]


def train(arena: Arena, context: int, batch: int) -> list[Row]:
    """Measure time and memory of a training step with gates, relative to LoRA; peaks come from fresh processes."""
    config = arena.config
    base = load(config)
    steps = {plan: training_step(config, plan, context, batch, _twin(base))[0] for plan in PLANS}
    seconds = means(measure_in_turns(torch.device(config.device), config, PLANS, steps.__getitem__))
    del base, steps
    peaks = {plan: measure_alone(trained, config, context, batch, plan) for plan in PLANS}
    return [
        {
            "contestant": plan,
            "trained of base": row["trained of base"],
            **spread("seconds", seconds[plan]),
            "time over lora": median_ratio(seconds[plan], seconds["lora"]),
            "peak bytes": row["peak bytes"],
            "peak over lora": row["peak bytes"] / peaks["lora"]["peak bytes"],
            "peak over held": max(0, row["peak bytes"] - row["held"]),
        }
        for plan, row in peaks.items()
    ]


def memory(arena: Arena, context: int, batch: int) -> list[Row]:
    """Measure the bytes of the cache, and the peak memory of a process that reads a prompt and generates."""
    measured: dict[str, Row] = {}

    def attempt(contestant: Contestant) -> None:
        measured[contestant.name] = measure_alone(generated, arena.config, context, batch, contestant)

    plan, rows = runnable_contestants(contestants(arena.config), attempt, every=True)
    full = measured.get(full_name(plan))
    for name, row in measured.items():
        shares = {
            "KV of full": None if full is None else row["KV bytes"] / full["KV bytes"],
            "peak of full": None if full is None else row["peak over model"] / max(1, full["peak over model"]),
        }
        rows.append({"contestant": name} | row | shares)
    return rows


CASES = {case.__name__: case for case in (decode, stream, prefill, train, memory)}


def measure_in_turns(
    device: torch.device,
    config: BenchConfig,
    names: Iterable[str],
    begin: Callable[[str], Callable[[], object]],
    steps: int = 1,
    turn: int | None = None,
    pause: Callable[[str], object] = lambda name: None,
) -> Times:
    """Let contestants take turns, round by round, and return the times of all rounds after the warm-up.

    Args:
        device: where they run.
        config: gives the number of rounds.
        names: names of the contestants.
        begin: makes the step of a contestant, in each round.
        steps: number of steps in a round.
        turn: number of steps in a turn, with all contestants in memory at once. None: a contestant takes all its steps,
            and is freed before the next contestant begins.
        pause: called with the contestant's name after each turn; its time does not count.
    """
    listed, all_times = [*names], Times()
    for number in range(config.warmup + config.rounds):
        for turn_names in [[name] for name in listed] if turn is None else [listed]:
            started = {name: begin(name) for name in turn_names}
            times: dict[str, list[float]] = {name: [] for name in turn_names}
            for num_done in range(0, steps, turn or steps):
                for name in turn_names:
                    times[name] += seconds_of(device, started[name], min(turn or steps, steps - num_done))
                    pause(name)
            del started  # frees the caches before new ones are made
            for name in turn_names if number >= config.warmup else ():
                all_times.setdefault(name, []).append(times[name])
    return all_times


def means(times: Times) -> dict[str, list[float]]:
    """Return the mean seconds of a step by contestant and round."""
    return {name: [*map(statistics.fmean, rounds)] for name, rounds in times.items()}


def measure_alone(
    measure: Callable[[BenchConfig, int, int, T], Row], config: BenchConfig, context: int, batch: int, contestant: T
) -> Row:
    """Measure a contestant in a fresh process. On a GPU, which counts allocations, measure in this process.

    Raises:
        UserError: the process failed; the message says why.
    """
    if config.device.startswith("cuda"):
        gc.collect()
        torch.cuda.empty_cache()
        return measure(config, context, batch, contestant)
    threads = config.threads or torch.get_num_threads()
    with ProcessPoolExecutor(1, get_context("spawn"), torch.set_num_threads, (threads,)) as pool:
        try:
            return pool.submit(measure, config, context, batch, contestant).result()
        except Exception as error:  # any error, or the end of the process
            error.__cause__ = None  # of concurrent.futures: its text is a traceback, and would be taken for the reason
            case = f"{config.mode}, context={context}, batch={batch}, {contestant}"
            raise UserError(f"{case}: {type(error).__name__}: {first_line(error)}") from error


@torch.no_grad()
def generated(config: BenchConfig, context: int, batch: int, contestant: Contestant) -> Row:
    """Read a prompt and generate, in this process; return kept share, bytes of the cache, and peak memory."""
    arena = Arena(config)
    ids = arena.tokens(batch, context)
    trim_memory()  # loading freed some
    loaded = used_bytes(arena.device)
    arena.cache(contestant)  # makes the gates, if there are any
    forget_peak(arena.device)
    cache = arena.cache(contestant)
    if config.fill:
        arena.fill(cache, batch, context)
    else:
        arena.read(cache, ids, contestant)
    row = {"kept": kept(cache), "KV bytes": kv_bytes(cache)}
    for _ in islice(arena.decode(cache, ids[:, :1], contestant), config.steps):
        pass
    return row | {"peak over model": max(0, peak_bytes(arena.device) - loaded)}


def trained(config: BenchConfig, context: int, batch: int, plan: str) -> Row:
    """Take two training steps in this process and return the peak; the first step makes the optimiser's state."""
    device = torch.device(config.device)
    step, share = training_step(config, plan, context, batch, load(config))
    forget_peak(device)
    step()
    step()
    return {"peak bytes": peak_bytes(device), "held": used_bytes(device), "trained of base": share}


def training_step(
    config: BenchConfig, plan: str, context: int, batch: int, base: PreTrainedModel
) -> tuple[Callable[[], None], float]:
    """Return a step of :class:`ag.training.module.GatedLM` with AdamW, and the trained share of the base's parameters.

    The rows are packed text, and the gates are causal: the most expensive setting.
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
    """Make an empty cache under random gates that keep the first and the recent tokens, and evict all others."""
    recent = arena.config.recent
    torch.manual_seed(arena.config.seed)
    settings = {"kind": kind, "window": recent if kind == "attention" else 0, "covers": "all", "bias": NEVER}
    gates = gates_for(arena.model, **settings, recent_tokens=recent, sink_tokens=context - recent)
    return EvictionCache(arena.model, replace(policy("flags"), gates=gates.to(arena.device)))


def _twin(base: PreTrainedModel) -> PreTrainedModel:
    """Copy a model's modules, which LoRA replaces. The copy shares the weights."""
    return copy.deepcopy(base, {id(x): x for x in (*base.parameters(), *base.buffers())})

"""What gates cost that go on deciding: a step with them over a step with a cache of the same size that decides nothing.

The gates here evict every generated token once it leaves the recent window, and keep as many first tokens of the prompt
as make up the context with that window. So every cache holds ``context`` tokens at each step: the gates' by themselves,
that of ``full`` because what it took in is cropped between its turns.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field, replace

import torch

from ag.bench.arena import Arena, kv_bytes
from ag.bench.contestants import Row
from ag.bench.measure import drift, seconds_of, spread
from ag.bench.models import gates_for
from ag.commands.bench import BenchConfig
from ag.engine import EvictionCache, policy
from ag.errors import UserError
from ag.gates.gate import KINDS

TURN = 8  # tokens that a contestant generates before the next one's turn
NEVER = -1e4  # bias with which no flag is open


@dataclass
class Runner:
    """A contestant at work."""

    name: str  # of its row
    cache: EvictionCache  # its own, which has read the prompt
    token: torch.Tensor  # the next one to be fed, ``[B, 1]``
    grows: bool  # whether what it takes in is cropped after its turn
    seconds: list[float] = field(default_factory=list)  # of each step
    first_bytes: int = 0  # allocated for keys and values, and for what the gates remember, after the first turn

    def turn(self, arena: Arena, steps: int) -> float:
        """Generate so many tokens; returns the seconds of all."""
        generated = arena.decode(self.cache, self.token)
        times = seconds_of(arena.device, lambda: next(generated), steps)
        if self.grows:
            self.cache.crop(-steps)
        self.first_bytes = self.first_bytes or kv_bytes(self.cache)
        self.seconds += times
        return sum(times)


def prepare(config: BenchConfig) -> Arena:
    """Return the model that all contestants run."""
    unknown = [kind for kind in config.kinds if kind not in KINDS]
    if unknown or not config.kinds:
        raise UserError(f"kinds={config.kinds}: expected some of {', '.join(KINDS)}.")
    small = [context for context in config.context if context <= config.recent]
    if small:
        raise UserError(
            f"context={small[0]}: expected more than the {config.recent} recent tokens; give a longer one, or recent=N."
        )
    return Arena.of(config)


@torch.no_grad()
def measure(arena: Arena, context: int, batch: int) -> list[Row]:
    """Return a row for each contestant; they run beside one another, each with a new cache in every round."""
    config = arena.config
    ratios: dict[str, list[float]] = {}
    rounds: list[list[Runner]] = []
    for number in range(config.warmup + config.rounds):
        runners = _runners(arena, context, batch)
        for runner in runners:
            runner.turn(arena, 1)  # settles what the prompt left
            runner.seconds.clear()
            runner.first_bytes = 0
        quotients = _race(arena, runners)
        if number >= config.warmup:
            rounds.append(runners)
            for name, values in quotients.items():
                ratios.setdefault(name, []).extend(values)
    return [
        {
            "contestant": mine[-1].name,
            "held": _held(mine[-1].cache),
            **spread("ms/token", [second for runner in mine for second in runner.seconds], 1000),
            "over full": statistics.median(ratios[mine[-1].name]),
            "last/first": statistics.median(drift(runner.seconds) for runner in mine),
            "last/first over full": statistics.median(
                drift(runner.seconds) / drift(runners[0].seconds) for runner, runners in zip(mine, rounds, strict=True)
            ),
            "KV bytes": mine[-1].first_bytes,
            "KV bytes at the end": kv_bytes(mine[-1].cache),
        }
        for mine in zip(*rounds, strict=True)
    ]


def _runners(arena: Arena, context: int, batch: int) -> list[Runner]:
    """Return the full cache first, then one for each kind of gates; all have read the same prompt."""
    config, ids = arena.config, arena.tokens(batch, context)
    found = []
    for kind in (None, *config.kinds):
        cache = EvictionCache(arena.model, "full") if kind is None else _gated(arena, kind, context)
        arena.read(cache, ids)
        found.append(Runner("full" if kind is None else f"gates, {kind}", cache, ids[:, :1], grows=kind is None))
    return found


def _gated(arena: Arena, kind: str, context: int) -> EvictionCache:
    """Make an empty cache under random gates of a kind that evict all but the first tokens and the recent ones."""
    config = arena.config
    torch.manual_seed(config.seed)
    gates = gates_for(
        arena.model,
        kind=kind,
        window=config.recent if kind == "attention" else 0,
        covers="all",
        bias=NEVER,
        recent_tokens=config.recent,
        sink_tokens=context - config.recent,
    )
    return EvictionCache(arena.model, replace(policy("flags"), gates=gates.to(arena.device)))


def _race(arena: Arena, runners: list[Runner]) -> dict[str, list[float]]:
    """Let the contestants take turns; returns for each the quotients of its turns and those of the first one."""
    turns: dict[str, list[float]] = {runner.name: [] for runner in runners}
    left = arena.config.steps
    while left:
        steps = min(TURN, left)
        for runner in runners:
            turns[runner.name].append(runner.turn(arena, steps))
        left -= steps
    return {name: [a / b for a, b in zip(mine, turns[runners[0].name], strict=True)] for name, mine in turns.items()}


def _held(cache: EvictionCache) -> float:
    """Return the tokens that a KV head of a sequence holds, the mean."""
    return cache.kept_share() * int(cache.valid.sum()) / len(cache.valid)

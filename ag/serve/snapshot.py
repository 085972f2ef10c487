"""The state of a scheduler, for the live page and Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from operator import add
from typing import Any, Self


class _Summed:
    """A dataclass with ``+``, field by field."""

    def __add__(self, other: Self) -> Self:
        names = [each.name for each in fields(self)]  # type: ignore[arg-type]
        values: dict[str, Any] = {name: getattr(self, name) + getattr(other, name) for name in names}
        return type(self)(**values)


@dataclass
class Counts(_Summed):
    """Totals since the scheduler started."""

    prompts: int = 0  # prompt tokens that the model read
    cached: int = 0  # prompt tokens from a cached prefix, which the model did not read
    steps: int = 0  # decode steps of the batch
    tokens: int = 0  # generated tokens
    num_started: int = 0  # completions that got a first token
    ttft_seconds: float = 0.0  # sum of the times to first token
    drafted: int = 0  # draft tokens that the model read
    accepted: int = 0  # draft tokens that became part of a completion
    preempted: int = 0  # preemptions; the model reads a preempted completion again later
    num_ended: Counter[str] = field(default_factory=Counter)  # completions that ended, by reason; ``error`` is a reason


@dataclass(frozen=True)
class Running:
    """A completion that is being generated."""

    index: int  # number of the completion, in order of submission
    num_prompt_tokens: int  # tokens of its prompt
    num_generated: int  # generated tokens so far
    seconds: float  # since it was submitted
    cached: tuple[float, ...]  # cached tokens per KV head, by layer


@dataclass(frozen=True)
class Snapshot(_Summed):
    """The state of a scheduler after a step; ``waiting`` is current."""

    num_waiting: int  # completions in the queue
    num_prefilling: int  # completions in prefill
    running: tuple[Running, ...]  # completions in decode
    blocks: int  # capacity of the pool
    free: int  # free blocks
    block_nbytes: int  # bytes of a block
    prefixes: int  # cached prefixes
    prefix_blocks: int  # blocks of cached prefixes; completions may share them
    counts: Counts  # totals so far


def sum_snapshots(snapshots: Sequence[Snapshot]) -> Snapshot:
    """Return the sum of the snapshots of several schedulers with one model."""
    return replace(reduce(add, snapshots), block_nbytes=snapshots[0].block_nbytes)

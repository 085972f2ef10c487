"""What a scheduler is doing, for the live page and Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from operator import add
from typing import Any, Self


class _Summed:
    """A dataclass whose instances are added field by field."""

    def __add__(self, other: Self) -> Self:
        names = [each.name for each in fields(self)]  # type: ignore[arg-type]
        values: dict[str, Any] = {name: getattr(self, name) + getattr(other, name) for name in names}
        return type(self)(**values)


@dataclass
class Counts(_Summed):
    """Totals since a scheduler was made."""

    prompts: int = 0  # prompt tokens that the model read
    cached: int = 0  # prompt tokens that were taken from a cached prefix instead
    steps: int = 0  # decoding steps of the batch
    tokens: int = 0  # generated tokens
    num_started: int = 0  # answers with a first token
    ttft_seconds: float = 0.0  # sum of the seconds from each request to the first token of its answer
    drafted: int = 0  # draft tokens that the model read
    accepted: int = 0  # draft tokens that became part of an answer
    preempted: int = 0  # preemptions; each frees the blocks of an answer, whose tokens are read again later
    num_ended: Counter[str] = field(default_factory=Counter)  # answers that ended, by reason, ``error`` included


@dataclass(frozen=True)
class Running:
    """An answer that is being generated."""

    index: int  # of the answer, in the order of submission
    num_prompt_tokens: int  # tokens of its prompt
    num_generated: int  # generated tokens so far
    seconds: float  # since it was submitted
    cached: tuple[float, ...]  # tokens per KV head in its cache, by layer


@dataclass(frozen=True)
class Snapshot(_Summed):
    """The state of a scheduler after a step; ``waiting`` is current."""

    num_waiting: int  # answers in the queue
    num_prefilling: int  # answers whose prompt is being read
    running: tuple[Running, ...]  # answers that are being generated
    blocks: int  # capacity of the pool
    free: int  # free blocks
    block_nbytes: int  # bytes of a block
    prefixes: int  # cached prefixes
    prefix_blocks: int  # blocks of cached prefixes, some of them shared with answers
    counts: Counts  # totals so far


def sum_snapshots(snapshots: Sequence[Snapshot]) -> Snapshot:
    """Return the sum of the snapshots of several schedulers of one model."""
    return replace(reduce(add, snapshots), block_nbytes=snapshots[0].block_nbytes)

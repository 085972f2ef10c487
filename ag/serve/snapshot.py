"""What a scheduler is doing, for those who watch it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass
class Counts:
    """What went by in a scheduler.

    Attributes:
        prompts: tokens of prompts that were read.
        reused: tokens of prompts that were not read, as their prefix was cached.
        steps: steps of the batch.
        tokens: of answers.
        started: answers with a first token.
        first_seconds: seconds from their requests to those tokens, all together.
        drafted: tokens that were looked up in prompts and answers.
        accepted: of these, tokens that the model would have chosen.
        preempted: answers that had to give their blocks back, and were read again.
        ended: answers that ended, by reason; ``error`` is one of them.
    """

    prompts: int = 0
    reused: int = 0
    steps: int = 0
    tokens: int = 0
    started: int = 0
    first_seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0
    preempted: int = 0
    ended: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Running:
    """An answer that is being written.

    Attributes:
        number: of the answer, counted from the first one that was asked for.
        prompt: tokens of its prompt.
        written: tokens of the answer so far.
        seconds: since it was asked for.
        held: tokens per KV head that it holds, by layer.
    """

    number: int
    prompt: int
    written: int
    seconds: float
    held: tuple[float, ...]


@dataclass(frozen=True)
class Snapshot:
    """A scheduler at one moment, between two steps; who waits is known to the moment.

    Attributes:
        waiting: answers whose prompt nobody has begun to read.
        reading: answers whose prompt is being read.
        running: answers that are being written.
        blocks: of the pool.
        free: blocks that nobody holds.
        block_nbytes: bytes of a block.
        prefixes: beginnings that prompts share, cached until others need their blocks.
        prefix_blocks: blocks that these have, some of them together with answers.
        counts: what went by.
    """

    waiting: int
    reading: int
    running: tuple[Running, ...]
    blocks: int
    free: int
    block_nbytes: int
    prefixes: int
    prefix_blocks: int
    counts: Counts


def together(all_of: Sequence[Snapshot]) -> Snapshot:
    """Return what several schedulers of one model are doing, as if they were one."""
    counts = [one.counts for one in all_of]
    return _sum(
        all_of,
        running=tuple(answer for one in all_of for answer in one.running),
        block_nbytes=all_of[0].block_nbytes,
        counts=_sum(counts, ended=sum((one.ended for one in counts), Counter[str]())),
    )


def _sum(parts: Sequence[T], **known: Any) -> T:
    """Add dataclasses field by field, but for those that are known."""
    names = [field.name for field in fields(parts[0]) if field.name not in known]  # type: ignore[arg-type]
    return type(parts[0])(**{name: sum(getattr(part, name) for part in parts) for name in names}, **known)

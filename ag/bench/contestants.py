"""The contestants of a bench: plain transformers in its forms, this engine's full cache, and policies."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.utils.import_utils import is_flash_attn_2_available

from ag.commands.bench import BenchConfig
from ag.commands.shared import KVDtype
from ag.config.policies import FLAGS
from ag.engine import policy
from ag.errors import first_line


@dataclass(frozen=True)
class Contestant:
    """A way to cache keys and values."""

    name: str  # name in the table
    policy: str | None = None  # policy of this engine; None: plain transformers with its own cache
    keep: float | None = None  # share of the prompt that the policy keeps; None: all
    kv_dtype: KVDtype = "float"  # type of this engine's keys and values
    # for plain transformers:
    attention: str = "sdpa"
    backend: str | None = None  # implementation of torch's attention; None: torch's choice
    static: bool = False  # whether the cache has a fixed size, with the step under torch.compile


PLAIN, FULL = Contestant("transformers"), Contestant("full", "full")
Row = dict[str, Any]  # row of a table, by column


def contestants(config: BenchConfig) -> list[Contestant]:
    """Return plain transformers, this engine's full cache, variants of transformers, and each policy at each share."""
    config.check()
    first, *more_backends = backends(config)
    listed = [replace(PLAIN, name=f"{PLAIN.name}, {name}", backend=name) for name in more_backends]
    if config.device.startswith("cuda") and config.dtype != "float32" and is_flash_attn_2_available():
        listed.append(Contestant("transformers, flash-attn", attention="flash_attention_2"))
    listed += [Contestant(f"transformers, static, {name}", backend=name, static=True) for name in config.static]
    for spec in config.policy:
        for share in config.keep:
            listed.append(Contestant(f"{spec} {share:g}", spec, float(share)))  # a whole number would be tokens
            if spec != FLAGS:
                policy(spec, float(share), config.schedule)  # checked before anything runs
    engine = [
        replace(x, name=x.name if kv_dtype == "float" else f"{x.name} {kv_dtype}", kv_dtype=kv_dtype)
        for kv_dtype in config.kv_dtypes
        for x in [FULL, *listed]
        if x.policy is not None
    ]
    return [replace(PLAIN, backend=first), *engine[:1], *(x for x in listed if x.policy is None), *engine[1:]]


def full_name(plan: Mapping[str, Contestant]) -> str:
    """Return the name of this engine's full cache, the first of several types; empty if it could not run."""
    return next((name for name, contestant in plan.items() if contestant.policy == FULL.policy), "")


def backends(config: BenchConfig) -> list[str | None]:
    """Return the implementations of torch's attention for plain transformers; None is torch's choice."""
    usual = None if config.device.startswith("cuda") and config.dtype == "float32" else "flash"
    return [*config.sdpa] or [usual]


def runnable_contestants(
    plan: list[Contestant], attempt: Callable[[Contestant], object], every: bool = False
) -> tuple[dict[str, Contestant], list[Row]]:
    """Let contestants try the measurement.

    Args:
        plan: contestants, plain transformers first.
        attempt: runs a contestant.
        every: whether plain transformers and contestants of this engine try too; these may only run out of memory.

    Returns:
        The contestants that can run, by name, and rows ``{"contestant", "skipped"}`` with the reason for each other.
    """
    runnable, skipped = {}, []
    for contestant in plan:
        may_be_skipped = contestant.policy is None and contestant is not plan[0]
        try:
            if may_be_skipped or every:
                attempt(contestant)
            runnable[contestant.name] = contestant
        except Exception as error:  # a backend without this case, no compiler, no memory, ...
            if not (may_be_skipped or isinstance(error, torch.OutOfMemoryError)):
                raise
            skipped.append({"contestant": contestant.name, "skipped": _reason(error)})
        if contestant.name not in runnable:  # its memory is for the next one
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    return runnable, skipped


def _reason(error: BaseException) -> str:
    """Return the first line of the error that caused others."""
    while cause := error.__cause__ or error.__context__:
        error = cause
    return first_line(error)

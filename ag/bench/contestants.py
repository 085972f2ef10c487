"""The contestants of a bench: plain transformers in its forms, this engine's full cache, and policies."""

from __future__ import annotations

from collections.abc import Callable
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
    """A way to hold keys and values."""

    name: str  # of its row
    policy: str | None = None  # of this engine; None means plain transformers with its own cache
    keep: float | None = None  # share of the prompt that the policy keeps; None means all
    kv_dtype: KVDtype = "float"  # of this engine's keys and values
    # for plain transformers:
    attention: str = "sdpa"
    backend: str | None = None  # implementation of torch's attention; None means torch's choice
    static: bool = False  # whether the cache has a fixed size, with the step under torch.compile


PLAIN, FULL = Contestant("transformers"), Contestant("full", "full")
Row = dict[str, Any]  # of a table, by column


def contestants(config: BenchConfig) -> list[Contestant]:
    """Return plain transformers, this engine's full cache, transformers' other forms, each policy with each share."""
    config.check()
    first, *others = backends(config)
    rivals = [replace(PLAIN, name=f"{PLAIN.name}, {name}", backend=name) for name in others]
    if config.device.startswith("cuda") and config.dtype != "float32" and is_flash_attn_2_available():
        rivals.append(Contestant("transformers, flash-attn", attention="flash_attention_2"))
    rivals += [Contestant(f"transformers, static, {name}", backend=name, static=True) for name in config.static]
    for spec in config.policy:
        for share in config.keep:
            rivals.append(Contestant(f"{spec} {share:g}", spec, float(share)))  # a whole number would be tokens
            if spec != FLAGS:
                policy(spec, float(share), config.schedule)  # checked before anything runs
    engine = [
        replace(one, name=one.name if held == "float" else f"{one.name} {held}", kv_dtype=held)
        for held in config.kv_dtypes
        for one in [FULL, *rivals]
        if one.policy is not None
    ]
    return [replace(PLAIN, backend=first), *engine[:1], *(one for one in rivals if one.policy is None), *engine[1:]]


def backends(config: BenchConfig) -> list[str | None]:
    """Return the implementations of torch's attention for plain transformers; None means torch's choice."""
    usual = None if config.device.startswith("cuda") and config.dtype == "float32" else "flash"
    return [*config.sdpa] or [usual]


def able(
    plan: list[Contestant], attempt: Callable[[Contestant], object], every: bool = False
) -> tuple[dict[str, Contestant], list[Row]]:
    """Let contestants try the measurement.

    Args:
        plan: contestants, plain transformers first.
        attempt: runs one.
        every: whether the first one and those of this engine try too; these may only run out of memory.

    Returns:
        Those that can run, by name, and rows ``{"contestant", "skipped"}`` with the reason for the others.
    """
    found, skipped = {}, []
    for one in plan:
        rival = one.policy is None and one is not plan[0]
        try:
            if rival or every:
                attempt(one)
            found[one.name] = one
        except Exception as error:  # a backend without this case, no compiler, no memory, ...
            if not (rival or isinstance(error, torch.OutOfMemoryError)):
                raise
            first: BaseException = error
            while cause := first.__cause__ or first.__context__:
                first = cause
            skipped.append({"contestant": one.name, "skipped": first_line(first)})
    return found, skipped

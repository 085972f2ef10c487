"""One contestant in a process of its own, so that its peak of memory is its own."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

import torch

from ag.bench.contestants import Row
from ag.commands.bench import BenchConfig
from ag.errors import UserError

T = TypeVar("T")


def call(
    measure: Callable[[BenchConfig, int, int, T], Row], config: BenchConfig, context: int, batch: int, one: T
) -> Row:
    """Measure a contestant and return its row: in a fresh process, or on a GPU, which counts allocations, in this one.

    Raises:
        UserError: with what that process died of.
    """
    if config.device.startswith("cuda"):
        gc.collect()
        torch.cuda.empty_cache()
        return measure(config, context, batch, one)
    with ProcessPoolExecutor(1, get_context("spawn"), _begin, (config.threads,)) as pool:
        try:
            return pool.submit(measure, config, context, batch, one).result()
        except Exception as error:  # whatever it is, or the end of the process
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            raise UserError(f"{config.mode}, context={context}, batch={batch}, {one}: {why}") from error


def _begin(threads: int | None) -> None:
    if threads is not None:
        torch.set_num_threads(threads)

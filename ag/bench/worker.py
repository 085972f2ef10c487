"""One contestant in a process of its own, so that its peak of memory is its own: ``python -m ag.bench.worker JSON``."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from dataclasses import asdict
from importlib import import_module
from typing import Any

import torch

from ag.bench.contestants import Contestant
from ag.commands.bench import BenchConfig
from ag.errors import UserError


def call(mode: str, config: BenchConfig, context: int, batch: int, one: Contestant | str) -> dict[str, Any]:
    """Measure a contestant and return its row: in a fresh process, or on a GPU, which counts allocations, in this one.

    Raises:
        UserError: with the last line that the process wrote, when it failed.
    """
    job = describe(mode, config, context, batch, one)
    if config.device.startswith("cuda"):
        gc.collect()
        torch.cuda.empty_cache()
        return run(job)
    done = subprocess.run(
        [sys.executable, "-m", "ag.bench.worker", json.dumps(job)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise UserError(f"{mode}, context={context}, batch={batch}, {one}: the process failed: {reason}")
    row: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return row


def describe(mode: str, config: BenchConfig, context: int, batch: int, one: Contestant | str) -> dict[str, Any]:
    """Return a job as JSON can hold it."""
    contestant = one if isinstance(one, str) else asdict(one)
    return {"mode": mode, "config": asdict(config), "context": context, "batch": batch, "contestant": contestant}


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Do a job in this process, by ``measure_one`` of the module of its mode, and return its row."""
    config, one = BenchConfig(**job["config"]), job["contestant"]
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    contestant = one if isinstance(one, str) else Contestant(**one)
    module = import_module(f"ag.bench.{job['mode']}")
    row: dict[str, Any] = module.measure_one(config, job["context"], job["batch"], contestant)
    return row


if __name__ == "__main__":
    print(json.dumps(run(json.loads(sys.argv[1]))))

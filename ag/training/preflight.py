"""Memory and time that a run needs, computed without network and before anything is loaded."""

from __future__ import annotations

import os
import sys

import torch

from ag.config import Config
from ag.errors import UserError
from ag.hardware import lacks_bfloat16, main_memory
from ag.model import base as models
from ag.training.memory_plan import GIB, TFLOPS, MemoryPlan, duration, plan, steps
from ag.training.outline import read_values


def check_memory(config: Config) -> str:
    """Refuse a run whose base model alone exceeds the memory of a device; warn if its steps may exceed it.

    Returns:
        A sentence with the run's memory and time; empty without a plan: the run replays, its weights are random, or
        only the hub has the model's configuration.

    Raises:
        UserError: with the memory and time that the run needs.
    """
    step_plan, memory = _plan(config), _memory(config)
    if step_plan is None:
        return ""
    needs, device_memory = _describe(config, step_plan), f"this device has {memory / GIB:.1f}"
    if (weights := step_plan.memory["base weights"]) > memory:
        smaller = "" if config.model.quantization == "nf4" else "model.quantization=nf4, "
        licence = models.licence(config.model.name)
        raise UserError(
            f"model.name={config.model.name}: its weights take {weights / GIB:.1f} GiB, and {device_memory}: expected "
            f"a device with more, {smaller}trainer.strategy=fsdp2 on several GPUs, or a smaller model. {needs}"
            f"{f' Also, {licence}.' if licence else ''}"
        )
    if step_plan.total > memory:
        _warn(f"a step of full rows may exceed the memory: {device_memory} GiB. {needs}")
    return needs


def warn_of_slow_bfloat16(config: Config) -> None:
    """Warn if the run computes in bfloat16 on a processor without instructions for it."""
    if config.trainer.precision == "bf16-mixed" and not _on_gpu(config) and lacks_bfloat16():
        _warn(
            "trainer.precision=bf16-mixed: this processor has no instructions for bfloat16, and takes about three "
            "times as long as in float32: use trainer.precision=32-true model.dtype=float32"
        )


def _warn(message: str) -> None:
    """Print a warning; of the processes on one machine only the first prints it."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"ag.fit: warning: {message}", file=sys.stderr)


def _describe(config: Config, step_plan: MemoryPlan) -> str:
    count, time = steps(config), ""
    if count is not None:
        run_time = duration(count * step_plan.flops / TFLOPS / 1e12)
        time = f" and at most {run_time} on GPUs of {TFLOPS} x 10^12 operations a second"
    gpus = config.trainer.world_size
    devices = "one device" if gpus == 1 else f"each of {gpus} devices"
    return f"This run needs {step_plan.total / GIB:.1f} GiB on {devices}{time}; python -m ag.plan shows the parts."


def _plan(config: Config) -> MemoryPlan | None:
    """Compute the plan of a run. None: the run replays, its weights are random, or only the hub has its geometry."""
    if config.loss.replay or read_values(config.model.name, config.model.revision) is None:
        return None
    return plan(config)


def _memory(config: Config) -> int:
    """Return the bytes of the device that a process trains on."""
    if _on_gpu(config):
        return torch.cuda.get_device_properties(0).total_memory
    return main_memory()


def _on_gpu(config: Config) -> bool:
    return config.trainer.accelerator != "cpu" and torch.cuda.is_available()

"""What a run needs that a machine may lack, without network and before anything is loaded."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from ag.config import Config
from ag.errors import UserError
from ag.model import base as models
from ag.model import configurations
from ag.training.memory_plan import GIB, TFLOPS, MemoryPlan, duration, plan, steps

SMALL = 8  # times that the files of a model fit into the memory of a device whose size needs no plan


def check_memory(config: Config) -> str:
    """Refuse a run whose base model alone exceeds the memory of a device, and warn of one whose steps may.

    Returns:
        A sentence with the memory and the time that the run takes; nothing where no plan is known here: the model is
        small, or its configuration is on the hub alone.

    Raises:
        UserError: with all that the run needs.
    """
    found, memory = _plan(config), _memory(config)
    if found is None:
        return ""
    told, has = _described(config, found), f"this device has {memory / GIB:.1f}"
    if (weights := found.memory["base weights"]) > memory:
        smaller = "" if config.model.quantization == "nf4" else "model.quantization=nf4, "
        licence = models.licence(config.model.name)
        raise UserError(
            f"model.name={config.model.name}: its weights take {weights / GIB:.1f} GiB, and {has}: expected a device "
            f"with more, {smaller}trainer.strategy=fsdp2 on several GPUs, or a smaller model. {told}"
            f"{f' Also, {licence}.' if licence else ''}"
        )
    if found.total > memory and os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"ag.fit: warning: a step of full rows may exceed the memory: {has} GiB. {told}", file=sys.stderr)
    return told


def _described(config: Config, found: MemoryPlan) -> str:
    count, time = steps(config), ""
    if count is not None:
        took = duration(count * found.flops / TFLOPS / 1e12)
        time = f" and at most {took} on GPUs of {TFLOPS} x 10^12 operations a second"
    gpus = config.trainer.devices * config.trainer.num_nodes
    where = "one device" if gpus == 1 else f"each of {gpus} devices"
    return f"This run needs {found.total / GIB:.1f} GiB on {where}{time}; python -m ag.plan shows the parts."


def _plan(config: Config) -> MemoryPlan | None:
    """Compute the plan of a run; None for one without, for small models, and where only the hub has the geometry."""
    name, folder = config.model.name, Path(config.model.name).expanduser()
    if config.loss.replay:
        return None
    if (folder / "config.json").is_file():
        return None if models.stored_nbytes(name) * SMALL < _memory(config) else plan(config)
    return plan(config) if config.model.revision is None and configurations.find(name) else None


def _memory(config: Config) -> int:
    """Return the bytes of the device that a process trains on."""
    if config.trainer.accelerator != "cpu" and torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

"""Steps of every server start: load the model, listen at an address, set up the log."""

from __future__ import annotations

import logging
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ag.commands.serve import ServeConfig
from ag.continuation import read_policy
from ag.engine.block_pool import Pool
from ag.errors import UserError, first_line
from ag.loading import load_model
from ag.model.base import check_device
from ag.serve.app import Service
from ag.serve.errors import error_location
from ag.serve.scheduler import Scheduler

logger = logging.getLogger("ag.serve")


def load_service(config: ServeConfig) -> Service:
    """Load the model and return its endpoints. A log line says what fits into the memory."""
    policy = read_policy(config)
    check_device(config.device)
    if torch.device(config.device).type == "cuda":
        config.check_memory(torch.cuda.get_device_properties(config.device).total_memory, config.device)
    model, tokenizer = load_model(
        policy.spec.path or config.gates, config.model, config.dtype, config.device, adapter=config.adapter
    )
    try:
        pool = Pool(model, config.memory_bytes, policy.kv_dtype)
    except UserError as error:
        raise UserError(f"memory={config.memory}: {error}") from error
    except RuntimeError as error:  # torch could not take it
        raise UserError(
            f"memory={config.memory}: {config.device} has not that much beside the weights of the model "
            f"({first_line(error)}); give less."
        ) from error
    # clients see the policy's text and must not see a path
    policy = replace(policy, spec=replace(policy.spec, path=None))
    scheduler = Scheduler(
        model,  # type: ignore[arg-type]  # a PeftModel forwards every attribute
        tokenizer,
        policy,
        pool,
        prefill_tokens=config.prefill_tokens,
        batch=config.batch,
        queue=config.queue,
        prompt_lookup=config.prompt_lookup,
    )
    service = Service(scheduler, config.name or Path(str(model.config.name_or_path)).name, config)
    capacity = scheduler.admission.capacity_text(pool.capacity, scheduler.context_length, scheduler.batch)
    logger.info("policy %s, %s", service.policy, capacity)
    return service


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address.

    Raises:
        UserError: when the address is not this machine's, or the port is taken.
    """
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise UserError(
            f"host={host} port={port}: {error.strerror}; expected an address of this machine and a free port; port=0 "
            "finds one."
        ) from None


def set_up_log() -> None:
    """Write the log on stderr: the start, a line for each request, and the end."""
    handler = logging.StreamHandler()
    handler.setFormatter(_LogFormatter("%(asctime)s %(message)s"))
    for name, level in (("ag.serve", logging.INFO), ("uvicorn", logging.WARNING)):
        logging.getLogger(name).setLevel(level)
        logging.getLogger(name).addHandler(handler)
        logging.getLogger(name).propagate = False


class _LogFormatter(logging.Formatter):
    """Formats log lines. An error appears as type and location, since its text may quote a prompt."""

    def formatException(self, info: Any) -> str:
        """Return an error's type and location; ``info`` is (type, error, traceback)."""
        return error_location(info[1])

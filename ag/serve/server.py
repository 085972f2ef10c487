"""The server process: from its start to the signal that ends it."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import uvicorn

from ag.commands.serve import KEY_VARIABLE, ServeConfig
from ag.config.command_line import Invocation
from ag.continuation import read_policy
from ag.engine.block_pool import Pool
from ag.errors import UserError, first_line
from ag.loading import load_model, named_base
from ag.model.base import check_device
from ag.serve.app import STOPPING, Service
from ag.serve.errors import error_location
from ag.serve.scheduler import Scheduler

logger = logging.getLogger("ag.serve")

DRAIN_SECONDS = 24.0  # for running completions after SIGTERM; orchestrators kill after 30
CLOSE_SECONDS = 2  # for open connections, after the last completion


def run(invocation: Invocation[ServeConfig]) -> int:
    """Serve until SIGTERM or Ctrl-C; returns the exit code."""
    config = replace(
        invocation.config, api_key=(invocation.config.api_key or os.environ.get(KEY_VARIABLE, "")).strip() or None
    )
    if invocation.dry_run:
        print(f"{read_policy(config).spec}: {config.memory_bytes} bytes, {config.host}:{config.port}")
        return 0
    _set_up_log()
    service = load_service(config)
    listener = listen(config.host, config.port)
    host, port = listener.getsockname()[:2]
    print(f"ag.serve: {service.name} at http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
    if not config.api_key and host not in ("127.0.0.1", "::1"):
        print(f"ag.serve: warning: host={host} without api_key: everybody who reaches it may ask", file=sys.stderr)
    options: dict[str, Any] = {"log_config": None, "access_log": False, "server_header": False, "lifespan": "on"}
    server = Server(service, uvicorn.Config(service.app(), timeout_graceful_shutdown=CLOSE_SECONDS, **options))
    server.run([listener])
    if service.scheduler.failed:  # as logged; a supervisor starts the server again
        return 1
    logger.info("stopped, %d requests cut", server.cut)
    return 0


def load_service(config: ServeConfig) -> Service:
    """Load the model and return its endpoints. A log line says what fits into the memory."""
    policy = read_policy(config)
    check_device(config.device)
    if torch.device(config.device).type == "cuda":
        config.check_memory(torch.cuda.get_device_properties(config.device).total_memory, config.device)
    gates = policy.spec.path or config.gates
    model, tokenizer = load_model(gates, config.model, config.dtype, config.device, adapter=config.adapter)
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
    limits = {name: getattr(config, name) for name in ("prefill_tokens", "batch", "queue", "prompt_lookup")}
    # a PeftModel forwards every attribute
    scheduler = Scheduler(model, tokenizer, policy, pool, **limits)  # type: ignore[arg-type]
    base_name, _ = named_base(gates, config.model)
    service = Service(scheduler, config.name or Path(os.path.expanduser(base_name)).absolute().name, config)
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


class _LogFormatter(logging.Formatter):
    """Formats log lines. An error appears as type and location, since its text may quote a prompt."""

    def formatException(self, info: Any) -> str:
        """Return an error's type and location; ``info`` is (type, error, traceback)."""
        return error_location(info[1])


def _set_up_log() -> None:
    """Write the log on stderr: the start, a line for each request, and the end."""
    handler = logging.StreamHandler()
    handler.setFormatter(_LogFormatter("%(asctime)s %(message)s"))
    for name, level in (("ag.serve", logging.INFO), ("uvicorn", logging.WARNING)):
        logging.getLogger(name).setLevel(level)
        logging.getLogger(name).addHandler(handler)
        logging.getLogger(name).propagate = False


class Server(uvicorn.Server):
    """A uvicorn server that finishes running completions before it ends."""

    def __init__(self, service: Service, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._scheduler, self._entrance = service.scheduler, service.entrance
        self._end: float | None = None  # time at which running completions are cut
        self._signal = ""  # name of the first signal, until it is logged
        self.cut = 0  # number of requests that were cut at the end

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Refuse new requests after SIGTERM or Ctrl-C. A second signal ends the server at once."""
        if self._end is not None:
            self.should_exit = self.force_exit = True
            self.cut = self._entrance.open
            return
        self._entrance.draining = True
        self._end, self._signal = time.monotonic() + DRAIN_SECONDS, signal.Signals(sig).name

    async def on_tick(self, counter: int) -> bool:
        """Return whether the server ends now. Uvicorn calls this ten times a second."""
        self.should_exit |= self._scheduler.failed
        if self._end is not None:
            if self._signal:  # not logged in the handler, which may interrupt the log
                logger.info("%s: %d open requests have %.0f s", self._signal, self._entrance.open, DRAIN_SECONDS)
                self._signal = ""
            is_over = time.monotonic() > self._end
            if is_over and not self.should_exit:
                self.cut = self._entrance.open
                self._scheduler.stop(STOPPING)
            self.should_exit |= is_over or not self._entrance.open
        return await super().on_tick(counter)

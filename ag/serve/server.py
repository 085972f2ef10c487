"""The server process: a model with its endpoints under uvicorn, from start to signal."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from ag.commands.serve import KEY_VARIABLE, ServeConfig
from ag.config.command_line import Invocation
from ag.continuation import load, read_policy
from ag.engine.block_pool import Pool
from ag.errors import UserError
from ag.serve.answers import where
from ag.serve.scheduler import Scheduler

try:
    import uvicorn

    from ag.serve.app import STOPPING, Service
except ModuleNotFoundError as error:
    missing = (error.name or "").partition(".")[0]
    raise UserError(f"ag.serve needs {missing}: pip install 'ag[serve]'.") from error

DRAIN_SECONDS = 24.0  # for running answers after SIGTERM; orchestrators kill after 30
CLOSE_SECONDS = 2  # for connections after the answers


def run(asked: Invocation[ServeConfig]) -> int:
    """Serve until SIGTERM or Ctrl-C; returns the exit code."""
    config = with_key(asked.config)
    chosen = read_policy(config)
    if asked.dry_run:
        print(f"{chosen.spec}: {config.memory_bytes} bytes, {config.host}:{config.port}")
        return 0
    if config.cluster is not None:
        from ag.serve.cluster import run_on

        return run_on(config.cluster, config)
    service = serving(config)
    log()
    listener = listen(config.host, config.port)
    host, port = listener.getsockname()[:2]
    announce(config, service.name, host, port)
    settings = uvicorn.Config(
        service.app(),
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        timeout_graceful_shutdown=CLOSE_SECONDS,
    )
    Server(service, settings).run([listener])
    return 0


class Server(uvicorn.Server):
    """A uvicorn server that finishes running answers before it ends.

    Args:
        service: whose app it serves.
        config: of uvicorn.
    """

    def __init__(self, service: Service, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._service = service
        self._end: float | None = None  # when running answers are cut

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Refuse new requests after SIGTERM or Ctrl-C; end at once after a second one."""
        if self._end is not None:
            self.should_exit = self.force_exit = True
            return
        self._service.draining = True
        self._end = time.monotonic() + DRAIN_SECONDS

    async def on_tick(self, counter: int) -> bool:
        """Return whether to end; uvicorn calls this ten times a second."""
        if self._end is not None:
            over = time.monotonic() > self._end
            if over:
                self._service.scheduler.stop(STOPPING)
            self.should_exit |= over or not self._service.open
        return await super().on_tick(counter)


def serving(config: ServeConfig) -> Service:
    """Load the model, and return its endpoints."""
    chosen = read_policy(config)
    model, tokenizer = load(config, chosen.spec.path or config.gates)
    scheduler = Scheduler(
        model,  # type: ignore[arg-type]  # a PeftModel forwards every attribute
        tokenizer,
        chosen,
        Pool(model, config.memory_bytes, chosen.kv_dtype),
        prefill_tokens=config.prefill_tokens,
        batch=config.batch,
        queue=config.queue,
        prompt_lookup=config.prompt_lookup,
    )
    return Service(scheduler, config.name or Path(str(model.config.name_or_path)).name, config)


def with_key(config: ServeConfig) -> ServeConfig:
    """Return a configuration with the key of the environment, if it has none of its own."""
    return replace(config, api_key=config.api_key or os.environ.get(KEY_VARIABLE))


def announce(config: ServeConfig, name: str, host: str, port: int) -> None:
    """Print the address, and a warning where other machines reach a server without a key."""
    print(f"ag.serve: {name} at http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
    if not config.api_key and host not in ("127.0.0.1", "::1"):
        print(f"ag.serve: warning: host={host} without api_key: everybody who reaches it may ask", file=sys.stderr)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address.

    Raises:
        UserError: when this machine does not have the address, or the port is taken.
    """
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise UserError(
            f"host={host} port={port}: {error.strerror}; expected an address of this machine and a free port; port=0 "
            "finds one."
        ) from None


def log() -> None:
    """Write a line on stderr for each request."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Line("%(asctime)s %(message)s"))
    for name, level in (("ag.serve", logging.INFO), ("uvicorn", logging.WARNING)):
        logging.getLogger(name).setLevel(level)
        logging.getLogger(name).addHandler(handler)
        logging.getLogger(name).propagate = False


class _Line(logging.Formatter):
    """A log line; an error appears as its type and place, since its text may quote a prompt."""

    def formatException(self, info: Any) -> str:
        """Return the place of an error, given as its type, itself and its traceback."""
        return where(info[1])

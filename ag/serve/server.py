"""The server process: endpoints under uvicorn, from start to signal."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from dataclasses import replace
from types import FrameType

import uvicorn

from ag.commands.serve import KEY_VARIABLE, ServeConfig
from ag.config.command_line import Invocation
from ag.continuation import read_policy
from ag.serve.app import STOPPING, Service
from ag.serve.start import listen, load_service, set_up_log

logger = logging.getLogger("ag.serve")

DRAIN_SECONDS = 24.0  # for running completions after SIGTERM; orchestrators kill after 30
CLOSE_SECONDS = 2  # for open connections, after the last completion


def run(invocation: Invocation[ServeConfig]) -> int:
    """Serve until SIGTERM or Ctrl-C; returns the exit code."""
    config = replace(invocation.config, api_key=invocation.config.api_key or os.environ.get(KEY_VARIABLE))
    policy = read_policy(config)
    if invocation.dry_run:
        print(f"{policy.spec}: {config.memory_bytes} bytes, {config.host}:{config.port}")
        return 0
    set_up_log()
    service = load_service(config)
    listener = listen(config.host, config.port)
    host, port = listener.getsockname()[:2]
    print(f"ag.serve: {service.name} at http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
    if not config.api_key and host not in ("127.0.0.1", "::1"):
        print(f"ag.serve: warning: host={host} without api_key: everybody who reaches it may ask", file=sys.stderr)
    settings = uvicorn.Config(
        service.app(),
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        timeout_graceful_shutdown=CLOSE_SECONDS,
    )
    server = Server(service, settings)
    server.run([listener])
    logger.info("stopped, %d requests cut", server.cut)
    return 0


class Server(uvicorn.Server):
    """A uvicorn server that finishes running completions before it ends.

    Args:
        service: has the app to serve.
        config: uvicorn's configuration.
    """

    def __init__(self, service: Service, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._scheduler, self._entrance = service.scheduler, service.entrance
        self._end: float | None = None  # time at which running completions are cut
        self._signal = ""  # name of the first signal, until it is logged
        #: Number of requests that were cut at the end.
        self.cut = 0

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

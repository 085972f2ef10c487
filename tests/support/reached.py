"""The server in this process behind a socket, for clients that make connections of their own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from ag.commands.serve import ServeConfig
from ag.serve import Scheduler
from ag.serve.app import Service
from ag.serve.server import listen


@contextmanager
def reached(scheduler: Scheduler, **limits: Any) -> Iterator[str]:
    """Serve a scheduler's app at a free port in a thread; gives the address."""
    service = Service(scheduler, "tiny", ServeConfig(**limits))
    server = uvicorn.Server(uvicorn.Config(service.app(), log_config=None, lifespan="on"))
    with listen("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join(10)

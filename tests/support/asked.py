"""The server's app in this process, asked by OpenAI's client, by plain HTTP, and by connections that may break off."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
from starlette.testclient import TestClient
from starlette.types import Message

from ag.commands.serve import ServeConfig
from ag.serve import Scheduler
from ag.serve.app import Service

KEY = "a key of a test"
HEADERS = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}


@contextmanager
def asked(scheduler: Scheduler, **limits: Any) -> Iterator[tuple[openai.OpenAI, TestClient, Service]]:
    """OpenAI's client of a scheduler's app, a plain one with its key, and the service itself."""
    service = Service(scheduler, "tiny", ServeConfig(api_key=KEY, **limits))
    with TestClient(service.app(), headers=HEADERS) as http:
        client = openai.OpenAI(base_url="http://testserver/v1", api_key=KEY, max_retries=0, http_client=http)
        yield client, http, service


class Connection:
    """A connection to an app, which sees what is put into it, and keeps what the app says in ``sent``.

    Args:
        app: of ASGI.
        body: of the request, as far as it comes at first.
        whole: whether that is all of it.
        reads: whether what the app says is read at once, or when ``reads`` is set.
    """

    def __init__(self, app: Any, body: dict[str, Any] | bytes, whole: bool = True, reads: bool = True) -> None:
        self.sent: list[Message] = []
        self.reads = asyncio.Event()
        if reads:
            self.reads.set()
        self._events: asyncio.Queue[Message] = asyncio.Queue()
        headers = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
        scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
        scope |= {"query_string": b"", "asgi": {"version": "3.0", "spec_version": "2.4"}}
        self.come(body if isinstance(body, bytes) else json.dumps(body).encode(), whole)
        self.answer = asyncio.ensure_future(app(scope, self._events.get, self._send))

    def come(self, body: bytes, whole: bool) -> None:
        """Let a part of the body come."""
        self._events.put_nowait({"type": "http.request", "body": body, "more_body": not whole})

    def leave(self) -> None:
        """Break off."""
        self._events.put_nowait({"type": "http.disconnect"})

    @property
    def status(self) -> int:
        """What the app answered."""
        return int(self.sent[0]["status"])

    async def _send(self, message: Message) -> None:
        self.sent.append(message)
        await self.reads.wait()

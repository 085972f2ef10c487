"""What every request passes before its endpoint: its id, the key, and the limits of requests and bodies."""

from __future__ import annotations

import asyncio
import hmac
import re
import uuid
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from fastapi.security import HTTPBearer
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ag.commands.serve import ServeConfig
from ag.serve.errors import ApiError, refusal, request_id
from ag.serve.scheduler import QueueFullError

BEARER = HTTPBearer(auto_error=False)  # None for a missing key: the refusal is in OpenAI's form
OPEN_PATHS = ("/", "/health")  # need no key; the script of the page sends it
BODY_SECONDS = 30  # longest time for a body to arrive
READ_MULTIPLE = 16  # a longer body is read up to this multiple of the limit: then its client sees the refusal


@dataclass
class Entrance:
    """Checks requests, and counts the open ones. One is open until its response was sent or its client has left."""

    config: ServeConfig  # has the key, and the limit of bodies
    max_open: int  # largest number of open requests
    draining: bool = False  # True while the server stops: new requests are refused
    open: int = 0  # number of open requests

    def guard(self, app: ASGIApp) -> ASGIApp:
        """Return an app that answers the requests that may pass, and refuses the others.

        Each request has an id in the log, and its response has it in ``X-Request-Id``: the client's id, or a new id.
        """

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                return await app(scope, receive, send)
            http, has_started = Request(scope, receive), False
            new_id = http.headers.get("x-request-id") or uuid.uuid4().hex
            request_id.set(re.sub("[^!-~]", "?", new_id)[:64])  # a client may send any characters

            async def send_with_id(message: Message) -> None:
                nonlocal has_started
                if message["type"] == "http.response.start":
                    has_started = True
                    message["headers"] = [*message["headers"], (b"x-request-id", new_id.encode("latin-1"))]
                await send(message)

            try:
                await self._check_key(http)
                if http.method == "POST":
                    await self._post(app, http, send_with_id)
                else:
                    await app(scope, receive, send_with_id)
            except Exception as error:
                if has_started:
                    raise
                response = await refusal(http, error)
                await response(scope, receive, send_with_id)

        return answer

    async def _check_key(self, http: Request) -> None:
        if not self.config.api_key or http.scope["path"] in OPEN_PATHS:
            return
        bearer, key = await BEARER(http), self.config.api_key.encode()
        if bearer is None or not hmac.compare_digest(bearer.credentials.strip().encode("latin-1"), key):
            message = "expected the header Authorization: Bearer KEY with this server's key."
            raise ApiError(401, message, code="invalid_api_key")

    async def _post(self, app: ASGIApp, http: Request, send: Send) -> None:
        """Let an app answer a request with a body, and cancel that if the client disconnects."""
        if self.open >= self.max_open:
            raise QueueFullError(f"{self.max_open} requests are open, the limit of this server: try again later.")
        self.open += 1
        tasks: list[asyncio.Future[Any]] = []
        try:
            messages: list[Message] = [{"type": "http.request", "body": await self._body(http)}]

            async def receive() -> Message:
                return messages.pop() if messages else await http.receive()

            answering = asyncio.ensure_future(app(http.scope, receive, send))
            leaving = asyncio.ensure_future(http.receive())  # after the body only the disconnect comes
            tasks += [answering, leaving]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
        finally:
            self.open -= 1
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _body(self, http: Request) -> bytes:
        """Read the body of a request.

        Raises:
            ApiError: when the server stops, or the body is not JSON, too long or too slow.
        """
        if self.draining:
            raise ApiError(503, "the server is stopping: ask another one.", code="draining")
        if http.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            # web forms of foreign pages cannot send this type
            raise ApiError(415, "expected the header Content-Type: application/json.")
        limit = self.config.body_bytes
        body, length = bytearray(), 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part in http.stream():
                    length += len(part)
                    if length <= limit:
                        body += part
                    elif length > READ_MULTIPLE * limit:
                        break
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {BODY_SECONDS} seconds.") from None
        if length > limit:
            raise ApiError(413, f"the body has more than {limit} bytes: expected at most {limit}.")
        return bytes(body)

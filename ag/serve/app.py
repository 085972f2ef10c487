"""The endpoints of OpenAI's API, the live page and Prometheus, over a scheduler in this process or over replicas."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict
from importlib.resources import files

from fastapi import APIRouter, Depends, FastAPI
from fastapi import Request as Http
from fastapi.responses import JSONResponse, Response
from openai.types import Model
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from ag.commands.serve import ServeConfig
from ag.engine.block_pool import PoolFullError
from ag.engine.policy import Policy
from ag.errors import UserError
from ag.serve.answers import Answers, WaitedError, where
from ag.serve.metrics import Metrics, Status, as_text
from ag.serve.prompts import Prompts
from ag.serve.protocol import ApiError, Asked, ChatAsked, CompletionAsked, Form, parse
from ag.serve.scheduler import Busy, Scheduler, StoppedError

logger = logging.getLogger("ag.serve")

BODY_SECONDS = 30  # longest time for a body to arrive
RETRY_SECONDS = 5  # of Retry-After
STOPPING = "the server is stopping: ask again later, or another one."
READ_MULTIPLE = 16  # a body up to this many times too long is read and dropped, so that its client sees the refusal
#: The start of a stream of server-sent events, which proxies must not buffer.
EVENTS: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ],
}
#: The parameters of a request, by path.
ASKED: dict[str, type[Asked]] = {"/v1/chat/completions": ChatAsked, "/v1/completions": CompletionAsked}


class Endpoints(ABC):
    """The endpoints of one model.

    Args:
        name: of the model, for clients.
        policy: text of the policy, for the live page.
        body: most bytes of a request's body.
        most: most open requests: bodies that arrive and answers that are generated or sent.
        api_key: the key that clients have to send; None means that no key is needed.
    """

    def __init__(self, name: str, policy: str, body: int, most: int, api_key: str | None) -> None:
        self.name, self.policy, self.api_key = name, policy, api_key
        self.began = int(time.time())
        #: True while the server stops: new requests are refused.
        self.draining = False
        #: Open requests for answers.
        self.open = 0
        self._longest_body, self._most, self._page = body, most, page()

    def app(self) -> FastAPI:
        """Return the app; :meth:`lifespan` runs around it."""
        app = FastAPI(lifespan=self.lifespan, openapi_url=None)  # its pages load scripts from other sites
        guarded = APIRouter(dependencies=[Depends(self._check_key)])
        for path in ASKED:
            guarded.add_api_route(path, self.answer, methods=["POST"])
        guarded.add_api_route("/v1/models", self.models, methods=["GET"])
        guarded.add_api_route("/v1/models/{name:path}", self.models, methods=["GET"])
        guarded.add_api_route("/metrics", self.metrics, methods=["GET"])
        guarded.add_api_route("/live", self.live, methods=["GET"])
        app.include_router(guarded)
        app.add_api_route("/health", self.health, methods=["GET"])
        app.add_api_route("/", self.page, methods=["GET"])  # its script sends the key
        app.add_exception_handler(ApiError, _refuse)
        app.add_exception_handler(HTTPException, _refuse)
        return app

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Run code before the first request and after the last one."""
        yield

    # ---- the part of a scheduler or of replicas

    @abstractmethod
    def ask(self, path: str, body: bytes) -> AsyncGenerator[Message]:
        """Answer the body of a request: yield ASGI messages, a start and then parts of a body. Errors are messages."""

    @abstractmethod
    async def status(self) -> Status:
        """Return the status of the scheduler or of all replicas.

        Raises:
            ApiError: 503, when no replica answers.
        """

    # ---- status

    async def health(self) -> Response:
        """Return 200 while requests are accepted, else 503."""
        try:
            word = self._word(await self.status())
        except ApiError:
            word = "failed"
        return JSONResponse({"status": word}, 200 if word == "ok" else 503)

    async def page(self) -> Response:
        """Return the live page."""
        text, rules = self._page
        return Response(text, media_type="text/html", headers={"Content-Security-Policy": rules})

    async def live(self) -> Response:
        """Return the figures of the live page."""
        status = await self.status()
        now, names = status.snapshot, {"model": self.name, "policy": self.policy, "status": self._word(status)}
        figures = asdict(now) | asdict(now.counts) | names | {"counts": None, "ended": now.counts.ended.total()}
        return JSONResponse(figures | {"seconds": time.monotonic()})

    async def metrics(self) -> Response:
        """Return the figures for Prometheus."""
        return Response(as_text((await self.status()).figures), media_type=CONTENT_TYPE_LATEST)

    async def models(self, name: str | None = None) -> Response:
        """Return the model of this name, or a list of the only model."""
        model = Model(id=self.name, created=self.began, object="model", owned_by="ag").model_dump()
        if name is None:
            return JSONResponse({"object": "list", "data": [model]})
        self.check_model(name)
        return JSONResponse(model)

    def _word(self, status: Status) -> str:
        return "failed" if not status.works else "draining" if self.draining else "ok"

    # ---- requests

    async def answer(self, http: Http) -> Response:
        """Answer a chat or a text."""
        if self.open >= self._most:
            raise api_error(Busy(f"{self._most} requests are open, the most that this server takes: try again later."))
        self.open += 1
        try:
            return MessagesResponse(self.ask(http.url.path, await self._body(http)), self._close)
        except BaseException as error:
            self._close()
            if isinstance(error, ClientDisconnect):
                return Response(status_code=499)  # no client reads it
            raise

    def _close(self) -> None:
        self.open -= 1

    def check_model(self, name: str) -> None:
        """Refuse a request for another model."""
        if name != self.name:
            raise ApiError(404, f"model={name[:200]!r}: expected {self.name!r}.", "model", "model_not_found")

    async def _check_key(self, http: Http) -> None:
        if self.api_key is None:
            return
        scheme, _, given = http.headers.get("authorization", "").partition(" ")
        right = hmac.compare_digest(given.strip().encode("latin-1"), self.api_key.encode())
        if not right or scheme.lower() != "bearer":
            raise ApiError(
                401, "expected the header Authorization: Bearer KEY with this server's key.", code="invalid_api_key"
            )

    async def _body(self, http: Http) -> bytes:
        """Read the body of a request for an answer.

        Raises:
            ApiError: when the server stops, or the body is not JSON, too long or too slow.
        """
        if self.draining:
            raise ApiError(503, "the server is stopping: ask another one.", code="draining", retry=RETRY_SECONDS)
        if http.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "expected the header Content-Type: application/json.")  # forms of other sites lack it
        limit = self._longest_body
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
            raise ApiError(413, f"the body has more than {limit} bytes, which is the most that is read.")
        return bytes(body)


class MessagesResponse(Response):
    """A response made of ASGI messages; a disconnect of the client ends their generator.

    Args:
        messages: a start and parts of a body.
        close: is called when all are sent, or the client has disconnected.
    """

    def __init__(self, messages: AsyncGenerator[Message], close: Callable[[], None]) -> None:
        super().__init__()
        self._messages, self._end = messages, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the messages."""

        async def disconnect() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        sending, leaving = asyncio.ensure_future(self._send(send)), asyncio.ensure_future(disconnect())
        try:
            await asyncio.wait([sending, leaving], return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            sending.cancel()
            await asyncio.wait([sending])
            self._end()
        if not sending.cancelled():
            sending.result()

    async def _send(self, send: Send) -> None:
        async with aclosing(self._messages) as messages:
            async for message in messages:
                await send(message)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Service(Endpoints):
    """The endpoints of a scheduler in this process.

    Args:
        scheduler: generates the answers.
        name: of the model, for clients.
        limits: limits of requests.
        api_key: the key that clients have to send; None means that no key is needed.
    """

    def __init__(self, scheduler: Scheduler, name: str, limits: ServeConfig, api_key: str | None = None) -> None:
        most = 2 * (scheduler.queue + scheduler.batch)
        super().__init__(name, policy_text(scheduler.policy), limits.body_bytes, most, api_key)
        self.prompts = Prompts(scheduler, limits)
        self.scheduler, self._metrics = scheduler, Metrics(scheduler.snapshot)
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)
        self._encoder = ThreadPoolExecutor(1, "encoder")  # one thread, as a tokenizer cannot encode two texts at once

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Start and stop the scheduler's thread."""
        self.start()
        yield
        self.scheduler.stop(STOPPING)
        await asyncio.to_thread(self._thread.join, 2)
        self._encoder.shutdown(wait=False, cancel_futures=True)

    def start(self) -> None:
        """Start the scheduler's thread."""
        self._thread.start()

    def _run(self) -> None:
        try:
            self.scheduler.run()
        except Exception as error:
            logger.error("the scheduler failed: %s", where(error))

    async def status(self) -> Status:
        """Return the status of the scheduler."""
        return Status(self.scheduler.snapshot(), [*self._metrics.collect()], not self.scheduler.failed)

    async def ask(self, path: str, body: bytes) -> AsyncGenerator[Message]:
        """Answer the body of a request: yield ASGI messages, a start and then parts of a body. Errors are messages."""
        answers: Answers | None = None
        try:
            asked: Asked = parse(ASKED[path], body)
            self.check_model(asked.model)
            request = await asyncio.get_running_loop().run_in_executor(self._encoder, self.prompts, asked)
            answers = Answers(request, self.scheduler, self._metrics.timed)
            form = Form(asked, self.scheduler.vocabulary, self.prompts.divider(asked, request.tokens))
            if asked.stream:
                yield EVENTS
                async for event in self._events(answers, form):
                    yield {"type": "http.response.body", "body": event.encode(), "more_body": True}
            else:
                whole = form.whole(await answers.whole(), len(request.tokens), answers.written)
                for message in as_messages(Response(whole, media_type="application/json")):
                    yield message
        except Exception as error:
            for message in as_messages(refusal(error)):
                yield message
        finally:
            if answers is not None:
                answers.close()

    async def _events(self, answers: Answers, form: Form) -> AsyncIterator[str]:
        """Yield the server-sent events of a stream."""
        try:
            for part in form.begin():
                yield f"data: {part}\n\n"
            async for piece in answers:
                yield ": waiting\n\n" if piece is None else f"data: {form.chunk(piece)}\n\n"
            if form.asked.stream_options.include_usage:
                yield f"data: {form.last(len(answers.request.tokens), answers.written)}\n\n"
            yield "data: [DONE]\n\n"
        except Exception as error:
            yield error_event(error)


# ---- errors


async def _refuse(http: Http, error: Exception) -> Response:
    return refusal(error)


def refusal(error: Exception) -> Response:
    """Return the response for an error, in OpenAI's form."""
    found = api_error(error)
    headers = {} if found.retry is None else {"Retry-After": str(found.retry)}
    if found.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(found.body, found.status, headers)


def error_event(error: Exception) -> str:
    """Return the event for an error inside a stream."""
    return f"data: {json.dumps(api_error(error).body)}\n\n"


def api_error(error: Exception) -> ApiError:
    """Return the error that a client sees."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, f"{error.detail}.")
    if isinstance(error, Busy):
        return ApiError(429, str(error), code="queue_full", retry=RETRY_SECONDS)
    if isinstance(error, StoppedError | WaitedError | PoolFullError):
        return ApiError(503, str(error), retry=RETRY_SECONDS)
    if isinstance(error, UserError):
        return ApiError(400, str(error))
    logger.error("a request failed: %s", where(error))
    return ApiError(500, "the server failed at this request.")


def as_messages(response: Response) -> list[Message]:
    """Return a response as ASGI messages."""
    start = {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers}
    return [start, {"type": "http.response.body", "body": bytes(response.body), "more_body": True}]


# ---- the live page


def policy_text(chosen: Policy) -> str:
    """Return the text of a policy with its budget."""
    return str(chosen.spec) + (f" {chosen.budget}" if chosen.budget else "")


def page() -> tuple[str, str]:
    """Return the live page, and a Content-Security-Policy that allows its own script and style only."""
    text = files("ag.serve").joinpath("page.html").read_text(encoding="utf-8")
    rules = ["default-src 'none'", "connect-src 'self'", "img-src data:", "base-uri 'none'", "form-action 'none'"]
    for tag in ("style", "script"):
        (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        rules.append(f"{tag}-src 'sha256-{digest}'")
    return text, "; ".join([*rules, "frame-ancestors 'none'"])

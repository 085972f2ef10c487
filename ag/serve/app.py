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
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import asdict
from importlib.resources import files
from typing import Annotated, Any, cast

from fastapi import APIRouter, Depends, FastAPI
from fastapi import Request as Http
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from openai.types import Model
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ag.commands.serve import ServeConfig
from ag.engine.block_pool import PoolFullError
from ag.errors import UserError
from ag.serve.answers import CompletionStream, error_location, request_id
from ag.serve.metrics import Metrics, Status, prometheus_text
from ag.serve.prompts import REQUEST_TYPES, RequestBuilder, policy_text
from ag.serve.protocol import ApiError, CompletionWriter, parse
from ag.serve.scheduler import QueueFullError, QueueTimeoutError, Scheduler, StoppedError
from ag.versions import versions

logger = logging.getLogger("ag.serve")

#: The key in ``Authorization: Bearer KEY``. None: the header has none.
ClientKey = Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]
BODY_SECONDS = 30  # longest time for a body to arrive
RETRY = {"Retry-After": "5"}  # seconds
STOPPING = "the server is stopping: ask again later, or another one."
READ_MULTIPLE = (
    16  # a longer body is read and dropped up to this multiple of the limit: then its client sees the refusal
)
#: Status and code of errors; the first type that matches applies.
STATUSES: Sequence[tuple[Any, int, str | None]] = (
    (QueueFullError, 429, "queue_full"),
    ((StoppedError, QueueTimeoutError, PoolFullError), 503, None),
    (UserError, 400, None),
    (ClientDisconnect, 499, None),  # nobody reads it
)
#: Headers of a stream of server-sent events; proxies must not buffer it.
EVENTS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class Endpoints(ABC):
    """The endpoints of one model.

    Args:
        name: the model's name, for clients.
        policy: text of the policy, for the live page.
        config: the server's configuration: limits of requests, and the key that clients must send.
        max_open: largest number of open requests. A request is open until its response was sent.
    """

    def __init__(self, name: str, policy: str, config: ServeConfig, max_open: int) -> None:
        self.name, self.policy, self.config = name, policy, config
        self.started_at = int(time.time())
        #: True while the server stops: new requests are refused.
        self.draining = False
        #: Number of open requests.
        self.open = 0
        self._max_open, self._page = max_open, page()

    def app(self) -> FastAPI:
        """Return the app; :meth:`lifespan` runs around it."""
        app = FastAPI(lifespan=self.lifespan, openapi_url=None)  # FastAPI's own pages load scripts from other sites
        guarded = APIRouter(dependencies=[Depends(self._check_key)])
        for path in REQUEST_TYPES:
            guarded.add_api_route(path, self.answer, methods=["POST"], dependencies=[Depends(self._count_open)])
        guarded.add_api_route("/version", self.version)
        guarded.add_api_route("/v1/models", self.models)
        guarded.add_api_route("/v1/models/{name:path}", self.models)
        guarded.add_api_route("/metrics", self.metrics)
        guarded.add_api_route("/live", self.live)
        app.include_router(guarded)
        app.add_api_route("/health", self.health)
        app.add_api_route("/", self.page)  # its script sends the key
        app.add_middleware(with_request_ids)
        if self.config.origins:  # the outermost middleware, since it writes into the headers
            allowed: Any = {"allow_origins": self.config.origins, "expose_headers": ["X-Request-Id"]}
            app.add_middleware(CORSMiddleware, allow_methods=["*"], allow_headers=["*"], **allowed)
        for kind in (ApiError, HTTPException, UserError, ClientDisconnect):
            app.add_exception_handler(kind, _refuse)
        return app

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Run code before the first request and after the last one."""
        yield

    # ---- defined by a scheduler or by replicas

    @abstractmethod
    def ask(self, path: str, body: bytes) -> AsyncGenerator[Message | bytes]:
        """Answer a request's body: yield the start of the response (ASGI), then the parts of its body.

        Raises:
            Exception: any error; :meth:`ask_or_refuse` sends it to the client.
        """

    @abstractmethod
    async def status(self) -> Status:
        """Return the status of the scheduler or of all replicas.

        Raises:
            ApiError: 503, when no replica answers.
        """

    # ---- status

    async def version(self) -> Response:
        """Return the version of the package."""
        return JSONResponse({"version": versions("ag")["ag"]})

    async def health(self) -> Response:
        """Return 200 while requests are accepted, else 503."""
        try:
            state = self._state(await self.status())
        except ApiError:
            state = "failed"
        return JSONResponse({"status": state}, 200 if state == "ok" else 503)

    async def page(self) -> Response:
        """Return the live page."""
        text, rules = self._page
        return Response(text, media_type="text/html", headers={"Content-Security-Policy": rules})

    async def live(self) -> Response:
        """Return the figures of the live page."""
        status = await self.status()
        snapshot, names = status.snapshot, {"model": self.name, "policy": self.policy, "status": self._state(status)}
        figures = (
            asdict(snapshot)
            | asdict(snapshot.counts)
            | names
            | {"counts": None, "num_ended": snapshot.counts.num_ended.total(), "memory": asdict(snapshot.memory)}
        )
        return JSONResponse(figures | {"seconds": time.monotonic()})

    async def metrics(self) -> Response:
        """Return the figures for Prometheus."""
        return Response(prometheus_text((await self.status()).metrics), media_type=CONTENT_TYPE_LATEST)

    async def models(self, name: str | None = None) -> Response:
        """Return the model of this name. None: a list with the server's model."""
        model = Model(id=self.name, created=self.started_at, object="model", owned_by="ag").model_dump()
        with suppress(ApiError):  # unknown until a replica runs
            model["max_model_len"] = (await self.status()).context_length
        if name is None:
            return JSONResponse({"object": "list", "data": [model]})
        self.check_model(name)
        return JSONResponse(model)

    def _state(self, status: Status) -> str:
        return "failed" if not status.is_healthy else "draining" if self.draining else "ok"

    # ---- requests

    async def answer(self, http: Http) -> Response:
        """Answer a request of any path in :data:`REQUEST_TYPES`."""
        return PartsResponse(cast("AsyncIterator[bytes]", self.ask_or_refuse(http.url.path, await self._body(http))))

    async def ask_or_refuse(self, path: str, body: bytes) -> AsyncGenerator[Message | bytes]:
        """Yield the parts of :meth:`ask`. An error becomes a refusal at the start, and an event of the stream later."""
        has_started = False
        try:
            async with aclosing(self.ask(path, body)) as parts:
                async for part in parts:
                    has_started = True
                    yield part
        except Exception as error:
            if has_started:
                yield f"data: {json.dumps(_log_refusal(error, 'broken off').body)}\n\n".encode()
            else:
                response = refusal(error)
                yield start_message(response)
                yield bytes(response.body)

    async def _count_open(self) -> AsyncIterator[None]:
        """Count a request as open until its response is sent, or its client has disconnected."""
        if self.open >= self._max_open:
            raise QueueFullError(f"{self._max_open} requests are open, the limit of this server: try again later.")
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1

    def check_model(self, name: str) -> None:
        """Refuse a request for another model; "" means this model."""
        if name not in ("", self.name):
            raise ApiError(404, f"model={name[:200]!r}: expected {self.name!r}.", "model", "model_not_found")

    async def _check_key(self, sent: ClientKey) -> None:
        if not self.config.api_key:
            return
        client_key = "" if sent is None else sent.credentials.strip()
        if not hmac.compare_digest(client_key.encode("latin-1"), self.config.api_key.encode()):
            raise ApiError(
                401, "expected the header Authorization: Bearer KEY with this server's key.", code="invalid_api_key"
            )

    async def _body(self, http: Http) -> bytes:
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


class PartsResponse(StreamingResponse):
    """A response from the parts of :meth:`Endpoints.ask_or_refuse`. A client's disconnect closes their generator."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the parts. Under ASGI 2.4 Starlette would notice a disconnect only at the next part."""
        await super().__call__({**scope, "asgi": {"spec_version": "2.3"}}, receive, send)

    async def stream_response(self, send: Send) -> None:
        """Send the parts."""
        async with aclosing(cast("AsyncGenerator[Any]", self.body_iterator)) as parts:
            await send(await anext(parts))
            async for part in parts:
                await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def with_request_ids(app: ASGIApp) -> ASGIApp:
    """Return an app that adds ``X-Request-Id`` to each response: the request's id, or a new id.

    The log has the id too.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        client_id = Headers(scope=scope).get("x-request-id") if scope["type"] == "http" else None
        new_id = client_id or uuid.uuid4().hex
        header = (b"x-request-id", new_id.encode("latin-1"))
        request_id.set(re.sub("[^!-~]", "?", new_id)[:64])  # a client may send any characters

        async def add(message: Message) -> None:
            is_start = message["type"] == "http.response.start"
            await send({**message, "headers": [*message["headers"], header]} if is_start else message)

        await app(scope, receive, add)

    return answer


class Service(Endpoints):
    """The endpoints of a scheduler in this process.

    Args:
        scheduler: generates the completions.
        name: the model's name, for clients.
        config: the server's configuration.
    """

    def __init__(self, scheduler: Scheduler, name: str, config: ServeConfig) -> None:
        max_open = 2 * (scheduler.queue + scheduler.batch)
        super().__init__(name, policy_text(scheduler.policy), config, max_open)
        self.prompts = RequestBuilder(scheduler, config)
        self.scheduler, self._metrics = scheduler, Metrics(scheduler.snapshot, scheduler.context_length)
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)
        self._encoder = ThreadPoolExecutor(1, "encoder")  # one thread: a tokenizer encodes one text at a time

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
            logger.error("the scheduler failed: %s", error_location(error))

    async def status(self) -> Status:
        """Return the status of the scheduler."""
        return Status(
            self.scheduler.snapshot(),
            [*self._metrics.collect()],
            not self.scheduler.failed,
            self.prompts.context_length,
        )

    async def ask(self, path: str, body: bytes) -> AsyncGenerator[Message | bytes]:
        """Answer a request by the scheduler."""
        params = parse(REQUEST_TYPES[path], body)
        self.check_model(params.model)
        encoded = await asyncio.get_running_loop().run_in_executor(self._encoder, self.prompts, params)
        if isinstance(encoded, dict):
            response: Response = JSONResponse(encoded)
            yield start_message(response)
            yield bytes(response.body)
            return
        writer = CompletionWriter(
            params, self.scheduler.vocabulary, self.prompts.output_parser(params, encoded[0].request.tokens)
        )
        try:
            completions = CompletionStream(encoded, self.scheduler, self._metrics)
        except (QueueFullError, StoppedError):
            raise
        except UserError as error:  # too long for the pool
            raise ApiError(
                400, str(error), params.token_limit[0] if params.token_limit else params.prompt_param
            ) from None
        try:
            if params.stream:
                yield start_message(StreamingResponse((), headers=EVENTS))
                yield writer.start_events().encode()
                async for delta in completions:
                    yield b": waiting\n\n" if delta is None else writer.delta_event(delta).encode()
                yield writer.end_events(completions.usage).encode()
            else:
                response = Response(
                    writer.full_json(await completions.collect(), completions.usage), media_type="application/json"
                )
                yield start_message(response)
                yield bytes(response.body)
        finally:
            completions.close()


# ---- errors


async def _refuse(http: Http, error: Exception) -> Response:
    return refusal(error)


def refusal(error: Exception) -> Response:
    """Return the response for an error, in OpenAI's form."""
    shown = _log_refusal(error)
    headers = {401: {"WWW-Authenticate": "Bearer"}, 429: RETRY, 503: RETRY}
    return JSONResponse(shown.body, shown.status, headers.get(shown.status))


def _log_refusal(error: Exception, action: str = "refused") -> ApiError:
    """Log that a request failed, without any of its text, and return the error that its client sees."""
    shown = api_error(error)
    reason = shown.code or shown.body["error"]["type"]
    logger.info("%s: %s with %d %s", request_id.get(), action, shown.status, reason)
    return shown


def api_error(error: Exception) -> ApiError:
    """Return the error that a client sees."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, f"{error.detail}.")
    for kind, status, code in STATUSES:
        if isinstance(error, kind):
            return ApiError(status, str(error), code=code)
    logger.error("a request failed: %s", error_location(error))
    return ApiError(500, "the server failed at this request.")


def start_message(response: Response) -> Message:
    """Return the ASGI message with the status and the headers of a response."""
    return {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers}


# ---- the live page


def page() -> tuple[str, str]:
    """Return the live page, and a Content-Security-Policy that allows only its own script and style."""
    text = files("ag.serve").joinpath("page.html").read_text(encoding="utf-8")
    rules = ["default-src 'none'", "connect-src 'self'", "img-src data:", "base-uri 'none'", "form-action 'none'"]
    for tag in ("style", "script"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        rules.append(f"{tag}-src 'sha256-{digest}'")
    return text, "; ".join([*rules, "frame-ancestors 'none'"])

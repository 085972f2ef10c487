"""The server's app: the endpoints of OpenAI's API, the live page and Prometheus, over a scheduler."""

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
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict
from importlib.resources import files
from typing import Annotated, Any, TypeVar

from fastapi import Depends, FastAPI
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.security.utils import get_authorization_scheme_param
from openai.types import Model
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as Http
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ag.commands.serve import ServeConfig
from ag.errors import UserError
from ag.serve.answers import CompletionStream
from ag.serve.errors import ApiError, error_location, log_refusal, new_app, refusal, request_id
from ag.serve.metrics import Metrics
from ag.serve.prompts import RequestBuilder, policy_text
from ag.serve.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationParams,
    RequestBody,
    TokenizeRequest,
)
from ag.serve.scheduler import QueueFullError, Scheduler, StoppedError
from ag.serve.writer import CompletionWriter
from ag.versions import versions

logger = logging.getLogger("ag.serve")

OPEN_PATHS = ("/", "/health")  # need no key; the script of the page sends it
BODY_SECONDS = 30  # longest time for a body to arrive
STOPPING = "the server is stopping: ask again later, or another one."
READ_MULTIPLE = 16  # a longer body is read up to this multiple of the limit: then its client sees the refusal
#: Headers of a stream of server-sent events; proxies must not buffer it.
EVENTS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


async def _at_end() -> AsyncIterator[ExitStack]:
    """Yield a stack of calls, which are made when a response was sent or its client has left."""
    with ExitStack() as stack:
        yield stack


T = TypeVar("T")
AtEnd = Annotated[ExitStack, Depends(_at_end)]


class Service:
    """The endpoints of one model.

    Args:
        scheduler: generates the completions.
        name: the model's name, for clients.
        config: the server's configuration.
    """

    def __init__(self, scheduler: Scheduler, name: str, config: ServeConfig) -> None:
        self.scheduler, self.name, self.config = scheduler, name, config
        #: Text of the policy, for the live page.
        self.policy = policy_text(scheduler.policy)
        #: True while the server stops: new requests are refused.
        self.draining = False
        #: Number of open requests. A request is open until its response was sent.
        self.open = 0
        self._started_at, self._page = int(time.time()), page()
        self._prompts = RequestBuilder(scheduler, config)
        self._metrics = Metrics(scheduler.snapshot, scheduler.context_length)
        self._encoder = ThreadPoolExecutor(1, "encoder")  # one thread: a tokenizer encodes one text at a time

    def app(self) -> FastAPI:
        """Return the app; the scheduler runs while it does."""
        app = new_app(lifespan=self._lifespan)
        app.post("/v1/chat/completions")(self.chat)
        app.post("/v1/completions")(self.complete)
        app.post("/tokenize")(self.tokenize)
        app.post("/detokenize")(self.detokenize)
        app.get("/v1/models")(self.models)
        app.get("/v1/models/{name:path}")(self.model)
        app.get("/version")(self.version)
        app.get("/health")(self.health)
        app.get("/metrics")(self.metrics)
        app.get("/live")(self.live)
        app.get("/")(self.page)
        app.add_middleware(self._gate)
        if self.config.origins:  # the outermost middleware, since it writes into the headers
            allowed: Any = {"allow_origins": self.config.origins, "expose_headers": ["X-Request-Id"]}
            app.add_middleware(CORSMiddleware, allow_methods=["*"], allow_headers=["*"], **allowed)
        return app

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Run the scheduler in its thread."""
        thread = threading.Thread(target=self._run, name="scheduler", daemon=True)
        thread.start()
        yield
        self.scheduler.stop(STOPPING)
        await asyncio.to_thread(thread.join, 2)
        self._encoder.shutdown(wait=False, cancel_futures=True)

    def _run(self) -> None:
        try:
            self.scheduler.run()
        except Exception as error:
            logger.error("the scheduler failed: %s", error_location(error))

    # ---- completions and tokens

    async def chat(self, params: ChatCompletionRequest, at_end: AtEnd) -> Response:
        """Continue a chat."""
        return await self._answer(params, at_end)

    async def complete(self, params: CompletionRequest, at_end: AtEnd) -> Response:
        """Continue texts."""
        return await self._answer(params, at_end)

    async def _answer(self, params: GenerationParams, at_end: ExitStack) -> Response:
        encoded = await self._encode(self._prompts.requests, params)
        parser = self._prompts.output_parser(params, encoded[0].request.tokens)
        writer = CompletionWriter(params, self.scheduler.vocabulary, parser)
        try:
            completions = CompletionStream(encoded, self.scheduler, self._metrics)
        except (QueueFullError, StoppedError):
            raise
        except UserError as error:  # too long for the pool
            param = params.token_limit[0] if params.token_limit else params.prompt_param
            raise ApiError(400, str(error), param) from None
        at_end.callback(completions.close)
        if params.stream:
            return StreamingResponse(
                _events(writer, completions, at_end), media_type="text/event-stream", headers=EVENTS
            )
        text = writer.full_json(await completions.collect(), completions.usage)
        return Response(text, media_type="application/json")

    async def tokenize(self, params: TokenizeRequest) -> dict[str, Any]:
        """Return the tokens of a text or a chat."""
        return await self._encode(self._prompts.tokenize, params)

    async def detokenize(self, params: DetokenizeRequest) -> dict[str, Any]:
        """Return the text of tokens."""
        return await self._encode(self._prompts.detokenize, params)

    async def _encode(self, encode: Callable[[Any], T], params: RequestBody) -> T:
        """Run a function of a request's parameters in the tokenizer's thread."""
        self._check_model(params.model)
        return await asyncio.get_running_loop().run_in_executor(self._encoder, encode, params)

    def _check_model(self, name: str) -> None:
        """Refuse a request for another model; "" means this model."""
        if name not in ("", self.name):
            raise ApiError(404, f"model={name[:200]!r}: expected {self.name!r}.", "model", "model_not_found")

    # ---- status

    async def models(self) -> dict[str, Any]:
        """Return a list with the model."""
        return {"object": "list", "data": [await self.model(self.name)]}

    async def model(self, name: str) -> dict[str, Any]:
        """Return the model of this name."""
        self._check_model(name)
        model = Model(id=self.name, created=self._started_at, object="model", owned_by="ag")
        return model.model_dump() | {"max_model_len": self.scheduler.context_length}

    async def version(self) -> dict[str, str]:
        """Return the version of the package."""
        return {"version": versions("ag")["ag"]}

    async def health(self) -> Response:
        """Return 200 while requests are accepted, else 503."""
        return JSONResponse({"status": self._state}, 200 if self._state == "ok" else 503)

    async def metrics(self) -> Response:
        """Return the figures for Prometheus."""
        return Response(generate_latest(self._metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def live(self) -> dict[str, Any]:
        """Return the figures of the live page."""
        snapshot = self.scheduler.snapshot()
        names = {"model": self.name, "policy": self.policy, "status": self._state, "seconds": time.monotonic()}
        sums = {"num_ended": snapshot.counts.num_ended.total(), "memory": asdict(snapshot.memory)}
        return asdict(snapshot) | asdict(snapshot.counts) | names | sums

    async def page(self) -> Response:
        """Return the live page."""
        text, rules = self._page
        return Response(text, media_type="text/html", headers={"Content-Security-Policy": rules})

    @property
    def _state(self) -> str:
        return "failed" if self.scheduler.failed else "draining" if self.draining else "ok"

    # ---- what every request passes

    def _gate(self, app: ASGIApp) -> ASGIApp:
        """Return an app that checks the key and the limits of each request, and logs refusals.

        Each request has an id in the log, and its response has it in ``X-Request-Id``: the client's id, or a new id.
        """

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                return await app(scope, receive, send)
            http, has_started = Http(scope, receive), False
            new_id = http.headers.get("x-request-id") or uuid.uuid4().hex
            request_id.set(re.sub("[^!-~]", "?", new_id)[:64])  # a client may send any characters

            async def send_with_id(message: Message) -> None:
                nonlocal has_started
                if message["type"] == "http.response.start":
                    has_started = True
                    message["headers"] = [*message["headers"], (b"x-request-id", new_id.encode("latin-1"))]
                await send(message)

            try:
                self._check_key(http)
                if scope["method"] != "POST":
                    await app(scope, receive, send_with_id)
                else:
                    with self._opened():
                        await _until_client_leaves(app, http, await self._body(http), send_with_id)
            except Exception as error:
                if has_started:
                    raise
                await refusal(error)(scope, receive, send_with_id)

        return answer

    def _check_key(self, http: Http) -> None:
        if not self.config.api_key or http.scope["path"] in OPEN_PATHS:
            return
        scheme, key = get_authorization_scheme_param(http.headers.get("authorization"))
        is_right = hmac.compare_digest(key.strip().encode("latin-1"), self.config.api_key.encode())
        if scheme.lower() != "bearer" or not is_right:
            message = "expected the header Authorization: Bearer KEY with this server's key."
            raise ApiError(401, message, code="invalid_api_key")

    @contextmanager
    def _opened(self) -> Iterator[None]:
        """Count a request as open until its response is sent, or its client has disconnected."""
        limit = 2 * (self.scheduler.queue + self.scheduler.batch)
        if self.open >= limit:
            raise QueueFullError(f"{limit} requests are open, the limit of this server: try again later.")
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1

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


async def _until_client_leaves(app: ASGIApp, http: Http, body: bytes, send: Send) -> None:
    """Let an app answer a request with this body, and cancel that if the client disconnects."""
    messages: list[Message] = [{"type": "http.request", "body": body}]

    async def receive() -> Message:
        return messages.pop() if messages else await http.receive()

    answering = asyncio.ensure_future(app(http.scope, receive, send))
    leaving = asyncio.ensure_future(http.receive())  # behind the body only the disconnect comes
    try:
        await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            answering.result()
    finally:
        answering.cancel()
        leaving.cancel()
        await asyncio.gather(answering, leaving, return_exceptions=True)


async def _events(writer: CompletionWriter, completions: CompletionStream, at_end: ExitStack) -> AsyncIterator[str]:
    """Yield the events of a stream; an error is its last event."""
    try:
        yield writer.start_events()
        async for delta in completions:
            yield ": waiting\n\n" if delta is None else writer.delta_event(delta)
        yield writer.end_events(completions.usage)
    except Exception as error:
        at_end.close()  # the log says first how the completions ended
        yield f"data: {json.dumps(log_refusal(error, 'broken off').body)}\n\n"


def page() -> tuple[str, str]:
    """Return the live page, and a Content-Security-Policy that allows only its own script and style."""
    text = files("ag.serve").joinpath("page.html").read_text(encoding="utf-8")
    rules = ["default-src 'none'", "connect-src 'self'", "img-src data:", "base-uri 'none'", "form-action 'none'"]
    for tag in ("style", "script"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        rules.append(f"{tag}-src 'sha256-{digest}'")
    return text, "; ".join([*rules, "frame-ancestors 'none'"])

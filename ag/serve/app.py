"""The server's app: the endpoints of OpenAI's API, the live page and Prometheus, over a scheduler."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import logging
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from dataclasses import asdict
from importlib.resources import files
from typing import Annotated, Any, TypeVar

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.routing import APIRoute
from openai.types import Model
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic_core import from_json
from starlette.exceptions import HTTPException

from ag.commands.serve import ServeConfig
from ag.errors import UserError
from ag.serve import protocol
from ag.serve.answers import CompletionStream, CompletionWriter
from ag.serve.entrance import Entrance
from ag.serve.errors import ApiError, error_location, log_refusal, refusal
from ag.serve.metrics import Metrics
from ag.serve.prompts import RequestBuilder, policy_text
from ag.serve.scheduler import QueueFullError, Scheduler, StoppedError
from ag.versions import versions

logger = logging.getLogger("ag.serve")

STOPPING = "the server is stopping: ask again later, or another one."
#: Headers of a stream of server-sent events; proxies must not buffer it.
EVENTS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

T = TypeVar("T")


class JsonRequest(Request):
    """A request whose body is JSON of the standard: in UTF-8, without NaN, and not nested too deeply."""

    async def json(self) -> Any:
        """Return the values of the body."""
        try:
            return from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise ApiError(400, f"the body is no JSON object in UTF-8: {error}.", code="invalid_json") from None


class JsonRoute(APIRoute):
    """A route whose requests are :class:`JsonRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return what answers a request."""
        handler = super().get_route_handler()

        async def answer(http: Request) -> Response:
            return await handler(JsonRequest(http.scope, http.receive))

        return answer


def new_app(**options: Any) -> FastAPI:
    """Return an app that reads bodies as :class:`JsonRequest`, and refuses requests in OpenAI's form."""
    handlers: dict[Any, Any] = {HTTPException: refusal, RequestValidationError: refusal}
    # without openapi_url there are no pages of FastAPI, which load scripts from other sites
    app = FastAPI(openapi_url=None, exception_handlers=handlers, **options)
    app.router.route_class = JsonRoute
    return app


async def _at_end() -> AsyncIterator[ExitStack]:
    """Yield a stack of calls that are made when the response was sent, or its client has left."""
    with ExitStack() as stack:
        yield stack


AtEnd = Annotated[ExitStack, Depends(_at_end)]


class Service:
    """The endpoints of one model, which clients know by ``name``."""

    def __init__(self, scheduler: Scheduler, name: str, config: ServeConfig) -> None:
        self.scheduler, self.name, self.config = scheduler, name, config
        self.policy = policy_text(scheduler.policy)  # for the live page
        self.entrance = Entrance(config, max_open=2 * (scheduler.queue + scheduler.batch))
        self._started_at, self._page = int(time.time()), page()
        self._prompts = RequestBuilder(scheduler, config)
        self._metrics = Metrics(scheduler.snapshot, scheduler.context_length)
        self._encoder = ThreadPoolExecutor(1, "encoder")  # one thread: a tokenizer encodes one text at a time

    def app(self) -> FastAPI:
        """Return the app; the scheduler runs while it does."""
        app = new_app(lifespan=self._lifespan)
        app.post("/v1/chat/completions")(self._chat)
        app.post("/v1/completions")(self._complete)
        app.post("/tokenize")(self._tokenize)
        app.post("/detokenize")(self._detokenize)
        endpoints: dict[str, Callable[..., Any]] = {
            "/v1/models": self._models,
            "/v1/models/{name:path}": self._model,
            "/version": self._version,
            "/health": self._health,
            "/metrics": self._prometheus,
            "/live": self._live,
            "/": self._live_page,
        }
        for path, endpoint in endpoints.items():
            app.api_route(path, methods=["GET", "HEAD"])(endpoint)
        app.add_middleware(self.entrance.guard)
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

    async def _chat(self, params: protocol.ChatCompletionRequest, at_end: AtEnd) -> Response:
        return await self._answer(params, at_end)

    async def _complete(self, params: protocol.CompletionRequest, at_end: AtEnd) -> Response:
        return await self._answer(params, at_end)

    async def _answer(self, params: protocol.GenerationRequest, at_end: ExitStack) -> Response:
        """Continue a chat or texts."""
        prompts = await self._encode(self._prompts.requests, params)
        parser = self._prompts.output_parser(params, prompts[0].request.tokens)
        writer = CompletionWriter(params, self.scheduler.vocabulary, parser)
        try:
            completions = CompletionStream(prompts, self.scheduler, self._metrics)
        except (QueueFullError, StoppedError):
            raise
        except UserError as error:  # too long for the pool
            param = params.token_limit[0] if params.token_limit else params.prompt_param
            raise ApiError(400, str(error), param) from None
        at_end.callback(completions.close)
        if params.stream:
            events = _events(writer, completions, at_end)
            return StreamingResponse(events, media_type="text/event-stream", headers=EVENTS)
        text = writer.full_json(await completions.collect(), completions.usage)
        return Response(text, media_type="application/json")

    async def _tokenize(self, params: protocol.TokenizeRequest) -> dict[str, Any]:
        return await self._encode(self._prompts.tokenize, params)

    async def _detokenize(self, params: protocol.DetokenizeRequest) -> dict[str, Any]:
        return await self._encode(self._prompts.detokenize, params)

    async def _encode(self, encode: Callable[[Any], T], params: protocol.RequestBody) -> T:
        """Run a function of a request's parameters in the tokenizer's thread."""
        self._check_model(params.model)
        return await asyncio.get_running_loop().run_in_executor(self._encoder, encode, params)

    def _check_model(self, name: str) -> None:
        """Refuse a request for another model; "" means this model."""
        if name not in ("", self.name):
            raise ApiError(404, f"model={name[:200]!r}: expected {self.name!r}.", "model", "model_not_found")

    # ---- status

    @property
    def _state(self) -> str:
        return "failed" if self.scheduler.failed else "draining" if self.entrance.draining else "ok"

    @property
    def _description(self) -> dict[str, Any]:
        """The model, as OpenAI's API describes it."""
        model = Model(id=self.name, object="model", created=self._started_at, owned_by="ag")
        return model.model_dump(exclude_unset=True) | {"max_model_len": self.scheduler.context_length}

    async def _models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self._description]}

    async def _model(self, name: str) -> dict[str, Any]:
        self._check_model(name)
        return self._description

    async def _version(self) -> dict[str, str]:
        return {"version": versions("ag")["ag"]}

    async def _health(self) -> Response:
        """Return 200 while requests are accepted, else 503."""
        return JSONResponse({"status": self._state}, 200 if self._state == "ok" else 503)

    async def _prometheus(self) -> Response:
        return Response(generate_latest(self._metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def _live(self) -> dict[str, Any]:
        """Return the figures of the live page."""
        snapshot = self.scheduler.snapshot()
        figures = asdict(snapshot) | asdict(snapshot.counts)
        del figures["counts"]
        figures |= {"model": self.name, "policy": self.policy, "status": self._state, "seconds": time.monotonic()}
        figures |= {"num_ended": snapshot.counts.num_ended.total(), "memory": asdict(snapshot.memory)}
        return figures

    async def _live_page(self) -> Response:
        text, rules = self._page
        return Response(text, media_type="text/html", headers={"Content-Security-Policy": rules})


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

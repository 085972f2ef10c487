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
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from dataclasses import asdict
from functools import partial
from importlib.resources import files
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ag.commands.serve import ServeConfig
from ag.errors import UserError
from ag.serve import protocol
from ag.serve.answers import CompletionStream, CompletionWriter
from ag.serve.entrance import Entrance
from ag.serve.errors import ApiError, error_location, log_refusal, read_body, refusal
from ag.serve.metrics import Metrics
from ag.serve.prompts import RequestBuilder, policy_text
from ag.serve.scheduler import QueueFullError, Scheduler, StoppedError
from ag.versions import versions

logger = logging.getLogger("ag.serve")

STOPPING = "the server is stopping: ask again later, or another one."
#: Headers of a stream of server-sent events; proxies must not buffer it.
EVENTS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


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

    def app(self) -> Starlette:
        """Return the app; the scheduler runs while it does."""
        routes = [
            self._post("/v1/chat/completions", protocol.ChatCompletionRequest, self._complete),
            self._post("/v1/completions", protocol.CompletionRequest, self._complete),
            self._post("/tokenize", protocol.TokenizeRequest, partial(self._encode_json, self._prompts.tokenize)),
            self._post("/detokenize", protocol.DetokenizeRequest, partial(self._encode_json, self._prompts.detokenize)),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            Route("/version", self._version),
            Route("/health", self._health),
            Route("/metrics", self._prometheus),
            Route("/live", self._live),
            Route("/", self._live_page),
        ]
        app = Starlette(routes=routes, lifespan=self._lifespan, exception_handlers={HTTPException: _refuse})
        app.add_middleware(self.entrance.guard)
        if self.config.origins:  # the outermost middleware, since it writes into the headers
            allowed: Any = {"allow_origins": self.config.origins, "expose_headers": ["X-Request-Id"]}
            app.add_middleware(CORSMiddleware, allow_methods=["*"], allow_headers=["*"], **allowed)
        return app

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
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

    def _post(self, path: str, kind: type[protocol.RequestBody], answer: Callable[[Any], Awaitable[ASGIApp]]) -> Route:
        """Return the route of an endpoint, whose body has the parameters ``kind``."""

        async def endpoint(http: Request) -> ASGIApp:
            params = read_body(kind, await http.body())
            self._check_model(params.model)
            return await answer(params)

        return Route(path, endpoint, methods=["POST"])

    async def _complete(self, params: protocol.GenerationRequest) -> ASGIApp:
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

        async def respond(scope: Scope, receive: Receive, send: Send) -> None:
            response: Response
            with ExitStack() as at_end:  # when the response was sent, or its client has left
                at_end.callback(completions.close)
                if params.stream:
                    events = _events(writer, completions, at_end)
                    response = StreamingResponse(events, media_type="text/event-stream", headers=EVENTS)
                else:
                    text = writer.full_json(await completions.collect(), completions.usage)
                    response = Response(text, media_type="application/json")
                await response(scope, receive, send)

        return respond

    async def _encode_json(self, encode: Callable[[Any], Any], params: protocol.RequestBody) -> Response:
        return JSONResponse(await self._encode(encode, params))

    async def _encode(self, encode: Callable[[Any], Any], params: protocol.RequestBody) -> Any:
        """Run a function of a request's parameters in the tokenizer's thread."""
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
        described = {"id": self.name, "object": "model", "created": self._started_at, "owned_by": "ag"}
        return described | {"max_model_len": self.scheduler.context_length}

    async def _models(self, http: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._description]})

    async def _model(self, http: Request) -> Response:
        self._check_model(http.path_params["name"])
        return JSONResponse(self._description)

    async def _version(self, http: Request) -> Response:
        return JSONResponse({"version": versions("ag")["ag"]})

    async def _health(self, http: Request) -> Response:
        """Return 200 while requests are accepted, else 503."""
        return JSONResponse({"status": self._state}, 200 if self._state == "ok" else 503)

    async def _prometheus(self, http: Request) -> Response:
        return Response(generate_latest(self._metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def _live(self, http: Request) -> Response:
        """Return the figures of the live page."""
        snapshot = self.scheduler.snapshot()
        figures = asdict(snapshot) | asdict(snapshot.counts)
        del figures["counts"]
        figures |= {"model": self.name, "policy": self.policy, "status": self._state, "seconds": time.monotonic()}
        figures |= {"num_ended": snapshot.counts.num_ended.total(), "memory": asdict(snapshot.memory)}
        return JSONResponse(figures)

    async def _live_page(self, http: Request) -> Response:
        text, rules = self._page
        return Response(text, media_type="text/html", headers={"Content-Security-Policy": rules})


async def _refuse(http: Request, error: Exception) -> Response:
    return refusal(error)


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

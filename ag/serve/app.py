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
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from dataclasses import asdict
from importlib.resources import files
from typing import Annotated, Any, TypeVar

from fastapi import Depends, FastAPI
from fastapi.responses import JSONResponse, Response, StreamingResponse
from openai.types import Model
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.middleware.cors import CORSMiddleware

from ag.commands.serve import ServeConfig
from ag.errors import UserError
from ag.serve.answers import CompletionStream
from ag.serve.entrance import Entrance
from ag.serve.errors import ApiError, error_location, log_refusal, new_app
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

STOPPING = "the server is stopping: ask again later, or another one."
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
        #: What every request passes.
        self.entrance = Entrance(config, max_open=2 * (scheduler.queue + scheduler.batch))
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
        return "failed" if self.scheduler.failed else "draining" if self.entrance.draining else "ok"


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

"""The HTTP server's app: OpenAI's endpoints over a batcher, and what tells how it does."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI
from fastapi import Request as Http
from fastapi.responses import JSONResponse, Response, StreamingResponse
from jinja2 import TemplateError
from openai.types import Model
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from ag.engine.pool import PoolFullError
from ag.errors import UserError
from ag.model.chat import Part, spans
from ag.serve.batcher import Batcher, Busy
from ag.serve.detokenizer import Detokenizer
from ag.serve.metrics import Metrics
from ag.serve.page import page
from ag.serve.protocol import FORMS, ApiError, Asked, ChatAsked, CompletionAsked, Form, as_json, parse, usage
from ag.serve.request import Request
from ag.serve.worker import Answers, Piece, StoppedError, WaitedError, Worker, where

logger = logging.getLogger("ag.serve")

BODY_SECONDS = 30  # in which a body has to come
RETRY_SECONDS = 5  # after which a client may ask again
READ_MULTIPLE = 16  # bodies up to so many times too long are read and dropped, so that their clients see the answer
T = TypeVar("T")
Spans = tuple[tuple[int, int], ...]  # the first token and the one behind the last of each


@dataclass(frozen=True)
class Limits:
    """What clients may ask.

    Attributes:
        body: bytes of a request's body.
        answer_tokens: of one answer; also what a chat's answer may have where its client does not say.
        wait_seconds: before a prompt is read.
        answer_seconds: before an answer ends.
        protect: parts of chats that are never evicted, where a client does not say.
    """

    body: int = 2**20
    answer_tokens: int = 1024
    wait_seconds: float = 60.0
    answer_seconds: float = 600.0
    protect: tuple[Part, ...] = ()


class Service:
    """The endpoints of one model.

    Args:
        batcher: answers the requests.
        name: of the model, for clients.
        limits: what clients may ask.
        api_key: what they have to know; None: nothing.
    """

    def __init__(self, batcher: Batcher, name: str, limits: Limits, api_key: str | None = None) -> None:
        self.name, self.limits, self.api_key = name, limits, api_key
        self.tokenizer, self.model = batcher.tokenizer, batcher.model
        self._policy = str(batcher.policy.spec) + (f" {batcher.policy.budget}" if batcher.policy.budget else "")
        self._page = page()
        self._metrics = Metrics(batcher.snapshot)
        self.worker = Worker(batcher, self._metrics.timed)
        self.began = int(time.time())
        #: Whether no request is taken any more.
        self.draining = False
        self._encoder = ThreadPoolExecutor(1, "encoder")  # one: a tokenizer cannot read two texts at once
        config = self.model.config.get_text_config()
        self._context: int | None = getattr(config, "max_position_embeddings", None)
        self._vocabulary = int(config.vocab_size)

    def app(self) -> FastAPI:
        """Return the app, which begins and ends the batcher's thread."""

        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            self.worker.start()
            yield
            await self.worker.stop(2)
            self._encoder.shutdown(wait=False, cancel_futures=True)

        app = FastAPI(lifespan=lifespan, openapi_url=None)  # the pages about it come from elsewhere
        guarded = APIRouter(dependencies=[Depends(self._check_key)])
        guarded.add_api_route("/v1/models", self.models, methods=["GET"])
        guarded.add_api_route("/v1/models/{name:path}", self.one_model, methods=["GET"])
        guarded.add_api_route("/v1/chat/completions", self.chat, methods=["POST"])
        guarded.add_api_route("/v1/completions", self.completions, methods=["POST"])
        guarded.add_api_route("/metrics", self.metrics, methods=["GET"])
        guarded.add_api_route("/live", self.live, methods=["GET"])
        app.include_router(guarded)
        app.add_api_route("/health", self.health, methods=["GET"])
        app.add_api_route("/", self.page, methods=["GET"])  # its script asks for the key
        app.add_exception_handler(ApiError, refuse)
        app.add_exception_handler(HTTPException, refuse)
        return app

    # ---- endpoints

    async def health(self) -> Response:
        """Tell whether requests are taken: 200, or 503."""
        return JSONResponse({"status": self._status()}, 200 if self._status() == "ok" else 503)

    async def page(self) -> Response:
        """Show what :meth:`live` tells."""
        text, rules = self._page
        return Response(text, media_type="text/html", headers={"Content-Security-Policy": rules})

    async def live(self) -> Response:
        """Tell the page what is going on."""
        now = self.worker.batcher.snapshot()
        told = asdict(now) | asdict(now.counts) | {"model": self.name, "policy": self._policy, "status": self._status()}
        return JSONResponse(told | {"counts": None, "ended": now.counts.ended.total(), "seconds": time.monotonic()})

    async def metrics(self) -> Response:
        """Tell Prometheus."""
        return Response(self._metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def models(self) -> Response:
        """List the model."""
        return JSONResponse({"object": "list", "data": [self._model().model_dump()]})

    async def one_model(self, name: str) -> Response:
        """Tell of the model."""
        self._check_model(name)
        return JSONResponse(self._model().model_dump())

    async def chat(self, http: Http) -> Response:
        """Answer a conversation."""
        return await self._answer(http, ChatAsked)

    async def completions(self, http: Http) -> Response:
        """Continue a text."""
        return await self._answer(http, CompletionAsked)

    # ---- an answer

    async def _answer(self, http: Http, kind: type[Asked]) -> Response:
        if self.draining:
            raise ApiError(503, "the server is stopping: ask another one.", code="draining", retry=RETRY_SECONDS)
        try:
            asked: Asked = parse(kind, await self._body(http))
            self._check_model(asked.model)
            prompt = await asyncio.get_running_loop().run_in_executor(self._encoder, self._prompt, asked)
            answers = self._submit(asked, *prompt)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        except (ApiError, HTTPException):
            raise
        except Exception as error:
            raise _told(error) from None
        form = FORMS[kind](asked, self.tokenizer)
        if asked.stream:
            return EventStream(self._events(answers, form), lambda: self.worker.close(answers))
        return await self._whole(http, answers, form)

    async def _events(self, answers: Answers, form: Form) -> AsyncIterator[str]:
        """Yield the server-sent events of a stream."""
        try:
            for part in form.begin():
                yield f"data: {as_json(part)}\n\n"
            async for piece in answers:
                yield ": waiting\n\n" if piece is None else f"data: {as_json(form.chunk(piece))}\n\n"
            if form.asked.stream_options.include_usage:
                yield f"data: {as_json(form.last(usage(len(answers.request.tokens), answers.written)))}\n\n"
            yield "data: [DONE]\n\n"
        except Exception as error:
            yield f"data: {json.dumps(_told(error).body)}\n\n"

    async def _whole(self, http: Http, answers: Answers, form: Form) -> Response:
        """Return the answers when they are whole; a client that leaves ends them."""
        try:
            pieces = await _unless_gone(http, _gathered(answers))
            if pieces is None:
                return Response(status_code=499)
            told = form.whole(pieces, usage(len(answers.request.tokens), answers.written))
            return Response(as_json(told), media_type="application/json")
        except Exception as error:
            raise _told(error) from None
        finally:
            self.worker.close(answers)

    def _submit(self, asked: Asked, tokens: list[int], protect: Spans) -> Answers:
        if asked.n > self.worker.batcher.batch:
            raise ApiError(400, f"n={asked.n}: expected at most {self.worker.batcher.batch} here.", "n")
        request = Request(
            tokens=tokens,
            max_tokens=self._longest(asked, len(tokens)),
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=max(asked.top_k, 0),
            min_p=asked.min_p,
            repetition_penalty=asked.repetition_penalty,
            logit_bias=asked.biases(self._vocabulary),
            seed=asked.seed,
            logprobs=asked.best,
            n=asked.n,
            protect=protect,
            wait_seconds=self.limits.wait_seconds,
            answer_seconds=self.limits.answer_seconds,
        )
        # stop texts are found here: the batcher would read the whole vocabulary for each new one
        before = tokens if isinstance(asked, CompletionAsked) else ()
        return self.worker.submit(request, [Detokenizer(self.tokenizer, asked.stops, before) for _ in range(asked.n)])

    def _longest(self, asked: Asked, prompt: int) -> int:
        """Return the most tokens that an answer may have."""
        most, context = self.limits.answer_tokens, self._context
        room = most if context is None else context - prompt
        if room < (asked.longest or 1):
            raise ApiError(
                400,
                f"the prompt has {prompt} tokens, and the answer may have {asked.longest or 1}: expected at most "
                f"{context}, the context of the model; shorten one of them.",
                code="context_length_exceeded",
            )
        if asked.longest is None:
            return min(room, most if isinstance(asked, ChatAsked) else 16)  # as OpenAI's API
        if asked.longest > most:
            raise ApiError(400, f"max_tokens={asked.longest}: expected at most {most} here.", "max_tokens")
        return asked.longest

    def _prompt(self, asked: Asked) -> tuple[list[int], Spans]:
        """Return the ids of a prompt, and which of them are never evicted."""
        if isinstance(asked, ChatAsked):
            return self._conversation(asked)
        assert isinstance(asked, CompletionAsked)
        protect = tuple((first, behind) for first, behind in asked.protect)
        prompt = asked.prompt
        if isinstance(prompt, list) and isinstance(prompt[0], str):
            if len(prompt) > 1:
                raise ApiError(400, f"{len(prompt)} prompts: expected one; send the others by themselves.", "prompt")
            prompt = prompt[0]
        if isinstance(prompt, str):
            return self._checked(self.tokenizer(prompt, verbose=False)["input_ids"]), protect
        return self._checked([int(token) for token in prompt]), protect

    def _conversation(self, asked: ChatAsked) -> tuple[list[int], Spans]:
        if self.tokenizer.chat_template is None:
            raise ApiError(400, "the model has no chat template: use /v1/completions.", "messages")
        messages = [message.for_template() for message in asked.messages]
        try:
            text = str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except TemplateError as error:
            raise ApiError(400, f"the chat template of the model refuses this: {error}.", "messages") from None
        parts = self.limits.protect if asked.protect is None else asked.protect
        protect = spans(self.tokenizer, text, messages, parts) if parts else ()
        tokens = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]  # the template has its own
        return self._checked(tokens), tuple(protect)

    def _checked(self, tokens: list[int]) -> list[int]:
        if not tokens:
            raise ApiError(400, "the prompt is empty: expected one token or more.", "prompt")
        if not 0 <= min(tokens) <= max(tokens) < self._vocabulary:
            raise ApiError(400, f"prompt: expected tokens of 0 to {self._vocabulary - 1}.", "prompt")
        return tokens

    # ---- what may come in

    async def _check_key(self, http: Http) -> None:
        given = http.headers.get("authorization", "").encode("latin-1")
        if self.api_key is not None and not hmac.compare_digest(given, f"Bearer {self.api_key}".encode()):
            raise ApiError(
                401, "expected the header Authorization: Bearer KEY with this server's key.", code="invalid_api_key"
            )

    async def _body(self, http: Http) -> bytes:
        """Read the body of a request."""
        if http.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "expected the header Content-Type: application/json.")  # no page's form can send it
        limit = self.limits.body
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

    def _check_model(self, name: str) -> None:
        if name != self.name:
            raise ApiError(404, f"model={name[:200]!r}: expected {self.name!r}.", "model", "model_not_found")

    def _status(self) -> str:
        return "failed" if self.worker.failed else "draining" if self.draining else "ok"

    def _model(self) -> Model:
        return Model(id=self.name, created=self.began, object="model", owned_by="ag")


class EventStream(StreamingResponse):
    """Server-sent events.

    Args:
        events: as text.
        close: called when all were sent, or the client has left, be it before the first one.
    """

    def __init__(self, events: AsyncIterator[str], close: Callable[[], None]) -> None:
        super().__init__(
            events, media_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        )
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()


async def refuse(http: Http, error: Exception) -> Response:
    """Answer with an error in OpenAI's form."""
    told = error if isinstance(error, ApiError) else _told(error)
    headers = {} if told.retry is None else {"Retry-After": str(told.retry)}
    if told.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(told.body, told.status, headers)


def _told(error: Exception) -> ApiError:
    """Return what a client is told of an error."""
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


async def _gathered(answers: Answers) -> list[Piece]:
    """Return each answer in one piece."""
    whole = [Piece(number, "") for number in range(answers.request.n)]
    texts: list[list[str]] = [[] for _ in whole]
    tokens: list[list[Any]] = [[] for _ in whole]
    async for piece in answers:
        if piece is None:
            continue
        texts[piece.number].append(piece.text)
        tokens[piece.number] += piece.tokens
        whole[piece.number] = piece
    return [
        replace(piece, text="".join(text), tokens=tuple(told))
        for piece, text, told in zip(whole, texts, tokens, strict=True)
    ]


async def _unless_gone(http: Http, work: Coroutine[Any, Any, T]) -> T | None:
    """Return what comes of some work, or None when the client leaves before."""

    async def gone() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()

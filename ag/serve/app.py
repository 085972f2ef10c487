"""The endpoints of OpenAI's API over a scheduler in this process."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from fastapi import FastAPI
from fastapi import Request as Http
from fastapi.responses import Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from ag.engine.policy import Policy
from ag.errors import UserError
from ag.model.chat import Chat, Part, spans
from ag.serve.detokenizer import Detokenizer
from ag.serve.endpoints import Endpoints, refusal
from ag.serve.metrics import Metrics
from ag.serve.protocol import FORMS, ApiError, Asked, ChatAsked, CompletionAsked, Form, as_json, parse, usage
from ag.serve.request import Request
from ag.serve.scheduler import Busy, Scheduler
from ag.serve.snapshot import Snapshot
from ag.serve.worker import Answers, Piece, Worker

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


class Service(Endpoints):
    """The endpoints of a scheduler in this process.

    Args:
        scheduler: answers the requests.
        name: of the model, for clients.
        limits: what clients may ask.
        api_key: what they have to know; None: nothing.
    """

    def __init__(self, scheduler: Scheduler, name: str, limits: Limits, api_key: str | None = None) -> None:
        super().__init__(name, shown(scheduler.policy), limits.body, api_key)
        self.limits, self.tokenizer, self.model = limits, scheduler.tokenizer, scheduler.model
        self._metrics = Metrics(scheduler.snapshot)
        self.worker = Worker(scheduler, self._metrics.timed)
        self._encoder = ThreadPoolExecutor(1, "encoder")  # one: a tokenizer cannot read two texts at once
        config = self.model.config.get_text_config()
        self._context: int | None = getattr(config, "max_position_embeddings", None)
        self._coming = 0  # requests that are not queued yet
        self._most = 2 * (scheduler.queue + scheduler.batch)  # requests at once, with those whose answer is being sent
        self._vocabulary = int(config.vocab_size)

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Begin and end the scheduler's thread."""
        self.worker.start()
        yield
        await self.worker.stop(2)
        self._encoder.shutdown(wait=False, cancel_futures=True)

    async def snapshot(self) -> Snapshot:
        """Return what is going on."""
        return self.worker.scheduler.snapshot()

    async def figures(self) -> bytes:
        """Return what Prometheus reads."""
        return self._metrics.text()

    async def works(self) -> bool:
        """Tell whether there is a scheduler that answers."""
        return not self.worker.failed

    async def chat(self, http: Http) -> Response:
        """Answer a conversation."""
        return await self._answer(http, ChatAsked)

    async def completions(self, http: Http) -> Response:
        """Continue a text."""
        return await self._answer(http, CompletionAsked)

    # ---- an answer

    async def _answer(self, http: Http, kind: type[Asked]) -> Response:
        if self._coming + len(self.worker.open) >= self._most:
            raise refusal(Busy(f"{self._most} requests are being answered, as many as may: try again later."))
        self._coming += 1
        try:
            asked: Asked = parse(kind, await self.body(http))
            self.check_model(asked.model)
            prompt = await asyncio.get_running_loop().run_in_executor(self._encoder, self._prompt, asked)
            answers = self._submit(asked, *prompt)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        except (ApiError, HTTPException):
            raise
        except Exception as error:
            raise refusal(error) from None
        finally:
            self._coming -= 1
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
            yield f"data: {json.dumps(refusal(error).body)}\n\n"

    async def _whole(self, http: Http, answers: Answers, form: Form) -> Response:
        """Return the answers when they are whole; a client that leaves ends them."""
        try:
            pieces = await _unless_gone(http, _gathered(answers))
            if pieces is None:
                return Response(status_code=499)
            told = form.whole(pieces, usage(len(answers.request.tokens), answers.written))
            return Response(as_json(told), media_type="application/json")
        except Exception as error:
            raise refusal(error) from None
        finally:
            self.worker.close(answers)

    def _submit(self, asked: Asked, tokens: list[int], protect: Spans) -> Answers:
        if asked.n > self.worker.scheduler.batch:
            raise ApiError(400, f"n={asked.n}: expected at most {self.worker.scheduler.batch} here.", "n")
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
        # stop texts are found here: the scheduler would read the whole vocabulary for each new one
        before = tokens if isinstance(asked, CompletionAsked) else ()
        return self.worker.submit(request, [Detokenizer(self.tokenizer, asked.stops, before) for _ in range(asked.n)])

    def _longest(self, asked: Asked, prompt: int) -> int:
        """Return the most tokens that an answer may have."""
        most, context = self.limits.answer_tokens, self._context
        room = most if context is None else context - prompt
        if context is not None and room < 1:
            raise ApiError(
                400,
                f"the prompt has {prompt} tokens: expected fewer than {context}, the context of the model; shorten it.",
                asked.text,
                "context_length_exceeded",
            )
        if asked.longest is None:
            return min(room, most if isinstance(asked, ChatAsked) else 16)  # as OpenAI's API
        name, told = asked.longest
        if told > most:
            raise ApiError(400, f"{name}={told}: expected at most {min(room, most)} here.", name)
        if told > room:
            raise ApiError(
                400,
                f"{name}={told}: expected at most {room} behind a prompt of {prompt} tokens, in the model's context of "
                f"{context}.",
                name,
                "context_length_exceeded",
            )
        return told

    def _prompt(self, asked: Asked) -> tuple[list[int], Spans]:
        """Return the ids of a prompt, and which of them are never evicted."""
        if isinstance(asked, ChatAsked):
            return self._conversation(asked)
        assert isinstance(asked, CompletionAsked)
        protect = tuple((first, behind) for first, behind in asked.protect)
        prompt = asked.prompt
        if isinstance(prompt, list) and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise ApiError(400, f"{len(prompt)} prompts: expected one; send the others by themselves.", "prompt")
            prompt = prompt[0]
        if isinstance(prompt, str):
            return self._checked(self.tokenizer(prompt, verbose=False)["input_ids"]), protect
        return self._checked(prompt), protect

    def _conversation(self, asked: ChatAsked) -> tuple[list[int], Spans]:
        if self.tokenizer.chat_template is None:
            raise ApiError(400, "the model has no chat template: use /v1/completions.", "messages")
        chat = Chat([message.for_template() for message in asked.messages], asked.variables)
        try:
            chat, text = self._rendered(chat)
            self._check_told(chat)
            if "tools" in asked.variables and text == replace(chat, variables=asked.chat_template_kwargs).text(
                self.tokenizer
            ):
                raise ApiError(400, "the chat template of the model tells it of no tools: leave them out.", "tools")
        except UserError as error:
            raise ApiError(400, str(error), "messages") from None
        parts = self.limits.protect if asked.protect is None else asked.protect
        protect = spans(self.tokenizer, chat, parts) if parts else ()
        tokens = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]  # the template has its own
        return self._checked(tokens), tuple(protect)

    def _rendered(self, chat: Chat) -> tuple[Chat, str]:
        """Return what the template makes of a chat, and the chat as the template takes it.

        Messages of the assistant that only call tools have no content, which many templates know, or an empty one.
        """
        try:
            return chat, chat.text(self.tokenizer)
        except UserError:
            filled = replace(chat, messages=[{"content": ""} | message for message in chat.messages])
            if filled == chat:
                raise
            return filled, filled.text(self.tokenizer)

    def _check_told(self, chat: Chat) -> None:
        """Refuse calls of tools, and what tools said, where the template leaves them out.

        To tell, a word that no text has stands in the place of each of them.
        """
        words: dict[str, str] = {}  # by parameter

        def word(param: str) -> str:
            return words.setdefault(param, uuid.uuid4().hex)

        messages = [dict(message) for message in chat.messages]
        for place, message in enumerate(messages):
            if message["role"] == "tool":
                message["content"] = word(f"messages[{place}].content")
            for number, call in enumerate(message.pop("tool_calls", [])):
                arguments = {"text": word(f"messages[{place}].tool_calls[{number}]")}
                called = call | {"function": call["function"] | {"arguments": arguments}}
                message["tool_calls"] = [*message.get("tool_calls", []), called]
        text = replace(chat, messages=messages).text(self.tokenizer) if words else ""
        for param in words:
            if words[param] not in text:
                raise ApiError(
                    400,
                    f"{param}: the chat template of the model leaves it out: say it in the content of a message of the "
                    "assistant or the user.",
                    param,
                )

    def _checked(self, tokens: list[int]) -> list[int]:
        if not tokens:
            raise ApiError(400, "the prompt is empty: expected one token or more.", "prompt")
        if not 0 <= min(tokens) <= max(tokens) < self._vocabulary:
            raise ApiError(400, f"prompt: expected tokens of 0 to {self._vocabulary - 1}.", "prompt")
        return tokens


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


def shown(chosen: Policy) -> str:
    """Return a policy as those see it who watch."""
    return str(chosen.spec) + (f" {chosen.budget}" if chosen.budget else "")

"""Asynchronous reading of the answers that a scheduler generates in its own thread."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ag.serve.metrics import Metrics
from ag.serve.request import Event, Prompt, Stream, Token
from ag.serve.scheduler import Scheduler, StoppedError

logger = logging.getLogger("ag.serve")

#: The id of the request that is being answered, for the log.
request_id: ContextVar[str] = ContextVar("request_id", default="-")

SILENCE_SECONDS = 15.0  # between two signs of life on a stream; proxies often close after 30 or 60 seconds


@dataclass(frozen=True)
class Piece:
    """A part of an answer."""

    number: int  # index of the answer among the answers to all prompts, those to the first prompt first
    text: str = ""  # new text
    tokens: tuple[Token, ...] = ()  # the tokens of that text
    reason: Literal["stop", "length"] | None = None  # why the answer ended; None means that it goes on
    prompt: tuple[Token, ...] | None = None  # the tokens of the prompt; None in all but the first piece of an answer
    kept: Mapping[str, Any] | None = None  # the policy and the share of the prompt that stays; as ``prompt``


class Answers:
    """The answers to the prompts of one request, as an asynchronous iterator of pieces.

    Args:
        prompts: the prompts.
        scheduler: generates the answers in another thread.
        metrics: record what was asked for, the seconds of each token, and the ends.

    Raises:
        Busy: when the queue is full; none of the prompts is read then.
        StoppedError: when the scheduler has stopped or failed.
        UserError: for a prompt that no empty pool and no context could hold.
    """

    def __init__(self, prompts: Sequence[Prompt], scheduler: Scheduler, metrics: Metrics) -> None:
        self._prompts = [prompt for prompt in prompts for _ in range(prompt.request.n)]  # by answer
        self._read = sum(len(prompt.request.tokens) for prompt in prompts)
        self._written, self._tokens = 0, [0] * len(self._prompts)  # of all answers, and of each
        self._since, self._id, self._scheduler = time.monotonic(), request_id.get(), scheduler
        self._failed = False  # whether an error ended an answer, and so the others
        self._metrics, self._loop = metrics, asyncio.get_running_loop()
        self._last: dict[int, float] = {}  # time of the last token of each answer
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._streams: list[Stream] = []
        try:
            for prompt in prompts:
                self._streams += scheduler.submit(prompt.request, partial(self._receive, len(self._streams)))
        except Exception:
            self._cancel()
            raise
        for prompt in prompts:
            metrics.asked(prompt.request)

    @property
    def used(self) -> dict[str, Any]:
        """The numbers of tokens so far, as ``usage`` of OpenAI's API."""
        first = {id(prompt): stream for prompt, stream in zip(self._prompts, self._streams, strict=True)}
        return {
            "prompt_tokens": self._read,
            "completion_tokens": self._written,
            "total_tokens": self._read + self._written,
            "prompt_tokens_details": {"cached_tokens": sum(stream.shared for stream in first.values())},
        }

    def _receive(self, first: int, number: int, event: Event) -> None:
        """Queue an event of an answer; called in the scheduler's thread, which does not wait for the reader.

        Args:
            first: index of the first answer to the same prompt.
            number: index of the answer among the answers to the same prompt.
            event: a token, an error or the end.
        """
        number += first
        if isinstance(event, Exception):
            self._failed = True
        if isinstance(event, Token):
            now = time.monotonic()
            self._metrics.timed(now - self._last.get(number, self._since), number not in self._last)
            self._last[number] = now
            self._written += 1
            self._tokens[number] += 1
        with suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._events.put_nowait, (number, event))

    async def __aiter__(self) -> AsyncIterator[Piece | None]:
        """Yield pieces until every answer has ended, and None after each ``SILENCE_SECONDS`` without a piece.

        Raises:
            Exception: the error that ended an answer.
        """
        going: dict[int, list[Token]] = {number: [] for number in range(len(self._streams))}  # without text so far
        first = set(going)  # answers without a piece so far
        while going:
            try:
                async with asyncio.timeout(SILENCE_SECONDS):
                    number, event = await self._events.get()
            except TimeoutError:
                yield None
                continue
            if isinstance(event, StoppedError) and self._written and not self._scheduler.failed:
                event = None  # of several answers this one has no token when the server stops
            if isinstance(event, Exception):
                raise event
            if event is None:
                piece = self._end(number, going.pop(number))
            else:
                going[number].append(event)
                if not event.text or self._streams[number].text.stopped:
                    continue
                piece = Piece(number, event.text, tuple(going[number]))
                going[number].clear()
            if number in first:
                first.remove(number)
                kept = {"policy": self._prompts[number].policy, "kept": self._streams[number].kept}
                piece = replace(piece, prompt=self._prompt(number), kept=kept)
            yield piece

    def _prompt(self, number: int) -> tuple[Token, ...]:
        """Return the tokens of the prompt of an answer, with texts and log-probabilities as far as requested."""
        echo, scores = self._prompts[number].echo, self._streams[number].prompt
        if not echo or not scores:
            return echo or scores or tuple(map(Token, self._prompts[number].request.tokens))
        return tuple(replace(score, text=one.text, place=one.place) for one, score in zip(echo, scores, strict=True))

    def _end(self, number: int, tokens: list[Token]) -> Piece:
        """Return the last piece of an answer: the text that was held back, without a stop text and its tokens."""
        stream = self._streams[number]
        text = "".join(token.text for token in tokens) + stream.text.rest()
        if stream.text.stopped:
            tokens = [token for token in tokens if token.place < stream.text.given]
        reason: Literal["stop", "length"] = "stop" if stream.reason == "stop" or stream.text.stopped else "length"
        self._metrics.ended(reason, self._tokens[number])
        return Piece(number, text, tuple(tokens), reason)

    async def whole(self) -> list[Piece]:
        """Return each answer as one piece."""
        found: dict[int, Piece] = {}
        async for new in self:
            if new is not None:
                old = found.setdefault(new.number, replace(new, text="", tokens=()))
                text, tokens = old.text + new.text, old.tokens + new.tokens
                found[new.number] = replace(old, text=text, tokens=tokens, reason=new.reason)
        return [found[number] for number in sorted(found)]

    def close(self) -> None:
        """Cancel the answers that have not ended, so that their blocks are freed, and write a line into the log."""
        ends = Counter(stream.reason or ("error" if self._failed else "cancelled") for stream in self._streams)
        self._cancel()
        reasons = ", ".join(
            reason if len(self._streams) == 1 else f"{count} {reason}" for reason, count in ends.items()
        )
        seconds = time.monotonic() - self._since
        logger.info("%s: %d tokens read, %d written, %.2f s, %s", self._id, self._read, self._written, seconds, reasons)

    def _cancel(self) -> None:
        for stream in self._streams:
            stream.cancel()


def where(error: BaseException) -> str:
    """Return an error's type and place, without its text, which may quote a prompt, and without folders."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    places = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames))
    return f"{type(error).__name__} at {places}"

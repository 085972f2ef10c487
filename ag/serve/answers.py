"""Asynchronous reading of the answers that a scheduler generates in its own thread."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ag.errors import UserError
from ag.serve.request import Event, Request, Token
from ag.serve.scheduler import Scheduler

logger = logging.getLogger("ag.serve")

SILENCE_SECONDS = 15.0  # between two signs of life on a stream; proxies often close after 30 or 60 seconds


class WaitedError(UserError):
    """A request waited longer than ``wait_seconds`` before its first token."""


@dataclass(frozen=True)
class Piece:
    """A part of an answer."""

    number: int  # index of the answer among the ``n`` answers to the request
    text: str = ""  # new text
    tokens: tuple[Token, ...] = ()  # the tokens of that text
    reason: Literal["stop", "length"] | None = None  # why the answer ended; None means that it goes on


class Answers:
    """The answers to one request, as an asynchronous iterator of pieces.

    Args:
        request: the request.
        scheduler: generates the answers in another thread.
        timed: is called with the seconds of each token and whether it is the first one of its answer.

    Raises:
        Busy: when the queue is full.
        StoppedError: when the scheduler has stopped or failed.
        UserError: for a request that no empty pool and no context could hold.
    """

    def __init__(self, request: Request, scheduler: Scheduler, timed: Callable[[float, bool], None]) -> None:
        self.request = request
        #: Generated tokens of all answers so far.
        self.written = 0
        self._since = time.monotonic()
        self._timed, self._loop = timed, asyncio.get_running_loop()
        self._last: dict[int, float] = {}  # time of the last token of each answer
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._streams = scheduler.submit(request, self._receive)

    def _receive(self, number: int, event: Event) -> None:
        """Queue an event of an answer; called in the scheduler's thread, which does not wait for the reader."""
        if isinstance(event, Token):
            now = time.monotonic()
            self._timed(now - self._last.get(number, self._since), number not in self._last)
            self._last[number] = now
            self.written += 1
        with suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._events.put_nowait, (number, event))

    async def __aiter__(self) -> AsyncIterator[Piece | None]:
        """Yield pieces until every answer has ended, and None after each ``SILENCE_SECONDS`` without a piece.

        Raises:
            WaitedError: when an answer did not begin in time.
            Exception: the error that ended an answer.
        """
        going: dict[int, list[Token]] = {number: [] for number in range(self.request.n)}  # tokens without text so far
        while going:
            try:
                async with asyncio.timeout(SILENCE_SECONDS):
                    number, event = await self._events.get()
            except TimeoutError:
                yield None
                continue
            if isinstance(event, Exception):
                raise event
            if event is None:
                yield self._end(number, going.pop(number))
            else:
                going[number].append(event)
                if event.text and not self._streams[number].text.stopped:
                    yield Piece(number, event.text, tuple(going[number]))
                    going[number].clear()

    def _end(self, number: int, tokens: list[Token]) -> Piece:
        """Return the last piece of an answer: the text that was held back, without a stop text and its tokens."""
        stream = self._streams[number]
        if stream.reason == "timeout" and number not in self._last:
            raise WaitedError(f"no token came within {self.request.wait_seconds} seconds: ask again later.")
        text = "".join(token.text for token in tokens) + stream.text.rest()
        if stream.text.stopped:
            tokens = [token for token in tokens if token.place < stream.text.given]
        return Piece(number, text, tuple(tokens), "stop" if stream.reason == "stop" else "length")

    async def whole(self) -> list[Piece]:
        """Return each answer as one piece."""
        found = [Piece(number) for number in range(self.request.n)]
        async for new in self:
            if new is not None:
                old = found[new.number]
                found[new.number] = Piece(new.number, old.text + new.text, old.tokens + new.tokens, new.reason)
        return found

    def close(self) -> None:
        """Cancel the answers that have not ended, so that their blocks are freed, and write a line into the log."""
        for stream in self._streams:
            stream.cancel()
        read, seconds = len(self.request.tokens), time.monotonic() - self._since
        ends = "+".join(stream.reason or "open" for stream in self._streams)
        logger.info("%d tokens read, %d written, %.2f s, %s", read, self.written, seconds, ends)


def where(error: BaseException) -> str:
    """Return an error's type and place, without its text, which may quote a prompt, and without folders."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    places = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames))
    return f"{type(error).__name__} at {places}"

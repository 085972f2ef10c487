"""How coroutines read the answers that a scheduler writes in its thread."""

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

SILENCE_SECONDS = 15.0  # after which a client hears that it still waits; proxies often close after 30 or 60


class WaitedError(UserError):
    """A request waited longer than it may before its first token."""


@dataclass(frozen=True)
class Piece:
    """A part of an answer.

    Attributes:
        number: of the answer among those to its request.
        text: that is new.
        tokens: whose text it is.
        reason: why the answer ended; None while it goes on.
    """

    number: int
    text: str
    tokens: tuple[Token, ...] = ()
    reason: Literal["stop", "length"] | None = None


class Answers:
    """The answers to one request, piece by piece as they come.

    Args:
        request: what is asked.
        scheduler: answers it, in another thread.
        timed: is told the seconds that each token took, and whether it was the first of its answer.

    Raises:
        Busy: when the queue is full.
        StoppedError: when the scheduler has stopped or failed.
        UserError: for a request that can never be answered.
    """

    def __init__(self, request: Request, scheduler: Scheduler, timed: Callable[[float, bool], None]) -> None:
        self.request = request
        #: Tokens of all answers so far.
        self.written = 0
        self.since = time.monotonic()
        self._timed, self._loop = timed, asyncio.get_running_loop()
        self._last: dict[int, float] = {}  # when each answer had its last token
        self._news: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self.streams = scheduler.submit(request, self._hear)

    def _hear(self, number: int, event: Event) -> None:
        """Take an event of an answer, in the thread of the scheduler, which does not wait for it to be read."""
        if isinstance(event, Token):
            now = time.monotonic()
            self._timed(now - self._last.get(number, self.since), number not in self._last)
            self._last[number] = now
            self.written += 1
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._news.put_nowait, (number, event))

    async def __aiter__(self) -> AsyncIterator[Piece | None]:
        """Yield the pieces until every answer has ended, and None where nothing came for a while.

        Raises:
            WaitedError: when an answer did not begin in time.
            Exception: what ended an answer, where that was an error.
        """
        going: dict[int, list[Token]] = {number: [] for number in range(self.request.n)}  # tokens without their text
        while going:
            try:
                async with asyncio.timeout(SILENCE_SECONDS):
                    number, event = await self._news.get()
            except TimeoutError:
                yield None
                continue
            if isinstance(event, Exception):
                raise event
            if event is None:
                yield self._end(number, going.pop(number))
            else:
                going[number].append(event)
                if event.text and not self.streams[number].text.stopped:
                    yield Piece(number, event.text, tuple(going[number]))
                    going[number].clear()

    def _end(self, number: int, tokens: list[Token]) -> Piece:
        """Return the last piece of an answer: what was held back, without the tokens of a stop text."""
        stream = self.streams[number]
        if stream.reason == "timeout" and number not in self._last:
            raise WaitedError(f"no token came within {self.request.wait_seconds} seconds: ask again later.")
        text = "".join(token.text for token in tokens) + stream.text.rest()
        if stream.text.stopped:
            tokens = [token for token in tokens if token.place < stream.text.given]
        return Piece(number, text, tuple(tokens), "stop" if stream.reason == "stop" else "length")

    async def whole(self) -> list[Piece]:
        """Return each answer in one piece."""
        found: dict[int, list[Piece]] = {number: [] for number in range(self.request.n)}
        async for piece in self:
            if piece is not None:
                found[piece.number].append(piece)
        return [
            Piece(
                number,
                "".join(piece.text for piece in pieces),
                tuple(token for piece in pieces for token in piece.tokens),
                pieces[-1].reason,
            )
            for number, pieces in found.items()
        ]

    def close(self) -> None:
        """Ask for no more, and write a line into the log: what the answers hold is given back."""
        for stream in self.streams:
            stream.cancel()
        read, seconds = len(self.request.tokens), time.monotonic() - self.since
        ends = "+".join(stream.reason or "open" for stream in self.streams)
        logger.info("%d tokens read, %d written, %.2f s, %s", read, self.written, seconds, ends)


def where(error: BaseException) -> str:
    """Say what an error is and where it was raised, without its text, which may quote a prompt, and without folders."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    places = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames))
    return f"{type(error).__name__} at {places}"

"""The thread that runs a scheduler, and how coroutines read the answers that it writes."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ag.errors import UserError
from ag.serve.request import Event, Request, Stream, Token
from ag.serve.scheduler import Scheduler

logger = logging.getLogger("ag.serve")

SILENCE_SECONDS = 15.0  # after which a client hears that it still waits; proxies often close after 30 or 60


class StoppedError(UserError):
    """The server is stopping, or its scheduler has failed: no answer goes on."""


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
        timed: is told the seconds that each token took, and whether it was the first of its answer.
    """

    def __init__(self, request: Request, timed: Callable[[float, bool], None]) -> None:
        self.request = request
        self.streams: list[Stream] = []
        #: Tokens of all answers so far.
        self.written = 0
        self.since = time.monotonic()
        self._timed, self._loop = timed, asyncio.get_running_loop()
        self._last: dict[int, float] = {}  # when each answer had its last token
        self._news: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()

    def hear(self, number: int, event: Event) -> None:
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
            StoppedError: when the server stops before.
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
        if stream.reason == "cancelled":
            raise StoppedError("the server is stopping: ask again later, or another one.")
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

    @property
    def end(self) -> str:
        """How the answers ended, in a word for each; ``open`` where one did not."""
        return "+".join(stream.reason or "open" for stream in self.streams)

    def cancel(self) -> None:
        """Ask for no more."""
        for stream in self.streams:
            stream.cancel()


class Worker:
    """A thread that runs a scheduler. All else belongs to the event loop, which the thread never keeps waiting.

    Args:
        scheduler: answers the requests.
        timed: see :class:`Answers`.
    """

    def __init__(self, scheduler: Scheduler, timed: Callable[[float, bool], None]) -> None:
        self.scheduler = scheduler
        #: The answers that somebody reads.
        self.open: set[Answers] = set()
        #: Whether the thread has ended by an error.
        self.failed = False
        self._timed = timed
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    async def stop(self, seconds: float) -> None:
        """End the thread; give up after a number of seconds."""
        self.cancel()
        self.scheduler.stop()
        await asyncio.to_thread(self._thread.join, seconds)

    def cancel(self) -> None:
        """Ask for no more of all that is open."""
        for answers in self.open:
            answers.cancel()

    def submit(self, request: Request) -> Answers:
        """Queue a request; :meth:`close` its answers in the end.

        Raises:
            Busy: when the queue is full.
            StoppedError: when the scheduler has failed.
            UserError: for a request that can never be answered.
        """
        if self.failed:
            raise StoppedError("the scheduler has failed: start the server again.")
        answers = Answers(request, self._timed)
        answers.streams = self.scheduler.submit(request, answers.hear)
        self.open.add(answers)
        return answers

    def close(self, answers: Answers) -> None:
        """Forget answers that nobody reads any more; what they hold is given back."""
        answers.cancel()
        self.open.discard(answers)
        read, seconds = len(answers.request.tokens), time.monotonic() - answers.since
        logger.info("%d tokens read, %d written, %.2f s, %s", read, answers.written, seconds, answers.end)

    def _run(self) -> None:
        try:
            self.scheduler.run()
        except Exception as error:
            self.failed = True
            logger.error("the scheduler failed: %s", where(error))
            for answers in list(self.open):
                answers.hear(0, StoppedError("the scheduler has failed: start the server again."))


def where(error: BaseException) -> str:
    """Say what an error is and where it was raised, without its text, which may quote a prompt, and without folders."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    places = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames))
    return f"{type(error).__name__} at {places}"

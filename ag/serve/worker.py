"""The thread that runs a scheduler, and how coroutines read the answers that it writes."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from ag.errors import UserError
from ag.serve.detokenizer import Detokenizer
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
        tokens: whose text it is, each with the place of its text in the answer, in characters.
        reason: why the answer ended; None while it goes on.
    """

    number: int
    text: str
    tokens: tuple[tuple[Token, int], ...] = ()
    reason: Literal["stop", "length"] | None = None


class Answers:
    """The answers to one request, piece by piece as they come.

    Args:
        request: what is asked.
        texts: of the answers, as many as it asks for.
        timed: is told the seconds that each token took, and whether it was the first of its answer.
    """

    def __init__(self, request: Request, texts: Sequence[Detokenizer], timed: Callable[[float, bool], None]) -> None:
        self.request = request
        self.streams: Sequence[Stream] = ()
        #: Tokens of all answers so far.
        self.written = 0
        self.since = time.monotonic()
        self._texts, self._timed = texts, timed
        self._pending: list[list[tuple[Token, int]]] = [[] for _ in texts]
        self._last = [self.since] * len(texts)  # when each answer had its last token
        self._counts = [0] * len(texts)
        self._news: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()

    def hear(self, number: int, event: Event) -> None:
        """Take an event of an answer, in the thread of the event loop."""
        if isinstance(event, Token):
            now = time.monotonic()
            self._timed(now - self._last[number], self._counts[number] == 0)
            self._last[number] = now
            self._counts[number] += 1
        self._news.put_nowait((number, event))

    async def __aiter__(self) -> AsyncIterator[Piece | None]:
        """Yield the pieces until every answer has ended, and None where nothing came for a while.

        Raises:
            StoppedError: when the server stops before.
            WaitedError: when an answer did not begin in time.
            Exception: what ended an answer, where that was an error.
        """
        left = set(range(len(self._texts)))
        while left:
            try:
                async with asyncio.timeout(SILENCE_SECONDS):
                    number, event = await self._news.get()
            except TimeoutError:
                yield None
                continue
            if number not in left:
                continue  # after its stop text
            piece = self._piece(number, event)
            if piece.reason is not None:
                left.remove(number)
            if piece.text or piece.tokens or piece.reason:
                yield piece

    @property
    def end(self) -> str:
        """How the answers ended, in a word for each; ``open`` where one did not."""
        return "+".join(stream.reason or "open" for stream in self.streams)

    def cancel(self) -> None:
        """Ask for no more."""
        for stream in self.streams:
            stream.cancel()

    def _piece(self, number: int, event: Event) -> Piece:
        text, pending = self._texts[number], self._pending[number]
        if isinstance(event, Exception):
            raise event
        if event is None:
            reason = self.streams[number].reason
            if reason == "cancelled":
                raise StoppedError("the server is stopping: ask again later, or another one.")
            if reason == "timeout" and not self._counts[number]:
                raise WaitedError(f"no token came within {self.request.wait_seconds} seconds: ask again later.")
            return Piece(number, text.rest(), self._taken(number), "stop" if reason == "stop" else "length")
        self.written += 1
        place = text.length
        new = text.add(event.id)
        pending.append((event, place))
        if text.stopped:
            self.streams[number].cancel("stop")
            pending[:] = [(token, place) for token, place in pending if place < text.given]
            return Piece(number, new, self._taken(number), "stop")
        return Piece(number, new, self._taken(number) if new else ())

    def _taken(self, number: int) -> tuple[tuple[Token, int], ...]:
        taken = tuple(self._pending[number])
        self._pending[number].clear()
        return taken


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
        self._lock = threading.Lock()
        self._news: list[tuple[Answers, int, Event]] = []  # not yet in the event loop

    def start(self) -> None:
        """Begin, for coroutines of the event loop that runs now."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self, seconds: float) -> None:
        """End the thread; give up after so many seconds."""
        self.cancel()
        self.scheduler.stop()
        await asyncio.to_thread(self._thread.join, seconds)

    def cancel(self) -> None:
        """Ask for no more of all that is open."""
        for answers in self.open:
            answers.cancel()

    def submit(self, request: Request, texts: Sequence[Detokenizer]) -> Answers:
        """Queue a request, whose answers become these texts; :meth:`close` them in the end.

        Raises:
            Busy: when the queue is full.
            StoppedError: when the scheduler has failed.
            UserError: for a request that can never be answered.
        """
        if self.failed:
            raise StoppedError("the scheduler has failed: start the server again.")
        answers = Answers(request, texts, self._timed)
        answers.streams = self.scheduler.submit(request, partial(self._hear, answers))
        self.open.add(answers)
        return answers

    def close(self, answers: Answers) -> None:
        """Forget answers that nobody reads any more; what they hold is given back."""
        answers.cancel()
        self.open.discard(answers)
        read, seconds = len(answers.request.tokens), time.monotonic() - answers.since
        logger.info("%d tokens read, %d written, %.2f s, %s", read, answers.written, seconds, answers.end)

    def _hear(self, answers: Answers, number: int, event: Event) -> None:
        """Carry an event to the event loop, which is woken once for all that come before it looks."""
        with self._lock:
            self._news.append((answers, number, event))
            first = len(self._news) == 1
        if first:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            news, self._news = self._news, []
        for answers, number, event in news:
            answers.hear(number, event)

    def _run(self) -> None:
        try:
            self.scheduler.run()
        except Exception as error:
            self.failed = True
            logger.error("the scheduler failed: %s", where(error))
            for answers in list(self.open):
                for number in range(answers.request.n):
                    self._hear(answers, number, StoppedError("the scheduler has failed: start the server again."))


def where(error: BaseException) -> str:
    """Say what an error is and where it was raised, without its text, which may quote a prompt, and without folders."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    places = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames))
    return f"{type(error).__name__} at {places}"

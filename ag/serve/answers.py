"""Completions as asynchronous streams. The scheduler generates them in its own thread."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from ag.serve.errors import request_id
from ag.serve.metrics import Metrics
from ag.serve.request import EncodedPrompt, Event, Stream, Token
from ag.serve.scheduler import Scheduler, StoppedError
from ag.serve.snapshot import Memory

logger = logging.getLogger("ag.serve")

SILENCE_SECONDS = 15.0  # between two comments on a silent stream; proxies often close it after 30 or 60 seconds


@dataclass(frozen=True)
class CompletionDelta:
    """New tokens of a completion, with their text."""

    index: int  # of the completion; counts first the completions to the first prompt
    text: str = ""
    tokens: tuple[Token, ...] = ()  # tokens of ``text``
    reason: Literal["stop", "length"] | None = None  # why the completion ended; None: it goes on
    prompt: tuple[Token, ...] | None = None  # prompt tokens, in the first delta only
    ag_fields: Mapping[str, Any] | None = None  # policy and kept share of the prompt, in the first delta only


class CompletionStream:
    """The completions to the prompts of one request, as an asynchronous iterator of :class:`CompletionDelta`.

    Args:
        prompts: the prompts.
        scheduler: generates the completions in another thread.
        metrics: record the requests, the seconds per token, and why completions ended.

    Raises:
        QueueFullError: when the queue is full; then no prompt is read.
        StoppedError: when the scheduler has stopped or failed.
        UserError: for a prompt that is too long for the pool or the context.
    """

    def __init__(self, prompts: Sequence[EncodedPrompt], scheduler: Scheduler, metrics: Metrics) -> None:
        self._prompts = [prompt for prompt in prompts for _ in range(prompt.request.n)]  # by completion
        self._prompt_tokens = sum(len(prompt.request.tokens) for prompt in prompts)
        self._num_tokens = [0] * len(self._prompts)  # by completion
        self._submitted_at, self._id, self._scheduler = time.monotonic(), request_id.get(), scheduler
        self._metrics, self._loop = metrics, asyncio.get_running_loop()
        self._last_token_at = [self._submitted_at] * len(self._prompts)  # time of the last token, by completion
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._failed = False  # whether an error ended the completions
        self._streams: list[Stream] = []
        try:
            for prompt in prompts:
                self._streams += scheduler.submit(prompt.request, partial(self._receive, len(self._streams)))
        except Exception:
            self._cancel()
            raise
        for prompt in prompts:
            metrics.record_request(prompt.request)

    @property
    def usage(self) -> dict[str, Any]:
        """``usage`` of OpenAI's API: numbers of tokens so far. Its field ``ag`` says what the cache holds of them."""
        memory = Memory.of_all([stream.memory for stream in self._streams])
        streams = {id(prompt): stream for prompt, stream in zip(self._prompts, self._streams, strict=True)}
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": sum(self._num_tokens),
            "total_tokens": self._prompt_tokens + sum(self._num_tokens),
            "prompt_tokens_details": {"cached_tokens": sum(stream.num_cached_tokens for stream in streams.values())},
            "ag": {"kept_share": round(memory.kept_share, 4), "saved_bytes": memory.saved_bytes},
        }

    def _receive(self, first_index: int, index: int, event: Event) -> None:
        """Queue an event of a completion. Runs in the scheduler's thread, which does not wait for the reader.

        Args:
            first_index: index of the prompt's first completion.
            index: index of the completion among the prompt's completions.
            event: a token, an error or the end.
        """
        index += first_index
        self._failed |= isinstance(event, Exception)
        if isinstance(event, Token):
            received_at, is_first = time.monotonic(), self._num_tokens[index] == 0
            self._metrics.record_token(received_at - self._last_token_at[index], is_first)
            self._last_token_at[index] = received_at
            self._num_tokens[index] += 1
        with suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

    async def __aiter__(self) -> AsyncIterator[CompletionDelta | None]:
        """Yield deltas until every completion has ended, and None after each ``SILENCE_SECONDS`` without a delta.

        Raises:
            Exception: the error that ended a completion.
        """
        # tokens of each running completion whose text is not final yet
        pending_tokens: dict[int, list[Token]] = {index: [] for index in range(len(self._streams))}
        not_begun = set(pending_tokens)  # completions without a delta so far
        while pending_tokens:
            try:
                async with asyncio.timeout(SILENCE_SECONDS):
                    index, event = await self._events.get()
            except TimeoutError:
                yield None
                continue
            if isinstance(event, StoppedError) and any(self._num_tokens) and not self._scheduler.failed:
                event = None  # the request's other completions have tokens, which are kept when the server stops
            if isinstance(event, Exception):
                raise event
            if event is None:
                delta = self._final_delta(index, pending_tokens.pop(index))
            else:
                pending_tokens[index].append(event)
                if not event.text or self._streams[index].detokenizer.stopped:
                    continue
                delta = CompletionDelta(index, event.text, tuple(pending_tokens[index]))
                pending_tokens[index].clear()
            if index in not_begun:
                not_begun.remove(index)
                ag_fields = {"policy": self._prompts[index].policy, "kept": self._streams[index].kept_share}
                delta = replace(delta, prompt=self._prompt_tokens_of(index), ag_fields=ag_fields)
            yield delta

    def _prompt_tokens_of(self, index: int) -> tuple[Token, ...]:
        """Return a completion's prompt tokens, with texts and log-probabilities if requested."""
        echo, scored_tokens = self._prompts[index].echo, self._streams[index].prompt
        if not echo or not scored_tokens:
            return echo or scored_tokens or tuple(map(Token, self._prompts[index].request.tokens))
        return tuple(
            replace(scored, text=token.text, text_offset=token.text_offset)
            for token, scored in zip(echo, scored_tokens, strict=True)
        )

    def _final_delta(self, index: int, tokens: list[Token]) -> CompletionDelta:
        """Return the last delta of a completion: the pending text without stop text, and its tokens."""
        stream = self._streams[index]
        text = "".join(token.text for token in tokens) + stream.detokenizer.flush()
        if stream.detokenizer.stopped:
            tokens = [token for token in tokens if token.text_offset < stream.detokenizer.num_released]
        has_stopped = stream.reason == "stop" or stream.detokenizer.stopped
        reason: Literal["stop", "length"] = "stop" if has_stopped else "length"
        self._metrics.record_end(reason, self._num_tokens[index])
        return CompletionDelta(index, text, tuple(tokens), reason)

    async def collect(self) -> list[CompletionDelta]:
        """Return each completion as one delta."""
        deltas: dict[int, list[CompletionDelta]] = {index: [] for index in range(len(self._streams))}
        async for delta in self:
            if delta is not None:
                deltas[delta.index].append(delta)
        return [
            replace(
                parts[0],
                text="".join(part.text for part in parts),
                tokens=tuple(token for part in parts for token in part.tokens),
                reason=parts[-1].reason,
            )
            for parts in deltas.values()
        ]

    def close(self) -> None:
        """Cancel running completions, which frees their blocks, and write a log line."""
        ends = Counter(stream.reason or ("error" if self._failed else "cancelled") for stream in self._streams)
        self._cancel()
        is_single, seconds = len(self._streams) == 1, time.monotonic() - self._submitted_at
        reasons = ", ".join(reason if is_single else f"{count} {reason}" for reason, count in ends.items())
        numbers = self._prompt_tokens, sum(self._num_tokens), seconds
        logger.info("%s: %d tokens read, %d written, %.2f s, %s", self._id, *numbers, reasons)

    def _cancel(self) -> None:
        for stream in self._streams:
            stream.cancel()

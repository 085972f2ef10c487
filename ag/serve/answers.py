"""Completions as asynchronous streams, and as JSON in OpenAI's format. The scheduler generates them in its thread."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from pydantic_core import to_json

from ag.serve.errors import request_id
from ag.serve.metrics import Metrics
from ag.serve.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from ag.serve.request import EncodedPrompt, Token
from ag.serve.scheduler import Scheduler, StoppedError
from ag.serve.snapshot import Memory
from ag.serve.stream import Event, Stream, Vocabulary
from ag.serve.tools import OutputParser

logger = logging.getLogger("ag.serve")

SILENCE_SECONDS = 15.0  # between two comments on a silent stream; proxies often close it after 30 or 60 seconds
LOWEST = -9999.0  # OpenAI's log-probability of an impossible token: JSON has no infinity


@dataclass(frozen=True)
class CompletionDelta:
    """New tokens of a completion, with their text."""

    index: int  # of the completion; counts first the completions to the first prompt
    text: str = ""
    tokens: tuple[Token, ...] = ()  # tokens of ``text``
    reason: Literal["stop", "length"] | None = None  # why the completion ended; None: it goes on
    prompt: tuple[Token, ...] | None = None  # prompt tokens, in the first delta only
    ag_fields: Mapping[str, Any] | None = None  # policy and kept share of the prompt, in the first delta only
    stop_tokens: tuple[Token, ...] = ()  # tokens of a stop text that ``text`` leaves out, in the last delta only


class CompletionStream:
    """The completions to the prompts of one request, as an asynchronous iterator of :class:`CompletionDelta`.

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
        for request in (prompt.request for prompt in prompts):
            metrics.observe(request_prompt_tokens=len(request.tokens), request_params_n=request.n)
            metrics.observe(request_params_max_tokens=request.max_tokens)

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
        """Queue an event of a prompt's completion ``index``. The scheduler's thread does not wait for the reader."""
        index += first_index
        self._failed |= isinstance(event, Exception)
        if isinstance(event, Token):
            received_at, name = time.monotonic(), "time_per_token" if self._num_tokens[index] else "time_to_first_token"
            self._metrics.observe(**{f"{name}_seconds": received_at - self._last_token_at[index]})
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
            stream = self._streams[index]
            if event is None:
                delta = self._final_delta(index, pending_tokens.pop(index))
            else:
                pending_tokens[index].append(event)
                if not event.text or stream.detokenizer.stopped:
                    continue
                delta = CompletionDelta(index, event.text, tuple(pending_tokens[index]))
                pending_tokens[index].clear()
            if index in not_begun:
                not_begun.remove(index)
                ag_fields = {"policy": self._prompts[index].policy, "kept": stream.kept_share}
                prompt = self._prompts[index].tokens_with(stream.prompt)
                delta = replace(delta, prompt=prompt, ag_fields=ag_fields)
            yield delta

    def _final_delta(self, index: int, tokens: list[Token]) -> CompletionDelta:
        """Return the last delta of a completion: the pending text without stop text, and its tokens."""
        stream, detokenizer = self._streams[index], self._streams[index].detokenizer
        text = "".join(token.text for token in tokens) + detokenizer.flush()
        num_shown = len(tokens)
        if detokenizer.stopped:
            num_shown = sum(token.text_offset < detokenizer.num_released for token in tokens)
        reason: Literal["stop", "length"] = "stop" if stream.reason == "stop" or detokenizer.stopped else "length"
        self._metrics.record_end(reason, self._num_tokens[index])
        return CompletionDelta(index, text, tuple(tokens[:num_shown]), reason, stop_tokens=tuple(tokens[num_shown:]))

    async def collect(self) -> list[CompletionDelta]:
        """Return each completion as one delta."""
        parts: defaultdict[int, list[CompletionDelta]] = defaultdict(list)
        async for delta in self:
            if delta is not None:
                parts[delta.index].append(delta)
        return [
            replace(
                deltas[0],
                text="".join(delta.text for delta in deltas),
                tokens=tuple(token for delta in deltas for token in delta.tokens),
                stop_tokens=deltas[-1].stop_tokens,
                reason=deltas[-1].reason,
            )
            for _, deltas in sorted(parts.items())
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


class CompletionWriter:
    """Writes the completions of one request as JSON, whole or as events of a stream.

    ``new_parser`` makes a parser that splits a completion into content, thoughts and calls. None: content only.
    """

    def __init__(
        self, params: GenerationRequest, vocabulary: Vocabulary, new_parser: Callable[[], OutputParser] | None = None
    ) -> None:
        self.params, self._vocabulary, self._chat = params, vocabulary, isinstance(params, ChatCompletionRequest)
        name = f"{'chatcmpl' if self._chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._head = {"id": name, "created": int(time.time()), "model": params.model}
        # by completion
        self._parsers: dict[int, OutputParser] | None = None if new_parser is None else defaultdict(new_parser)
        self._echo_lengths: dict[int, int] = {}  # characters of the repeated prompt

    def start_events(self) -> str:
        """Return the first events of a stream: in a chat the role of each completion."""
        role = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        roles = range(self.params.n) if self._chat else ()
        return "".join(_event(self._json([{"index": index, **role}])) for index in roles)

    def delta_event(self, delta: CompletionDelta) -> str:
        """Return a delta as an event of a stream."""
        text = {"delta": self._message_fields(delta)} if self._chat else {"text": delta.text}
        first = self._chat and delta.index == 0
        return _event(self._json([self._choice(delta, text)], **(self._prompt_fields(delta) if first else {})))

    def end_events(self, usage: Mapping[str, Any]) -> str:
        """Return the last events of a stream, with the usage if requested."""
        with_usage = (self.params.stream_options or {}).get("include_usage")
        return (_event(self._json([], usage=usage)) if with_usage else "") + _event("[DONE]")

    def full_json(self, completions: Sequence[CompletionDelta], usage: Mapping[str, Any]) -> str:
        """Return the whole completions, with their usage."""
        choices = []
        for delta in completions:
            message = {"role": "assistant", "content": "", "refusal": None} | self._message_fields(delta)
            for call in message.get("tool_calls", []):
                del call["index"]  # of streams
                message["content"] = message["content"] or None
            choices.append(self._choice(delta, {"message": message} if self._chat else {"text": delta.text}))
        prompt_fields = self._prompt_fields(completions[0]) if self._chat else {}
        return self._json(choices, "chat.completion", usage=usage, **prompt_fields)

    def _json(self, choices: Sequence[Any], kind: str = "chat.completion.chunk", **more_fields: Any) -> str:
        kind = kind if self._chat else "text_completion"
        answer = self._head | {"object": kind, "choices": choices, **more_fields}
        return to_json(answer, inf_nan_mode="null").decode()

    def _message_fields(self, delta: CompletionDelta) -> dict[str, Any]:
        if self._parsers is None:
            return {"content": delta.text} if delta.text else {}
        return self._parsers[delta.index].add(delta.text, last=delta.reason is not None)

    def _choice(self, delta: CompletionDelta, text: dict[str, Any]) -> dict[str, Any]:
        logprobs: dict[str, Any] | None = None
        tokens = delta.tokens
        if isinstance(self.params, CompletionRequest) and self.params.echo:
            echo_length = sum(len(token.text) for token in delta.prompt or ())
            echo_length = self._echo_lengths.setdefault(delta.index, echo_length)
            tokens = tuple(replace(token, text_offset=echo_length + token.text_offset) for token in tokens)
            if delta.prompt is not None:
                tokens = delta.prompt + tokens
                text = {"text": "".join(token.text for token in delta.prompt) + delta.text}
        if self.params.num_logprobs is not None:
            logprobs = self._chat_logprobs(tokens) if self._chat else self._text_logprobs(tokens)
        has_calls = self._parsers is not None and self._parsers[delta.index].count
        reason = "tool_calls" if has_calls and delta.reason == "stop" else delta.reason
        choice = {"index": delta.index, "logprobs": logprobs, "finish_reason": reason, **text}
        if self.params.return_token_ids:
            choice["token_ids"] = [token.id for token in (*delta.tokens, *delta.stop_tokens)]
        return choice if self._chat else choice | self._prompt_fields(delta)

    def _prompt_fields(self, delta: CompletionDelta) -> dict[str, Any]:
        """Return the requested fields of the prompt: token ids and log-probabilities (as vLLM), kept share."""
        if delta.prompt is None:
            return {}
        prompt_fields: dict[str, Any] = {} if self.params.ag is None else {"ag": delta.ag_fields}
        if self.params.return_token_ids:
            prompt_fields["prompt_token_ids"] = [token.id for token in delta.prompt]
        if self.params.prompt_logprobs is not None:
            prompt_fields["prompt_logprobs"] = [self._ranks(token) if token.rank else None for token in delta.prompt]
        return prompt_fields

    # ---- log-probabilities

    def _ranks(self, token: Token) -> dict[int, Any]:
        top = [(*other, rank) for rank, other in enumerate(token.top_logprobs[: self.params.prompt_logprobs], 1)]
        return {
            token_id: {"logprob": _finite(logprob), "rank": rank, "decoded_token": self._vocabulary.text(token_id)}
            for token_id, logprob, rank in [*top, (token.id, token.logprob, token.rank)]
        }

    def _chat_logprobs(self, tokens: Sequence[Token]) -> dict[str, Any]:
        def value(token: int, logprob: float | None) -> dict[str, Any]:
            text = self._vocabulary.text(token)  # part of a character is U+FFFD
            token_bytes = self._vocabulary.bytes_of(token) or text.encode()  # a special token has no bytes
            return {"token": text, "bytes": [*token_bytes], "logprob": _finite(logprob)}

        def with_top(token: Token) -> dict[str, Any]:
            return value(token.id, token.logprob) | {"top_logprobs": [value(*other) for other in token.top_logprobs]}

        return {"content": [*map(with_top, tokens)]}

    def _text_logprobs(self, tokens: Sequence[Token]) -> dict[str, Any]:
        return {
            "tokens": [self._vocabulary.text(token.id) for token in tokens],
            "token_logprobs": [_finite(token.logprob) if token.rank else None for token in tokens],
            "top_logprobs": [self._top_logprobs(token) if token.rank else None for token in tokens],
            "text_offset": [token.text_offset for token in tokens],
        }

    def _top_logprobs(self, token: Token) -> dict[str, float]:
        """Return the log-probabilities of the most probable tokens and the chosen token, by text.

        The key of the chosen token is its text, as in ``tokens``. If several tokens have one text, the chosen token, or
        else the most probable token, has the text as its key. The key of each further token is ``token_id:N``.
        """
        values = dict(token.top_logprobs[: self.params.num_logprobs]) | {token.id: token.logprob}
        names: dict[str, int] = {}
        for token_id in [token.id, *values]:
            names.setdefault(self._vocabulary.text(token_id), token_id)
        texts = {token_id: text for text, token_id in names.items()}
        return {texts.get(token_id, f"token_id:{token_id}"): _finite(value) for token_id, value in values.items()}


def _event(data: str) -> str:
    return f"data: {data}\n\n"


def _finite(logprob: float | None) -> float:
    return max(logprob or 0.0, LOWEST)

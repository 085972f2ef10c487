"""Writes completions as JSON in OpenAI's format, whole or as events of a stream."""

from __future__ import annotations

import json
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ag.serve.answers import CompletionDelta
from ag.serve.detokenizer import Vocabulary
from ag.serve.protocol import ChatCompletionRequest, CompletionRequest, GenerationParams
from ag.serve.request import Token
from ag.serve.tools import OutputParser

LOWEST = -9999.0  # OpenAI's log-probability of an impossible token: JSON has no infinity


class CompletionWriter:
    """Writes the completions of one request as JSON, whole or as deltas.

    Args:
        params: parameters of the request.
        vocabulary: texts of tokens.
        new_parser: makes a parser that splits a completion into content, thoughts and calls. None: content only.
    """

    def __init__(
        self, params: GenerationParams, vocabulary: Vocabulary, new_parser: Callable[[], OutputParser] | None = None
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

    def _json(self, choices: list[dict[str, Any]], kind: str = "chat.completion.chunk", **more_fields: Any) -> str:
        kind = kind if self._chat else "text_completion"
        answer = self._head | {"object": kind, "choices": choices, **more_fields}
        return json.dumps(answer, ensure_ascii=False, separators=(",", ":"), allow_nan=False)

    def _message_fields(self, delta: CompletionDelta) -> dict[str, Any]:
        if self._parsers is None:
            return {"content": delta.text} if delta.text else {}
        return self._parsers[delta.index].add(delta.text, last=delta.reason is not None)

    def _choice(self, delta: CompletionDelta, text: dict[str, Any]) -> dict[str, Any]:
        logprobs, tokens = None, delta.tokens
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
            choice["token_ids"] = [token.id for token in delta.tokens]
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

    def _ranks(self, token: Token) -> dict[int, Any]:
        top = [(*other, rank) for rank, other in enumerate(token.top_logprobs[: self.params.prompt_logprobs], 1)]
        return {
            token_id: {"logprob": _finite(logprob), "rank": rank, "decoded_token": self._vocabulary.text(token_id)}
            for token_id, logprob, rank in [*top, (token.id, token.logprob, token.rank)]
        }

    # ---- log-probabilities

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

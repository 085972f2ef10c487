"""What clients of OpenAI's API may ask here, and the form of the answers that they get."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from openai import BaseModel as Answer
from openai.types import Completion, CompletionChoice
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat import completion_create_params as chat_params
from openai.types.completion_create_params import CompletionCreateParamsBase
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError, from_json

from ag.errors import nearest
from ag.model.chat import Part, for_template
from ag.serve.answers import Piece
from ag.serve.detokenizer import Vocabulary
from ag.serve.request import Token

LOWEST = -9999.0  # OpenAI's log-probability of what is impossible: JSON has no infinity

#: Parameters of OpenAI's API that are not supported, with the values that ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
}
#: Parameters that say something of the client and change no answer.
IGNORED = {"metadata", "prompt_cache_key", "safety_identifier", "user"}


class ApiError(Exception):
    """What a client is told when it gets no answer.

    Args:
        status: of HTTP.
        message: what is wrong, what was expected, and the fix.
        param: the parameter that is meant, such as ``messages[0].role``.
        code: a word for programs.
        retry: seconds after which asking again may help.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, retry: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry = status, param, code, retry

    @property
    def body(self) -> dict[str, Any]:
        """The error in OpenAI's form."""
        kind = {429: "rate_limit_error", 401: "authentication_error"}.get(self.status, "invalid_request_error")
        kind = "server_error" if self.status >= 500 else kind
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


# ---- requests


class _Part(BaseModel):
    """A part of a request: it has no other parameters, and a text is no number."""

    model_config = ConfigDict(extra="forbid", strict=True)


class TextPart(_Part):
    """A part of a message's content: text."""

    type: Literal["text"]
    text: str


class Function(_Part):
    """What the assistant calls."""

    name: str
    arguments: str | dict[str, Any] = "{}"


class ToolCall(_Part):
    """A call of a tool by the assistant."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: Function
    index: int | None = Field(None, exclude=True)  # of a stream


class Message(_Part):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    name: str | None = None
    reasoning_content: str | None = None  # the assistant's thoughts, as servers of reasoning models call them
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    content: str | Annotated[list[TextPart], Field(min_length=1)] | None = Field(None, validate_default=True)

    @field_validator("content")
    @classmethod
    def _is_there(cls, content: Any, others: ValidationInfo) -> Any:
        if content is None and not (others.data.get("role") == "assistant" and others.data.get("tool_calls")):
            raise PydanticCustomError("missing", "Field required")
        return content

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates take it."""
        told = self.model_dump(exclude_none=True)
        if isinstance(self.content, list):
            told["content"] = "".join(part.text for part in self.content)
        if self.role == "developer":
            told["role"] = "system"
        return for_template(told)


class StreamOptions(_Part):
    """What else a stream tells."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False  # padding of the answer, which this server never adds


Ids = Annotated[list[int], Field(min_length=1)]
StopText = Annotated[str, Field(min_length=1, max_length=1000)]


class Asked(_Part):
    """The parameters of both kinds of request; null stands for the default.

    A parameter that :class:`ag.serve.Request` has too, and in the same form, goes there by its name: one more of
    drawing is a field here, a field there, and a line in :func:`ag.serve.sampler.processors`.
    """

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)  # -1: as 0, any number
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] = Field(default_factory=list)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = Field(default_factory=dict)
    n: int = Field(1, ge=1, le=128)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    #: The parameter with the text to continue.
    text: ClassVar[str]
    #: The parameters that OpenAI's API has.
    known: ClassVar[frozenset[str]]

    @property
    def longest(self) -> tuple[str, int] | None:
        """Most tokens of the answer, behind the name of its parameter; None means that the client does not say."""
        return None if self.max_tokens is None else ("max_tokens", self.max_tokens)

    @field_validator("stream_options")
    @classmethod
    def _streams(cls, told: StreamOptions, others: ValidationInfo) -> StreamOptions:
        if told.model_fields_set and not others.data.get("stream"):
            raise PydanticCustomError("alone", "needs stream=true; leave it out")
        return told

    @property
    def best(self) -> int | None:
        """How many of the most probable tokens to name at each place; None means that none is asked for."""
        raise NotImplementedError

    def biases(self, vocabulary: int) -> dict[int, float]:
        """Return what is added to logits, by token of a vocabulary of this size.

        Raises:
            ApiError: for what is no token of it.
        """
        for name in self.logit_bias:
            if not (name.isascii() and name.isdigit() and len(name) < 10 and int(name) < vocabulary):
                message = f"logit_bias: {name[:80]!r}: expected tokens of 0 to {vocabulary - 1}."
                raise ApiError(400, message, "logit_bias")
        return {int(name): bias for name, bias in self.logit_bias.items()}


class ChatAsked(Asked):
    """The parameters of ``/v1/chat/completions``."""

    text = "messages"
    known = frozenset(chat_params.CompletionCreateParamsBase.__annotations__)

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    tools: list[dict[str, Any]] = Field(default_factory=list)  # which the chat template tells the model of
    tool_choice: Literal["none", "auto"] = "auto"
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)  # variables of it, such as enable_thinking
    protect: list[Part] | None = None  # parts of the chat that are never evicted; None means those of the server

    @field_validator("top_logprobs")
    @classmethod
    def _is_asked_for(cls, told: int, others: ValidationInfo) -> int:
        if told and not others.data.get("logprobs"):
            raise PydanticCustomError("alone", "needs logprobs=true; add that, or leave this out")
        return told

    @property
    def variables(self) -> dict[str, Any]:
        """What the chat template is told beside the messages."""
        shown = self.tools if self.tool_choice == "auto" else []
        return self.chat_template_kwargs | ({"tools": shown} if shown else {})

    @property
    def longest(self) -> tuple[str, int] | None:
        """Most tokens of the answer, behind the name of its parameter; None means that the client does not say."""
        named = self.max_completion_tokens
        return super().longest if named is None else ("max_completion_tokens", named)

    @property
    def best(self) -> int | None:
        """How many of the most probable tokens to name at each place; None means that none is asked for."""
        return self.top_logprobs if self.logprobs else None


class CompletionAsked(Asked):
    """The parameters of ``/v1/completions``."""

    text = "prompt"
    known = frozenset(CompletionCreateParamsBase.__annotations__)

    prompt: str | Ids | Annotated[list[str], Field(min_length=1)] | Annotated[list[Ids], Field(min_length=1)]
    logprobs: int | None = Field(None, ge=0, le=20)
    protect: list[Annotated[list[int], Field(min_length=2, max_length=2)]] = Field(default_factory=list)  # tokens

    @property
    def best(self) -> int | None:
        """How many of the most probable tokens to name at each place; None means that none is asked for."""
        return self.logprobs


def parse(kind: type[Asked], body: bytes) -> Any:
    """Read the body of a request.

    Raises:
        ApiError: 400, naming the parameter, its value, and what was expected.
    """
    try:
        told = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON in UTF-8: {error}.", code="invalid_json") from None
    if not isinstance(told, dict):
        raise ApiError(400, "the body is JSON, but not an object: expected {...}.", code="invalid_json")
    told = {name: value for name, value in told.items() if value is not None}
    for name in sorted(told.keys() - kind.model_fields.keys()):
        if name not in kind.known:
            hint = nearest(name, kind.model_fields)
            raise ApiError(400, f"{name[:80]!r} is no parameter{hint or '.'}", name[:80], "unknown_parameter")
        if name not in IGNORED and told[name] not in NEUTRAL.get(name, ()):
            raise ApiError(400, f"{name} is not supported by this server: leave it out.", name, "unsupported_parameter")
        del told[name]
    for message in told["messages"] if isinstance(told.get("messages"), list) else []:
        if isinstance(message, dict):  # what the client of openai adds to the messages of an assistant
            for name in [name for name, value in message.items() if value is None or value == [] and name != "content"]:
                del message[name]
    try:
        return kind.model_validate(told)
    except ValidationError as error:
        raise _refusal(error) from None


def _refusal(error: ValidationError) -> ApiError:
    """Return what a client is told of the first value that does not fit."""
    errors = error.errors(include_url=False)
    first = max(errors, key=lambda found: len(found["loc"]))  # where a value may be of several kinds, the nearest one
    param = _param(first["loc"])
    alike = [found for found in errors if _param(found["loc"]) == param]
    # why a value of the right kind does not fit, or all the kinds that would
    told = [found["msg"] for found in alike if not found["type"].endswith("_type")] or [x["msg"] for x in alike]
    reason = " or ".join(dict.fromkeys(told)).replace(" or Input should be ", " or ")
    if first["type"] == "missing":
        return ApiError(400, f"{param}: {reason}.", param or None, "missing")
    return ApiError(400, f"{param}={first['input']!r:.80}: {reason}.", param or None, "invalid_value")


def _param(place: Sequence[int | str]) -> str:
    """Return the name of a parameter, such as ``messages[0].role``."""
    names = [part for part in place if isinstance(part, int) or part.isidentifier() and part not in ("str", "list")]
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in names).lstrip(".")


# ---- answers


class _Going(CompletionChoice):
    """A choice of a text, which may go on."""

    finish_reason: Literal["stop", "length"] | None  # type: ignore[assignment]  # OpenAI's type knows none that does


class _Completion(Completion):
    choices: list[_Going]  # type: ignore[assignment]


class Form:
    """The form of the answers to one request, whole or in pieces; as JSON, by OpenAI's types.

    Args:
        asked: the request.
        vocabulary: knows the texts of tokens.
    """

    def __init__(self, asked: Asked, vocabulary: Vocabulary) -> None:
        self.asked, self.text_of, self._chat = asked, vocabulary.text, isinstance(asked, ChatAsked)
        name = f"{'chatcmpl' if self._chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._head = {"id": name, "created": int(time.time()), "model": asked.model}

    def begin(self) -> list[str]:
        """Return what a stream begins with: of a chat the role of each answer."""
        role = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        return [self._piece([{"index": number, **role}]) for number in range(self.asked.n)] if self._chat else []

    def chunk(self, piece: Piece) -> str:
        """Return a piece of an answer for a stream."""
        said = {"delta": {"content": piece.text} if piece.text else {}} if self._chat else {"text": piece.text}
        return self._piece([self._choice(piece, said)])

    def last(self, prompt: int, written: int) -> str:
        """Return the end of a stream that tells how many tokens there were."""
        return self._piece([], usage=_usage(prompt, written))

    def whole(self, answers: Sequence[Piece], prompt: int, written: int) -> str:
        """Return the answers, each in one piece, and how many tokens the prompt and they have."""
        choices = []
        for piece in answers:
            message = {"role": "assistant", "content": piece.text, "refusal": None}
            choices.append(self._choice(piece, {"message": message} if self._chat else {"text": piece.text}))
        kind, name = (ChatCompletion, "chat.completion") if self._chat else (_Completion, "text_completion")
        return _json(kind, object=name, choices=choices, usage=_usage(prompt, written), **self._head)

    def _piece(self, choices: list[dict[str, Any]], **more: Any) -> str:
        kind, name = (ChatCompletionChunk, "chat.completion.chunk") if self._chat else (_Completion, "text_completion")
        return _json(kind, object=name, choices=choices, **more, **self._head)

    def _choice(self, piece: Piece, said: dict[str, Any]) -> dict[str, Any]:
        logprobs = None
        if self.asked.best is not None:
            logprobs = self._of_chat(piece.tokens) if self._chat else self._of_text(piece.tokens)
        return {"index": piece.number, "logprobs": logprobs, "finish_reason": piece.reason, **said}

    # ---- log-probabilities

    def _of_chat(self, tokens: Sequence[Token]) -> dict[str, Any]:
        def value(token: int, logprob: float | None) -> dict[str, Any]:
            text = self.text_of(token)  # a part of a character is no text: then there are no bytes of it
            known = None if "\ufffd" in text else list(text.encode())
            return {"token": text, "bytes": known, "logprob": _finite(logprob)}

        best = [[value(*other) for other in token.best] for token in tokens]
        found = [value(token.id, token.logprob) for token in tokens]
        return {"content": [one | {"top_logprobs": others} for one, others in zip(found, best, strict=True)]}

    def _of_text(self, tokens: Sequence[Token]) -> dict[str, Any]:
        return {
            "tokens": [self.text_of(token.id) for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [self._best(token) for token in tokens],
            "text_offset": [token.place for token in tokens],
        }

    def _best(self, token: Token) -> dict[str, float]:
        """Return the log-probabilities of the most probable tokens and of the one that was chosen.

        The chosen one is named by its text, as in ``tokens``; of others that are spelled alike the most probable one
        is, and the rest by their ids.
        """
        values = dict(token.best) | {token.id: token.logprob}
        names: dict[str, int] = {}
        for other in [token.id, *values]:
            names.setdefault(self.text_of(other), other)
        texts = {other: text for text, other in names.items()}
        return {texts.get(other, f"token_id:{other}"): _finite(value) for other, value in values.items()}


def _finite(logprob: float | None) -> float:
    return max(logprob or 0.0, LOWEST)


def _usage(prompt: int, written: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}


def _json(kind: type[Answer], **fields: Any) -> str:
    return kind.model_validate(fields).to_json(indent=None)

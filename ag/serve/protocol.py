"""What clients of OpenAI's API may ask here, and the form of the answers that they get."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from openai import BaseModel as Answer
from openai.types import Completion, CompletionChoice, CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage, ChatCompletionTokenLogprob
from openai.types.chat import completion_create_params as chat_params
from openai.types.chat.chat_completion import Choice, ChoiceLogprobs
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceDelta
from openai.types.chat.chat_completion_chunk import ChoiceLogprobs as ChunkLogprobs
from openai.types.chat.chat_completion_token_logprob import TopLogprob
from openai.types.completion_choice import Logprobs
from openai.types.completion_create_params import CompletionCreateParamsBase
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError, from_json

from ag.errors import nearest
from ag.model.chat import Part, for_template
from ag.serve.detokenizer import Spelling
from ag.serve.request import Token
from ag.serve.worker import Piece

LOWEST = -9999.0  # OpenAI's log-probability of what is impossible: JSON has no infinity

#: Values of parameters that are not supported which ask for nothing.
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


class TextPart(BaseModel):
    """A part of a message's content: text."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]
    text: str


class Function(BaseModel):
    """What the assistant calls."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    arguments: str | dict[str, Any] = "{}"


class ToolCall(BaseModel):
    """A call of a tool by the assistant."""

    model_config = ConfigDict(extra="forbid", strict=True)

    id: str | None = None
    type: Literal["function"] = "function"
    function: Function
    index: int | None = None  # of a stream

    def for_template(self) -> dict[str, Any]:
        """Return the call as chat templates take it."""
        named = {} if self.id is None else {"id": self.id}
        return {"type": self.type, "function": self.function.model_dump()} | named


class Message(BaseModel):
    """A message of a conversation."""

    model_config = ConfigDict(extra="forbid", strict=True)

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
        told = self.model_dump(exclude={"tool_calls"})
        if isinstance(self.content, list):
            told["content"] = "".join(part.text for part in self.content)
        if self.role == "developer":
            told["role"] = "system"
        if self.tool_calls:
            told["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return for_template(told)


class StreamOptions(BaseModel):
    """What else a stream tells."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    include_obfuscation: Literal[False] = False  # padding of the answer, which this server never adds


Ids = Annotated[list[int], Field(min_length=1)]
StopText = Annotated[str, Field(min_length=1, max_length=1000)]


class Asked(BaseModel):
    """The parameters of both kinds of request; null stands for the default."""

    model_config = ConfigDict(extra="forbid", strict=True)

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
        """Most tokens of the answer, behind the name of the parameter that says so; None: the client does not say."""
        return None if self.max_tokens is None else ("max_tokens", self.max_tokens)

    @field_validator("stream_options")
    @classmethod
    def _streams(cls, told: StreamOptions, others: ValidationInfo) -> StreamOptions:
        if told.model_fields_set and not others.data.get("stream"):
            raise PydanticCustomError("alone", "needs stream=true; leave it out")
        return told

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts that end the answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def best(self) -> int | None:
        """How many of the most probable tokens to name at each place; None: no log-probabilities."""
        raise NotImplementedError

    def biases(self, vocabulary: int) -> dict[int, float]:
        """Return what is added to logits, by token of a vocabulary of this size.

        Raises:
            ApiError: for what is no token of it.
        """
        for name in self.logit_bias:
            if not (name.isascii() and name.isdigit() and len(name) < 10 and int(name) < vocabulary):
                raise ApiError(
                    400, f"logit_bias: {name[:80]!r}: expected tokens of 0 to {vocabulary - 1}.", "logit_bias"
                )
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
    protect: list[Part] | None = None  # parts of the chat that are never evicted; None: those of the server

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
        """Most tokens of the answer, behind the name of the parameter that says so; None: the client does not say."""
        named = self.max_completion_tokens
        return super().longest if named is None else ("max_completion_tokens", named)

    @property
    def best(self) -> int | None:
        """How many of the most probable tokens to name at each place; None: no log-probabilities."""
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
        """How many of the most probable tokens to name at each place; None: no log-probabilities."""
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
    missing = first["type"] == "missing"
    value = "" if missing else f"={_shown(first['input'])}"
    return ApiError(400, f"{param}{value}: {reason}.", param or None, "missing" if missing else "invalid_value")


def _param(place: Sequence[int | str]) -> str:
    """Return the name of a parameter, such as ``messages[0].role``."""
    names = [part for part in place if isinstance(part, int) or part.isidentifier() and part not in ("str", "list")]
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in names).lstrip(".")


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.80}"
    except ValueError:  # Python writes no number of so many digits
        return "..."


class Form(ABC):
    """The form of an answer to one request, whole or in pieces.

    Args:
        asked: the request.
        tokenizer: a fast one, which knows the texts of tokens.
    """

    prefix: ClassVar[str]

    def __init__(self, asked: Asked, tokenizer: Any) -> None:
        self.asked, self.text_of = asked, Spelling(tokenizer)
        self.head: dict[str, Any] = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": asked.model,
        }

    def begin(self) -> list[Answer]:
        """Return what a stream begins with."""
        return []

    @abstractmethod
    def chunk(self, piece: Piece) -> Answer:
        """Return a piece of an answer for a stream."""

    @abstractmethod
    def last(self, usage: CompletionUsage) -> Answer:
        """Return the end of a stream that tells how many tokens there were."""

    @abstractmethod
    def whole(self, answers: Sequence[Piece], usage: CompletionUsage) -> Answer:
        """Return the answers, each in one piece."""


class ChatForm(Form):
    """The form of ``/v1/chat/completions``."""

    prefix = "chatcmpl"

    def begin(self) -> list[Answer]:
        """Return the role of each answer."""
        return [self._chunk(number, ChoiceDelta(role="assistant", content="")) for number in range(self.asked.n)]

    def chunk(self, piece: Piece) -> Answer:
        """Return a piece of an answer for a stream."""
        delta = ChoiceDelta(content=piece.text) if piece.text else ChoiceDelta()
        logprobs = self._logprobs(piece)
        told = None if logprobs is None else ChunkLogprobs(content=logprobs)
        return self._chunk(piece.number, delta, logprobs=told, finish_reason=piece.reason)

    def last(self, usage: CompletionUsage) -> Answer:
        """Return the end of a stream that tells how many tokens there were."""
        return ChatCompletionChunk(object="chat.completion.chunk", choices=[], usage=usage, **self.head)

    def whole(self, answers: Sequence[Piece], usage: CompletionUsage) -> Answer:
        """Return the answers, each in one piece."""
        choices = []
        for piece in answers:
            logprobs = self._logprobs(piece)
            choices.append(
                Choice(
                    index=piece.number,
                    message=ChatCompletionMessage(role="assistant", content=piece.text, refusal=None),
                    logprobs=None if logprobs is None else ChoiceLogprobs(content=logprobs),
                    finish_reason=piece.reason or "stop",
                )
            )
        return ChatCompletion(object="chat.completion", choices=choices, usage=usage, **self.head)

    def _chunk(self, number: int, delta: ChoiceDelta, **told: Any) -> Answer:
        choice = ChunkChoice(index=number, delta=delta, **{"finish_reason": None, **told})
        return ChatCompletionChunk(object="chat.completion.chunk", choices=[choice], **self.head)

    def _logprobs(self, piece: Piece) -> list[ChatCompletionTokenLogprob] | None:
        if self.asked.best is None:
            return None
        return [
            ChatCompletionTokenLogprob(
                **self._named(token.id, token.logprob or 0.0),
                top_logprobs=[TopLogprob(**self._named(*best)) for best in token.best],
            )
            for token, _ in piece.tokens
        ]

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.text_of(token)  # a part of a character is no text: then there are no bytes of it
        return {
            "token": text,
            "bytes": None if "\ufffd" in text else list(text.encode()),
            "logprob": max(logprob, LOWEST),
        }


class CompletionForm(Form):
    """The form of ``/v1/completions``."""

    prefix = "cmpl"

    def chunk(self, piece: Piece) -> Answer:
        """Return a piece of an answer for a stream."""
        # constructed without checks: OpenAI's type knows no choice that goes on
        choice = CompletionChoice.model_construct(
            index=piece.number, text=piece.text, logprobs=self._logprobs(piece), finish_reason=piece.reason
        )
        return Completion.model_construct(object="text_completion", choices=[choice], **self.head)

    def last(self, usage: CompletionUsage) -> Answer:
        """Return the end of a stream that tells how many tokens there were."""
        return Completion(object="text_completion", choices=[], usage=usage, **self.head)

    def whole(self, answers: Sequence[Piece], usage: CompletionUsage) -> Answer:
        """Return the answers, each in one piece."""
        choices = [
            CompletionChoice(
                index=piece.number,
                text=piece.text,
                logprobs=self._logprobs(piece),
                finish_reason=piece.reason or "stop",
            )
            for piece in answers
        ]
        return Completion(object="text_completion", choices=choices, usage=usage, **self.head)

    def _logprobs(self, piece: Piece) -> Logprobs | None:
        if self.asked.best is None:
            return None
        return Logprobs(
            tokens=[self.text_of(token.id) for token, _ in piece.tokens],
            token_logprobs=[max(token.logprob or 0.0, LOWEST) for token, _ in piece.tokens],
            top_logprobs=[self._best(token) for token, _ in piece.tokens],
            text_offset=[place for _, place in piece.tokens],
        )

    def _best(self, token: Token) -> dict[str, float]:
        """Return the log-probabilities of the most probable tokens and of the one that was chosen.

        The chosen one is named by its text, as in ``tokens``; of others that are spelled alike the most probable one
        is, and the rest by their ids.
        """
        values = dict(token.best) | {token.id: token.logprob or 0.0}
        names: dict[str, int] = {}
        for other in [token.id, *values]:
            names.setdefault(self.text_of(other), other)
        texts = {other: text for text, other in names.items()}
        return {texts.get(other, f"token_id:{other}"): max(value, LOWEST) for other, value in values.items()}


def usage(prompt: int, written: int) -> CompletionUsage:
    """Return how many tokens a prompt and its answers have."""
    return CompletionUsage(prompt_tokens=prompt, completion_tokens=written, total_tokens=prompt + written)


def as_json(answer: Answer) -> str:
    """Return an answer as JSON, without fields that nobody set."""
    return answer.model_dump_json(exclude_unset=True)


FORMS: Mapping[type[Asked], type[Form]] = {ChatAsked: ChatForm, CompletionAsked: CompletionForm}

"""Requests and answers in the form of OpenAI's API."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar, cast

from openai.types.chat import ChatCompletionNamedToolChoiceParam
from openai.types.chat import completion_create_params as chat_params
from openai.types.completion_create_params import CompletionCreateParamsBase
from openai.types.shared import ReasoningEffort
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError, from_json
from typing_extensions import TypedDict

from ag.errors import nearest
from ag.model.chat import Part as ChatPart
from ag.model.chat import for_template
from ag.serve.answers import Piece
from ag.serve.detokenizer import Vocabulary
from ag.serve.request import Token
from ag.serve.tools import Divider

LOWEST = -9999.0  # OpenAI's log-probability of an impossible token: JSON has no infinity

#: Unsupported parameters of OpenAI's API, with the values under which they change nothing.
NEUTRAL: Mapping[str, Sequence[Any]] = {
    "audio": (),
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
}
#: Parameters that describe the client and change no answer.
IGNORED = {"metadata", "prompt_cache_key", "safety_identifier", "user"}
#: Parameters that need another one, which is true or false.
NEEDED = {
    "prompt_logprobs": ("stream", False),
    "stream_options": ("stream", True),
    "top_logprobs": ("logprobs", True),
    "continue_final_message": ("add_generation_prompt", False),
}


class ApiError(Exception):
    """An error that a client sees.

    Args:
        status: of HTTP.
        message: what is wrong, what was expected, and the fix.
        param: the parameter at fault, such as ``messages[0].role``.
        code: a word for programs.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def body(self) -> dict[str, Any]:
        """The error in OpenAI's form."""
        kind = {429: "rate_limit_error", 401: "authentication_error"}.get(self.status, "invalid_request_error")
        kind = "server_error" if self.status >= 500 else kind
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


# ---- requests


class Part(BaseModel):
    """A part of a request, without unknown parameters and without conversion of types."""

    model_config = ConfigDict(extra="forbid", strict=True)


class TextPart(Part):
    """A part of a message's content: text."""

    type: Literal["text"]
    text: str


class Function(Part):
    """The function of a tool call."""

    name: str
    arguments: str | dict[str, Any] = "{}"


class ToolCall(Part):
    """A call of a tool by the assistant."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: Function
    index: int | None = Field(None, exclude=True)  # clients that join a stream leave it in


class Message(Part):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    name: str | None = None
    reasoning_content: str | None = None  # thoughts of the assistant
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
        message = self.model_dump(exclude_none=True)
        if isinstance(self.content, list):
            message["content"] = "".join(part.text for part in self.content)
        if self.role == "developer":
            message["role"] = "system"
        return for_template(message)


class JsonSchema(Part):
    """A named JSON schema."""

    name: str
    description: str | None = None
    rules: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None  # an answer follows its schema always


class ResponseFormat(Part):
    """What the text of an answer is."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = Field(None, validate_default=True)

    @field_validator("json_schema")
    @classmethod
    def _fits(cls, schema: JsonSchema | None, others: ValidationInfo) -> JsonSchema | None:
        if (schema is None) == (others.data.get("type") == "json_schema"):
            raise PydanticCustomError("alone", "goes with type='json_schema', which needs it")
        return schema


class StructuredOutputs(TypedDict, total=False):
    """The rule that an answer follows, in the form of vLLM."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # type: ignore[misc]
    json: str | dict[str, Any]
    regex: str
    choice: Annotated[list[str], Field(min_length=1)]
    grammar: str


class ToolFunction(Part):
    """A function that the assistant may call; the chat template gets all of it."""

    model_config = ConfigDict(extra="allow", strict=True)

    name: Annotated[str, Field(min_length=1)]
    parameters: dict[str, Any] = Field(default_factory=dict)


class Tool(Part):
    """A tool that the assistant may call."""

    type: Literal["function"]
    function: ToolFunction


class StreamOptions(Part):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False  # padding, which this server never adds


TokenName = Annotated[int, Field(ge=0, strict=False)]  # a key of JSON is a text
Span = Annotated[list[int], Field(min_length=2, max_length=2)]  # of tokens: the first one, and that behind the last
Protected = TypeVar("Protected")
Ids = Annotated[list[int], Field(min_length=1)]
StopText = Annotated[str, Field(min_length=1, max_length=1000)]


class Extensions(Part, Generic[Protected]):
    """What this server adds to OpenAI's API: how a request is evicted."""

    policy: str | None = None  # None means the server's
    budget: Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, le=1)] | None = None  # tokens, or a share
    protect: list[Protected] | None = None  # what is never evicted; None means the server's protect= in a chat


class Body(Part):
    """The parameters of a request; null stands for the default."""

    model: str

    #: The parameters that OpenAI's API has.
    known: ClassVar[frozenset[str]] = frozenset()
    #: Parameters that are not supported, with the values under which they change nothing.
    neutral: ClassVar[Mapping[str, Sequence[Any]]] = NEUTRAL


class Asked(Body):
    """The parameters of chats and of texts.

    A parameter that :class:`ag.serve.Request` has under the same name is copied there. A new parameter of sampling is
    therefore a field here, a field there, and a line in :func:`ag.serve.sampler.processors`.
    """

    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)  # -1 and 0 mean no limit
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] = Field(default_factory=list)
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0)
    logit_bias: dict[TokenName, Annotated[float, Field(ge=-100, le=100)]] = Field(default_factory=dict)
    n: int = Field(1, ge=1, le=128)
    stream: bool = False
    stream_options: StreamOptions | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    return_token_ids: bool = False
    structured_outputs: Annotated[StructuredOutputs, Field(min_length=1, max_length=1)] | None = None

    ag: Extensions[Any] | None = None

    #: The parameter that holds the prompt.
    text: ClassVar[str]
    #: The parameters that limit an answer; the first one that is given holds.
    limits: ClassVar[Sequence[str]] = ["max_tokens"]

    @property
    def longest(self) -> tuple[str, int] | None:
        """Name and value of the limit of the answer in tokens; None means that the request has none."""
        return next(((name, getattr(self, name)) for name in self.limits if getattr(self, name) is not None), None)

    @property
    def best(self) -> int | None:
        """Number of the most probable tokens to return at each place; None means no log-probabilities at all."""
        raise NotImplementedError

    @property
    def best_of_prompt(self) -> int | None:
        """The same at each place of the prompt."""
        return self.prompt_logprobs

    @field_validator(*NEEDED, check_fields=False)
    @classmethod
    def _has_what_it_needs(cls, value: Any, others: ValidationInfo) -> Any:
        name = str(others.field_name)
        other, flag = NEEDED[name]
        if value != cls.model_fields[name].default and bool(others.data.get(other)) != flag:
            needed = {"other": other, "flag": json.dumps(flag)}
            raise PydanticCustomError("alone", "needs {other}={flag}; change that, or leave this out", needed)
        return value

    @property
    def rule(self) -> tuple[str, str, str] | None:
        """The rule that the answer follows, as parameter, kind and text of a grammar; None means free text."""
        for kind, rule in (self.structured_outputs or {}).items():
            return f"structured_outputs.{kind}", kind, rule if isinstance(rule, str) else json.dumps(rule)
        return None


class ChatAsked(Asked):
    """The parameters of ``/v1/chat/completions``."""

    text = "messages"
    #: The parameter that holds how much the model thinks.
    effort: ClassVar[str] = "reasoning_effort"
    limits = ["max_completion_tokens", "max_tokens"]
    known = frozenset(chat_params.CompletionCreateParamsBase.__annotations__)

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: list[Tool] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | ChatCompletionNamedToolChoiceParam = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)  # variables of the chat template
    reasoning_effort: ReasoningEffort = None  # another one
    add_generation_prompt: bool | None = None  # None means that the chat ends with the opening of an answer
    continue_final_message: bool = False
    ag: Extensions[ChatPart] | None = None

    @field_validator("reasoning_effort")
    @classmethod
    def _is_told_once(cls, effort: ReasoningEffort, others: ValidationInfo) -> ReasoningEffort:
        if "reasoning_effort" in others.data.get("chat_template_kwargs", {}):
            raise PydanticCustomError("alone", "chat_template_kwargs has it too; leave one of them out")
        return effort

    @field_validator("response_format")
    @classmethod
    def _is_the_only_rule(cls, asked: ResponseFormat | None, others: ValidationInfo) -> ResponseFormat | None:
        if asked is not None and asked.type != "text" and others.data.get("structured_outputs"):
            raise PydanticCustomError("alone", "excludes structured_outputs; leave one of them out")
        return asked

    @field_validator("tool_choice")
    @classmethod
    def _can_be_called(cls, choice: Any, others: ValidationInfo) -> Any:
        names = [tool.function.name for tool in others.data.get("tools", [])]
        if choice not in ("none", "auto") and not names:
            raise PydanticCustomError("alone", "needs tools; add them, or leave this out")
        if isinstance(choice, dict) and choice["function"]["name"] not in names:
            raise PydanticCustomError("unknown", f"expected the name of one of the tools, {', '.join(names):.200}")
        return choice

    @property
    def callable(self) -> list[Tool]:
        """The tools that the assistant may call."""
        if isinstance(self.tool_choice, str):
            return [] if self.tool_choice == "none" else self.tools
        return [tool for tool in self.tools if tool.function.name == self.tool_choice["function"]["name"]]

    @property
    def forced(self) -> bool:
        """Whether the assistant must call one of them."""
        return self.tool_choice not in ("none", "auto")

    @property
    def variables(self) -> dict[str, Any]:
        """The variables of the chat template, tools among them."""
        tools = [tool.model_dump(exclude_unset=True) for tool in self.tools] if self.callable else []
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return self.chat_template_kwargs | effort | ({"tools": tools} if tools else {})

    @property
    def opened(self) -> bool:
        """Whether the chat ends with the opening of an answer."""
        return not self.continue_final_message and self.add_generation_prompt is not False

    @property
    def rule(self) -> tuple[str, str, str] | None:
        """The rule that the answer follows, as parameter, kind and text of a grammar; None means free text."""
        asked = self.response_format
        if asked is None or asked.type == "text":
            return super().rule
        if asked.json_schema is None:
            return "response_format", "json", '{"type": "object"}'
        return "response_format.json_schema.schema", "json", json.dumps(asked.json_schema.rules)

    @property
    def best(self) -> int | None:
        """Number of the most probable tokens to return at each place; None means no log-probabilities at all."""
        return self.top_logprobs if self.logprobs else None


class CompletionAsked(Asked):
    """The parameters of ``/v1/completions``."""

    text = "prompt"
    known = frozenset(CompletionCreateParamsBase.__annotations__)

    prompt: str | Ids | Annotated[list[str], Field(min_length=1)] | Annotated[list[Ids], Field(min_length=1)]
    max_tokens: int | None = Field(None, ge=0)  # 0 reads the prompt alone
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)
    ag: Extensions[Span] | None = None

    @property
    def best(self) -> int | None:
        """Number of the most probable tokens to return at each place; None means no log-probabilities at all."""
        return self.logprobs

    @property
    def best_of_prompt(self) -> int | None:
        """The same at each place of the prompt."""
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((number for number in wanted if number is not None), default=None)

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts, as texts or token ids."""
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return cast("Sequence[str | list[int]]", [self.prompt] if one else self.prompt)


class TokenizeAsked(ChatAsked):
    """The parameters of ``/tokenize``: a text, or those of a chat, in the form of vLLM."""

    model: str = ""  # the server's
    messages: list[Message] = Field(default_factory=list)
    prompt: str | None = Field(None, validate_default=True)
    add_special_tokens: bool | None = None  # None means those of a text, and none in a chat
    return_token_strs: bool = False

    @field_validator("prompt")
    @classmethod
    def _is_one(cls, prompt: str | None, others: ValidationInfo) -> str | None:
        if (prompt is None) != bool(others.data.get("messages")):
            raise PydanticCustomError("alone", "expected either prompt or messages")
        return prompt


class DetokenizeAsked(Body):
    """The parameters of ``/detokenize``, in the form of vLLM."""

    model: str = ""  # the server's
    tokens: list[Annotated[int, Field(ge=0)]]


def parse(kind: type[Body], body: bytes) -> Any:
    """Read the body of a request.

    Raises:
        ApiError: 400, naming the parameter, its value, and what was expected.
    """
    try:
        values = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON in UTF-8: {error}.", code="invalid_json") from None
    if not isinstance(values, dict):
        raise ApiError(400, "the body is JSON, but not an object: expected {...}.", code="invalid_json")
    values = {name: value for name, value in values.items() if value is not None}
    for name in sorted(values.keys() - kind.model_fields.keys()):
        if name not in kind.known:
            hint = nearest(name, kind.model_fields)
            raise ApiError(400, f"{name[:80]!r} is an unknown parameter{hint or '.'}", name[:80], "unknown_parameter")
        if name not in IGNORED and values[name] not in kind.neutral.get(name, ()):
            raise ApiError(400, f"{name} is not supported by this server: leave it out.", name, "unsupported_parameter")
        del values[name]
    for message in _objects(values.get("messages", values.get("input"))):
        for part in (message, *_objects(message.get("content"))):  # OpenAI's client adds empty fields
            for name in [name for name, value in part.items() if value is None or value == [] and name != "content"]:
                del part[name]
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _refusal(error) from None


def _objects(value: Any) -> list[dict[str, Any]]:
    """Return the objects of a list."""
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _refusal(error: ValidationError) -> ApiError:
    """Return the error for the first value that does not fit."""
    errors = error.errors(include_url=False)
    first = max(errors, key=lambda found: len(found["loc"]))  # of several possible types the one that fits furthest
    param = _param(first["loc"])
    alike = [found for found in errors if _param(found["loc"]) == param]
    # why a value of the right type does not fit, or else all types that would
    reasons = [found["msg"] for found in alike if not found["type"].endswith("_type")] or [x["msg"] for x in alike]
    reason = " or ".join(dict.fromkeys(reasons)).replace(" or Input should be ", " or ")
    if first["type"] == "missing":
        return ApiError(400, f"{param}: {reason}.", param or None, "missing")
    return ApiError(400, f"{param}={first['input']!r:.80}: {reason}.", param or None, "invalid_value")


def _param(place: Sequence[int | str]) -> str:
    """Return the name of a parameter, such as ``messages[0].role``."""
    kinds = re.compile(r"str|list|[A-Z]\w*")  # of several possible types
    names = [part for part in place if isinstance(part, int) or part.isidentifier() and not kinds.fullmatch(part)]
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part:.80}" for part in names).lstrip(".")


# ---- answers


class Form:
    """The answers to one request as JSON, whole or in pieces.

    Args:
        asked: the parameters of the request.
        vocabulary: the texts of tokens.
        divider: makes what divides an answer into content, thoughts and calls; None means that it is content alone.
    """

    def __init__(self, asked: Asked, vocabulary: Vocabulary, divider: Callable[[], Divider] | None = None) -> None:
        self.asked, self._vocabulary, self._chat = asked, vocabulary, isinstance(asked, ChatAsked)
        name = f"{'chatcmpl' if self._chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._dividers: dict[int, Divider] | None = None if divider is None else defaultdict(divider)  # by answer
        self._head = {"id": name, "created": int(time.time()), "model": asked.model}
        self._echoed: dict[int, int] = {}  # characters of the repeated prompt, by answer

    def begin(self) -> str:
        """Return the first events of a stream: of a chat the role of each answer."""
        role = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        roles = range(self.asked.n) if self._chat else ()
        return "".join(_event(self._json([{"index": number, **role}])) for number in roles)

    def chunk(self, piece: Piece) -> str:
        """Return a piece of an answer as an event of a stream."""
        text = {"delta": self._parts(piece)} if self._chat else {"text": piece.text}
        first = self._chat and piece.number == 0
        return _event(self._json([self._choice(piece, text)], **(self._of_prompt(piece) if first else {})))

    def end(self, used: Mapping[str, Any]) -> str:
        """Return the last events of a stream, with the numbers of tokens if they were requested."""
        options = self.asked.stream_options
        wanted = options is not None and options.include_usage
        return (_event(self._json([], usage=used)) if wanted else "") + _event("[DONE]")

    def whole(self, answers: Sequence[Piece], used: Mapping[str, Any]) -> str:
        """Return the answers, each in one piece, with the numbers of tokens."""
        choices = []
        for piece in answers:
            message = {"role": "assistant", "content": "", "refusal": None} | self._parts(piece)
            for call in message.get("tool_calls", []):
                del call["index"]  # of streams
                message["content"] = message["content"] or None
            choices.append(self._choice(piece, {"message": message} if self._chat else {"text": piece.text}))
        of_prompt = self._of_prompt(answers[0]) if self._chat else {}
        return self._json(choices, object="chat.completion", usage=used, **of_prompt)

    def _json(self, choices: list[dict[str, Any]], *, object: str = "chat.completion.chunk", **more: Any) -> str:
        kind = object if self._chat else "text_completion"
        fields = {"object": kind, "choices": choices, **more, **self._head}
        return json.dumps(fields, ensure_ascii=False, separators=(",", ":"))

    def _parts(self, piece: Piece) -> dict[str, Any]:
        """Return the parts of a message that a piece of a chat adds."""
        if self._dividers is None:
            return {"content": piece.text} if piece.text else {}
        return self._dividers[piece.number].add(piece.text, last=piece.reason is not None)

    def _choice(self, piece: Piece, text: dict[str, Any]) -> dict[str, Any]:
        logprobs, tokens = None, piece.tokens
        if isinstance(self.asked, CompletionAsked) and self.asked.echo:
            shift = sum(len(token.text) for token in piece.prompt or ())
            shift = self._echoed.setdefault(piece.number, shift)
            tokens = tuple(replace(token, place=shift + token.place) for token in tokens)
            if piece.prompt is not None:
                tokens = piece.prompt + tokens
                text = {"text": "".join(token.text for token in piece.prompt) + piece.text}
        if self.asked.best is not None:
            logprobs = self._of_chat(tokens) if self._chat else self._of_text(tokens)
        ids = {"token_ids": [token.id for token in piece.tokens]} if self.asked.return_token_ids else {}
        more = ids if self._chat else ids | self._of_prompt(piece)
        called = self._dividers is not None and self._dividers[piece.number].count
        reason = "tool_calls" if called and piece.reason == "stop" else piece.reason
        return {"index": piece.number, "logprobs": logprobs, "finish_reason": reason, **text, **more}

    def _of_prompt(self, piece: Piece) -> dict[str, Any]:
        """Return what was requested of a prompt: tokens and log-probabilities in the form of vLLM, and what stays."""
        if piece.prompt is None:
            return {}
        found: dict[str, Any] = {} if self.asked.ag is None else {"ag": piece.kept}
        if self.asked.return_token_ids:
            found["prompt_token_ids"] = [token.id for token in piece.prompt]
        if self.asked.prompt_logprobs is not None:
            found["prompt_logprobs"] = [self._ranked(token) if token.rank else None for token in piece.prompt]
        return found

    def _ranked(self, token: Token) -> dict[int, Any]:
        best = token.best[: self.asked.prompt_logprobs]
        ranked = [(other, logprob, rank) for rank, (other, logprob) in enumerate(best, 1)]
        return {
            other: {"logprob": _finite(logprob), "rank": rank, "decoded_token": self._vocabulary.text(other)}
            for other, logprob, rank in [*ranked, (token.id, token.logprob, token.rank)]
        }

    # ---- log-probabilities

    def _of_chat(self, tokens: Sequence[Token]) -> dict[str, Any]:
        def value(token: int, logprob: float | None) -> dict[str, Any]:
            text = self._vocabulary.text(token)  # U+FFFD stands for a part of a character
            spelled = self._vocabulary.bytes_of(token) or text.encode()  # of a special token
            return {"token": text, "bytes": [*spelled], "logprob": _finite(logprob)}

        best = [[value(*other) for other in token.best] for token in tokens]
        found = [value(token.id, token.logprob) for token in tokens]
        return {"content": [one | {"top_logprobs": others} for one, others in zip(found, best, strict=True)]}

    def _of_text(self, tokens: Sequence[Token]) -> dict[str, Any]:
        return {
            "tokens": [self._vocabulary.text(token.id) for token in tokens],
            "token_logprobs": [_finite(token.logprob) if token.rank else None for token in tokens],
            "top_logprobs": [self._best(token) if token.rank else None for token in tokens],
            "text_offset": [token.place for token in tokens],
        }

    def _best(self, token: Token) -> dict[str, float]:
        """Return the log-probabilities of the most probable tokens and of the chosen one, by text.

        The key of the chosen token is its text, as in ``tokens``. Of other tokens with the same text the most probable
        one has the text as its key, and the others have ``token_id:N``.
        """
        values = dict(token.best[: self.asked.best]) | {token.id: token.logprob}
        names: dict[str, int] = {}
        for other in [token.id, *values]:
            names.setdefault(self._vocabulary.text(other), other)
        texts = {other: text for text, other in names.items()}
        return {texts.get(other, f"token_id:{other}"): _finite(value) for other, value in values.items()}


def _event(data: str) -> str:
    return f"data: {data}\n\n"


def _finite(logprob: float | None) -> float:
    return max(logprob or 0.0, LOWEST)

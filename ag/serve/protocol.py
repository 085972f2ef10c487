"""Requests and completions in OpenAI's format."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar, cast

from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionNamedToolChoiceParam
from openai.types.chat import completion_create_params as chat_params
from openai.types.completion_create_params import CompletionCreateParamsBase
from openai.types.shared import ReasoningEffort
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError, from_json
from typing_extensions import TypedDict

from ag.errors import nearest
from ag.model.chat import Part as ChatPart
from ag.model.chat import for_template
from ag.serve.answers import CompletionDelta
from ag.serve.detokenizer import Vocabulary
from ag.serve.request import Count, MinP, Penalty, RepetitionPenalty, Temperature, Token, TopP
from ag.serve.tools import OutputParser

LOWEST = -9999.0  # OpenAI's log-probability of an impossible token: JSON has no infinity

#: Unsupported parameters of OpenAI's API, with values that change nothing.
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
#: Parameters that describe the client and do not change a completion.
IGNORED = {"metadata", "prompt_cache_key", "safety_identifier", "user"}
#: Parameters that need another parameter: its name and its required value.
NEEDED = {
    "prompt_logprobs": ("stream", False),
    "stream_options": ("stream", True),
    "top_logprobs": ("logprobs", True),
    "continue_final_message": ("add_generation_prompt", False),
}


class ApiError(Exception):
    """An error for the client.

    Args:
        status: HTTP status.
        message: the value, the expected value, and the fix.
        param: the wrong parameter, for example ``messages[0].role``.
        code: error code for programs.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def body(self) -> dict[str, Any]:
        """The error in OpenAI's format."""
        kind = {429: "rate_limit_error", 401: "authentication_error"}.get(self.status, "invalid_request_error")
        kind = "server_error" if self.status >= 500 else kind
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


# ---- requests


class StrictModel(BaseModel):
    """A part of a request. Unknown parameters are refused, and types are not converted."""

    model_config = ConfigDict(extra="forbid", strict=True)


class TextPart(StrictModel):
    """A text in a message's content."""

    type: Literal["text"]
    text: str


class Function(StrictModel):
    """The function of a tool call."""

    name: str
    arguments: str | dict[str, Any] = "{}"


class ToolCall(StrictModel):
    """A call of a tool by the assistant."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: Function
    index: int | None = Field(None, exclude=True)  # clients that copy it from a stream send it


class Message(StrictModel):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    name: str | None = None
    reasoning_content: str | None = None  # thoughts of the assistant
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    content: str | Annotated[list[TextPart], Field(min_length=1)] | None = Field(None, validate_default=True)

    @field_validator("content")
    @classmethod
    def _check_content(cls, content: Any, info: ValidationInfo) -> Any:
        if content is None and not (info.data.get("role") == "assistant" and info.data.get("tool_calls")):
            raise PydanticCustomError("missing", "Field required")
        return content

    def for_template(self) -> dict[str, Any]:
        """Return the message for chat templates."""
        message = self.model_dump(exclude_none=True)
        if isinstance(self.content, list):
            message["content"] = "".join(part.text for part in self.content)
        if self.role == "developer":
            message["role"] = "system"
        return for_template(message)


class JsonSchema(StrictModel):
    """A named JSON schema."""

    name: str
    description: str | None = None
    rules: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None  # ignored: a completion always follows its schema


class ResponseFormat(StrictModel):
    """The format of a completion's text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = Field(None, validate_default=True)

    @field_validator("json_schema")
    @classmethod
    def _check_schema(cls, schema: JsonSchema | None, info: ValidationInfo) -> JsonSchema | None:
        if (schema is None) == (info.data.get("type") == "json_schema"):
            raise PydanticCustomError("alone", "goes with type='json_schema', which needs it")
        return schema


class StructuredOutputs(TypedDict, total=False):
    """The grammar of a completion, in vLLM's format."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # type: ignore[misc]
    json: str | dict[str, Any]
    regex: str
    choice: Annotated[list[str], Field(min_length=1)]
    grammar: str


class ToolFunction(StrictModel):
    """A function that the assistant may call. The chat template gets all its fields."""

    model_config = ConfigDict(extra="allow", strict=True)

    name: Annotated[str, Field(min_length=1)]
    parameters: dict[str, Any] = Field(default_factory=dict)


class Tool(StrictModel):
    """A tool that the assistant may call."""

    type: Literal["function"]
    function: ToolFunction


class StreamOptions(StrictModel):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False  # this server never adds padding


TokenName = Annotated[int, Field(ge=0, strict=False)]  # keys of JSON objects are texts
Span = Annotated[list[int], Field(min_length=2, max_length=2)]  # first token of the span, first token after the span
Protected = TypeVar("Protected")
Ids = Annotated[list[int], Field(min_length=1)]
StopText = Annotated[str, Field(min_length=1, max_length=1000)]


class Extensions(StrictModel, Generic[Protected]):
    """The server's extensions of OpenAI's API: the policy of a request."""

    policy: str | None = None  # None: the server's policy
    budget: Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, le=1)] | None = (
        None  # tokens per KV head, or a share of the prompt
    )
    protect: list[Protected] | None = None  # never evicted; None: in a chat the server's protect=


class RequestBody(StrictModel):
    """The parameters of a request; null means the default."""

    model: str

    #: Names of the parameters in OpenAI's API.
    openai_fields: ClassVar[frozenset[str]] = frozenset()
    #: Unsupported parameters, with values that change nothing.
    neutral_values: ClassVar[Mapping[str, Sequence[Any]]] = NEUTRAL


class GenerationParams(RequestBody):
    """The parameters of chat completions and text completions.

    A parameter is copied to :class:`ag.serve.Request` if that has a field of this name, and shares its range. A new
    sampling parameter needs a field here, a field there, and a line in :func:`ag.serve.sampler.processors`.
    """

    max_tokens: int | None = Field(None, ge=1)
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: int = Field(0, ge=-1)  # -1 and 0: no limit
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] = Field(default_factory=list)
    stop_token_ids: list[Count] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: Count = 0
    logit_bias: dict[TokenName, Annotated[float, Field(ge=-100, le=100)]] = Field(default_factory=dict)
    n: int = Field(1, ge=1, le=128)
    stream: bool = False
    stream_options: StreamOptions | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    return_token_ids: bool = False
    structured_outputs: Annotated[StructuredOutputs, Field(min_length=1, max_length=1)] | None = None

    ag: Extensions[Any] | None = None

    #: Name of the prompt's parameter.
    prompt_param: ClassVar[str]
    #: Names of parameters that limit a completion; the first that is set applies.
    limit_params: ClassVar[Sequence[str]] = ["max_tokens"]

    @property
    def token_limit(self) -> tuple[str, int] | None:
        """Name and value of the completion's token limit. None: the request has no limit."""
        return next(
            ((name, getattr(self, name)) for name in self.limit_params if getattr(self, name) is not None), None
        )

    @property
    def num_logprobs(self) -> int | None:
        """Number of most probable tokens to return per token. None: no log-probabilities."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Number of most probable tokens to return per prompt token. None: no log-probabilities."""
        return self.prompt_logprobs

    @field_validator(*NEEDED, check_fields=False)
    @classmethod
    def _check_needed(cls, value: Any, info: ValidationInfo) -> Any:
        name = str(info.field_name)
        needed_name, needed_value = NEEDED[name]
        if value != cls.model_fields[name].default and bool(info.data.get(needed_name)) != needed_value:
            needed = {"other": needed_name, "flag": json.dumps(needed_value)}
            raise PydanticCustomError("alone", "needs {other}={flag}; change that, or leave this out", needed)
        return value

    @property
    def rule(self) -> tuple[str, str, str] | None:
        """Parameter, kind and text of the grammar that the completion follows. None: free text."""
        for kind, rule in (self.structured_outputs or {}).items():
            return f"structured_outputs.{kind}", kind, rule if isinstance(rule, str) else json.dumps(rule)
        return None


class ChatCompletionRequest(GenerationParams):
    """The parameters of ``/v1/chat/completions``."""

    prompt_param = "messages"
    limit_params = ["max_completion_tokens", "max_tokens"]
    openai_fields = frozenset(chat_params.CompletionCreateParamsBase.__annotations__)

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: list[Tool] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | ChatCompletionNamedToolChoiceParam = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)  # variables of the chat template
    reasoning_effort: ReasoningEffort = None  # a further variable of the chat template
    add_generation_prompt: bool | None = None  # None: true, unless the last message is continued
    continue_final_message: bool = False
    ag: Extensions[ChatPart] | None = None

    @field_validator("reasoning_effort")
    @classmethod
    def _check_one_effort(cls, effort: ReasoningEffort, info: ValidationInfo) -> ReasoningEffort:
        if "reasoning_effort" in info.data.get("chat_template_kwargs", {}):
            raise PydanticCustomError("alone", "chat_template_kwargs has it too; leave one of them out")
        return effort

    @field_validator("response_format")
    @classmethod
    def _check_one_format(cls, response_format: ResponseFormat | None, info: ValidationInfo) -> ResponseFormat | None:
        if response_format is not None and response_format.type != "text" and info.data.get("structured_outputs"):
            raise PydanticCustomError("alone", "excludes structured_outputs; leave one of them out")
        return response_format

    @field_validator("tool_choice")
    @classmethod
    def _check_tool_choice(cls, choice: Any, info: ValidationInfo) -> Any:
        names = [tool.function.name for tool in info.data.get("tools", [])]
        if choice not in ("none", "auto") and not names:
            raise PydanticCustomError("alone", "needs tools; add them, or leave this out")
        if isinstance(choice, dict) and choice["function"]["name"] not in names:
            raise PydanticCustomError("unknown", f"expected the name of one of the tools, {', '.join(names):.200}")
        return choice

    @property
    def callable_tools(self) -> list[Tool]:
        """Tools that the assistant may call."""
        if isinstance(self.tool_choice, str):
            return [] if self.tool_choice == "none" else self.tools
        return [tool for tool in self.tools if tool.function.name == self.tool_choice["function"]["name"]]

    @property
    def must_call_tool(self) -> bool:
        """Whether the assistant must call a tool."""
        return self.tool_choice not in ("none", "auto")

    @property
    def template_variables(self) -> dict[str, Any]:
        """Variables of the chat template, tools included."""
        tools = [tool.model_dump(exclude_unset=True) for tool in self.tools] if self.callable_tools else []
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return self.chat_template_kwargs | effort | ({"tools": tools} if tools else {})

    @property
    def opens_completion(self) -> bool:
        """Whether the chat template opens the assistant's turn at the end."""
        return not self.continue_final_message and self.add_generation_prompt is not False

    @property
    def rule(self) -> tuple[str, str, str] | None:
        """Parameter, kind and text of the grammar that the completion follows. None: free text."""
        response_format = self.response_format
        if response_format is None or response_format.type == "text":
            return super().rule
        if response_format.json_schema is None:
            return "response_format", "json", '{"type": "object"}'
        return "response_format.json_schema.schema", "json", json.dumps(response_format.json_schema.rules)

    @property
    def num_logprobs(self) -> int | None:
        """Number of most probable tokens to return per token. None: no log-probabilities."""
        return self.top_logprobs if self.logprobs else None


class CompletionRequest(GenerationParams):
    """The parameters of ``/v1/completions``."""

    prompt_param = "prompt"
    openai_fields = frozenset(CompletionCreateParamsBase.__annotations__)

    prompt: str | Ids | Annotated[list[str], Field(min_length=1)] | Annotated[list[Ids], Field(min_length=1)]
    max_tokens: Count | None = None  # 0: prefill only
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)
    ag: Extensions[Span] | None = None

    @property
    def num_logprobs(self) -> int | None:
        """Number of most probable tokens to return per token. None: no log-probabilities."""
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Number of most probable tokens to return per prompt token. None: no log-probabilities."""
        requested = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((number for number in requested if number is not None), default=None)

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """Prompts as texts or token ids."""
        is_single = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return cast("Sequence[str | list[int]]", [self.prompt] if is_single else self.prompt)


class TokenizeRequest(ChatCompletionRequest):
    """The parameters of ``/tokenize`` in vLLM's format: a text or a chat."""

    model: str = ""  # the server's
    messages: list[Message] = Field(default_factory=list)
    prompt: str | None = Field(None, validate_default=True)
    add_special_tokens: bool | None = None  # None: true for a text, false for a chat
    return_token_strs: bool = False

    @field_validator("prompt")
    @classmethod
    def _check_prompt_or_messages(cls, prompt: str | None, info: ValidationInfo) -> str | None:
        if (prompt is None) != bool(info.data.get("messages")):
            raise PydanticCustomError("alone", "expected either prompt or messages")
        return prompt


class DetokenizeRequest(RequestBody):
    """The parameters of ``/detokenize`` in vLLM's format."""

    model: str = ""  # the server's
    tokens: list[Count]


def parse(kind: type[RequestBody], body: bytes) -> Any:
    """Read the body of a request.

    Raises:
        ApiError: 400, with the parameter, its value and the expected value.
    """
    try:
        values = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON in UTF-8: {error}.", code="invalid_json") from None
    if not isinstance(values, dict):
        raise ApiError(400, "the body is JSON, but not an object: expected {...}.", code="invalid_json")
    values = {name: value for name, value in values.items() if value is not None}
    for name in sorted(values.keys() - kind.model_fields.keys()):
        if name not in kind.openai_fields:
            hint = nearest(name, kind.model_fields)
            raise ApiError(400, f"{name[:80]!r} is an unknown parameter{hint or '.'}", name[:80], "unknown_parameter")
        if name not in IGNORED and values[name] not in kind.neutral_values.get(name, ()):
            raise ApiError(400, f"{name} is not supported by this server: leave it out.", name, "unsupported_parameter")
        del values[name]
    for message in _objects(values.get("messages")):
        for part in (message, *_objects(message.get("content"))):  # OpenAI's client sends empty fields
            for name in [name for name, value in part.items() if value is None or value == [] and name != "content"]:
                del part[name]
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _refusal(error) from None


def _objects(value: Any) -> list[dict[str, Any]]:
    """Return the objects of a list."""
    return [element for element in value if isinstance(element, dict)] if isinstance(value, list) else []


def _refusal(error: ValidationError) -> ApiError:
    """Return the error for the first value that does not fit."""
    errors = error.errors(include_url=False)
    first = max(errors, key=lambda detail: len(detail["loc"]))  # if several types are possible: the best match
    param = _param(first["loc"])
    details = [detail for detail in errors if _param(detail["loc"]) == param]
    # reasons why a value of the right type is refused, or else all possible types
    reasons = [detail["msg"] for detail in details if not detail["type"].endswith("_type")] or [
        detail["msg"] for detail in details
    ]
    reason = " or ".join(dict.fromkeys(reasons)).replace(" or Input should be ", " or ")
    if first["type"] == "missing":
        return ApiError(400, f"{param}: {reason}.", param or None, "missing")
    return ApiError(400, f"{param}={first['input']!r:.80}: {reason}.", param or None, "invalid_value")


def _param(location: Sequence[int | str]) -> str:
    """Return the name of a parameter, for example ``messages[0].role``."""
    type_names = re.compile(r"str|list|[A-Z]\w*")  # names of alternative types
    names = [
        part for part in location if isinstance(part, int) or part.isidentifier() and not type_names.fullmatch(part)
    ]
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part:.80}" for part in names).lstrip(".")


# ---- completions


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
        # by completion
        self._parsers: dict[int, OutputParser] | None = None if new_parser is None else defaultdict(new_parser)
        self._head = {"id": name, "created": int(time.time()), "model": params.model}
        self._echo_lengths: dict[int, int] = {}  # characters of the repeated prompt, by completion

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
        options = self.params.stream_options
        with_usage = options is not None and options.include_usage
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
        return self._json(choices, is_whole=True, usage=usage, **prompt_fields)

    def _json(self, choices: list[dict[str, Any]], *, is_whole: bool = False, **more_fields: Any) -> str:
        fields = {"choices": choices, **more_fields, **self._head}
        if not self._chat:  # OpenAI's own type has no null for the reason of a delta and for the first token's logprob
            return json.dumps({"object": "text_completion", **fields}, ensure_ascii=False, separators=(",", ":"))
        if is_whole:
            answer: BaseModel = ChatCompletion.model_validate({"object": "chat.completion", **fields})
        else:
            answer = ChatCompletionChunk.model_validate({"object": "chat.completion.chunk", **fields})
        return answer.model_dump_json(exclude_unset=True)

    def _message_fields(self, delta: CompletionDelta) -> dict[str, Any]:
        """Return the message fields of a chat's delta."""
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
        ids = {"token_ids": [token.id for token in delta.tokens]} if self.params.return_token_ids else {}
        more_fields = ids if self._chat else ids | self._prompt_fields(delta)
        has_calls = self._parsers is not None and self._parsers[delta.index].count
        reason = "tool_calls" if has_calls and delta.reason == "stop" else delta.reason
        return {"index": delta.index, "logprobs": logprobs, "finish_reason": reason, **text, **more_fields}

    def _prompt_fields(self, delta: CompletionDelta) -> dict[str, Any]:
        """Return the requested fields of the prompt: token ids and log-probabilities (as vLLM), kept share."""
        if delta.prompt is None:
            return {}
        prompt_fields: dict[str, Any] = {} if self.params.ag is None else {"ag": delta.ag_fields}
        if self.params.return_token_ids:
            prompt_fields["prompt_token_ids"] = [token.id for token in delta.prompt]
        if self.params.prompt_logprobs is not None:
            prompt_fields["prompt_logprobs"] = [
                self._rank_fields(token) if token.rank else None for token in delta.prompt
            ]
        return prompt_fields

    def _rank_fields(self, token: Token) -> dict[int, Any]:
        top = token.top_logprobs[: self.params.prompt_logprobs]
        ranked = [(top_id, logprob, rank) for rank, (top_id, logprob) in enumerate(top, 1)]
        return {
            token_id: {"logprob": _finite(logprob), "rank": rank, "decoded_token": self._vocabulary.text(token_id)}
            for token_id, logprob, rank in [*ranked, (token.id, token.logprob, token.rank)]
        }

    # ---- log-probabilities

    def _chat_logprobs(self, tokens: Sequence[Token]) -> dict[str, Any]:
        def value(token: int, logprob: float | None) -> dict[str, Any]:
            text = self._vocabulary.text(token)  # part of a character is U+FFFD
            token_bytes = self._vocabulary.bytes_of(token) or text.encode()  # a special token has no bytes
            return {"token": text, "bytes": [*token_bytes], "logprob": _finite(logprob)}

        top = [[value(*other) for other in token.top_logprobs] for token in tokens]
        chosen = [value(token.id, token.logprob) for token in tokens]
        return {
            "content": [entry | {"top_logprobs": alternatives} for entry, alternatives in zip(chosen, top, strict=True)]
        }

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

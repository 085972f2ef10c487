"""Bodies of requests in OpenAI's format, which FastAPI reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Generic, Literal, Self, TypeVar, cast

from openai.types.chat import ChatCompletionNamedToolChoiceParam
from openai.types.chat import completion_create_params as chat_params
from openai.types.completion_create_params import CompletionCreateParamsBase
from openai.types.shared import ReasoningEffort
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from ag.errors import nearest
from ag.model.chat import Part as ChatPart
from ag.model.chat import for_template, from_api
from ag.serve.request import Count, SamplingParams, Temperature

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
IGNORED = {
    "metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "user"
}  # fmt: skip
#: What to do with a parameter that needs another one.
NEEDS = "needs {}; change that, or leave this out"


class StrictModel(BaseModel):
    """A part of a request. Unknown parameters are refused, and types are not converted."""

    model_config = ConfigDict(extra="forbid", strict=True)


class MessagePart(StrictModel):
    """A part of a conversation. OpenAI's client sends null or [] for fields that it does not have."""

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        given = ((name, value) for name, value in values.items() if value is not None)
        return {name: value for name, value in given if value != [] or name == "content"}


class TextPart(MessagePart):
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


class Message(MessagePart):
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
        return for_template(from_api(self.model_dump(exclude_none=True)))


class JsonSchema(StrictModel):
    """A named JSON schema."""

    name: str
    description: str | None = None
    rules: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None  # ignored: a completion always follows its schema


class ResponseFormat(StrictModel):
    """The format of a completion's text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None


class StructuredOutputs(TypedDict, total=False):
    """The grammar of a completion, in vLLM's format."""

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


class StreamOptions(TypedDict, total=False):
    """Options of a stream."""

    include_usage: bool
    include_obfuscation: Literal[False]  # this server never adds padding


TokenName = Annotated[int, Field(ge=0, strict=False)]  # keys of JSON objects are texts
Span = Annotated[list[int], Field(min_length=2, max_length=2)]  # first token of the span, first token after the span
Protected = TypeVar("Protected")
Ids = Annotated[list[int], Field(min_length=1)]
StopText = Annotated[str, Field(min_length=1, max_length=1000)]


class Extensions(StrictModel, Generic[Protected]):
    """The server's extensions of OpenAI's API: the policy of a request."""

    policy: str | None = None  # None: the server's policy
    #: Tokens per KV head, or a share of the prompt.
    budget: Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, le=1)] | None = None
    protect: list[Protected] | None = None  # never evicted; None: in a chat the server's protect=


class RequestBody(StrictModel):
    """The parameters of a request; null means the default."""

    model: str = ""  # the server's

    #: Names of the parameters in OpenAI's API.
    openai_fields: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, values: Any) -> Any:
        """Drop parameters that are null or change nothing, and refuse those that this server does not have."""
        if not isinstance(values, dict):
            return values
        values = {name: value for name, value in values.items() if value is not None}
        for name in sorted(values.keys() - cls.model_fields.keys()):
            shown = {"param": name[:80], "hint": nearest(name, cls.model_fields)}
            if name not in cls.openai_fields:
                raise PydanticCustomError("unknown_parameter", "'{param}' is an unknown parameter{hint}", shown)
            if values.pop(name) not in NEUTRAL.get(name, ()) and name not in IGNORED:
                message = "{param} is not supported by this server: leave it out"
                raise PydanticCustomError("unsupported_parameter", message, shown)
        return values


class GenerationParams(SamplingParams, RequestBody):
    """The parameters of chat completions and text completions."""

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: Temperature = 1.0
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] = Field(default_factory=list)
    logit_bias: dict[TokenName, Annotated[float, Field(ge=-100, le=100)]] = Field(default_factory=dict)
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    structured_outputs: Annotated[StructuredOutputs, Field(min_length=1, max_length=1)] | None = None

    ag: Extensions[Any] | None = None

    #: Name of the prompt's parameter.
    prompt_param: ClassVar[str]

    @property
    def token_limit(self) -> tuple[str, int] | None:
        """Name and value of the completion's token limit. None: the request has no limit."""
        limits = {name: getattr(self, name, None) for name in ("max_completion_tokens", "max_tokens")}
        return next(((name, number) for name, number in limits.items() if number is not None), None)

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        """Refuse values that do not go together."""
        for param, is_refused, reason in self._clashes():
            if is_refused:
                shown = {"param": param, "value": f"{getattr(self, param)!r:.80}", "reason": reason}
                raise PydanticCustomError("invalid_value", "{param}={value}: {reason}", shown)
        return self

    def _clashes(self) -> list[tuple[str, Any, str]]:
        """Return parameters, whether other parameters exclude their values, and what to do then."""
        return [
            ("prompt_logprobs", self.prompt_logprobs is not None and self.stream, NEEDS.format("stream=false")),
            ("stream_options", self.stream_options is not None and not self.stream, NEEDS.format("stream=true")),
        ]

    @property
    def grammar_source(self) -> tuple[str, str, str] | None:
        """Parameter, kind and text of the grammar that the completion follows. None: free text."""
        for kind, source in (self.structured_outputs or {}).items():
            return f"structured_outputs.{kind}", kind, source if isinstance(source, str) else json.dumps(source)
        return None


class ChatCompletionRequest(GenerationParams):
    """The parameters of ``/v1/chat/completions``."""

    prompt_param = "messages"
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

    def _clashes(self) -> list[tuple[str, Any, str]]:
        names, schema = [tool.function.name for tool in self.tools], self.response_format
        chosen = None if isinstance(self.tool_choice, str) else self.tool_choice["function"]["name"]
        alone = schema is not None and (schema.type == "json_schema") != (schema.json_schema is not None)
        opens_anew = self.continue_final_message and self.add_generation_prompt
        in_variables = self.reasoning_effort is not None and "reasoning_effort" in self.chat_template_kwargs
        with_grammar = self.structured_outputs is not None
        two_grammars = with_grammar and schema is not None and schema.type != "text"
        known = f"expected the name of one of the tools, {', '.join(names):.200}"
        return [
            *super()._clashes(),
            ("top_logprobs", self.top_logprobs and not self.logprobs, NEEDS.format("logprobs=true")),
            ("continue_final_message", opens_anew, NEEDS.format("add_generation_prompt=false")),
            ("reasoning_effort", in_variables, "chat_template_kwargs has it too; leave one of them out"),
            (
                "response_format",
                alone,
                "json_schema and type='json_schema' go together; add the other, or leave both out",
            ),
            ("response_format", two_grammars, "excludes structured_outputs; leave one of them out"),
            (
                "structured_outputs",
                with_grammar and self.callable_tools,
                "excludes calls of tools; leave one of them out",
            ),
            ("tool_choice", self.must_call_tool and not names, "needs tools; add them, or leave this out"),
            ("tool_choice", chosen is not None and chosen not in names, known),
        ]

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
    def grammar_source(self) -> tuple[str, str, str] | None:
        """Parameter, kind and text of the grammar that the completion follows. None: free text."""
        if self.response_format is None or self.response_format.type == "text":
            return super().grammar_source
        if (schema := self.response_format.json_schema) is None:
            return "response_format", "json", '{"type": "object"}'
        return "response_format.json_schema.schema", "json", json.dumps(schema.rules)

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
    def prompts(self) -> Sequence[str | list[int]]:
        """Prompts as texts or token ids."""
        is_single = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return cast("Sequence[str | list[int]]", [self.prompt] if is_single else self.prompt)


GenerationRequest = ChatCompletionRequest | CompletionRequest


class TokenizeRequest(ChatCompletionRequest):
    """The parameters of ``/tokenize`` in vLLM's format: a text or a chat."""

    model: str = ""
    messages: list[Message] = Field(default_factory=list)
    prompt: str | None = None
    add_special_tokens: bool | None = None  # None: true for a text, false for a chat
    return_token_strs: bool = False

    def _clashes(self) -> list[tuple[str, Any, str]]:
        is_wrong = (self.prompt is None) != bool(self.messages)
        return [*super()._clashes(), ("prompt", is_wrong, "expected either prompt or messages")]


class DetokenizeRequest(RequestBody):
    """The parameters of ``/detokenize`` in vLLM's format."""

    tokens: list[Count]

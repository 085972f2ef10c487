"""``/v1/responses`` of OpenAI's API, for text: its parameters become a chat completion request."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from openai.types.responses.response_create_params import ResponseCreateParamsBase
from openai.types.shared import ReasoningEffort
from pydantic import Field

from ag.serve.answers import CompletionDelta
from ag.serve.protocol import ChatCompletionRequest, Message, RequestBody, StrictModel
from ag.serve.request import Temperature, TopP

#: Parameters that are not supported, with values that change nothing.
NEUTRAL: Mapping[str, Sequence[Any]] = {
    "background": (False,),
    "conversation": (),
    "include": ([],),
    "parallel_tool_calls": (True, False),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "text": ({"format": {"type": "text"}}, {}),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}


class InputText(StrictModel):
    """A text in a message's content. It may come from an earlier response."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] = Field(default_factory=list, max_length=0)
    logprobs: list[Any] = Field(default_factory=list)


class InputMessage(StrictModel):
    """A message of a conversation. It may come from an earlier response."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[InputText], Field(min_length=1)]
    id: str | None = None
    status: str | None = None


class Reasoning(StrictModel):
    """Reasoning effort, a variable of chat templates."""

    effort: ReasoningEffort = None


class ResponsesRequest(RequestBody):
    """The parameters of ``/v1/responses``."""

    openai_fields = frozenset(ResponseCreateParamsBase.__annotations__)
    neutral_values = NEUTRAL

    input: Annotated[str, Field(min_length=1)] | Annotated[list[InputMessage], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    reasoning: Reasoning = Reasoning()
    stream: bool = False

    def to_chat(self) -> ChatCompletionRequest:
        """Return the parameters as a chat completion request."""
        messages = [] if self.instructions is None else [Message(role="system", content=self.instructions)]
        if isinstance(self.input, str):
            messages.append(Message(role="user", content=self.input))
        else:
            for message in self.input:
                text = (
                    message.content
                    if isinstance(message.content, str)
                    else "".join(part.text for part in message.content)
                )
                messages.append(Message(role=message.role, content=text))
        copied = {name: getattr(self, name) for name in ("model", "temperature", "top_p", "stream")}
        return _ResponsesChat(
            **copied,
            messages=messages,
            max_output_tokens=self.max_output_tokens,
            reasoning_effort=self.reasoning.effort,
        )


class _ResponsesChat(ChatCompletionRequest):
    """A chat whose errors name the parameters of ``/v1/responses``."""

    prompt_param = "input"
    effort_param = "reasoning.effort"
    limit_params = ["max_output_tokens"]

    max_output_tokens: int | None


class ResponsesWriter:
    """Writes the completion of one request as JSON, whole or as events.

    Args:
        params: parameters of the request.
    """

    def __init__(self, params: ResponsesRequest) -> None:
        self.params, self._sequence_number, self._text = params, 0, ""
        self._response = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": float(int(time.time())),
            **params.model_dump(include={"model", "instructions", "max_output_tokens", "temperature", "top_p"}),
            "error": None,
            "incomplete_details": None,
            "metadata": {},
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": params.reasoning.effort, "summary": None},
            "status": "in_progress",
            "store": False,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "truncation": "disabled",
            "usage": None,
        }
        self._item = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant"}
        self._part_location = {"item_id": self._item["id"], "output_index": 0, "content_index": 0}
        self._reason: str | None = None

    def start_events(self) -> str:
        """Return the first events of a stream."""
        opened = self._item | {"status": "in_progress", "content": []}
        return (
            self._event("response.created", response=self._response)
            + self._event("response.in_progress", response=self._response)
            + self._event("response.output_item.added", output_index=0, item=opened)
            + self._event("response.content_part.added", **self._part_location, part=_text_part(""))
        )

    def delta_event(self, delta: CompletionDelta) -> str:
        """Return a delta of the completion as an event."""
        self._text, self._reason = self._text + delta.text, delta.reason
        if not delta.text:
            return ""
        return self._event("response.output_text.delta", **self._part_location, delta=delta.text, logprobs=[])

    def end_events(self, usage: Mapping[str, Any]) -> str:
        """Return the last events of a stream, with its usage."""
        response = self._finished_response(self._text, self._reason, usage)
        return (
            self._event("response.output_text.done", **self._part_location, text=self._text, logprobs=[])
            + self._event("response.content_part.done", **self._part_location, part=_text_part(self._text))
            + self._event("response.output_item.done", output_index=0, item=response["output"][0])
            + self._event(f"response.{response['status']}", response=response)
        )

    def full_json(self, completions: Sequence[CompletionDelta], usage: Mapping[str, Any]) -> str:
        """Return the whole completion, with its usage."""
        [delta] = completions
        return json.dumps(self._finished_response(delta.text, delta.reason, usage))

    def _finished_response(self, text: str, reason: str | None, usage: Mapping[str, Any]) -> dict[str, Any]:
        """Return the response at its end."""
        status = "completed" if reason == "stop" else "incomplete"
        usage = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
            "ag": usage["ag"],
        }
        return self._response | {
            "status": status,
            "incomplete_details": None if status == "completed" else {"reason": "max_output_tokens"},
            "output": [self._item | {"status": status, "content": [_text_part(text)]}],
            "usage": usage,
        }

    def _event(self, kind: str, **fields: Any) -> str:
        values = {"type": kind, "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        return f"event: {kind}\ndata: {json.dumps(values)}\n\n"


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

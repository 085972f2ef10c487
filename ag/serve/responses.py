"""``/v1/responses`` of OpenAI's API, as far as texts go: its parameters become those of a chat."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from openai.types.responses.response_create_params import ResponseCreateParamsBase
from openai.types.shared import ReasoningEffort
from pydantic import Field

from ag.serve.answers import Piece
from ag.serve.protocol import Body, ChatAsked, Message, Part

#: Parameters that are not supported, with the values under which they change nothing.
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


class InputText(Part):
    """A part of a message's content: text, which may come from an earlier response."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] = Field(default_factory=list, max_length=0)
    logprobs: list[Any] = Field(default_factory=list)


class InputMessage(Part):
    """A message of a conversation, which may come from an earlier response."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[InputText], Field(min_length=1)]
    id: str | None = None
    status: str | None = None


class Reasoning(Part):
    """How much the model thinks, for chat templates."""

    effort: ReasoningEffort = None


class ResponsesAsked(Body):
    """The parameters of ``/v1/responses``."""

    known = frozenset(ResponseCreateParamsBase.__annotations__)
    neutral = NEUTRAL

    input: Annotated[str, Field(min_length=1)] | Annotated[list[InputMessage], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    reasoning: Reasoning = Reasoning()
    stream: bool = False

    def as_chat(self) -> ChatAsked:
        """Return the parameters as those of a chat."""
        messages = [] if self.instructions is None else [Message(role="system", content=self.instructions)]
        if isinstance(self.input, str):
            messages.append(Message(role="user", content=self.input))
        else:
            for one in self.input:
                said = one.content if isinstance(one.content, str) else "".join(part.text for part in one.content)
                messages.append(Message(role=one.role, content=said))
        same = {name: getattr(self, name) for name in ("model", "temperature", "top_p", "stream")}
        return _Chat(
            **same,
            messages=messages,
            max_output_tokens=self.max_output_tokens,
            reasoning_effort=self.reasoning.effort,
        )


class _Chat(ChatAsked):
    """A chat whose errors name the parameters of ``/v1/responses``."""

    text = "input"
    effort = "reasoning.effort"
    limits = ["max_output_tokens"]

    max_output_tokens: int | None


class ResponseForm:
    """The answer to one request as JSON, whole or as events.

    Args:
        asked: the parameters of the request.
    """

    def __init__(self, asked: ResponsesAsked) -> None:
        self.asked, self._number, self._text = asked, 0, ""
        self._response = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": float(int(time.time())),
            **asked.model_dump(include={"model", "instructions", "max_output_tokens", "temperature", "top_p"}),
            "error": None,
            "incomplete_details": None,
            "metadata": {},
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": asked.reasoning.effort, "summary": None},
            "status": "in_progress",
            "store": False,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "truncation": "disabled",
            "usage": None,
        }
        self._item = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant"}
        self._place = {"item_id": self._item["id"], "output_index": 0, "content_index": 0}
        self._reason: str | None = None

    def begin(self) -> str:
        """Return the first events of a stream."""
        opened = self._item | {"status": "in_progress", "content": []}
        return (
            self._event("response.created", response=self._response)
            + self._event("response.in_progress", response=self._response)
            + self._event("response.output_item.added", output_index=0, item=opened)
            + self._event("response.content_part.added", **self._place, part=_part(""))
        )

    def chunk(self, piece: Piece) -> str:
        """Return a piece of the answer as an event."""
        self._text, self._reason = self._text + piece.text, piece.reason
        if not piece.text:
            return ""
        return self._event("response.output_text.delta", **self._place, delta=piece.text, logprobs=[])

    def end(self, used: Mapping[str, Any]) -> str:
        """Return the last events of a stream, with the numbers of tokens."""
        response = self._ended(self._text, self._reason, used)
        return (
            self._event("response.output_text.done", **self._place, text=self._text, logprobs=[])
            + self._event("response.content_part.done", **self._place, part=_part(self._text))
            + self._event("response.output_item.done", output_index=0, item=response["output"][0])
            + self._event(f"response.{response['status']}", response=response)
        )

    def whole(self, answers: Sequence[Piece], used: Mapping[str, Any]) -> str:
        """Return the answer in one piece, with the numbers of tokens."""
        [piece] = answers
        return json.dumps(self._ended(piece.text, piece.reason, used))

    def _ended(self, text: str, reason: str | None, used: Mapping[str, Any]) -> dict[str, Any]:
        """Return the response at its end."""
        status = "completed" if reason == "stop" else "incomplete"
        usage = {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": {**used["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": used["total_tokens"],
        }
        return self._response | {
            "status": status,
            "incomplete_details": None if status == "completed" else {"reason": "max_output_tokens"},
            "output": [self._item | {"status": status, "content": [_part(text)]}],
            "usage": usage,
        }

    def _event(self, kind: str, **fields: Any) -> str:
        values = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return f"event: {kind}\ndata: {json.dumps(values)}\n\n"


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

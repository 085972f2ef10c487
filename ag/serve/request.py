"""A request to continue a text, and the stream of tokens that answers it."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor
from torch.nn import functional as F

from ag.engine.masks import marked
from ag.errors import UserError, require
from ag.serve.detokenizer import Detokenizer

#: Why an answer ended: its text did, it has ``max_tokens``, its reader left, or time ran out.
Reason = Literal["stop", "length", "cancelled", "timeout"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """A text to continue.

    Attributes:
        tokens: ids of the prompt.
        max_tokens: most tokens of an answer.
        temperature: divides logits before a token is drawn; 0 takes the most probable token each time.
        top_p: tokens are drawn from the most probable ones that have this probability together.
        top_k: tokens are drawn from this number of the most probable ones; 0 means that there is no such limit.
        min_p: tokens are drawn from those at least this times as probable as the most probable one.
        repetition_penalty: divides the logits of tokens that came before, 0.01 to 100.
        logit_bias: added to logits, by token.
        seed: of drawing; None means that each answer has another one.
        stop: texts that end an answer and are no part of it.
        continues: whether an answer goes on with the text of the prompt; False means that it begins a text of its own,
            whose first word has no space in front.
        logprobs: how many of the most probable tokens to name at each place, with log-probabilities; None means that no
            log-probabilities are returned.
        n: answers.
        protect: tokens of the prompt that are never evicted, whatever the policy: pairs (first token, the one behind
            the last), counted from 0.
        wait_seconds: longest time before the prompt is read; None means that it may wait for ever.
        answer_seconds: longest time before the answer ends; None means that there is no such limit.

    Raises:
        UserError: for a value out of range.
    """

    tokens: Sequence[int]
    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    continues: bool = True
    logprobs: int | None = None
    n: int = 1
    protect: tuple[tuple[int, int], ...] = ()
    wait_seconds: float | None = None
    answer_seconds: float | None = None

    def __post_init__(self) -> None:
        if not self.tokens:
            raise UserError("Request: tokens is empty: expected a prompt of one token or more.")
        require(self, "max_tokens", self.max_tokens >= 1, "1 or more")
        require(self, "temperature", self.temperature >= 0, "0 or more")
        require(self, "top_p", 0 < self.top_p <= 1, "above 0, at most 1")
        require(self, "top_k", self.top_k >= 0, "0 or more")
        require(self, "min_p", 0 <= self.min_p <= 1, "0 to 1")
        require(self, "repetition_penalty", 0.01 <= self.repetition_penalty <= 100, "0.01 to 100")
        require(self, "stop", all(self.stop), "texts that are not empty")
        require(self, "logprobs", self.logprobs is None or self.logprobs >= 0, "0 or more, or None")
        require(self, "n", self.n >= 1, "1 or more")
        inside = all(0 <= first < behind <= len(self.tokens) for first, behind in self.protect)
        require(self, "protect", inside, f"pairs such as (0, 40), within the {len(self.tokens)} tokens of the prompt")

    def marks(self) -> Tensor:
        """Return which tokens of the prompt are protected, ``[T]`` bool."""
        marks = marked(self.protect)
        return F.pad(marks, (0, len(self.tokens) - len(marks)))


@dataclass(frozen=True)
class Token:
    """A token of an answer.

    Attributes:
        id: in the vocabulary.
        text: of the answer that is certain since this token; "" where it is, or may be, a part of something longer.
        place: characters of the answer before the token.
        logprob: its log-probability under the model, before anything changes the logits; None means that the request
            did not ask for it.
        best: the most probable tokens and their log-probabilities, where the request asked for them.
    """

    id: int
    text: str = ""
    place: int = 0
    logprob: float | None = None
    best: tuple[tuple[int, float], ...] = ()


#: What a stream gives: tokens, then an error or None at the end.
Event = Token | Exception | None


class Stream:
    """One answer as it comes: iterating waits for its tokens. Any thread may read or cancel it.

    Args:
        text: of the answer; at the end its ``rest()`` is what was held back, if anything.
        hear: takes each event in the thread of the scheduler, at once and without waiting; then nothing is left to
            iterate over. None means that events wait to be read.
    """

    def __init__(self, text: Detokenizer, hear: Callable[[Event], None] | None = None) -> None:
        self.text = text
        #: Why the answer ended; None while it goes on.
        self.reason: Reason | None = None
        #: Whether the reader asked for no more.
        self.cancelled = False
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        #: Gives the reader an event.
        self.put = hear or self._events.put

    def __iter__(self) -> Iterator[Token]:
        """Yield the tokens.

        Raises:
            Exception: what ended the answer, where that was an error.
        """
        while (event := self._events.get()) is not None:
            if isinstance(event, Exception):
                raise event
            yield event

    def cancel(self) -> None:
        """Ask for no more: what the answer holds is free before the next token of the others."""
        self.cancelled = True

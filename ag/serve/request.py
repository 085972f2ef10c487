"""A request to continue a text, and the stream of tokens that answers it."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor
from torch.nn import functional as F

from ag.engine.masks import marked
from ag.engine.policy import Policy
from ag.errors import UserError, require
from ag.serve.detokenizer import Detokenizer

#: Why an answer ended: an end or stop text, ``max_tokens``, a cancellation, or a time limit.
Reason = Literal["stop", "length", "cancelled", "timeout"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt and how to continue it.

    Raises:
        UserError: for a value out of range.
    """

    tokens: Sequence[int]  # ids of the prompt
    max_tokens: int = 128  # most tokens of an answer; 0 reads the prompt alone
    #: Tokens of an answer for which admission keeps blocks; a longer answer takes free blocks, and ends where an
    #: otherwise empty pool has none. None means ``max_tokens``.
    reserved: int | None = None
    temperature: float = 0.0  # divides logits before sampling; 0 means greedy decoding
    top_p: float = 1.0  # sample from the most probable tokens whose probabilities sum to this
    top_k: int = 0  # sample from this number of the most probable tokens; 0 means no limit
    min_p: float = 0.0  # sample from tokens at least this times as probable as the most probable one
    repetition_penalty: float = 1.0  # divides the logits of tokens that occurred before, 0.01 to 100
    frequency_penalty: float = 0.0  # is subtracted from a logit for each time that the answer has the token, -2 to 2
    presence_penalty: float = 0.0  # is subtracted once from the logit of each token that the answer has, -2 to 2
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # numbers that are added to logits, by token
    seed: int | None = None  # of sampling; None means a different one for each answer
    stop: tuple[str, ...] = ()  # texts that end an answer and are not part of it
    stop_token_ids: Sequence[int] = ()  # tokens that end an answer, beside the model's; their texts are no part of it
    include_stop_str_in_output: bool = False  # True if what ends an answer is part of its text
    ignore_eos: bool = False  # True if the model's own end tokens do not end an answer
    min_tokens: int = 0  # tokens of an answer before which nothing but ``max_tokens`` ends it
    continues: bool = True  # the answer continues the prompt's text; False: a new text, whose first word has no space
    special: bool = False  # True if special tokens are part of an answer's text
    logprobs: int | None = None  # most probable tokens to return at each place; None means no log-probabilities at all
    prompt_logprobs: int | None = None  # the same of the prompt, which is then read without a cached prefix
    n: int = 1  # number of answers
    policy: Policy | None = None  # under which it is answered; None means the scheduler's
    kept: bool = False  # True if the stream says how much of the prompt stays
    #: A matcher that has read nothing, of :class:`ag.serve.structured.Grammars`, which the answer follows. None means
    #: free text.
    grammar: Any = None
    protect: tuple[tuple[int, int], ...] = ()  # half-open spans (start, end) of the prompt that no policy evicts
    wait_seconds: float | None = None  # longest time until the prompt is read; None means no limit
    answer_seconds: float | None = None  # longest time until the answer ends; None means no limit

    def __post_init__(self) -> None:
        if not self.tokens:
            raise UserError("Request: tokens is empty: expected a prompt of one token or more.")
        require(self, "max_tokens", self.max_tokens >= 0, "0 or more")
        require(self, "temperature", self.temperature >= 0, "0 or more")
        require(self, "top_p", 0 < self.top_p <= 1, "above 0, at most 1")
        require(self, "top_k", self.top_k >= 0, "0 or more")
        require(self, "min_p", 0 <= self.min_p <= 1, "0 to 1")
        require(self, "repetition_penalty", 0.01 <= self.repetition_penalty <= 100, "0.01 to 100")
        for name in ("frequency_penalty", "presence_penalty"):
            require(self, name, -2 <= getattr(self, name) <= 2, "-2 to 2")
        expected = f"0 to max_tokens={self.max_tokens}"
        require(self, "min_tokens", 0 <= self.min_tokens <= self.max_tokens, expected)
        require(self, "stop", all(self.stop), "texts that are not empty")
        for name in ("logprobs", "prompt_logprobs"):
            require(self, name, getattr(self, name) is None or getattr(self, name) >= 0, "0 or more, or None")
        require(self, "n", self.n >= 1, "1 or more")
        inside = all(0 <= first < end <= len(self.tokens) for first, end in self.protect)
        require(self, "protect", inside, f"pairs such as (0, 40), within the {len(self.tokens)} tokens of the prompt")

    @property
    def num_reserved(self) -> int:
        """Tokens of an answer for which admission keeps blocks."""
        return self.max_tokens if self.reserved is None else min(self.reserved, self.max_tokens)

    def protected_mask(self) -> Tensor:
        """Return which tokens of the prompt are protected, ``[T]`` bool."""
        mask = marked(self.protect)
        return F.pad(mask, (0, len(self.tokens) - len(mask)))


@dataclass(frozen=True)
class Token:
    """A token of an answer or of a prompt."""

    id: int  # in the vocabulary
    text: str = ""  # that became final with this token; "" while it may be part of a character or of a stop text
    text_offset: int = 0  # characters of the answer, or of the prompt, before the token
    #: Its log-probability under the model, before any change to the logits; None means that it was not requested, or
    #: that nothing precedes the token.
    logprob: float | None = None
    top_logprobs: tuple[
        tuple[int, float], ...
    ] = ()  # the most probable tokens and their log-probabilities, if requested
    rank: int = 0  # 1 for the most probable token; 0 means that ``logprob`` is None


@dataclass(frozen=True)
class EncodedPrompt:
    """A request of a client."""

    request: Request
    policy: str = ""  # under which it is answered
    echo: tuple[Token, ...] = ()  # the tokens of the prompt with their texts, if the answer repeats the prompt


#: Events of a stream: tokens, then an error, or None at a normal end.
Event = Token | Exception | None


class Stream:
    """One answer as it is generated; iteration waits for tokens. Any thread may read or cancel it.

    Args:
        detokenizer: detokenizer of the answer; after the end its ``rest()`` is the text that was held back.
        on_event: is called with each event in the scheduler's thread, and must not block. Iteration then yields
            nothing. None: events are queued for iteration.
    """

    def __init__(self, detokenizer: Detokenizer, on_event: Callable[[Event], None] | None = None) -> None:
        self.detokenizer = detokenizer
        #: Why the answer ended; None means that it goes on.
        self.reason: Reason | None = None
        #: Whether :meth:`cancel` was called.
        self.cancelled = False
        #: The tokens of the prompt with their log-probabilities, if requested; complete before the first event.
        self.prompt: tuple[Token, ...] = ()
        #: Tokens of the prompt that were taken from a cached prefix; known before the first event.
        self.num_cached_tokens = 0
        #: Share of the (token, KV head) pairs of the prompt that stays behind it, if requested; as ``prompt``.
        self.kept_share: float | None = None
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        #: Passes an event to the reader.
        self.put = on_event or self._events.put

    def __iter__(self) -> Iterator[Token]:
        """Yield the tokens.

        Raises:
            Exception: the error that ended the answer.
        """
        while (event := self._events.get()) is not None:
            if isinstance(event, Exception):
                raise event
            yield event

    def cancel(self) -> None:
        """End the answer; its blocks are freed before the next step."""
        self.cancelled = True

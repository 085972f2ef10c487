"""A request to continue a prompt, and the tokens of prompts and completions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, InstanceOf, ValidationError
from torch import Tensor
from torch.nn import functional as F

from ag.engine.masks import marked
from ag.engine.policy import Policy
from ag.errors import UserError, require

#: Why a completion ended: an end token or stop text, ``max_tokens``, a cancellation, or a time limit.
Reason = Literal["stop", "length", "cancelled", "timeout"]

Count = Annotated[int, Field(ge=0)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Temperature = Annotated[float, Field(ge=0, le=2)]


class SamplingParams(BaseModel):
    """Parameters of a request that clients send under the same names, with the same ranges.

    A new one needs a field here, and a line in :func:`ag.serve.sampler.processors`.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    temperature: Temperature = 0.0  # divides logits before sampling; 0: greedy decoding
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0  # sample from the most probable tokens that sum to this
    top_k: Annotated[int, Field(ge=-1)] = 0  # sample from this number of most probable tokens; -1 and 0: no limit
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0  # sample from tokens with at least this share of the largest
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0  # divides the logits of earlier tokens
    frequency_penalty: Penalty = 0.0  # subtracted from a token's logit per occurrence in the completion
    presence_penalty: Penalty = 0.0  # subtracted from the logits of tokens in the completion
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None  # None: each completion draws anew
    stop_token_ids: Sequence[Count] = ()  # further tokens that end a completion; their texts are not part of it
    include_stop_str_in_output: bool = False  # True if the text includes its stop text or token
    ignore_eos: bool = False  # True if the model's end tokens do not end a completion
    min_tokens: Count = 0  # before this number of tokens only ``max_tokens`` ends a completion
    n: Annotated[int, Field(ge=1, le=128)] = 1  # number of completions
    #: Number of most probable tokens to return per prompt token. The prompt then uses no cached prefix.
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


class Request(SamplingParams):
    """A prompt, and how to continue it.

    Raises:
        UserError: for a value out of range.
    """

    tokens: Annotated[Sequence[int], Field(min_length=1)]  # ids of the prompt
    max_tokens: Count = 128  # largest number of tokens of a completion; 0: prefill only
    #: Tokens of a completion for which admission keeps blocks. A longer completion takes free blocks, and ends when the
    #: pool is full and nothing else runs. None: ``max_tokens``.
    reserved: int | None = None
    logit_bias: Mapping[int, float] = {}  # added to the logits, by token
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()  # texts that end a completion; they are not part of it
    #: True: a completion goes on with the prompt's text. False: it is a new text, with no space before its first word.
    prompt_text_goes_on: bool = True
    with_special_tokens: bool = False  # True if a completion's text includes special tokens
    logprobs: Count | None = None  # number of most probable tokens to return per token; None: no log-probabilities
    policy: InstanceOf[Policy] | None = None  # None: the scheduler's policy
    report_kept_share: bool = False  # True if the stream reports the kept share of the prompt
    #: The completion's grammar: an unused matcher of :class:`ag.serve.structured.Grammars`. None: free text.
    grammar: Any = None
    protect: tuple[tuple[int, int], ...] = ()  # half-open spans (start, end) of the prompt that are never evicted
    wait_seconds: float = math.inf  # longest wait before prefill
    answer_seconds: float = math.inf  # longest time until the completion ends

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            first = error.errors()[0]
            raise UserError(f"Request: {first['loc'][0]}={first['input']!r:.200}: {first['msg']}.") from None
        require(self, "min_tokens", self.min_tokens <= self.max_tokens, f"at most max_tokens={self.max_tokens}")
        inside = all(0 <= first < end <= len(self.tokens) for first, end in self.protect)
        require(self, "protect", inside, f"pairs such as (0, 40), within the {len(self.tokens)} tokens of the prompt")

    @property
    def num_reserved(self) -> int:
        """Number of tokens of a completion for which admission keeps blocks."""
        return self.max_tokens if self.reserved is None else min(self.reserved, self.max_tokens)

    def protected_mask(self) -> Tensor:
        """Return which prompt tokens the request protects, ``[T]`` bool."""
        mask = marked(self.protect)
        return F.pad(mask, (0, len(self.tokens) - len(mask)))


@dataclass(frozen=True)
class Token:
    """A token of a completion or of a prompt."""

    id: int  # in the vocabulary
    text: str = ""  # text that became final with this token; "" inside a character or a possible stop text
    text_offset: int = 0  # characters before the token, in the completion or the prompt
    #: Log-probability under the model, before any change to the logits. None: not requested, or the first prompt token.
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()  # most probable tokens, log-probabilities
    rank: int = 0  # by probability: 1 for the most probable token; 0 if ``logprob`` is None


@dataclass(frozen=True)
class EncodedPrompt:
    """A client's prompt as a request."""

    request: Request
    policy: str = ""  # text of the policy
    echo: tuple[Token, ...] = ()  # prompt tokens with their texts, if the client asked for ``echo``

    def tokens_with(self, scored: tuple[Token, ...]) -> tuple[Token, ...]:
        """Return the prompt tokens, with their texts and the log-probabilities of ``scored``, as far as requested."""
        if not self.echo or not scored:
            return self.echo or scored or tuple(map(Token, self.request.tokens))
        return tuple(
            replace(token, text=echoed.text, text_offset=echoed.text_offset)
            for token, echoed in zip(scored, self.echo, strict=True)
        )

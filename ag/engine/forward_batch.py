"""The next tokens of a batch of sequences, as layers see them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class ForwardBatch:
    """The next tokens of each sequence on their way through the layers, left-aligned: column j is the j-th new one.

    Attributes:
        ranks: ``[B, T]`` long on the device, the place of each token in its sequence; -1 where there is none.
        columns: ``[B, T]`` long, the column of each among the tokens of the model's call, -1 where there is none; None
            means that both are the same.
        counts: ``[B]`` long on the host, new tokens.
        num_tokens: ``[B]`` long on the host, tokens of each sequence, these included.
        settled: ``[B]`` long on the host, how many of these can no longer be taken back; see :class:`SequenceState`.
        prompt_len: ``[B]`` long on the host, tokens of each prompt.
        protected: ``[B, L]`` bool on the host, which tokens the caller protects, by rank; None means none.
        is_prefill: whether the tokens belong to the prompt.
        ends_prompt: whether every prompt is read after them.
        fresh: whether nothing was held before.
        evict: ``[B]`` bool on the host, the sequences to evict from after these tokens; None means none.
        step: whether it is one token of each sequence behind its prompt, in memory that is the same at each step.
        prompt_there: ``prompt_len`` on the device, in memory that is the same at each step.
        protected_there: ``protected`` on the device, likewise.
        memo: what layers worked out that is the same for all of them.
    """

    ranks: Tensor
    columns: Tensor | None
    counts: Tensor
    num_tokens: Tensor
    settled: Tensor
    prompt_len: Tensor
    protected: Tensor | None
    is_prefill: bool
    ends_prompt: bool
    fresh: bool
    prompt_there: Tensor
    protected_there: Tensor | None
    evict: Tensor | None = None
    step: bool = False
    memo: dict[Any, Any] = field(default_factory=dict)

    @property
    def padded(self) -> bool:
        """Whether some sequence has fewer new tokens than another."""
        return bool((self.counts < self.ranks.shape[1]).any())

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return int(self.num_tokens.max())

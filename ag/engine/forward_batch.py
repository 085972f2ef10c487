"""The next tokens of a batch of sequences, as layers see them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor


class Prompts(NamedTuple):
    """Facts of the prompts that passes need. The tensors stay in place until the prompts or protected spans change."""

    lengths: Tensor  # [B] long on the host, tokens of each prompt
    protected: Tensor | None  # [B, L] bool on the host, by token index: tokens that the caller protects; None: no token
    capacity: Tensor | None  # [B] long on the host, tokens per KV head, the mean over layers; None means no budget
    limits: tuple[int | Tensor, int | Tensor] | None  # the scorer's limits under this capacity; None means no budget
    lengths_on_device: Tensor  # the lengths on the device
    protected_on_device: Tensor | None  # protected tokens, on the device


@dataclass(frozen=True, kw_only=True, eq=False)
class ForwardBatch:
    """The next tokens of each sequence on their way through the layers, left-aligned: column j is the j-th new one.

    Attributes:
        token_indices: ``[B, T]`` long on the device, the index of each token in its sequence; -1 for padding.
        columns: ``[B, T]`` long, the column of each among the tokens of the model's call, -1 where there is none; None
            means that column j is token j.
        counts: ``[B]`` long on the host, new tokens.
        num_tokens: ``[B]`` long on the host, tokens of each sequence, these included.
        max_length: tokens of the longest sequence.
        settled: ``[B]`` long on the host, how many of these can no longer be taken back; see :class:`SequenceState`.
        prompts: what follows from the prompts.
        is_prefill: whether the tokens belong to the prompt.
        ends_prompt: whether every prompt is read after them.
        is_first_pass: whether nothing was cached before.
        evicting: ``[B]`` bool on the host, the sequences to evict from after these tokens; None means none.
        step: whether it is one token of each sequence after its prompt; its tensors lie at one address at each step.
        notes: what one moment of this pass leaves for a later one: ("logits", layer) and ("gate", layer), a gate's
            outputs; ("kv_readers", layer), the layers that still read its keys; "longest_rows", for positions by slot;
            "expired", where a layer freed tokens.
    """

    token_indices: Tensor
    columns: Tensor | None
    counts: Tensor
    num_tokens: Tensor
    max_length: int
    settled: Tensor
    prompts: Prompts
    is_prefill: bool
    ends_prompt: bool
    is_first_pass: bool
    evicting: Tensor | None = None
    step: bool = False
    notes: dict[Any, Any] = field(default_factory=dict)

    @property
    def padded(self) -> bool:
        """Whether some sequence has fewer new tokens than another."""
        return bool((self.counts < self.token_indices.shape[1]).any())

    def first_since(self, block: int | None, lengths: Tensor) -> Tensor:
        """Return the token index ``[B]`` of the first token that came since tokens could last be evicted.

        Queries that are looked back at do not see what had left the sliding window by then: whether it is still held
        depends on when memory was freed.

        Args:
            block: tokens of the prompt between evictions; None only after a prompt.
            lengths: tokens of each sequence ``[B]`` on the device, these included.
        """
        if self.is_prefill:
            assert block is not None
            return (lengths - 1) // block * block
        return lengths - (1 if self.step else self.counts.to(lengths.device))

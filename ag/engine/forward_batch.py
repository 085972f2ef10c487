"""The next tokens of a batch of sequences, as layers see them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from ag.model.interceptor import AttentionCall


class Prompts(NamedTuple):
    """Facts of the prompts that passes need. The tensors stay in place until the prompts or protected spans change."""

    lengths: Tensor  # [B] long on the host, tokens of each prompt
    protected: Tensor | None  # [B, L] bool on the host, by token index: tokens that the caller protects; None: no token
    capacity: Tensor | None  # [B] long on the host, tokens per KV head, the mean over layers; None means no budget
    limits: tuple[int | Tensor, int | Tensor] | None  # the scorer's limits under this capacity; None means no budget
    lengths_on_device: Tensor  # the lengths on the device
    protected_on_device: Tensor | None  # protected tokens, on the device


class PendingEviction(NamedTuple):
    """An eviction from a layer that waits until the last layer which reads its keys and values has attended."""

    readers_left: int
    call: AttentionCall
    weights: Tensor | None  # of a single query, where the scorer needs them
    evictor: Any  # the Evictor of the pass; None: this pass evicts nothing from the layer


@dataclass(kw_only=True, eq=False)
class PassNotes:
    """Values that one stage of a pass stores for a later stage.

    Attributes:
        gate_logits: by layer, the logits of the new tokens, until these are stored.
        gate_outputs: by layer, what was stored of them, for later layers that read its keys and values. None: no gate.
        kv_readers: by layer, the eviction that waits for the last layer which reads its keys and values.
        longest_rows: ``[B]`` long on the host, tokens of each sequence's longest row before the pass, for positions by
            slot.
        expired: whether a layer freed tokens that no later query sees.
    """

    gate_logits: dict[int, Tensor] = field(default_factory=dict)
    gate_outputs: dict[int, Tensor | None] = field(default_factory=dict)
    kv_readers: dict[int, PendingEviction] = field(default_factory=dict)
    longest_rows: Tensor | None = None
    expired: bool = False


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
        num_committed: ``[B]`` long on the host, tokens that can no longer be taken back; see :class:`SequenceState`.
        prompts: what follows from the prompts.
        is_prefill: whether the tokens belong to the prompt.
        ends_prompt: whether every prompt is read after them.
        is_first_pass: whether nothing was cached before.
        evicting: ``[B]`` bool on the host, the sequences to evict from after these tokens; None means none.
        step: whether it is one token of each sequence after its prompt; its tensors lie at one address at each step.
        notes: values that one stage of this pass stores for a later stage.
    """

    token_indices: Tensor
    columns: Tensor | None
    counts: Tensor
    num_tokens: Tensor
    max_length: int
    num_committed: Tensor
    prompts: Prompts
    is_prefill: bool
    ends_prompt: bool
    is_first_pass: bool
    evicting: Tensor | None = None
    step: bool = False
    notes: PassNotes = field(default_factory=PassNotes)

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

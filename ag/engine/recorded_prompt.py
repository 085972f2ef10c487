"""A prompt that the model repeats later, for KVzip: its ids, positions and attention calls."""

from __future__ import annotations

import copy
from dataclasses import fields
from typing import NamedTuple

import torch
from torch import Tensor

from ag.engine.scorers.kvzip import KVzip
from ag.engine.sequences import SequenceState
from ag.errors import UserError
from ag.model.interceptor import AttentionCall


class ReconstructionScores(NamedTuple):
    """Scores of a prompt by its repetition."""

    scores: dict[int, Tensor]  # by layer, [B, Hkv, N] float32, a column for each token
    seconds: float  # of the model and of measuring


class RecordedPrompt:
    """The ids of a prompt, the position after it, and how each layer attends.

    Args:
        scorer: which tokens of the prompt are repeated, after which instructions.
    """

    def __init__(self, scorer: KVzip) -> None:
        self.scorer = scorer
        #: Measurements by scorer, which caches that read a prompt together share.
        self.shared_results: dict[KVzip, ReconstructionScores] = {}
        #: Ids of the prompt so far, ``[B, columns]``; empty once it was repeated.
        self.ids = torch.zeros(0, 0, dtype=torch.long)
        #: The position after the newest token, ``[B]``; empty once the prompt was repeated.
        self.next_position = torch.zeros(0, dtype=torch.long)
        #: How each layer attends: its last call, without the tokens.
        self.calls: dict[int, AttentionCall] = {}

    def note_tokens(self, tokens: Tensor, num_columns: int) -> None:
        """Note the ids ``[B, T]`` of a forward pass, after ``num_columns`` of the prompt; refuse embeddings."""
        if tokens.ndim != 2:
            raise UserError("kvzip repeats the prompt by its token ids: give input_ids, not inputs_embeds.")
        if not num_columns:
            self.ids = tokens[:, :0]
            self.next_position = tokens.new_zeros(len(tokens))
        self.ids = torch.cat([self.ids[:, :num_columns], tokens], 1)

    def note_positions(self, token_indices: Tensor, positions: Tensor) -> None:
        """Note the positions ``[B or 1, w]`` of tokens of token indices ``[B, w]``, -1 where there is none."""
        newest = torch.where(token_indices >= 0, positions.to(token_indices.device), -1).amax(1)
        self.next_position = torch.where(newest >= 0, newest + 1, self.next_position.to(token_indices.device))

    def note_call(self, call: AttentionCall) -> None:
        """Note how a layer attends, and hold none of its tokens."""
        noted = {field.name: getattr(call, field.name) for field in fields(AttentionCall)} | {"memo": {}}
        for name in "qkv":
            batch, heads, _, size = noted[name].shape
            noted[name] = noted[name].new_empty(batch, heads, 0, size)
        self.calls[call.layer] = AttentionCall(**noted)

    def fork(self) -> RecordedPrompt:
        """Return a copy for another continuation of the prompt."""
        new = copy.copy(self)
        new.shared_results, new.calls = {}, {**self.calls}
        return new

    def select(self, indices: Tensor) -> None:
        """Make the sequences those at ``indices``."""
        self.ids, self.next_position = (
            x[indices.to(x.device)] if len(x) else x for x in (self.ids, self.next_position)
        )

    def due(self, sequences: SequenceState) -> bool:
        """Return whether the forward pass that ends has read the end of the prompt."""
        return len(self.ids) > 0 and sequences.ready

    def clear(self) -> None:
        """Forget the prompt, which was repeated."""
        self.ids, self.next_position, self.calls = self.ids[:0], self.next_position[:0], {}

"""Controls, which every useful policy beats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ag.engine.scorer_inputs import Needs, ScorerInputs
from ag.engine.scorers.base import Scorer

HASH_MULTIPLIERS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)  # multipliers of xxHash


@dataclass(frozen=True, kw_only=True)
class Random(Scorer):
    """Random scores: a hash of (seed, layer, head, token index), independent of padding and batch.

    Attributes:
        seed: seed of the hash.
    """

    seed: int = 0
    alone: ClassVar[str] = "its scores are random"
    needs = Needs(key_indices=True, steady=True)

    def score(self, inputs: ScorerInputs) -> Tensor:
        """Return numbers in [0, 1)."""
        heads = torch.arange(inputs.key_indices.shape[1], device=inputs.key_indices.device)[:, None]
        seed = (self.seed * 1000 + inputs.layer) * HASH_MULTIPLIERS[2] & 0xFFFFFFFF
        mixed = inputs.key_indices * HASH_MULTIPLIERS[0] + heads * HASH_MULTIPLIERS[1] + seed
        for shift in (15, 13, 16):
            mixed = mixed & 0xFFFFFFFF
            mixed = (mixed ^ (mixed >> shift)) * HASH_MULTIPLIERS[shift % 3]
        return (mixed & 0xFFFFFF).float() / 2**24


@dataclass(frozen=True, kw_only=True)
class KNorm(Scorer):
    """Keys with a small norm (Devoto et al. 2024, "A Simple and Effective L2 Norm-Based Strategy")."""

    needs = Needs(keys=True, steady=True)

    def score(self, inputs: ScorerInputs) -> Tensor:
        """Return ``-||k||``."""
        norms: Tensor = torch.linalg.vector_norm(inputs.keys.float(), dim=-1)
        return -norms

"""Add a scorer and run it beside others: python scripts/examples/add_a_scorer.py MODEL PROMPT."""

import sys
from dataclasses import dataclass

import torch
from torch import Tensor

import ag
from ag.config import ModelConfig
from ag.engine.attention_stats import AttentionStats
from ag.engine.scorers import SCORERS, Scorer
from ag.model.base import load_base


@dataclass(frozen=True, kw_only=True)
class ValueNorm(Scorer):
    """Keep the tokens whose value is large."""

    def score(self, seen: AttentionStats) -> Tensor:
        """Return ``||v||``, [B, Hkv, N]: higher is kept."""
        return torch.linalg.vector_norm(seen.v, dim=-1)


SCORERS["value_norm"] = ValueNorm
model, tokenizer = load_base(ModelConfig(name=sys.argv[1]))
inputs = tokenizer(sys.argv[2], return_tensors="pt")
for policy in ("value_norm", "knorm", "tova"):
    cache = ag.EvictionCache(model, policy, budget=0.5)
    model.generate(**inputs, past_key_values=cache, max_new_tokens=2, do_sample=False)
    print(policy, cache.kept_positions(layer=0)[0][0].tolist())

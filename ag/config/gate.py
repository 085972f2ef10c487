"""Hyper-parameters of the gates of one model."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from ag.config.keys import keys, refuse
from ag.config.sections import key

HEAD_STEP = 8  # a head size that is not given is rounded to a multiple of this
TOKEN_KINDS = ("linear", "affine", "mlp", "fast_kvzip", "retention")  # these gates look at one token by itself


@dataclass
class GateConfig:
    """Hyper-parameters of the gates of one model; the paper's symbols are given in parentheses."""

    num_heads: int = key(4, "heads of the gate's own attention (h')", ge=1)
    head_dim: int = key(
        0, "size of each of these heads (d'); 0: all heads together an eighth of the base model's width", ge=0
    )
    threshold: float = key(0.5, "a token is kept when sigmoid(logit + bias) > threshold (tau)")
    bias: float = key(2.0, "added to every logit: above 0 gates start open (gamma)")
    scope: Literal["causal", "prompt"] = key(
        "causal", "causal: a gate sees the past; prompt: it sees the whole prompt, and responses are never gated"
    )
    granularity: Literal["kv_head", "query_head"] = key(
        "kv_head",
        "one logit per KV head, or one per query head (a KV entry is evicted when all its query heads drop it)",
    )
    kind: str = key(
        "attention",
        "attention: an attention block; or a map of each token by itself: linear, affine (with biases), mlp (two "
        "layers), fast_kvzip (its share of attention beside learned keys), retention (its rate of decay; inference "
        "only); or a kind of a plugin",
        words="attention | linear | affine | mlp | fast_kvzip | retention | a kind of your own",
    )
    hidden: int = key(
        64, "kind=mlp and retention: units of the hidden layer; fast_kvzip: learned keys per KV head", ge=1
    )
    window: int = key(
        0, "kind=attention: newest tokens that the gate of a token attends to, its own included; 0 means all", ge=0
    )
    covers: Literal["prompt", "all"] = key(
        "prompt", "prompt: tokens of the first prompt may be evicted; all: later turns and generated tokens too"
    )
    shortcut: bool = key(False, "kind=attention: add a linear map of each token beside the attention block")
    estimator: Literal["ste", "soft"] = key(
        "ste",
        "ste: hard flags, with the slope of the sigmoid in the backward pass; soft: noisy sigmoids in training, hard "
        "flags afterwards",
    )
    prefill: Literal["sparse", "dense"] = key(
        "sparse", "sparse: evicted tokens are invisible within the prompt too; dense: only after it"
    )
    recent_tokens: int = key(1, "every query sees this many newest tokens, its own included", ge=1)
    sink_tokens: int = key(0, "every query sees this many first tokens", ge=0)
    layer_offset: int = key(0, "1: a layer's gate reads the input of the previous layer", ge=0, le=1)
    first_layer: int = key(0, "index of the first layer with a gate", ge=0)

    def sized(self, hidden_size: int) -> GateConfig:
        """Return a copy whose ``head_dim``, if it is 0, is set for a base of this hidden size.

        An attention block of d / 8 has about 3 % of the parameters of a layer of width d: 4 heads of 128 for a 7B
        model, 4 of 16 for SmolLM2-135M.
        """
        if self.head_dim:
            return self
        return replace(self, head_dim=max(HEAD_STEP, round(hidden_size / 8 / self.num_heads / HEAD_STEP) * HEAD_STEP))

    @property
    def boundary(self) -> float:
        """The logit, without bias, above which a token is kept."""
        return math.log(self.threshold / (1 - self.threshold)) - self.bias

    def __post_init__(self) -> None:
        """Check the ranges and the combinations."""
        for name, gate_key in keys(type(self)).items():
            if not gate_key.accepts(getattr(self, name)):
                raise ValueError(f"gate.{name}={getattr(self, name)!r}: expected {gate_key.expected()}.")
        if not 0 < self.threshold < 1:
            raise ValueError(f"gate.threshold={self.threshold}: expected a probability between 0 and 1.")
        if self.covers == "all" and self.scope == "prompt":
            reason = "a gate that sees the whole prompt at once cannot follow a growing text; use gate.scope=causal."
            refuse(self, "covers scope", reason, "gate.")
        if self.window and self.scope == "prompt":
            reason = "that gate sees the whole prompt; use gate.scope=causal, or gate.window=0."
            refuse(self, "window scope", reason, "gate.")
        if self.window and self.kind in TOKEN_KINDS:
            reason = "that gate looks at one token by itself; use gate.window=0, or gate.kind=attention."
            refuse(self, "window kind", reason, "gate.")
        if self.first_layer < self.layer_offset:
            refuse(
                self, "first_layer layer_offset", "the first layer has none before it; use gate.first_layer=1.", "gate."
            )

"""Attention-Gates: small learned modules that decide, by layer and head, which tokens stay in the KV cache.

Source: Zeng et al., "In-context KV-Cache Eviction for LLMs via Attention-Gate", section 3.3 (Eq. 3 to 5).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ag.config.gate import GateConfig
from ag.errors import UserError
from ag.gates.calibration import Calibration
from ag.gates.memory import GateMemory, has_gaps
from ag.kernels.gated_attention import gated_attention
from ag.model.geometry import fingerprint
from ag.plugins import part

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from ag.gates.adapters import Adapter


class AttentionGate(nn.Module):
    """The gate of one layer: hidden states in, one logit per token and head out, by an attention block.

    Args:
        hidden_size: width d of the model.
        heads: logits per token: KV heads, or query heads with ``granularity="query_head"``.
        kv_heads: KV heads Hkv of the layer.
        config: hyper-parameters.
    """

    #: Whether each later token multiplies a token's score by the sigmoid of its logit. Such gates rank tokens under a
    #: budget, and have no flags.
    decays: ClassVar[bool] = False

    def __init__(self, hidden_size: int, heads: int, kv_heads: int, config: GateConfig) -> None:
        super().__init__()
        self.config = config.sized(hidden_size)
        self.kv_heads = kv_heads
        self.build(hidden_size, heads)
        self.start()

    def start(self) -> None:
        """Initialise the parameters."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.xavier_uniform_(parameter)

    def build(self, hidden_size: int, heads: int) -> None:
        """Make the parameters, for arguments of the class."""
        inner = self.config.num_heads * self.config.head_dim
        self.q_proj = nn.Linear(hidden_size, inner, bias=False)
        self.k_proj = nn.Linear(hidden_size, inner, bias=False)
        self.v_proj = nn.Linear(hidden_size, inner, bias=False)
        self.o_proj = nn.Linear(inner, heads, bias=False)
        if self.config.shortcut:
            self.linear = nn.Linear(hidden_size, heads, bias=False)

    def forward(
        self, hidden: Tensor, valid: Tensor | None = None, left_padded: bool = False, first: Tensor | None = None
    ) -> Tensor:
        """Compute the logits, before bias and threshold.

        Args:
            hidden: hidden states ``[B, T, d]`` that enter the layer's attention.
            valid: ``[B, T]`` bool, True on the tokens that the gate may see; None means all.
            left_padded: whether invalid tokens may come before valid ones.
            first: ``[B, T]`` long, the column where the document of each token begins, which is the first that a causal
                gate sees; None means that a row is one document.

        Returns:
            ``[B, Hkv, T]`` float32. With ``granularity="query_head"`` it is the largest logit of a group, so that an
            entry is dropped only when every query head of the group drops it.
        """
        return self._by_kv_head(self.mix(self._typed(hidden), valid, left_padded, first))

    def mix(self, hidden: Tensor, valid: Tensor | None, left_padded: bool, first: Tensor | None) -> Tensor:
        """Return the logits ``[B, T, heads]`` of hidden states in the type of the parameters; see :meth:`forward`."""
        q, k, v = map(self._by_head, self._projected(hidden))
        return self._out(self._attend(q, k, v, valid, left_padded, first), hidden)

    def step(self, hidden: Tensor, ranks: Tensor, real: Tensor | None, memory: GateMemory) -> Tensor:
        """Compute the logits of the next tokens of a text, causally, and add the tokens to the gate's memory.

        Args:
            hidden: hidden states ``[B, T, d]`` of the new tokens.
            ranks: ``[B, T]`` long, the index of each among its sequence's own tokens.
            real: ``[B, T]`` bool, False on padding; None without padding.
            memory: keys and values of the tokens so far.

        Returns:
            ``[B, Hkv, T]`` float32, as :meth:`forward` gives for the whole text; undefined on padding.

        Raises:
            UserError: when the kind defines ``mix`` and not ``step``.
        """
        if type(self).mix is not AttentionGate.mix:
            raise UserError(
                f"{type(self).__name__} defines mix, not step: derive it from TokenGate if it reads each token alone, "
                "define step, or use gate.covers=prompt and whole prompts."
            )
        hidden = hidden.to(self.q_proj.weight.dtype)
        q, k, v = self._projected(hidden)
        before = bool(memory)
        memory.add(k, v, ranks, real)
        if before or (self.config.window and real is not None and has_gaps(real)):
            mixed = memory.attend(self._by_head(q), ranks)
        else:
            q, k, v = map(self._by_head, (q, k, v))
            mixed = self._attend(q, k, v, real, real is not None, None)
        return self._by_kv_head(self._out(mixed, hidden))

    def _typed(self, hidden: Tensor) -> Tensor:
        return hidden.to(next(self.parameters()).dtype)  # a 16-bit model may have float32 gates

    def _by_kv_head(self, logits: Tensor) -> Tensor:
        if logits.shape[2] > self.kv_heads:
            logits = logits.unflatten(2, (self.kv_heads, -1)).amax(-1)
        return logits.float().transpose(1, 2)

    def _projected(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.q_proj(hidden), self.k_proj(hidden), self.v_proj(hidden)

    def _by_head(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.config.num_heads, -1).transpose(1, 2)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, left_padded: bool, first: Tensor | None
    ) -> Tensor:
        """Return the attention ``[B, h', T, d']`` among the tokens of a whole text."""
        if self.config.scope == "prompt":
            mask = None if valid is None else valid[:, None, None, :]
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        if left_padded or first is not None or self.config.window:
            scaling, window = self.config.head_dim**-0.5, self.config.window or None
            return gated_attention(q, k, v, None, key_valid=valid, scaling=scaling, window=window, first=first)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)  # a query never sees the padding to its right

    def _out(self, mixed: Tensor, hidden: Tensor) -> Tensor:
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out + self.linear(hidden) if self.config.shortcut else out


class TokenGate(AttentionGate):
    """A gate that reads each token alone, without memory; base of kinds that define ``mix``."""

    def step(self, hidden: Tensor, ranks: Tensor, real: Tensor | None, memory: GateMemory) -> Tensor:
        """Compute the logits ``[B, Hkv, T]`` of the next tokens of a text."""
        return self.forward(hidden)


class LinearGate(TokenGate):
    """A linear map of each token."""

    bias: ClassVar[bool] = False

    def build(self, hidden_size: int, heads: int) -> None:
        """Make the parameters."""
        self.linear = nn.Linear(hidden_size, heads, bias=self.bias)

    def mix(self, hidden: Tensor, valid: Tensor | None, left_padded: bool, first: Tensor | None) -> Tensor:
        """Return the logits ``[B, T, heads]``."""
        result: Tensor = self.linear(hidden)
        return result


class AffineGate(LinearGate):
    """A linear map of each token, with a bias for each head (the smaller surrogate of KVzap)."""

    bias = True


class MLPGate(TokenGate):
    """Two layers on each token (the surrogate of KVzap)."""

    activation: ClassVar[Callable[..., Tensor]] = staticmethod(F.gelu)

    def build(self, hidden_size: int, heads: int) -> None:
        """Make the parameters."""
        self.inner = nn.Linear(hidden_size, self.config.hidden)
        self.outer = nn.Linear(self.config.hidden, heads)

    def mix(self, hidden: Tensor, valid: Tensor | None, left_padded: bool, first: Tensor | None) -> Tensor:
        """Return the logits ``[B, T, heads]``."""
        result: Tensor = self.outer(self.activation(self.inner(hidden)))
        return result


class RetentionGate(MLPGate):
    """Two layers on each token, which give the factor of its score for each later token.

    Source: Bui et al. 2025, "Cache What Lasts: Token Retention for Memory-Bounded KV Cache in LLMs" (TRIM-KV), arXiv
    2512.03324.
    """

    decays = True
    activation = staticmethod(F.silu)


class FastKVzipGate(TokenGate):
    """The share of attention of a token's own key beside learned keys, the mean over a group's queries.

    Source: Kim et al., "Fast KVzip: Efficient and Accurate LLM Inference with Gated KV Eviction", arXiv 2601.17668.
    With ``granularity="query_head"`` every query head has a query of ``gate.head_dim`` numbers; ``gate.hidden`` is the
    number of learned keys of a KV head.
    """

    def build(self, hidden_size: int, heads: int) -> None:
        """Make the parameters."""
        size = self.config.head_dim
        self.q_proj = nn.Linear(hidden_size, heads * size)
        self.k_proj = nn.Linear(hidden_size, self.kv_heads * size, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(size, eps=1e-6), nn.RMSNorm(size, eps=1e-6)
        self.k_base = nn.Parameter(torch.zeros(self.kv_heads, 1, self.config.hidden, size))
        self.b = nn.Parameter(torch.zeros(self.kv_heads, 1, heads // self.kv_heads))

    def start(self) -> None:
        """Draw the projections; norms begin at 1, learned keys and biases at 0."""
        for projection in (self.q_proj, self.k_proj):
            nn.init.xavier_uniform_(projection.weight)
        nn.init.zeros_(self.q_proj.bias)

    def mix(self, hidden: Tensor, valid: Tensor | None, left_padded: bool, first: Tensor | None) -> Tensor:
        """Return the logits ``[B, T, Hkv]`` of the share."""
        shape, scale = (*hidden.shape[:2], self.kv_heads, -1, self.config.head_dim), self.config.head_dim**-0.5
        queries = self.q_norm(self.q_proj(hidden).view(shape))  # [B, T, Hkv, G, d']
        keys = self.k_norm(self.k_proj(hidden).view(shape))
        own = (queries * keys).sum(-1) * scale + self.b[:, 0]
        rows = queries.transpose(1, 2).flatten(2, 3)  # [B, Hkv, T G, d']: all tokens share the learned keys
        others = (rows @ self.k_base[:, 0].mT * scale).logsumexp(-1)
        others = others.unflatten(2, (-1, own.shape[-1])).transpose(1, 2)
        kept, gone = (F.logsigmoid(x).logsumexp(-1) for x in (own - others, others - own))  # finite where one is 1
        return kept - gone


#: The classes of gates by the name that ``GateConfig.kind`` gives them.
KINDS: dict[str, type[AttentionGate]] = {
    "attention": AttentionGate,
    "linear": LinearGate,
    "affine": AffineGate,
    "mlp": MLPGate,
    "fast_kvzip": FastKVzipGate,
    "retention": RetentionGate,
}


def gate_kind(name: str) -> type[AttentionGate]:
    """Return the class of a kind of gates, or raise a ``UserError`` for an unknown one."""
    found: type[AttentionGate] = part("ag.gate_kinds", "gate.kind", name, AttentionGate)
    return found


class AttentionGates(nn.Module):
    """The gates of a whole model.

    Args:
        model_config: configuration of the base model (a Hugging Face decoder), or its :func:`fingerprint`.
        config: hyper-parameters of the gates.

    Raises:
        UserError: when ``first_layer`` leaves no layer with a gate, or no gate is of this kind.
    """

    def __init__(self, model_config: PretrainedConfig | Mapping[str, Any], config: GateConfig) -> None:
        super().__init__()
        geometry = dict(model_config) if isinstance(model_config, Mapping) else fingerprint(model_config)
        self.config = config = config.sized(geometry["hidden_size"])
        self.fingerprint: dict[str, Any] = geometry
        #: The LoRA adapter of the export that the gates were loaded from, or None.
        self.adapter: Adapter | None = None
        #: The boundary of each share, of the last validation or the export; None before a validation.
        self.calibration: Calibration | None = None
        if isinstance(geometry["num_kv_heads"], list):
            *some, last = geometry["num_kv_heads"]
            raise UserError(
                f"AttentionGates: layers have {', '.join(map(str, some))} and {last} KV heads: expected the same "
                "number in all layers with a gate; use another model, or a policy without gates."
            )
        kind = gate_kind(config.kind)
        #: Whether scores fall with the age of a token; see :class:`AttentionGate`.
        self.decays = kind.decays
        heads = geometry["num_kv_heads" if config.granularity == "kv_head" else "num_heads"]
        self.layers = nn.ModuleDict(
            {
                str(index): kind(geometry["hidden_size"], heads, geometry["num_kv_heads"], config)
                for index in range(config.first_layer, geometry["num_layers"])
                if index not in geometry["windowed_layers"]
            }
        )
        if not self.layers:
            raise UserError(
                f"gate.first_layer={config.first_layer}: the model has {geometry['num_layers']} layers, "
                "so that no layer gets a gate; choose a smaller one."
            )

    @property
    def layer_indices(self) -> list[int]:
        """Indices of the layers that have a gate, ascending."""
        return [int(index) for index in self.layers]

    def probability(self, logits: Tensor) -> Tensor:
        """Return ``sigmoid(logits + bias)``, the soft gate."""
        return torch.sigmoid(logits + self.config.bias)

    def stored(self, logits: Tensor) -> Tensor:
        """Return what a cache stores and a budget ranks by: the logit of the soft gate, or its log where scores decay.

        Sigmoids would not do: from about 17 on they are 1 in float32.
        """
        biased = logits + self.config.bias
        return F.logsigmoid(biased) if self.decays else biased

    def check_flags(self) -> None:
        """Raise ``UserError`` when these gates have no flags."""
        if self.decays:
            raise UserError(
                f"gate.kind={self.config.kind}: scores fall with the age of a token, without flags: expected a budget, "
                "such as ag.policy('gates:PATH', budget=512); to train gates use another kind."
            )

    def flags(self, logits: Tensor) -> Tensor:
        """Return hard flags, True where a token is kept (Eq. 4, strict inequality), or raise a ``UserError``."""
        self.check_flags()
        return logits > self.config.boundary  # probability > threshold, in one operation

    def keep(self, logits: Tensor) -> Tensor:
        """Return differentiable keep flags, float32 and of the shape of ``logits``, or raise a ``UserError``.

        The straight-through estimator (Yin et al. 2019) has the value of the flags and the slope of the sigmoid. The
        soft estimator adds logistic noise in training, which makes the sigmoid a relaxed Bernoulli sample; outside
        training it gives the flags.
        """
        self.check_flags()
        if self.config.estimator == "soft" and self.training:
            uniform = torch.rand_like(logits).clamp_(1e-6, 1 - 1e-6)
            return self.probability(logits + torch.logit(uniform))
        probability = self.probability(logits)
        return (probability > self.config.threshold).float() + (probability - probability.detach())

    def at(self, *, threshold: float | None = None, share: float | None = None) -> AttentionGates:
        """Return gates with the same weights, shared with these, and other flags.

        Args:
            threshold: probability above which a token is kept, in place of the configuration's.
            share: share of the tokens that the flags keep, over all layers and KV heads of the validation data, by the
                calibration. Another text may keep more or less; sinks and recents stay too.

        Raises:
            UserError: unless exactly one is given, for a value out of range, or a share without a calibration.
        """
        if (threshold is None) == (share is None):
            raise UserError("Gates have one boundary: give threshold= or share=, and not both.")
        other = copy.copy(self)
        if threshold is not None:
            if not 0 < threshold < 1:
                raise UserError(f"threshold={threshold}: expected a probability between 0 and 1.")
            other.config = replace(self.config, threshold=threshold)
        elif self.calibration is None:
            raise UserError(
                f"share={share}: these gates have no table of shares; measure it and export them again by ag.fit "
                "recipe=RECIPE init=EXPORT optim.gate_lr=0 warmup.regress_steps=0 trainer.max_steps=1, or give "
                "threshold= or a budget."
            )
        elif share is not None:
            moved = self.calibration.boundary(share) - self.config.boundary
            other.config = replace(self.config, bias=self.config.bias - moved)
        return other

    def save_pretrained(self, path: str | PathLike[str]) -> None:
        """Write the gates to a folder; see :func:`ag.gates.export.save`."""
        from ag.gates import export  # input and output are no part of a gate

        export.save(path, self)

    @classmethod
    def from_pretrained(cls, path: str | PathLike[str], model_config: PretrainedConfig | None = None) -> AttentionGates:
        """Read gates from a folder or the hub (``ORG/NAME[:REVISION]``); see :func:`ag.gates.export.load`."""
        from ag.gates import export

        found: AttentionGates = export.load(path, cls, model_config)
        return found

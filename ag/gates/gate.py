"""Attention-Gates: small learned modules that decide, by layer and head, which tokens the KV cache keeps.

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
    """The gate of one layer: an attention block that maps hidden states to one logit per token and head.

    Args:
        hidden_size: width d of the model.
        heads: logits per token: KV heads, or query heads with ``granularity="query_head"``.
        kv_heads: KV heads Hkv of the layer.
        config: hyper-parameters.
    """

    #: Whether each later token multiplies a token's score by the sigmoid of its logit. Gates with decay rank tokens
    #: under a budget, and have no flags.
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
        """Make the parameters. ``heads`` is the number of logits per token."""
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
            valid: ``[B, T]`` bool, True on tokens that the gate may read. None: all tokens.
            left_padded: whether invalid tokens may come before valid ones.
            first: ``[B, T]`` long, the column where the document of each token begins; a causal gate reads no earlier
                column. None: a row is one document.

        Returns:
            ``[B, Hkv, T]`` float32. With ``granularity="query_head"`` it is the largest logit of a group: an entry is
            evicted only if every query head of the group drops it.
        """
        return self._by_kv_head(self.mix(self._typed(hidden), valid, left_padded, first))

    def mix(self, hidden: Tensor, valid: Tensor | None, left_padded: bool, first: Tensor | None) -> Tensor:
        """Return the logits ``[B, T, heads]``; ``hidden`` has the type of the parameters. See :meth:`forward`."""
        q, k, v = map(self._by_head, self._projected(hidden))
        return self._out(self._attend(q, k, v, valid, left_padded, first), hidden)

    def step(self, hidden: Tensor, token_indices: Tensor, valid: Tensor | None, memory: GateMemory) -> Tensor:
        """Compute the logits of the next tokens of a text, causally, and add the tokens to the gate's memory.

        Args:
            hidden: hidden states ``[B, T, d]`` of the new tokens.
            token_indices: ``[B, T]`` long, index of each token among its sequence's own tokens.
            valid: ``[B, T]`` bool, False on padding. None: no padding.
            memory: keys and values of the earlier tokens.

        Returns:
            ``[B, Hkv, T]`` float32, equal to :meth:`forward` on the whole text; undefined on padding.

        Raises:
            UserError: the kind defines ``mix`` and not ``step``.
        """
        if type(self).mix is not AttentionGate.mix:
            raise UserError(
                f"{type(self).__name__} defines mix, not step: derive it from TokenGate if it reads each token alone, "
                "define step, or use gate.covers=prompt and whole prompts."
            )
        hidden = hidden.to(self.q_proj.weight.dtype)
        q, k, v = self._projected(hidden)
        has_memory = bool(memory)
        memory.add(k, v, token_indices, valid)
        if has_memory or (self.config.window and valid is not None and has_gaps(valid)):
            mixed = memory.attend(self._by_head(q), token_indices)
        else:
            q, k, v = map(self._by_head, (q, k, v))
            mixed = self._attend(q, k, v, valid, valid is not None, None)
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
        """Return the attention outputs ``[B, h', T, d']`` of a whole text."""
        if self.config.scope == "prompt":
            mask = None if valid is None else valid[:, None, None, :]
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        if left_padded or first is not None or self.config.window:
            scaling, window = self.config.head_dim**-0.5, self.config.window or None
            return gated_attention(q, k, v, None, key_valid=valid, scaling=scaling, window=window, first=first)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)  # causal: no query sees padding on the right

    def _out(self, mixed: Tensor, hidden: Tensor) -> Tensor:
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out + self.linear(hidden) if self.config.shortcut else out


class TokenGate(AttentionGate):
    """A gate that reads each token alone, without memory: the base of kinds that define ``mix``."""

    def step(self, hidden: Tensor, token_indices: Tensor, valid: Tensor | None, memory: GateMemory) -> Tensor:
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
    """A linear map of each token, with a bias for each head (KVzap's smaller surrogate)."""

    bias = True


class MLPGate(TokenGate):
    """Two layers on each token (KVzap's surrogate)."""

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
    """Two layers on each token. The sigmoid of the logit is the factor of the token's score for each later token.

    Source: Bui et al. 2025, "Cache What Lasts: Token Retention for Memory-Bounded KV Cache in LLMs" (TRIM-KV), arXiv
    2512.03324.
    """

    decays = True
    activation = staticmethod(F.silu)


class FastKVzipGate(TokenGate):
    """A token's query attends to its own key and to learned keys. The gate is the own key's share, mean over a group.

    Source: Kim et al., "Fast KVzip: Efficient and Accurate LLM Inference with Gated KV Eviction", arXiv 2601.17668.
    With ``granularity="query_head"`` every query head has a query of size ``gate.head_dim``. Each KV head has
    ``gate.hidden`` learned keys.
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
        """Initialise the projections at random; norms begin at 1, learned keys and biases at 0."""
        for projection in (self.q_proj, self.k_proj):
            nn.init.xavier_uniform_(projection.weight)
        nn.init.zeros_(self.q_proj.bias)

    def mix(self, hidden: Tensor, valid: Tensor | None, left_padded: bool, first: Tensor | None) -> Tensor:
        """Return the logits ``[B, T, Hkv]`` of the share."""
        shape, scale = (*hidden.shape[:2], self.kv_heads, -1, self.config.head_dim), self.config.head_dim**-0.5
        queries = self.q_norm(self.q_proj(hidden).view(shape))  # [B, T, Hkv, G, d']
        keys = self.k_norm(self.k_proj(hidden).view(shape))
        own_logit = (queries * keys).sum(-1) * scale + self.b[:, 0]
        rows = queries.transpose(1, 2).flatten(2, 3)  # [B, Hkv, T G, d']: all tokens share the learned keys
        base_logit = (rows @ self.k_base[:, 0].mT * scale).logsumexp(-1)
        base_logit = base_logit.unflatten(2, (-1, own_logit.shape[-1])).transpose(1, 2)
        logits = own_logit - base_logit
        log_kept, log_evicted = (F.logsigmoid(x).logsumexp(-1) for x in (logits, -logits))  # finite if a share is 1
        return log_kept - log_evicted


#: The classes of gates by their name in ``GateConfig.kind``.
KINDS: dict[str, type[AttentionGate]] = {
    "attention": AttentionGate,
    "linear": LinearGate,
    "affine": AffineGate,
    "mlp": MLPGate,
    "fast_kvzip": FastKVzipGate,
    "retention": RetentionGate,
}


def gate_kind(name: str) -> type[AttentionGate]:
    """Return the class of a kind of gates, or raise a ``UserError`` if the name is unknown."""
    gate_class: type[AttentionGate] = part("ag.gate_kinds", "gate.kind", name, AttentionGate)
    return gate_class


class AttentionGates(nn.Module):
    """The gates of a whole model.

    Args:
        model_config: configuration of the base model (a Hugging Face decoder), or its :func:`fingerprint`.
        config: hyper-parameters of the gates.

    Raises:
        UserError: no layer from ``first_layer`` on can have a gate, or the kind is unknown.
    """

    def __init__(self, model_config: PretrainedConfig | Mapping[str, Any], config: GateConfig) -> None:
        super().__init__()
        geometry = dict(model_config) if isinstance(model_config, Mapping) else fingerprint(model_config)
        self.config = config = config.sized(geometry["hidden_size"])
        self.fingerprint: dict[str, Any] = geometry
        #: The LoRA adapter of the gates' export. None: the export has no adapter, or the gates have no export.
        self.adapter: Adapter | None = None
        #: The boundary of each share, from the last validation or the export. None: not validated yet.
        self.calibration: Calibration | None = None
        if isinstance(geometry["num_kv_heads"], list):
            *head_counts, last_count = geometry["num_kv_heads"]
            raise UserError(
                f"AttentionGates: layers have {', '.join(map(str, head_counts))} and {last_count} KV heads: expected "
                "the same number in all layers with a gate; use another model, or a policy without gates."
            )
        gate_class = gate_kind(config.kind)
        #: Whether scores fall with the age of a token; see :class:`AttentionGate`.
        self.decays = gate_class.decays
        heads = geometry["num_kv_heads" if config.granularity == "kv_head" else "num_heads"]
        self.layers = nn.ModuleDict(
            {
                str(index): gate_class(geometry["hidden_size"], heads, geometry["num_kv_heads"], config)
                for index in range(config.first_layer, geometry["num_layers"])
                if index not in geometry["windowed_layers"]
            }
        )
        if not self.layers:
            able = [index for index in range(geometry["num_layers"]) if index not in geometry["windowed_layers"]]
            raise UserError(
                f"gate.first_layer={config.first_layer}: no layer from there on can have a gate: expected at most "
                f"{able[-1]}, the last layer that can."
                if able
                else "AttentionGates: no layer of this model keeps keys and values that a gate could evict: use "
                "another model, or a policy without gates."
            )

    @property
    def layer_indices(self) -> list[int]:
        """Indices of the layers that have a gate, ascending."""
        return [int(index) for index in self.layers]

    def probability(self, logits: Tensor) -> Tensor:
        """Return ``sigmoid(logits + bias)``, the soft gate."""
        return torch.sigmoid(logits + self.config.bias)

    def stored(self, logits: Tensor) -> Tensor:
        """Return the scores that a cache stores: logits with bias, or their log sigmoid if scores decay.

        Sigmoids cannot rank: in float32 they are 1 from a logit of about 17.
        """
        biased = logits + self.config.bias
        return F.logsigmoid(biased) if self.decays else biased

    def check_flags(self) -> None:
        """Raise ``UserError`` if these gates have no flags."""
        if self.decays:
            raise UserError(
                f"gate.kind={self.config.kind}: scores fall with the age of a token, without flags: expected a budget, "
                "such as ag.policy('gates:PATH', budget=512); to train gates use another kind."
            )

    def flags(self, logits: Tensor) -> Tensor:
        """Return hard flags, True for kept tokens (Eq. 4, strict inequality), or raise a ``UserError``."""
        self.check_flags()
        return logits > self.config.boundary  # probability > threshold, in one operation

    def keep(self, logits: Tensor) -> Tensor:
        """Return differentiable keep flags, float32, shaped like ``logits``, or raise a ``UserError``.

        The soft estimator adds logistic noise in training; the sigmoid is then a relaxed Bernoulli sample. Outside
        training, and by the other estimator, these are the flags with a straight-through gradient.
        """
        self.check_flags()
        if self.config.estimator == "soft" and self.training:
            uniform = torch.rand_like(logits).clamp_(1e-6, 1 - 1e-6)
            return self.probability(logits + torch.logit(uniform))
        return self.straight_through(logits)

    def straight_through(self, logits: Tensor) -> Tensor:
        """Return the flags, float32, with the slope of the sigmoid (Yin et al. 2019), or raise a ``UserError``."""
        probability = self.probability(logits)
        return self.flags(logits).float() + (probability - probability.detach())

    def at(self, *, threshold: float | None = None, share: float | None = None) -> AttentionGates:
        """Return gates with another boundary; the weights are shared with these gates.

        Args:
            threshold: probability above which a token is kept, instead of the configuration's.
            share: share of the tokens that the flags keep, over all layers and KV heads of the validation data, from
                the calibration. Other texts may keep more or less. Sinks and recents are kept too.

        Raises:
            UserError: both or none are given, a value is out of range, or there is no calibration for a share.
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
                "recipe=RECIPE init=EXPORT train=gates optim.gate_lr=0 optim.warmup_steps=0 loss.anneal_steps=0 "
                "warmup.regress_steps=0 warmup.rounds=0 trainer.max_steps=1 (with an adapter also "
                "model.name=RUN/merged, which export.merge=true writes), or give threshold= or a budget."
            )
        elif share is not None:
            moved = self.calibration.boundary(share) - self.config.boundary
            other.config = replace(self.config, bias=self.config.bias - moved)
        return other

    def save_pretrained(self, path: str | PathLike[str]) -> None:
        """Write the gates to a folder; see :func:`ag.gates.export.save`."""
        from ag.gates import export  # a gate needs no input or output of files

        export.save(path, self)

    @classmethod
    def from_pretrained(cls, path: str | PathLike[str], model_config: PretrainedConfig | None = None) -> AttentionGates:
        """Read gates from a folder or the hub (``ORG/NAME[:REVISION]``); see :func:`ag.gates.export.load`."""
        from ag.gates import export

        gates: AttentionGates = export.load(path, cls, model_config)
        return gates

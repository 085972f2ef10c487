"""Interceptors compute a model's attention: gates do in training, and the forward pass of a cache does in inference.

:mod:`ag.model.hooks` describes how a model finds its :class:`Interceptor`.
"""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ag.kernels.gated_attention import gated_attention
from ag.kernels.softmax import PLAIN, Softmax
from ag.model.hybrid import ColumnPass, States
from ag.model.structure import USE_ANOTHER, UnsupportedModelError, own_config

#: Implementations that need a mask to be causal; sdpa needs no mask to be causal.
NEEDS_MASK = (None, "eager", "flex_attention")


@dataclass
class AttentionCall:
    """One call of a layer's attention: q ``[B, H, T, D]``, k and v ``[B, Hkv, T, D]`` of the new tokens, post-RoPE.

    ``memo`` keeps measurements, so that each is made once for the parts of a policy and for caches that share a pass.
    """

    module: nn.Module
    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    scaling: float
    window: int | None
    softmax: Softmax = PLAIN
    chunk: int | None = None  # tokens of the chunks of a text within which the layer attends; None means no chunks
    shared: bool = False  # whether the queries are of another layer than keys and values, which ``layer`` counts
    mask: Tensor | None = None  # [B or 1, 1, T, T], of a prompt whose images see later tokens; None means causal
    memo: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def dense(self, valid: Tensor | None, left_padded: bool) -> Tensor:
        """Attend causally to every new token, ``[B, H, T, D]``, by the model's own implementation where that can.

        Args:
            valid: ``[B, T]`` bool, False on padding; None means no padding.
            left_padded: whether some row starts with padding (padding on the right is never seen).
        """
        if self.mask is not None:
            if not self.softmax.plain:
                raise UnsupportedModelError(
                    f"{type(self.module).__name__} caps its logits or has sink logits, and tokens of this prompt see "
                    f"later ones: expected plain logits under such a mask; {USE_ANOTHER}"
                )
            by_mask: Callable[..., Any] = sdpa_attention_forward
            module = OwnConfig(self.module)
            output: Tensor = by_mask(module, self.q, self.k, self.v, self.mask, dropout=0.0, scaling=self.scaling)[0]
            return output.transpose(1, 2)
        windowed = self.window is not None and self.q.shape[2] > self.window
        if left_padded or windowed or not self.softmax.plain:
            options: dict[str, Any] = {"scaling": self.scaling, "window": self.window, "softmax": self.softmax}
            return gated_attention(self.q, self.k, self.v, None, valid, **options)
        own = causal_attention(self.module)
        out: Tensor = own(OwnConfig(self.module), self.q, self.k, self.v, None, dropout=0.0, scaling=self.scaling)[0]
        return out.transpose(1, 2)


class Interceptor(ABC):
    """Gates or a cache that compute the attention of each layer of a forward pass."""

    #: How often each layer attended in the current or last pass; None before the first.
    attended: list[int] | None = None
    #: Modules that run in a forward pass beside the model's.
    modules: Sequence[nn.Module] = ()
    #: States of a hybrid model's layers that do not attend; None means that the model has no states.
    states: States | None = None
    #: The columns of the call that the current pass reads, ``[B, w]``, left-aligned, then -1; None means all columns.
    columns: Tensor | None = None
    #: How the model reads them, where layers read columns in turn; None means left-aligned.
    arranged: ColumnPass | None = None
    #: Which columns of the call are tokens, ``[B, T]`` bool, if no attention mask says it; None means all.
    tokens: Tensor | None = None
    #: Tokens of the text of each sequence, ``[B]`` on the host, or of each token ``[B, T]``, for a RoPE whose
    #: frequencies depend on it; None means that each row of the call is a text, whole.
    text_lengths: Tensor | None = None
    #: The attention mask that came to the model, ``[B, seen + T]``; None means that all columns are tokens.
    token_mask: Any = None
    #: The model's own attention masks by type of layer, set only where tokens see later ones (the tokens of an image);
    #: empty where all attend causally.
    masks: Mapping[str, Tensor] = MappingProxyType({})

    @property
    def seen_tokens(self) -> int:
        """Columns that went by in earlier passes."""
        return 0

    def begin(self, decoder: nn.Module, attention_mask: Tensor | None, tokens: Tensor) -> None:
        """Start a forward pass.

        Args:
            decoder: the model's stack of layers.
            attention_mask: ``[B, seen + T]``, nonzero on real tokens; None means that all are.
            tokens: ids ``[B, T]`` or embeddings ``[B, T, d]`` of the new tokens.
        """
        return None

    def passes(self, position_ids: Tensor | None) -> Iterator[tuple[Tensor | None, Tensor | None]]:
        """Yield the columns and positions of each pass that the new tokens are read in; a pass ends as the next begins.

        Args:
            position_ids: ``[B or 1, T]`` of all new tokens, as the caller gave them; None means that none were given.

        Yields:
            The columns ``[B, w]`` of the tokens, -1 where there is none; None means one pass of all new tokens as they
            came. Their positions ``[B, w]``; None means that the model counts them.
        """
        yield None, position_ids

    def expect(self, valid: Tensor, tokens: Tensor | None = None) -> None:
        """Announce the whole text before generation: the part that was read, and the part that comes in passes.

        Args:
            valid: ``[B, T]`` bool, False on padding.
            tokens: ids ``[B, T]``, or the ids of the coming part alone; None means that they are not known.
        """
        return None

    def end_generation(self, tokens: Tensor | None, broken_off: bool) -> None:
        """Record the text ``[B, T]`` after generation, whose last token may not have been read; None if unknown.

        ``broken_off`` says that an error ended the generation.
        """
        return None

    def enter_layer(self, layer: int, hidden: Tensor) -> None:
        """Take the hidden states ``[B, T, d]`` that enter the attention of a layer."""
        return None

    @abstractmethod
    def attend(self, call: AttentionCall) -> Tensor:
        """Compute the attention output ``[B, H, T, D]``."""


def _cache_argument(model: Any) -> str:
    """Return the name of the cache in the forward pass of a class of models: ``cache`` since transformers 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


cache_argument: Callable[[Any], str] = functools.cache(_cache_argument)


def causal_attention(module: nn.Module) -> Callable[..., Any]:
    """Return the model's own attention function, or sdpa's, that is causal without a mask.

    Raises:
        UnsupportedModelError: for an implementation that is not known to be causal without a mask.
    """
    name = own_config(module)._attn_implementation
    own = sdpa_attention_forward if name in NEEDS_MASK else ALL_ATTENTION_FUNCTIONS.get(name)
    if own not in (sdpa_attention_forward, flash_attention_forward):
        raise UnsupportedModelError(
            f"attn_implementation={name}: expected a function that is known to be causal without a mask; use sdpa, "
            "eager, flex_attention or flash_attention_2."
        )
    return own


class OwnConfig:
    """An attention module with the model's own configuration, where flash attention finds its own name."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self.config = module, own_config(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

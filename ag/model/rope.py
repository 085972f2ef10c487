"""The rotary embedding of a model's layers, and rotations of queries and keys by it.

Two kinds of RoPE take their frequencies from the longest position of a pass: longrope (Phi-3) has one set for texts up
to a length and one for longer ones, and dynamic NTK has another set for each longer text. In a batch, or for a part of
a prompt, that is not the length of the text at hand, so :class:`RopeByText` rotates each sequence by the set of its own
text.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ag.model.geometry import attention_layers
from ag.model.structure import USE_ANOTHER, UnsupportedModelError

#: Lengths of texts on the host, ``[b]`` of the sequences of the pass at hand, or ``[b, T]`` of each token's; None means
#: that the longest position of the pass decides, as in transformers.
LENGTHS: ContextVar[Tensor | None] = ContextVar("LENGTHS", default=None)
SETS = 64  # most sets of frequencies that are kept
COMPLEX = "polar"  # of torch: Llama 4 and DeepSeek V2 call it
FURTHER = 1000  # times the length of a text: rotations are measured there too, as their size may differ (PhiMoE)


def rope_of(decoder: Any, layer: int) -> tuple[Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], float]:
    """Return the function of a layer from ``x`` and positions ``[B, T]`` to cosines and sines, and their scaling.

    Some models have a RoPE for each type of layers (Gemma 3).
    """
    rotary = decoder.rotary_emb
    if not isinstance(rotary.rope_type, dict):
        return rotary, rotary.attention_scaling
    kind = decoder.config.layer_types[attention_layers(decoder.config)[layer]]
    return partial(rotary, layer_type=kind), getattr(rotary, f"{kind}_attention_scaling")


def rotate(decoder: Any, x: Tensor, positions: Tensor, span: int = 1, layer: int = 0) -> Tensor:
    """Rotate queries or keys by positions, as the model's RoPE does; negative positions undo a rotation.

    Args:
        decoder: the model's stack of layers.
        x: ``[B, H, n, D]``, already scaled as the model's RoPE scales (yarn).
        positions: ``[B or 1, H or 1, n or 1]``, whole or not.
        span: rotate by the mean over this number of positions, beginning with each.
        layer: index of the layer, where layers have several RoPEs.
    """
    apply = sys.modules[type(decoder).__module__].apply_rotary_pos_emb
    positions = positions.expand(len(x), -1, -1)
    steps = (positions[..., None] + torch.arange(span, device=positions.device)).flatten(1)
    rope, scaling = rope_of(decoder, layer)
    cos, sin = (part / scaling for part in rope(x.float(), steps))
    cos, sin = (  # a rotation is linear in both
        part.unflatten(1, (*positions.shape[1:], span)).mean(3).expand(-1, x.shape[1], -1, -1).flatten(0, 1)
        for part in (cos, sin)
    )
    flat = x.float().flatten(0, 1)
    turned: Tensor = apply(flat[:, None], flat[:, None][:, :0], cos, sin)[0]
    return turned.view_as(x).to(x.dtype)


def changing_length(decoder: Any) -> int | None:
    """Return the length of a text beyond which a decoder's RoPE takes other frequencies; None means that it does not.

    Raises:
        UnsupportedModelError: for a RoPE of changing frequencies beside others, or one that cannot be told the length
            of a text, or that rotates by complex numbers.
    """
    rotary: Any = getattr(decoder, "rotary_emb", None)
    rope_types = getattr(rotary, "rope_type", None)
    named = [*rope_types.values()] if isinstance(rope_types, dict) else [rope_types]
    dynamic = [kind for kind in named if isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind)]
    if not dynamic:
        return None
    if isinstance(rope_types, dict) or not hasattr(type(rotary).forward, "__wrapped__"):
        raise UnsupportedModelError(
            f"{type(decoder).__name__} rotates keys by {dynamic[0]} RoPE, whose frequencies depend on the longest text "
            f"of a batch: expected one for all layers, by transformers' dynamic_rope_update; {USE_ANOTHER}"
        )
    if COMPLEX in inspect.unwrap(type(rotary).forward).__code__.co_names:
        raise UnsupportedModelError(
            f"{type(decoder).__name__} rotates keys by {dynamic[0]} RoPE in complex numbers: expected cosines and "
            f"sines; {USE_ANOTHER}"
        )
    if dynamic[0] == "longrope":
        return int(decoder.config.rope_parameters["original_max_position_embeddings"])
    return int(rotary.original_max_seq_len)


class RopeByText:
    """Rotates each sequence of a pass by the frequencies of its own text, until :meth:`remove`.

    Args:
        decoder: the model's stack of layers.
        changes: the length of a text beyond which it has other frequencies.
    """

    def __init__(self, decoder: Any, changes: int) -> None:
        self.rotary, self.changes = decoder.rotary_emb, changes
        self._earlier_forward = vars(self.rotary).get("forward")  # another library's; None means that there is none
        self._own, self._like = self.rotary.forward, copy.deepcopy(self.rotary)
        self._sets: dict[Any, tuple[nn.Module, Tensor | None]] = {}
        self.rotary.forward = self

    def remove(self) -> None:
        """Give the model its own rotations back."""
        del self.rotary.forward
        if self._earlier_forward is not None:
            self.rotary.forward = self._earlier_forward

    def set_of(self, lengths: Tensor) -> Tensor:
        """Return the length that stands for the set of frequencies of texts of these lengths.

        It is ``changes`` for texts up to that length. For longer ones it is ``changes + 1`` (longrope, which has one
        set for them all) or their own length (dynamic NTK).
        """
        further = lengths.clamp_max(self.changes + 1) if self.rotary.rope_type == "longrope" else lengths
        return further.clamp_min(self.changes)

    def outgrows(self, lengths: Tensor, tokens: Tensor) -> Tensor:
        """Return which texts ``[B]``, rotated as texts of ``lengths``, have too many ``tokens`` for that."""
        return (lengths <= self.changes) & (tokens > self.changes)

    def steady(self, lengths: Tensor) -> bool:
        """Return whether texts of these lengths are all rotated by one set of tensors, at each step."""
        scaled = any(size is not None for _, size in self._sets.values())
        return self.rotary.rope_type == "longrope" and not scaled and len(self.set_of(lengths).unique()) == 1

    @contextmanager
    def reading(self, lengths: Tensor) -> Iterator[None]:
        """Rotate by the lengths of the texts of a pass, ``[b]`` or of the text of each token ``[b, T]``."""
        token = LENGTHS.set(lengths)
        try:
            yield
        finally:
            LENGTHS.reset(token)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return cosines and sines ``[B or 1, T, D]`` at these positions ``[B or 1, T]``."""
        lengths = LENGTHS.get()
        if lengths is None:
            return self._own(x, position_ids, *args, **kwargs)
        sets = self.set_of(lengths)
        first, *other_sets = sets.unique().tolist()
        cos, sin = self._rotated(first, x, position_ids)
        for other in other_sets:
            in_set = (sets == other).to(x.device)
            in_set = in_set[..., None] if in_set.ndim == 2 else in_set[:, None, None]
            cos, sin = (
                torch.where(in_set, new, old)
                for new, old in zip(self._rotated(other, x, position_ids), (cos, sin), strict=True)
            )
        return cos, sin

    def _rotated(self, length: int, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines by the frequencies of a text of this length."""
        rotary, size = self._set(length, x)
        cos, sin = inspect.unwrap(type(self.rotary).forward)(rotary, x if size is None else x.float(), positions)
        if size is not None:
            by = size / (cos.square() + sin.square()).sqrt()
            cos, sin = (cos * by).to(x.dtype), (sin * by).to(x.dtype)
        return cos, sin

    def _set(self, length: int, x: Tensor) -> tuple[nn.Module, Tensor | None]:
        """Return what rotates texts of this length, and their size ``[1, 1, D]`` of a sine and a cosine together.

        None means that cosines and sines have one size at all positions. In PhiMoE it depends on the longest position
        of a pass: it is measured once, and later rotations are scaled to it.
        """
        kind, forward = (length, x.device), type(self.rotary).forward
        if kind not in self._sets:
            if len(self._sets) >= SETS:
                self._sets.pop(next(iter(self._sets)))
            rotary = copy.deepcopy(self._like).to(x.device)
            rotary.inv_freq = rotary.original_inv_freq.clone().to(x.device)
            rotary.max_seq_len_cached = rotary.original_max_seq_len
            at = torch.tensor([[length - 1], [0], [FURTHER * length]], device=x.device).split(1)
            forward(rotary, x, at[0])  # takes the frequencies
            size, *sizes = (sum(part.square() for part in inspect.unwrap(forward)(rotary, x.float(), n)) for n in at)
            changes = any(bool(((other - size).abs() > size / FURTHER).any()) for other in sizes)
            self._sets[kind] = rotary, size.sqrt() if changes else None
        return self._sets[kind]

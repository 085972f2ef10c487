"""Hybrid models: layers that keep a state of fixed size beside layers that attend.

Linear attention, state spaces and convolutions read the columns of a pass in turn. Padding before the first token of a
text leaves their states empty; padding after it would move convolutions on and let states decay. So a pass reads the
tokens of each sequence right-aligned, and leaves out sequences that have none in it. Sequences that have states share a
pass if it has equal numbers of their tokens (``in_turn`` of ag/engine/pass_split.py).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin

from ag.model.geometry import ATTENTION, has_other_layers

SEQUENTIAL_TYPES = ("linear_attention", "conv")  # types of layers that keep states; models take one mask for each type


class States(Cache):
    """The states of layers that do not attend, in transformers' own cache layers.

    Keys and values of attention are handed on, and not kept.

    Args:
        config: of the decoder.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(layers=DynamicCache(config=config).layers)
        #: Whether all states are inputs of convolutions. Then the newest inputs can be taken back.
        self.can_crop = {*config.layer_types} <= {*ATTENTION, "conv"}

    @classmethod
    def of(cls, config: PretrainedConfig) -> States | None:
        """Return empty states for a decoder; None means that all of its layers attend, and nothing else."""
        states = cls(config) if has_other_layers(config) else None
        return states if states is not None and states.kept else None

    @property
    def kept(self) -> list[Any]:
        """The layers that have a state."""
        return [layer for layer in self.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]

    @property
    def recording(self) -> list[Any]:
        """The layers that keep more than later tokens need."""
        return [layer for layer in self.kept if layer.record_past]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Hand keys and values of an attention layer on."""
        return key_states, value_states

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The states by a name that says layer, kind and number; they have a row for each sequence."""
        return {
            f"{index}.{kind}.{number}": (
                _newest(state, layer.conv_kernel_size[number]) if layer.record_past and kind == "conv_states" else state
            )
            for index, layer in enumerate(self.kept)
            for kind in ("conv_states", "recurrent_states")
            for number, state in getattr(layer, kind).items()
            if state is not None
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what :attr:`tensors` gave.

        Raises:
            KeyError: for a layer or a kind that is none.
        """
        layers = dict(enumerate(self.kept))
        for name, state in tensors.items():
            index, kind, number = name.split(".")
            layer, state_number = layers[int(index)], int(number)
            update = {"conv_states": layer.update_conv_state, "recurrent_states": layer.update_recurrent_state}[kind]
            update(state, state_number)
            layer.has_previous_state[state_number] = True

    def record(self, on: bool) -> None:
        """Keep all inputs of convolutions from now on, for :meth:`crop`; or the newest, which later tokens need."""
        self.crop()
        for layer in self.kept:
            layer.record_past = on

    def recorded(self, columns: int) -> int:
        """Return how many of the ``columns`` that were read can be taken back.

        A state as wide as the text holds all of its inputs, and can give all of them back. A narrower one holds the
        newest inputs, of which enough must stay to fill the kernel.
        """
        states = [(x, layer.conv_kernel_size[n]) for layer in self.recording for n, x in layer.conv_states.items()]
        widths = [(x.shape[-1], size) for x, size in states if x is not None]
        return min((width if width >= columns else width - size for width, size in widths), default=0)

    def crop(self, columns: int = 0) -> None:
        """Take the newest columns back, and forget what no later one needs."""
        for layer in self.recording:
            for number, x in layer.conv_states.items():
                if x is not None:
                    layer.conv_states[number] = _newest(x, layer.conv_kernel_size[number], columns)

    @property
    def nbytes(self) -> int:
        """Bytes of all states, inputs that are kept to go back included."""
        states_of_layers = [kind for layer in self.kept for kind in (layer.conv_states, layer.recurrent_states)]
        return sum(x.nbytes for kind in states_of_layers for x in kind.values() if x is not None)

    def select(self, indices: Tensor) -> None:
        """Make the sequences those at ``indices``."""
        for layer in self.kept:
            for states in (layer.conv_states, layer.recurrent_states):
                states.update({n: x[indices.to(x.device)] for n, x in states.items() if x is not None})

    def at(self, rows: Tensor) -> States:
        """Return a copy of the states of the sequences at ``rows`` ``[b]`` alone."""
        part = copy.copy(self)
        part.layers = [copy.copy(layer) for layer in self.layers]
        for layer in part.kept:  # its states are replaced, so that only those of ``rows`` are copied
            vars(layer).update({name: dict(value) for name, value in vars(layer).items() if isinstance(value, dict)})
        part.crop()
        part.select(rows)
        return part

    def put(self, rows: Tensor, part: States, batch: int) -> None:
        """Replace the states of sequences at ``rows`` ``[b]`` of ``batch`` by ``part``, which read their last pass."""
        self.crop()
        part.crop()
        for layer, other in zip(self.kept, part.kept, strict=True):
            for old_states, new_states in (
                (layer.conv_states, other.conv_states),
                (layer.recurrent_states, other.recurrent_states),
            ):
                for number, x in new_states.items():
                    if x is not None:
                        state = old_states[number]
                        state = x.new_zeros(batch, *x.shape[1:]) if state is None else state
                        new_states[number] = state.index_copy(0, rows.to(x.device), x)
        self.layers = part.layers

    def join(self, other: States) -> None:
        """Append the sequences of another cache of this model."""
        self.crop()
        other.crop()
        for layer, other_layer in zip(self.kept, other.kept, strict=True):
            for name in ("conv_states", "recurrent_states"):
                rows, added = getattr(layer, name), getattr(other_layer, name)
                rows.update({n: torch.cat([x, added[n]]) for n, x in rows.items() if x is not None})


class ColumnPass(NamedTuple):
    """A pass for layers that read columns in turn: the tokens of each sequence right-aligned, padding before them."""

    columns: Tensor | None  # [b, w], which columns of the call are read, -1 on padding; None means all as they came
    positions: Tensor | None  # [..., b or 1, w], of these columns; None means that the model counts them
    valid: Tensor | None  # [b, w] bool, which columns are tokens; None means all
    order: Tensor | None = None  # [b, w], the column of each token in left-aligned order; None means its own place
    rows: Tensor | None = None  # [b], the sequences of the batch that have a token; None means all
    batch: int = 0  # sequences of the batch, where some have no token

    def aligned(self, x: Tensor, dim: int) -> Tensor:
        """Return ``x`` ``[b, ...]`` of the pass for the whole batch ``[B, ...]``, left-aligned in a dimension."""
        x = x if self.order is None else taken(x, self.order, dim)
        if self.rows is None:
            return x
        return x.new_zeros(self.batch, *x.shape[1:]).index_copy(0, self.rows.to(x.device), x)

    def restore_columns(self, x: Tensor, dim: int) -> Tensor:
        """Undo :meth:`aligned`."""
        x = x if self.rows is None else x[self.rows.to(x.device)]
        return x if self.order is None else x.new_zeros(x.shape).scatter(dim, _index(self.order, x, dim), x)


def columns_in_order(positions: Tensor | None, mask: Tensor | None, length: int) -> ColumnPass:
    """Arrange a pass over all columns of a call.

    Args:
        positions: ``[..., B or 1, T]``; None means that the model counts them.
        mask: ``[B, T or more]``, nonzero on tokens, with padding on either side; None means that all are tokens.
        length: columns of the pass.
    """
    valid = None if mask is None or length == 1 or bool(mask[:, -length:].all()) else mask[:, -length:].bool()
    return ColumnPass(None, positions, None if valid is None else valid.contiguous())


def right_aligned(columns: Tensor, positions: Tensor | None) -> ColumnPass:
    """Arrange a pass over the next tokens of each sequence.

    Args:
        columns: ``[B, w]``, the columns of each sequence's tokens, left-aligned, then -1.
        positions: ``[..., B or 1, w]``, of these tokens; None means that the model counts them.
    """
    (batch, width), counts, rows = columns.shape, (columns >= 0).sum(1), None
    if bool((counts == 0).any()):  # a pass without any token reads padding in the first sequence
        rows = counts.nonzero()[:, 0] if bool(counts.any()) else counts.new_zeros(1)
        if positions is not None:
            positions = positions.expand(*positions.shape[:-2], batch, width)[..., rows.to(positions.device), :]
        columns, counts = columns[rows], counts[rows]
    num_padding = width - counts[:, None]
    if not bool(num_padding.any()):
        return ColumnPass(columns, positions, None, None, rows, batch)
    columns_in_row = torch.arange(width, device=columns.device)
    columns = columns.gather(1, (columns_in_row - num_padding) % width)
    if positions is not None:
        positions = positions.expand(*positions.shape[:-2], len(columns), width)
        source = ((columns_in_row - num_padding) % width).to(positions.device)
        positions = positions.gather(-1, source.expand_as(positions))
    return ColumnPass(columns, positions, columns >= 0, (columns_in_row + num_padding) % width, rows, batch)


def masks_by_type(attention: Tensor, valid: Tensor | None) -> dict[str, Tensor | None]:
    """Return the masks of a pass by the type of layer, as hybrid models take them.

    Args:
        attention: what layers that attend get.
        valid: ``[b, w]`` bool, which columns of the pass are tokens; None means all.
    """
    return {**dict.fromkeys(ATTENTION, attention), **dict.fromkeys(SEQUENTIAL_TYPES, valid)}


def find_noncausal_masks(masks: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Return the masks ``[B or 1, 1, T, S]`` of a model by type of layer if some token sees a later one, else none."""
    mask_tensors = {kind: mask for kind, mask in masks.items() if isinstance(mask, Tensor) and mask.ndim == 4}
    for mask in mask_tensors.values():
        length, columns = mask.shape[-2:]
        future = torch.ones(length, columns, dtype=torch.bool, device=mask.device).triu(columns - length + 1)
        visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        if bool((visible & future).any()):
            return mask_tensors
    return {}


def _newest(x: Tensor, size: int, columns: int = 0) -> Tensor:
    """Return the last ``size`` inputs of a convolution ``[B, d, n]`` before the newest columns, zeros before a text."""
    kept = x[..., : x.shape[-1] - columns][..., -size:]
    return F.pad(kept, (size - kept.shape[-1], 0)).contiguous()


def taken(x: Tensor, columns: Tensor, dim: int) -> Tensor:
    """Return the columns ``[B, n]`` of a dimension of ``x`` ``[B, ...]``."""
    return x.gather(dim, _index(columns, x, dim))


def _index(order: Tensor, like: Tensor, dim: int) -> Tensor:
    shape = [len(order), *[1] * (like.ndim - 1)]
    shape[dim] = order.shape[1]
    full = [*like.shape]
    full[dim] = order.shape[1]
    return order.to(like.device).view(shape).expand(full)

"""Positions for RoPE other than those of the text: the slots of a row, or positions squeezed into the context.

Keys are stored with the rotation that attention reads. When their positions change they are rotated again, by the
difference: rotations add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ag.errors import UserError
from ag.model.interceptor import AttentionCall
from ag.model.rope import rotate
from ag.model.support import check_rerotation

if TYPE_CHECKING:
    from ag.engine.block_pool import BlockPool
    from ag.engine.forward_batch import ForwardBatch

FREE = torch.iinfo(torch.long).max  # the token index of a free slot, where it is to come last


class KeyRotation:
    """Rotates cached keys again when their positions change, which rounds them each time.

    In 16 bits or in codes the errors add up, because small angles are rounded away: after 256 rotations by one position
    a key in bfloat16 is 13 % off, one in codes of 8 bits 42 %, and one in float32 less than 0.001 %. Keys and values
    are therefore stored in float32 or a wider type.

    Args:
        decoder: the model's stack of layers.

    Raises:
        UserError: the model's keys cannot be rotated again.
    """

    name: ClassVar[str]
    #: Whether the position of a token depends on the number of cached tokens before it.
    depends_on_cached = False

    def __init__(self, decoder: Any) -> None:
        check_rerotation(decoder, self.name)
        self.decoder = decoder

    def dtype(self, model: torch.dtype) -> torch.dtype:
        """Return float32, or the wider type."""
        return torch.promote_types(model, torch.float32)

    def check(self, pool: BlockPool) -> None:
        """Raise a ``UserError`` for a stored type whose rounding errors add up."""
        kind = pool.dtype
        if pool.kv_dtype != "float" or self.dtype(kind) != kind:
            held_dtype = pool.kv_dtype if pool.kv_dtype != "float" else str(kind).removeprefix("torch.")
            raise UserError(
                f"positions={self.name}: keys are rotated again after evictions, and stored as {held_dtype} they would "
                "lose digits each time: expected float32; use a model in float32 or a cache without pool=, with "
                "kv_dtype=float, or positions=original."
            )

    def positions(self, batch: ForwardBatch, stores: Sequence[Any]) -> Tensor | None:
        """Return the positions ``[B, T]`` of the new tokens for RoPE; None means that the model counts them."""
        return None

    def rotate_call(self, call: AttentionCall, batch: ForwardBatch, store: Any) -> AttentionCall:
        """Return a call in the stored type, with queries and keys rotated to their positions among cached tokens."""
        q, k, v = (x.to(store.pool.dtype) for x in (call.q, call.k, call.v))
        return replace(call, q=q, k=k, v=v)

    def to_token_index(self, q: Tensor, batch: ForwardBatch, store: Any, layer: int) -> Tensor:
        """Rotate queries ``[B, H, T, D]`` from their positions to their token indices, to be remembered."""
        return q

    def to_cache_position(self, q: Tensor, batch: ForwardBatch, store: Any, layer: int) -> Tensor:
        """Rotate queries ``[B, H, T, D]`` from their token indices to their positions among cached tokens."""
        return q

    def before_eviction(self, store: Any, layer: int) -> Tensor | None:
        """Return what :meth:`after_eviction` needs of a layer's rows as they are now."""
        return None

    def after_eviction(self, store: Any, layer: int, old_order: Tensor | None) -> None:
        """Rotate a layer's keys to their positions among the tokens that were kept."""

    def crop(self, layer_stores: Sequence[Any], old_lengths: Tensor, new_lengths: Tensor) -> None:
        """Rotate all keys to their positions after sequences ``[B]`` were cropped from old to new lengths."""

    def rotate_stored_keys(self, store: Any, layer: int, pool_index: Tensor, offset: Tensor) -> None:
        """Rotate stored keys by ``offset`` positions, in place.

        ``pool_index`` ``[B, Hkv, N]`` says where they lie in the pool, in blocks that no other row shares.
        """
        moved = offset != 0
        moved_index, keys = pool_index[moved], store.pages(layer).keys.flatten(0, 1)
        rotated = rotate(self.decoder, keys[moved_index][None, None], offset[moved][None, None], layer=layer)
        keys[moved_index] = rotated[0, 0]


class SlotPositions(KeyRotation):
    """The position of a token is the number of tokens before it in its row.

    While nothing is evicted this is its token index: a prompt is read as the model reads it. The model rotates new
    tokens by the length of the longest row, and layers rotate them back for each KV head whose row is shorter.

    Source: StreamingLLM (Xiao et al. 2023, arXiv 2309.17453).
    """

    name = "slot"
    depends_on_cached = True

    def positions(self, batch: ForwardBatch, stores: Sequence[Any]) -> Tensor | None:
        """Return the positions after the longest row of each sequence."""
        counted = batch.counts if batch.step else torch.zeros_like(batch.counts)  # a step is counted beforehand
        longest_rows = torch.stack([store.lengths_cpu.amax((0, 2)) for store in stores]).amax(0)
        batch.notes.longest_rows = longest_rows - counted
        columns = torch.arange(batch.token_indices.shape[1], device=batch.token_indices.device)
        ends = torch.stack([store.lengths.amax((0, 2)) for store in stores]).amax(0)
        return ends.long()[:, None] + columns

    def rotate_call(self, call: AttentionCall, batch: ForwardBatch, store: Any) -> AttentionCall:
        """Rotate new tokens from the positions that the model gave them to the ends of their rows."""
        counted = batch.counts if batch.step else torch.zeros_like(batch.counts)
        longest_rows = batch.notes.longest_rows
        assert longest_rows is not None
        offset = store.lengths_cpu[call.layer] - (counted + longest_rows)[:, None]
        call = super().rotate_call(call, batch, store)
        return replace(call, q=self._rotate_rows(call.q, offset), k=self._rotate_rows(call.k, offset))

    def to_token_index(self, q: Tensor, batch: ForwardBatch, store: Any, layer: int) -> Tensor:
        """Rotate queries forward by the number of tokens that their row has lost."""
        return self._rotate_rows(q, batch.num_tokens[:, None] - store.lengths_cpu[layer])

    def to_cache_position(self, q: Tensor, batch: ForwardBatch, store: Any, layer: int) -> Tensor:
        """Rotate queries back by the number of tokens that their row has lost."""
        return self._rotate_rows(q, store.lengths_cpu[layer] - batch.num_tokens[:, None])

    def _rotate_rows(self, x: Tensor, offset: Tensor) -> Tensor:
        """Rotate ``[B, H, T, D]`` by a number of positions ``[B, Hkv]`` for each KV head."""
        if not bool(offset.any()):
            return x
        head_offset = offset.repeat_interleave(x.shape[1] // offset.shape[1], 1)
        return rotate(self.decoder, x, head_offset[:, :, None].to(x.device))

    def before_eviction(self, store: Any, layer: int) -> Tensor | None:
        """Return the token indices of each row, ascending, ``[B, Hkv, N]``."""
        return _ascending(store.ledger(layer)[1])

    def after_eviction(self, store: Any, layer: int, old_order: Tensor | None) -> None:
        """Rotate each key back by the number of tokens before it that were evicted."""
        assert old_order is not None
        pool_index, token_indices = store.ledger(layer)
        positions, old_positions = (
            torch.searchsorted(order, token_indices) for order in (_ascending(token_indices), old_order)
        )
        offset = (positions - old_positions).masked_fill(token_indices < 0, 0)
        self.rotate_stored_keys(store, layer, pool_index, offset)


class InterpolatedPositions(KeyRotation):
    """The positions of the text, those of far tokens squeezed into the model's context.

    A token whose distance to the text's end is more than half of the context gets a smaller distance, in proportion, so
    that the first token is one context away. While a text is no longer than the context nothing is squeezed. In a
    longer text the cached keys are rotated again whenever it has grown by a sixteenth of the context, to their
    positions seen from the end of the next sixteenth. New tokens have their own positions.

    Source: position interpolation (Chen et al. 2023, arXiv 2306.15595), applied to far tokens alone; these are the
    tokens whose positions Self-Extend (Jin et al. 2024, arXiv 2401.01325) groups.
    """

    name = "interpolated"

    def __init__(self, decoder: Any) -> None:
        super().__init__(decoder)
        self.context: int = decoder.config.max_position_embeddings
        self.stride, self.num_exact = max(self.context // 16, 1), self.context // 2

    def positions(self, batch: ForwardBatch, stores: Sequence[Any]) -> Tensor | None:
        """Raise a ``UserError`` for a pass so long that its own tokens would be squeezed."""
        max_offset = self.num_exact - self.stride
        over = (batch.num_tokens > self.context) & (batch.counts > max_offset)
        if bool(over.any()):
            row = int(over.long().argmax())
            raise UserError(
                f"positions=interpolated: sequence {row} would grow by {int(batch.counts[row])} tokens to "
                f"{int(batch.num_tokens[row])} in one pass, beyond the model's context of {self.context}: expected at "
                f"most {max_offset} tokens a pass there; give schedule=blocks:{max_offset}, or fewer tokens to each "
                "forward pass, and call cache.reset() first."
            )
        return None

    def rotate_call(self, call: AttentionCall, batch: ForwardBatch, store: Any) -> AttentionCall:
        """Rotate the cached keys of the layer, where a text has grown into another sixteenth."""
        self._move_keys(store, call.layer, batch.num_tokens - batch.counts, batch.num_tokens)
        return super().rotate_call(call, batch, store)

    def crop(self, layer_stores: Sequence[Any], old_lengths: Tensor, new_lengths: Tensor) -> None:
        """Rotate keys back, where a text ends in an earlier sixteenth again."""
        for layer, store in enumerate(layer_stores):
            self._move_keys(store, layer, old_lengths, new_lengths)

    def _move_keys(self, store: Any, layer: int, old_lengths: Tensor, new_lengths: Tensor) -> None:
        """Rotate a layer's keys from their positions in texts of old lengths ``[B]`` to those in texts of new ones."""
        ends = [
            ((x + self.stride - 1) // self.stride * self.stride).clamp_min(self.context)
            for x in (old_lengths, new_lengths)
        ]
        moved = ends[0] != ends[1]
        if not bool(moved.any()):
            return
        store.copy_shared_blocks(layer, moved)
        pool_index, token_indices = store.ledger(layer)
        old_positions, new_positions = (
            self._cache_positions(token_indices, end.to(token_indices.device)[:, None, None] - 1) for end in ends
        )
        offset = (new_positions - old_positions).masked_fill(token_indices < 0, 0)
        self.rotate_stored_keys(store, layer, pool_index, offset)

    def _cache_positions(self, token_indices: Tensor, last: Tensor) -> Tensor:
        """Return the positions of tokens seen from token index ``last``, float64; the two arguments broadcast."""
        distance, max_distance = (last - token_indices).double(), self.context - 1 - self.num_exact
        share = max_distance / (last - self.num_exact).clamp_min(max_distance).double()
        squeezed = self.num_exact + (distance - self.num_exact) * share
        return last - torch.where(distance > self.num_exact, squeezed, distance)


def _ascending(token_indices: Tensor) -> Tensor:
    """Return the token indices of rows in order, free slots last."""
    ascending: Tensor = token_indices.masked_fill(token_indices < 0, FREE).sort(-1).values
    return ascending


#: By the option ``positions`` of a policy; under ``original`` keys stay as the model rotated them.
ROTATIONS: dict[str, type[KeyRotation]] = {"slot": SlotPositions, "interpolated": InterpolatedPositions}

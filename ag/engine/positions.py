"""Rotations of keys and queries by other places than those in the text: slots, or places squeezed together.

Keys are stored rotated as queries meet them, so that attention reads them where they lie. When their places change they
are rotated on by the difference: rotations add up.
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
from ag.model.support import check_turns

if TYPE_CHECKING:
    from ag.engine.block_pool import BlockPool
    from ag.engine.forward_batch import ForwardBatch

FREE = torch.iinfo(torch.long).max  # the token index of a free slot, where it is to come last


class Turned:
    """Held keys are turned on when their places change, which rounds them each time.

    In 16 bits or in codes that adds up: small angles are rounded away, so that a key in bfloat16 is 13 % off after 256
    turns by one place, one in codes of 8 bits 42 %, and one in float32 less than 0.001 %. So keys and values are held
    in float32 at least, and not in codes.

    Args:
        decoder: the model's stack of layers.

    Raises:
        UserError: when the model's keys cannot be rotated anew.
    """

    name: ClassVar[str]
    #: Whether the places of tokens depend on the number of held ones before them.
    counts_held = False

    def __init__(self, decoder: Any) -> None:
        check_turns(decoder, self.name)
        self.decoder = decoder

    def dtype(self, model: torch.dtype) -> torch.dtype:
        """Return float32, or the wider type."""
        return torch.promote_types(model, torch.float32)

    def check(self, pool: BlockPool) -> None:
        """Refuse types whose rounding errors add up over turns."""
        kind = pool.dtype
        if pool.kv_dtype != "float" or self.dtype(kind) != kind:
            held_dtype = pool.kv_dtype if pool.kv_dtype != "float" else str(kind).removeprefix("torch.")
            raise UserError(
                f"positions={self.name}: keys are turned anew when others go, and held as {held_dtype} each turn would "
                "lose "
                "some of them: expected float32; use a model in float32 or a cache without pool=, with "
                "kv_dtype=float, or positions=original."
            )

    def positions(self, batch: ForwardBatch, stores: Sequence[Any]) -> Tensor | None:
        """Return the positions ``[B, T]`` of the new tokens for RoPE; None means that the model counts them."""
        return None

    def rotate_call(self, call: AttentionCall, batch: ForwardBatch, store: Any) -> AttentionCall:
        """Return a call in the stored type, with queries and keys at their places among the held tokens."""
        q, k, v = (x.to(store.pool.dtype) for x in (call.q, call.k, call.v))
        return replace(call, q=q, k=k, v=v)

    def to_token_index(self, q: Tensor, batch: ForwardBatch, store: Any, layer: int) -> Tensor:
        """Return queries ``[B, H, T, D]`` at their places, rotated to their token indices to be remembered."""
        return q

    def by_place(self, q: Tensor, batch: ForwardBatch, store: Any, layer: int) -> Tensor:
        """Return queries ``[B, H, T, D]`` at their token indices, rotated to their places among the cached tokens."""
        return q

    def order(self, store: Any, layer: int) -> Tensor | None:
        """Return what :meth:`close_up` needs of a layer from before tokens go."""
        return None

    def close_up(self, store: Any, layer: int, order: Tensor | None) -> None:
        """Turn a layer's keys to the places that they have after tokens went."""

    def crop(self, stores: Sequence[Any], old_lengths: Tensor, new_lengths: Tensor) -> None:
        """Rotate all keys to their positions after sequences of ``before`` tokens ``[B]`` were cropped to ``after``."""

    def turn(self, store: Any, layer: int, index: Tensor, further: Tensor) -> None:
        """Rotate stored keys on by ``further`` places, in place.

        ``index`` ``[B, Hkv, N]`` says where they lie in the pool, in blocks that no other row shares.
        """
        moved = further != 0
        at, keys = index[moved], store.pages(layer).keys.flatten(0, 1)
        keys[at] = rotate(self.decoder, keys[at][None, None], further[moved][None, None], layer=layer)[0, 0]


class Slots(Turned):
    """The place of a token is the number of tokens before it that its head holds.

    While nothing is evicted this is its token index: a prompt is read as the model reads it. The model rotates new
    tokens by the number of tokens that the longest row holds, and layers turn them on for each KV head that holds
    fewer.

    Source: StreamingLLM (Xiao et al. 2023, arXiv 2309.17453).
    """

    name = "slot"
    counts_held = True

    def positions(self, batch: ForwardBatch, stores: Sequence[Any]) -> Tensor | None:
        """Go on after the longest row of each sequence."""
        came = batch.counts if batch.step else torch.zeros_like(batch.counts)  # a step is counted beforehand
        batch.memo["behind"] = torch.stack([store.lengths_cpu.amax((0, 2)) for store in stores]).amax(0) - came
        columns = torch.arange(batch.token_indices.shape[1], device=batch.token_indices.device)
        ends = torch.stack([store.lengths.amax((0, 2)) for store in stores]).amax(0)
        return ends.long()[:, None] + columns

    def rotate_call(self, call: AttentionCall, batch: ForwardBatch, store: Any) -> AttentionCall:
        """Turn the new tokens on from where the model put them to the end of their rows."""
        came = batch.counts if batch.step else torch.zeros_like(batch.counts)
        further = store.lengths_cpu[call.layer] - (came + batch.memo["behind"])[:, None]
        call = super().rotate_call(call, batch, store)
        return replace(call, q=self._turned(call.q, further), k=self._turned(call.k, further))

    def to_token_index(self, q: Tensor, batch: ForwardBatch, store: Any, layer: int) -> Tensor:
        """Turn queries on by the number of tokens that their head has lost."""
        return self._turned(q, batch.num_tokens[:, None] - store.lengths_cpu[layer])

    def by_place(self, q: Tensor, batch: ForwardBatch, store: Any, layer: int) -> Tensor:
        """Turn queries back by the number of tokens that their head has lost."""
        return self._turned(q, store.lengths_cpu[layer] - batch.num_tokens[:, None])

    def _turned(self, x: Tensor, further: Tensor) -> Tensor:
        """Rotate ``[B, H, T, D]`` by a number of places ``[B, Hkv]`` for each KV head."""
        if not bool(further.any()):
            return x
        wide = further.repeat_interleave(x.shape[1] // further.shape[1], 1)
        return rotate(self.decoder, x, wide[:, :, None].to(x.device))

    def order(self, store: Any, layer: int) -> Tensor | None:
        """Return the token indices that each row holds, ascending, ``[B, Hkv, N]``."""
        return _ascending(store.ledger(layer)[1])

    def close_up(self, store: Any, layer: int, order: Tensor | None) -> None:
        """Turn each key back by the number of tokens before it that went."""
        assert order is not None
        index, token_indices = store.ledger(layer)
        slots_before, slots_in_order = (
            torch.searchsorted(x, token_indices) for x in (_ascending(token_indices), order)
        )
        self.turn(store, layer, index, (slots_before - slots_in_order).masked_fill(token_indices < 0, 0))


class Interpolated(Turned):
    """Places in the text; places of far tokens are squeezed into the model's context.

    Seen from a text's end, a token at a distance of more than half of the context is nearer, in proportion, so that the
    first token lies as far away as the context is long. While a text is no longer than the context nothing is squeezed.
    In a longer one held keys are turned on whenever it has grown by a sixteenth of the context, to where they lie as
    seen from the end of the next sixteenth. New tokens lie at their own places.

    Source: position interpolation (Chen et al. 2023, arXiv 2306.15595), applied to far tokens alone; these are the
    tokens whose positions Self-Extend (Jin et al. 2024, arXiv 2401.01325) groups.
    """

    name = "interpolated"

    def __init__(self, decoder: Any) -> None:
        super().__init__(decoder)
        self.context: int = decoder.config.max_position_embeddings
        self.stride, self.num_exact = max(self.context // 16, 1), self.context // 2

    def positions(self, batch: ForwardBatch, stores: Sequence[Any]) -> Tensor | None:
        """Refuse passes whose new tokens would have to be squeezed for later ones."""
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
        """Turn the held keys of the layer, where a text has grown into another part."""
        self._turn(store, call.layer, batch.num_tokens - batch.counts, batch.num_tokens)
        return super().rotate_call(call, batch, store)

    def crop(self, stores: Sequence[Any], slots_in_order: Tensor, after: Tensor) -> None:
        """Turn keys back, where a text is in an earlier part again."""
        for layer, store in enumerate(stores):
            self._turn(store, layer, slots_in_order, after)

    def _turn(self, store: Any, layer: int, old_lengths: Tensor, new_lengths: Tensor) -> None:
        """Turn a layer's keys from where they lie in texts of ``before`` tokens ``[B]`` to where they do in others."""
        ends = [
            ((x + self.stride - 1) // self.stride * self.stride).clamp_min(self.context)
            for x in (old_lengths, new_lengths)
        ]
        moved = ends[0] != ends[1]
        if not bool(moved.any()):
            return
        store.copy_shared_blocks(layer, moved)
        index, token_indices = store.ledger(layer)
        old_positions, new_positions = (
            self._cache_positions(token_indices, end.to(token_indices.device)[:, None, None] - 1) for end in ends
        )
        self.turn(store, layer, index, (new_positions - old_positions).masked_fill(token_indices < 0, 0))

    def _cache_positions(self, token_indices: Tensor, at: Tensor) -> Tensor:
        """Return the places of tokens as seen from token index ``at``, float64; the two arguments broadcast."""
        distance, max_distance = (at - token_indices).double(), self.context - 1 - self.num_exact
        share = max_distance / (at - self.num_exact).clamp_min(max_distance).double()
        return at - torch.where(
            distance > self.num_exact, self.num_exact + (distance - self.num_exact) * share, distance
        )


def _ascending(token_indices: Tensor) -> Tensor:
    """Return the token indices of rows in order, free slots last."""
    ascending: Tensor = token_indices.masked_fill(token_indices < 0, FREE).sort(-1).values
    return ascending


#: By the option ``positions`` of a policy; under ``original`` keys stay as the model rotated them.
ROTATIONS: dict[str, type[Turned]] = {"slot": Slots, "interpolated": Interpolated}

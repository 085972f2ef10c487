"""The keys and values that a layer holds after its new tokens, as tensors by slot."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from ag.engine.forward_batch import ForwardBatch
from ag.engine.kv_store import KVStore
from ag.kernels.pages import read


@dataclass(frozen=True, kw_only=True)
class CachedKV:
    """Keys, values, token indices and gate outputs of a layer's slots; each is gathered when it is first read.

    Rows are padded to N slots. In the first pass of a prompt these are the tensors that the model computed.

    Attributes:
        store: the rows of the layer.
        layer: index of the layer.
        batch: the new tokens, which are stored already.
        new_keys: keys of the new tokens ``[B, Hkv, T, D]``.
        new_values: values of the new tokens ``[B, Hkv, T, Dv]``.
        shape: B, Hkv and N.
        lengths: ``[B]`` long, tokens of each sequence so far.
        sliding_window: the model's sliding window in the layer. None: the layer has none.
        prefill_chunk: tokens of a prompt between evictions. None: a prompt is evicted from once.
        same_for_all_heads: whether the host knows that all KV heads hold equal tokens in equal slots.
        sequences: ``[B]`` long, the sequences of the store's rows, after a first pass. None: all.
    """

    store: KVStore
    layer: int
    batch: ForwardBatch
    new_keys: Tensor
    new_values: Tensor
    shape: tuple[int, int, int]
    lengths: Tensor
    sliding_window: int | None
    prefill_chunk: int | None
    same_for_all_heads: bool
    sequences: Tensor | None = None

    def of_sequences(self, sequences: Tensor) -> CachedKV:
        """Return what some sequences ``[b]`` long hold in a step."""
        shape, lengths = (len(sequences), *self.shape[1:]), self.lengths[sequences]
        return replace(self, shape=shape, lengths=lengths, sequences=sequences)

    @property
    def in_order(self) -> bool:
        """Whether the host knows that the token of index n lies in slot n."""
        return self.batch.is_first_pass

    @cached_property
    def _pool_indices(self) -> Tensor:
        indices = self.store.pool_indices(self.layer, all_slots=self.batch.step)
        return indices if self.sequences is None else indices[self.sequences]

    @cached_property
    def _keys_and_values(self) -> tuple[Tensor, Tensor]:
        if self.batch.is_first_pass:
            return self.new_keys, self.new_values
        return read(self.store.pages(self.layer), self._pool_indices)

    @property
    def keys(self) -> Tensor:
        """Keys ``[B, Hkv, N, D]``, undefined on free slots."""
        return self._keys_and_values[0]

    @property
    def values(self) -> Tensor:
        """Values ``[B, Hkv, N, Dv]``, undefined on free slots."""
        return self._keys_and_values[1]

    @cached_property
    def token_indices(self) -> Tensor:
        """Token index of each slot ``[B, Hkv, N]`` long, negative on free slots.

        A token that left the sliding window before the last possible eviction has no slot: whether it is still stored
        depends on when memory was freed. While a prompt is read that is evicted from once, all its tokens have slots.
        """
        if self.batch.is_first_pass:
            return self.batch.token_indices[:, None].expand(-1, self.shape[1], -1)
        token_indices = self.store.token_indices(self.layer, all_slots=self.batch.step)
        if self.sequences is not None:
            token_indices = token_indices[self.sequences]
        if self.sliding_window is None or (self.batch.is_prefill and self.prefill_chunk is None):
            return token_indices
        last_expired = self.batch.first_since(self.prefill_chunk, self.lengths) - self.sliding_window
        return token_indices.masked_fill(token_indices <= last_expired[:, None, None], -1)

    @property
    def gate_outputs(self) -> Tensor:
        """Gate output of each slot ``[B, Hkv, N]``, undefined on free slots."""
        return self.store.gate_outputs(self.layer, self._pool_indices)

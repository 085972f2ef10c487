"""Read-only queries about the contents of a cache."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from ag.engine.forward import Forward
from ag.engine.layer import Layer
from ag.engine.report import Report
from ag.errors import UserError


class CacheQueries(Forward):
    """The side of :class:`ag.engine.cache.EvictionCache` that is read.

    A token counts as held if some later query may see it; the tokens of the last pass may be taken back. The memory of
    tokens that left a sliding window, or are neither flagged by a gate nor recent, is freed a few tokens later.
    """

    @property
    def valid(self) -> Tensor:
        """``[B, seen]`` bool, False on padding."""
        return self.sequences.mask

    @property
    def seen_tokens(self) -> int:
        """Columns of the input that went by, padding and evicted tokens included."""
        return self.sequences.columns

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks that are taken, and of the memory of gates; states of other layers do not count."""
        blocks = sum(store.num_blocks() for store in self.stores) * self.pool.block_nbytes(self.stores[0].gate_type)
        return blocks + sum(part.gate_memory.nbytes for part in self.layers)

    @property
    def over_budget(self) -> Tensor:
        """``[B]`` bool on the CPU: sequences that hold more than the budget because they protect more."""
        noted = None if self.evictor is None else self.evictor.budgets.over_budget
        return torch.zeros(len(self.sequences), dtype=torch.bool) if noted is None else noted

    @property
    def scoring_seconds(self) -> float:
        """Seconds spent on scores and decisions; on a card the host waits for the last of them."""
        return sum(layer.watch.seconds for layer in self.layers)

    def kept_positions(self, layer: int) -> list[list[Tensor]]:
        """Return which of its tokens each sequence holds in each KV head of a layer, counted from 0, ascending.

        Padding is not counted: the first generated token of a prompt of 10 tokens is token 10.
        """
        token_indices = self._token_indices(layer)
        return [[row[row >= 0].sort().values for row in sequence] for sequence in token_indices]

    def held_tokens(self) -> Tensor:
        """Return the tokens per KV head that each layer holds of each sequence, ``[B, L]`` float32 on the CPU."""
        counts = [(self._token_indices(layer) >= 0).sum(-1).float().mean(1).cpu() for layer in range(len(self.layers))]
        return torch.stack(counts, 1)

    def kept_share(self, *, prompt: bool = False) -> float:
        """Return the share of the (token, KV head) pairs seen so far that is still held, over all layers and sequences.

        Args:
            prompt: count the tokens of the prompt alone, without those that followed it.
        """
        lengths = self.sequences.prompt_len if prompt else self.sequences.num_tokens
        lengths = lengths.minimum(self.sequences.num_tokens)
        num_entries = 0
        for layer in range(len(self.layers)):
            token_indices = self._token_indices(layer)
            end = lengths.to(token_indices.device)[:, None, None]
            num_entries += int(((token_indices >= 0) & (token_indices < end)).sum())
        visible = int(lengths.sum()) * sum(store.kv_heads for store in self.store_of)
        return num_entries / visible if visible else 1.0

    def report(self, kinds: Mapping[str, Tensor] = MappingProxyType({})) -> Report:
        """Return what each layer and head holds, what it costs, and the time that scoring took.

        Args:
            kinds: columns ``[B, T]`` bool of the text by a name, such as ``{"image": ids == image_token_id}``, of
                which the report says how much is held.

        Raises:
            UserError: for columns of another shape than the batch and the text.
        """
        layers = range(len(self.layers))
        return Report(
            policy=repr(self.policy),
            tokens=int(self.sequences.num_tokens.sum()),
            over_budget=int(self.over_budget.sum()),
            kept=[(self._token_indices(layer) >= 0).sum((0, 2)).tolist() for layer in layers],
            nbytes=self.layer_nbytes(),
            seconds=[part.watch.seconds for part in self.layers],
            plain_nbytes=sum(self._plain_nbytes(part) for part in self.layers),
            state_nbytes=0 if self.states is None else self.states.nbytes,
            kinds={name: self._share_of(name, columns) for name, columns in kinds.items()},
        )

    def _share_of(self, name: str, columns: Tensor) -> float:
        """Return the share of the tokens in some columns ``[B, T]`` bool that is held, over all layers and heads."""
        valid = self.valid
        if columns.ndim != 2 or len(columns) != len(valid) or columns.shape[1] > valid.shape[1]:
            raise UserError(
                f"report: {name} {tuple(columns.shape)}: expected columns of the text {tuple(valid.shape)}, or of its "
                "beginning."
            )
        new_valid = valid[:, : columns.shape[1]]
        token_indices = (new_valid.cumsum(1) - 1).where(new_valid & columns.to(new_valid.device), -1)
        counted = torch.zeros(len(valid), self.seen_tokens + 1, dtype=torch.bool, device=valid.device)
        counted.scatter_(1, token_indices.where(token_indices >= 0, self.seen_tokens), True)
        counted[:, -1] = False  # which took the other columns, and stands for free slots
        num_entries = 0
        for layer in range(len(self.layers)):
            at = self._token_indices(layer)
            num_entries += int(counted.to(at.device).gather(1, at.where(at >= 0, self.seen_tokens).flatten(1)).sum())
        total = int(counted.sum()) * sum(store.kv_heads for store in self.store_of)
        return num_entries / total if total else 1.0

    def layer_nbytes(self) -> list[int]:
        """Return the bytes of each layer's blocks and of its gate's memory; shared blocks count for each."""
        size = self.pool.block_nbytes(self.stores[0].gate_type)
        blocks = [int(store.owned[layer].sum()) for layer, store in enumerate(self.store_of)]
        return [n * size + part.gate_memory.nbytes for n, part in zip(blocks, self.layers, strict=True)]

    def _plain_nbytes(self, part: Layer) -> int:
        """Return the bytes of transformers' own cache for the same columns: in a window, all but the next token's."""
        columns = self.seen_tokens if part.window is None else min(self.seen_tokens, part.window - 1)
        number, key, value = self.store_of[part.index].head_shape
        return len(self.sequences) * columns * number * (key + value) * self.pool.dtype.itemsize

    def _token_indices(self, layer: int) -> Tensor:
        """Return a layer's token indices ``[B, Hkv, N]``, -1 on free slots and for tokens that no longer count."""
        store = self.store_of[layer]
        index, token_indices = store.ledger(layer)
        visible = self.layers[layer].visible(store, index, token_indices, self.sequences.settled)
        return token_indices.masked_fill(~visible, -1)

    # ---- for transformers

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the columns seen, which drive positions: within a pass those before it."""
        within = self.batch.token_indices.shape[1] if self.broken and self.batch is not None else 0
        return self.seen_tokens - within

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return the sizes of a mask over everything seen."""
        return self.seen_tokens + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1: there is no limit."""
        return -1

    @property
    def is_initialized(self) -> bool:
        """Whether tokens were read."""
        return self.seen_tokens > 0

    is_compileable = property(lambda self: False)
    get_max_cache_shape = get_max_length  # the name before transformers 5.20

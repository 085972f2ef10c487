"""The tokens, bytes and scoring times of a cache, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ag.engine.cache_state import CacheState
from ag.engine.layer import Layer
from ag.errors import UserError


@dataclass(frozen=True)
class Report:
    """A cache in numbers; its text is a table.

    Attributes:
        policy: repr of the policy.
        tokens: tokens that went by, those after the prompt too, summed over sequences, padding not counted.
        kept: by layer and KV head, tokens still held, summed over sequences.
        nbytes: by layer, bytes allocated for keys and values.
        seconds: by layer, time spent on scores and decisions, without steps that a CUDA graph replays.
        over_budget: sequences that hold more than the budget, because more is protected than it allows.
        plain_nbytes: bytes of keys and values that transformers' own cache would hold for these columns.
        state_nbytes: bytes of the states of layers that do not attend (linear attention, convolutions), beside these.
        kinds: shares of some kinds of tokens that are still held, by name.
    """

    policy: str
    tokens: int
    kept: list[list[int]]
    nbytes: list[int]
    seconds: list[float]
    over_budget: int = 0
    plain_nbytes: int = 0
    state_nbytes: int = 0
    kinds: Mapping[str, float] = field(default_factory=dict)

    @property
    def kept_share(self) -> float:
        """Share of the (token, layer, KV head) entries of all tokens that went by that is still held."""
        counts = [count for heads in self.kept for count in heads]
        return sum(counts) / (self.tokens * len(counts)) if self.tokens and counts else 1.0

    def __str__(self) -> str:
        lines = [
            f"{self.policy}: {self.kept_share:.1%} of all {self.tokens:,} tokens held (prompt and what followed)",
            f"{'layer':>5} {'least':>9} {'mean':>11} {'most':>9} {'of all':>7} {'KV bytes':>15} {'scoring s':>10}",
        ]
        for index, (heads, size, time) in enumerate(zip(self.kept, self.nbytes, self.seconds, strict=True)):
            mean = sum(heads) / len(heads) if heads else 0.0
            share = mean / self.tokens if self.tokens else 1.0
            least, most = min(heads, default=0), max(heads, default=0)
            lines.append(f"{index:>5} {least:>9,} {mean:>11,.1f} {most:>9,} {share:>7.1%} {size:>15,} {time:>10.4f}")
        mean = self.tokens * self.kept_share
        total = f"{'all':>5} {'':>9} {mean:>11,.1f} {'':>9} {self.kept_share:>7.1%} {sum(self.nbytes):>15,}"
        lines.append(f"{total} {sum(self.seconds):>10.4f}")
        if self.plain_nbytes:
            share = sum(self.nbytes) / self.plain_nbytes
            lines.append(f"{share:.1%} of the {self.plain_nbytes:,} bytes of transformers' own cache for the same text")
        if self.state_nbytes:
            lines.append(f"{self.state_nbytes:,} bytes more for the states of layers that do not attend")
        lines += [f"{share:.1%} of {name} held" for name, share in self.kinds.items()]
        if self.over_budget:
            lines.append(
                f"over budget in {self.over_budget} {'sequence' if self.over_budget == 1 else 'sequences'}: more is "
                "protected (sinks, recent, window) than the budget allows, and stays"
            )
        return "\n".join(lines)


def report(state: CacheState, kinds: Mapping[str, Tensor]) -> Report:
    """Return the report of a cache; see :meth:`ag.engine.cache.EvictionCache.report`."""
    visible = [visible_token_indices(state, layer) for layer in range(len(state.layers))]
    return Report(
        policy=repr(state.setup.policy),
        tokens=int(state.sequences.num_tokens.sum()),
        over_budget=int(over_budget(state).sum()),
        kept=[(token_indices >= 0).sum((0, 2)).tolist() for token_indices in visible],
        nbytes=layer_nbytes(state),
        seconds=[layer.watch.seconds for layer in state.layers],
        plain_nbytes=sum(_plain_nbytes(state, layer) for layer in state.layers),
        state_nbytes=0 if state.states is None else state.states.nbytes,
        kinds={name: _share_of(state, visible, name, columns) for name, columns in kinds.items()},
    )


def over_budget(state: CacheState) -> Tensor:
    """Return the sequences that hold more than the budget because they protect more, ``[B]`` bool on the CPU."""
    noted = None if state.evictor is None else state.evictor.budgets.over_budget
    return torch.zeros(len(state.sequences), dtype=torch.bool) if noted is None else noted


def visible_token_indices(state: CacheState, layer: int) -> Tensor:
    """Return a layer's token indices ``[B, Hkv, N]``, -1 on free slots and for tokens that no later query sees."""
    store = state.layer_stores[layer]
    pool_indices, token_indices = store.ledger(layer)
    visible = state.layers[layer].visible(store, pool_indices, token_indices, state.sequences.num_committed)
    return token_indices.masked_fill(~visible, -1)


def share_held(state: CacheState, prompt: bool) -> float:
    """Return the share of the (token, KV head) pairs of all tokens, or of the prompts alone, that is still held."""
    sequences = state.sequences
    lengths = sequences.prompt_len if prompt else sequences.num_tokens
    lengths = lengths.minimum(sequences.num_tokens)
    num_held = 0
    for layer in range(len(state.layers)):
        token_indices = visible_token_indices(state, layer)
        end = lengths.to(token_indices.device)[:, None, None]
        num_held += int(((token_indices >= 0) & (token_indices < end)).sum())
    total = int(lengths.sum()) * sum(store.kv_heads for store in state.layer_stores)
    return num_held / total if total else 1.0


def layer_nbytes(state: CacheState) -> list[int]:
    """Return the bytes of each layer's blocks and of its gate's memory; shared blocks count for each."""
    size = state.setup.pool.block_nbytes(state.stores[0].gate_type)
    blocks = [int(store.block_counts[layer].sum()) for layer, store in enumerate(state.layer_stores)]
    return [n * size + layer.gate_memory.nbytes for n, layer in zip(blocks, state.layers, strict=True)]


def _plain_nbytes(state: CacheState, layer: Layer) -> int:
    """Return the bytes of transformers' own cache for these columns: in a window or chunk, all but the next token's."""
    columns, span = state.sequences.columns, layer.chunk if layer.window is None else layer.window
    columns = columns if span is None else min(columns, span - 1)
    number, key, value = state.layer_stores[layer.index].head_shape
    dtype: torch.dtype = state.setup.decoder.dtype
    return len(state.sequences) * columns * number * (key + value) * dtype.itemsize


def _share_of(state: CacheState, visible: Sequence[Tensor], name: str, columns: Tensor) -> float:
    """Return the share of the tokens in some columns ``[B, T]`` bool that is held, over all layers and heads.

    ``visible`` are the layers' :func:`visible_token_indices`.
    """
    valid, num_columns = state.sequences.mask, state.sequences.columns
    if columns.ndim != 2 or len(columns) != len(valid) or columns.shape[1] > num_columns:
        raise UserError(
            f"report: {name} {tuple(columns.shape)}: expected columns of the text {tuple(valid.shape)}, or of its "
            "beginning."
        )
    new_valid = valid[:, : columns.shape[1]]
    token_indices = (new_valid.cumsum(1) - 1).where(new_valid & columns.to(new_valid.device).bool(), -1)
    counted = torch.zeros(len(valid), num_columns + 1, dtype=torch.bool, device=valid.device)
    counted.scatter_(1, token_indices.where(token_indices >= 0, num_columns), True)
    counted[:, -1] = False  # the last column took all others, and stands for free slots
    num_held = 0
    for token_indices in visible:
        column = token_indices.where(token_indices >= 0, num_columns).flatten(1)
        num_held += int(counted.to(column.device).gather(1, column).sum())
    total = int(counted.sum()) * sum(store.kv_heads for store in state.layer_stores)
    return num_held / total if total else 1.0

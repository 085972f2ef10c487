"""The tokens that a cache held when each query attended, and the equivalent forward pass under dense masks.

Nothing here is shared with the library's attention: the logits of a run are recomputed from the record alone.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import ag
from ag.engine.forward_pass import ForwardPass
from ag.engine.kv_store import KVStore
from ag.engine.layer import Layer
from ag.engine.policy import Policy
from ag.model.interceptor import AttentionCall
from tests.support.batches import columns, padded, step
from tests.support.bounds import hold, of_pass
from tests.support.dense import masked


@dataclass
class Arrival:
    """New tokens of a layer: token indices by sequence, and the tokens that each head holds and shows with them."""

    new: list[list[int]]
    held: list[list[list[int]]]  # token indices by sequence and head
    open: list[list[set[int]]]  # held tokens that queries see at any distance, by sequence and head
    near: int | None  # newest tokens, its own included, that a query sees of the others; None means all

    def seen(self, row: int, head: int, query: int) -> list[int]:
        """Ranks that a query sees of its head's tokens."""
        open_, near = self.open[row][head], self.near
        return [
            t for t in {*self.held[row][head], query} if t <= query and (near is None or query - t < near or t in open_)
        ]


@dataclass
class Run:
    """A run of a cache: every arrival by layer, and the tokens of each layer, sequence and head after every pass."""

    cache: ag.EvictionCache
    arrivals: list[list[Arrival]]
    held: list[list[list[list[list[int]]]]] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)  # [own tokens, V] by sequence

    def visible(self, layer: int, row: int, length: int) -> Tensor:
        """The held tokens that each query saw, ``[Hkv, length, length]`` bool."""
        heads = len(self.arrivals[layer][0].held[row])
        seen = torch.zeros(heads, length, length, dtype=torch.bool)
        for arrival in self.arrivals[layer]:
            for query in arrival.new[row]:
                for head in range(heads):
                    seen[head, query, arrival.seen(row, head, query)] = True
        return seen


@contextmanager
def watched(cache: ag.EvictionCache) -> Iterator[list[list[Arrival]]]:
    """Record every arrival of tokens at the layers of a cache; KVzip's repetitions of a prompt do not count."""
    arrivals: list[list[Arrival]] = [[] for _ in cache.state.layers]
    read = Layer.append_and_attend

    def recording(layer: Layer, call: Any, batch: Any, store: KVStore, *others: Any) -> Any:
        found = read(layer, call, batch, store, *others)  # nothing goes within it
        here = batch is cache.interceptor.batch  # and no repetition of kvzip's, of which nothing stays
        if here and any(layer is part for part in cache.state.layers):
            new = [
                [token_index for token_index in token_indices if token_index >= 0]
                for token_indices in batch.token_indices.tolist()
            ]
            arrivals[layer.index].append(arrived(layer, new, batch, store))
        return found

    Layer.append_and_attend = recording  # type: ignore[method-assign, assignment]
    try:
        yield arrivals
    finally:
        Layer.append_and_attend = read  # type: ignore[method-assign]


def arrived(layer: Layer, new: list[list[int]], batch: Any, store: KVStore) -> Arrival:
    """Return the tokens that a layer holds when its queries attend."""
    index, token_indices = store.ledger(layer.index)
    held = [[sorted(t for t in head.tolist() if t >= 0) for head in heads] for heads in token_indices]
    dense = batch.is_prefill and layer.gates is not None and layer.gates.config.prefill == "dense"
    if layer.visible_unflagged is None or dense:
        return Arrival(new, held, [[set() for _ in heads] for heads in held], None)
    flags = store.gate_outputs(layer.index, index) & (token_indices >= 0)
    open_ = [[{*token_indices[b, h][flags[b, h]].tolist()} for h in range(len(held[b]))] for b in range(len(held))]
    return Arrival(new, held, open_, layer.visible_unflagged)


def run(
    model: Any,
    policy: Policy,
    rows: Sequence[Tensor],
    prompts: Sequence[int],
    side: str = "left",
    steps: Sequence[int] | None = None,
) -> Run:
    """Prefill the first ``prompts[b]`` tokens of each row in one padded batch and feed the others in ``steps`` passes.

    ``steps`` are numbers of tokens a pass, by default one each.
    """
    steps = steps or [1] * (len(rows[0]) - prompts[0])
    return feed(ag.EvictionCache(model, policy), model, rows, [prompts, *([n] * len(rows) for n in steps)], side)


@torch.no_grad()
def feed(
    cache: ag.EvictionCache,
    model: Any,
    rows: Sequence[Tensor],
    passes: Sequence[Sequence[int]],
    side: str = "left",
    parts: int = 0,
) -> Run:
    """Feed rows in passes, which are lists of each row's tokens, padded by :func:`batches.padded`.

    The first ``parts`` passes are the prompt, which is announced; 0 means that the first pass is the prompt.
    """
    done, given = [0] * len(rows), []
    for lengths in passes:
        given.append(padded([row[d : d + n] for row, d, n in zip(rows, done, lengths, strict=True)], side))
        done = [d + n for d, n in zip(done, lengths, strict=True)]
    if parts:
        cache.expect(torch.cat([x["attention_mask"] for x in given[:parts]], 1).bool())
    mask = torch.zeros(len(rows), 0, dtype=torch.long)
    with watched(cache) as arrivals:
        result, outs = Run(cache, arrivals), []
        for x in given:
            mask = torch.cat([mask, x["attention_mask"]], 1)
            outs.append(step(model, cache, x["input_ids"], mask))
            result.held.append(columns(cache))
    result.logits = [row[flags] for row, flags in zip(torch.cat(outs, 1), mask.bool(), strict=True)]
    return result


def check(model: Any, rows: Sequence[Tensor], result: Run) -> None:
    """Assert that the logits of a run equal those of its record under masks."""
    for b, row in enumerate(rows):
        seen = [result.visible(layer, b, len(row)) for layer in range(len(result.arrivals))]

        def visible(layer: int, _: Tensor, seen: list[Tensor] = seen) -> Tensor:
            return seen[layer]

        wanted = partial(masked, model, row, visible)
        hold(result.logits[b], wanted(), of_pass(model, wanted))


def observed_calls(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[tuple[AttentionCall, Tensor]]]:
    """Record q, k, v of each attention call from now on, by layer, and which of them are tokens."""
    calls: dict[int, list[tuple[AttentionCall, Tensor]]] = defaultdict(list)
    attend: Callable[[ForwardPass, AttentionCall], Tensor] = ForwardPass.attend

    def recorded(self: ForwardPass, call: AttentionCall) -> Tensor:
        assert self.batch is not None
        calls[call.layer].append((call, self.batch.token_indices >= 0))
        return attend(self, call)

    monkeypatch.setattr(ForwardPass, "attend", recorded)
    return calls


def seen_by(calls: list[tuple[AttentionCall, Tensor]], name: str, row: int) -> Tensor:
    """The queries or keys ``[H, T, D]`` of a sequence's own tokens."""
    return torch.cat([getattr(call, name)[row][:, real[row]] for call, real in calls], 1)

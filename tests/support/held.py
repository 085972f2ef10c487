"""What a cache held when each token attended, and the forward pass that this stands for, written out with dense masks.

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
from ag.engine.kv_store import KVStore
from ag.engine.layer import Layer
from ag.engine.policy import Policy
from ag.model.hooks import AttentionCall
from tests.support.bounds import hold, of_pass
from tests.support.dense import masked


@dataclass
class Arrival:
    """Tokens that came to a layer: their ranks by sequence, and what each head held with them and lets queries see."""

    new: list[list[int]]
    held: list[list[list[int]]]  # ranks by sequence and head
    open: list[list[set[int]]]  # of these, those that queries see whatever their distance, by sequence and head
    near: int | None  # newest tokens, its own included, that a query sees of the others; None: all

    def seen(self, row: int, head: int, query: int) -> list[int]:
        """Ranks that a query sees of what its head held."""
        open_, near = self.open[row][head], self.near
        return [
            t for t in {*self.held[row][head], query} if t <= query and (near is None or query - t < near or t in open_)
        ]


@dataclass
class Run:
    """A run of a cache: by layer every arrival; after every pass what each layer, sequence and head holds."""

    cache: ag.EvictionCache
    arrivals: list[list[Arrival]]
    held: list[list[list[list[list[int]]]]] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)  # [own tokens, V] by sequence

    def visible(self, layer: int, row: int, length: int) -> Tensor:
        """``[Hkv, length, length]`` bool: what each query saw of the tokens that its head held when it attended."""
        heads = len(self.arrivals[layer][0].held[row])
        seen = torch.zeros(heads, length, length, dtype=torch.bool)
        for arrival in self.arrivals[layer]:
            for query in arrival.new[row]:
                for head in range(heads):
                    seen[head, query, arrival.seen(row, head, query)] = True
        return seen


def contents(cache: Any, layer: int) -> list[list[list[int]]]:
    """Ranks that a layer holds for later queries, by sequence and head."""
    return [[head.tolist() for head in heads] for heads in cache.kept_positions(layer)]


def everything(cache: Any) -> list[list[list[list[int]]]]:
    """Ranks that a cache holds for later queries, by layer, sequence and head."""
    return [contents(cache, layer) for layer in range(len(cache.layers))]


@contextmanager
def watched(cache: ag.EvictionCache) -> Iterator[list[list[Arrival]]]:
    """Record every arrival of the text's tokens at the layers of a cache; a repetition of a prompt is none."""
    arrivals: list[list[Arrival]] = [[] for _ in cache.layers]
    read = Layer.read

    def recording(layer: Layer, call: Any, batch: Any, store: KVStore, *others: Any) -> Any:
        found = read(layer, call, batch, store, *others)  # nothing goes within it
        here = batch is cache.batch  # and no repetition of kvzip's, of which nothing stays
        if here and any(layer is part for part in cache.layers):
            new = [[rank for rank in ranks if rank >= 0] for ranks in batch.ranks.tolist()]
            arrivals[layer.index].append(arrived(layer, new, batch, store))
        return found

    Layer.read = recording  # type: ignore[method-assign, assignment]
    try:
        yield arrivals
    finally:
        Layer.read = read  # type: ignore[method-assign]


def arrived(layer: Layer, new: list[list[int]], batch: Any, store: KVStore) -> Arrival:
    """What a layer holds as its queries attend."""
    index, ranks = store.ledger(layer.index)
    held = [[sorted(t for t in head.tolist() if t >= 0) for head in heads] for heads in ranks]
    dense = batch.is_prefill and layer.gates is not None and layer.gates.config.prefill == "dense"
    if layer.flagged is None or dense:
        return Arrival(new, held, [[set() for _ in heads] for heads in held], None)
    flags = store.pool.gate(torch.bool).flatten()[index] & (ranks >= 0)
    open_ = [[{*ranks[b, h][flags[b, h]].tolist()} for h in range(len(held[b]))] for b in range(len(held))]
    return Arrival(new, held, open_, layer.flagged)


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
) -> Run:
    """Feed rows in passes, each of which takes so many tokens of each row, padded on a side."""
    done = [0] * len(rows)
    mask = torch.zeros(len(rows), 0, dtype=torch.long)
    with watched(cache) as arrivals:
        result, outs = Run(cache, arrivals), []
        for lengths in passes:
            longest = max(lengths)
            ids, flags = (torch.zeros(len(rows), longest, dtype=torch.long) for _ in range(2))
            for b, (row, n) in enumerate(zip(rows, lengths, strict=True)):
                place = slice(longest - n, longest) if side == "left" else slice(0, n)
                ids[b, place], flags[b, place] = row[done[b] : done[b] + n], 1
            mask, done = torch.cat([mask, flags], 1), [d + n for d, n in zip(done, lengths, strict=True)]
            positions = (mask.cumsum(1) - 1).clamp_min(0)[:, -longest:]
            outs.append(model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache).logits)
            result.held.append(everything(cache))
    result.logits = [row[flags] for row, flags in zip(torch.cat(outs, 1), mask.bool(), strict=True)]
    return result


def check(model: Any, rows: Sequence[Tensor], result: Run) -> None:
    """Assert that the logits of a run are those of its record under masks."""
    for b, row in enumerate(rows):
        seen = [result.visible(layer, b, len(row)) for layer in range(len(result.arrivals))]

        def visible(layer: int, _: Tensor, seen: list[Tensor] = seen) -> Tensor:
            return seen[layer]

        wanted = partial(masked, model, row, visible)
        hold(result.logits[b], wanted(), of_pass(model, wanted))


def alone_too(
    model: Any, policy: Policy, rows: Sequence[Tensor], passes: Sequence[Sequence[int]], side: str = "left"
) -> Run:
    """Feed rows in a padded batch, whose logits must be those of its record, and each alone, which must hold the same.

    Returns the batch's run.
    """
    batch = feed(ag.EvictionCache(model, policy), model, rows, passes, side)
    check(model, rows, batch)
    for b, row in enumerate(rows):
        alone = feed(ag.EvictionCache(model, policy), model, [row], [[n[b]] for n in passes if n[b]])
        together = [held for held, n in zip(batch.held, passes, strict=True) if n[b]]
        assert [[layer[b] for layer in held] for held in together] == [[layer[0] for layer in x] for x in alone.held]
    return batch


def observed_calls(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[tuple[AttentionCall, Tensor]]]:
    """By layer, the q, k, v of all that comes from now on, and which of them are tokens."""
    calls: dict[int, list[tuple[AttentionCall, Tensor]]] = defaultdict(list)
    attend: Callable[[ag.EvictionCache, AttentionCall], Tensor] = ag.EvictionCache.attend

    def recorded(self: ag.EvictionCache, call: AttentionCall) -> Tensor:
        assert self.batch is not None
        calls[call.layer].append((call, self.batch.ranks >= 0))
        return attend(self, call)

    monkeypatch.setattr(ag.EvictionCache, "attend", recorded)
    return calls


def seen_by(calls: list[tuple[AttentionCall, Tensor]], name: str, row: int) -> Tensor:
    """The queries or keys ``[H, T, D]`` of a sequence's own tokens."""
    return torch.cat([getattr(call, name)[row][:, real[row]] for call, real in calls], 1)

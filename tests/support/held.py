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
from ag.engine.policy import Policy
from ag.engine.store import PagedStore
from ag.model.hooks import AttentionCall
from tests.support.bounds import hold, of_pass
from tests.support.dense import masked


@dataclass
class Arrival:
    """Tokens that came to a layer: their ranks by sequence; what each head held with them, ranks too."""

    new: list[list[int]]
    held: list[list[list[int]]]


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
                    seen[head, query, [t for t in {*arrival.held[row][head], query} if t <= query]] = True
        return seen


def contents(store: Any) -> list[list[list[int]]]:
    """Ranks that a store holds, by sequence and head."""
    rows = [ranks.tolist() for ranks in store.kept()]
    return [rows[i : i + store.kv_heads] for i in range(0, len(rows), store.kv_heads)]


@contextmanager
def watched(cache: ag.EvictionCache) -> Iterator[list[list[Arrival]]]:
    """Record every arrival of tokens at the stores of a cache."""
    arrivals: list[list[Arrival]] = [[] for _ in cache.layers]
    append = PagedStore.append

    def recording(
        store: PagedStore, k: Tensor, v: Tensor, ranks: Tensor, keep: Tensor | None, *others: Any, **more: Any
    ) -> None:
        append(store, k, v, ranks, keep, *others, **more)
        if cache.reread is not None and cache.reread.active:  # kvzip's, of which nothing stays
            return
        layer = next(i for i, x in enumerate(cache.evicting_layers) if x.store is store)
        real = torch.ones_like(ranks, dtype=torch.bool) if keep is None else keep[:, 0]
        new = [r[flags].tolist() for r, flags in zip(ranks, real, strict=True)]
        arrivals[layer].append(Arrival(new, contents(store)))

    PagedStore.append = recording  # type: ignore[method-assign, assignment]
    try:
        yield arrivals
    finally:
        PagedStore.append = append  # type: ignore[method-assign]


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
            result.held.append([contents(layer.store) for layer in cache.evicting_layers])
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
        assert self.text.now is not None
        calls[call.layer].append((call, self.text.now.real))
        return attend(self, call)

    monkeypatch.setattr(ag.EvictionCache, "attend", recorded)
    return calls


def seen_by(calls: list[tuple[AttentionCall, Tensor]], name: str, row: int) -> Tensor:
    """The queries or keys ``[H, T, D]`` of a sequence's own tokens."""
    return torch.cat([getattr(call, name)[row][:, real[row]] for call, real in calls], 1)

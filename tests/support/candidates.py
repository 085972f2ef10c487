"""Candidates made by hand, decisions on them, and the tokens that selections keep, as lists."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import ag
from ag.engine.allocators.base import Candidates
from ag.engine.evictor import Evictor
from ag.retention import INF, eviction_score


def candidates_of(
    lengths: Sequence[int],
    capacity: int,
    protected: int = 0,
    seed: int = 0,
    heads: int = 2,
    preference: Sequence[float] | None = None,
    levels: int | None = None,
) -> list[Candidates]:
    """The candidates of each layer of a batch of one, of ``lengths`` tokens; ``levels`` distinct scores make ties."""
    make = torch.Generator().manual_seed(seed)
    result = []
    for layer, n in enumerate(lengths):
        score = torch.rand(1, heads, n, generator=make)
        if levels:
            score = (score * levels).floor()
        guard = (torch.arange(n) >= n - protected).expand(1, heads, n)
        chosen = None if preference is None else torch.tensor([preference[layer]], dtype=torch.float64)
        numbers = torch.tensor([capacity]), torch.tensor([n])
        result.append(
            Candidates(eviction_score(score, guard), *numbers, evicting=torch.tensor([True]), preference=chosen)
        )
    return result


class Scripted(Evictor):
    """A decision whose layers show ready-made brought."""

    def __init__(self, allocator: str, brought: list[Candidates], **options: Any) -> None:
        heads = [x.score.shape[1] for x in brought]
        super().__init__(ag.policy(f"knorm@{allocator}", budget=1, **options), [*range(len(brought))], heads)
        self._script: list[Candidates] = brought

    def _candidates(self, reader: Any, evicting: Any, records: Any) -> Candidates:
        candidates: Candidates = self._script[reader.layer]
        return candidates

    def show(self, layer: int) -> dict[int, Tensor]:
        """Show one layer; return the masks."""
        reader: Any = SimpleNamespace(layer=layer, decoding=False, lengths=self._script[layer].prompt_lengths)
        return self.decide(reader)

    def run(self, watch: Callable[[list[list[list[int]]]], object] = lambda held: None) -> list[list[list[int]]]:
        """Show all layers; return the tokens that each head of each layer holds at the end."""
        held: list[list[list[int]]] = []
        for layer, candidates in enumerate(self._script):
            held.append([list(range(candidates.score.shape[2])) for _ in range(candidates.score.shape[1])])
            watch(held)
            for index, keep in self.show(layer).items():
                for g, tokens in enumerate(held[index]):
                    flags = keep[0, g].tolist()
                    assert not any(flags[len(tokens) :])
                    held[index][g] = [token for token, stays in zip(tokens, flags, strict=False) if stays]
            watch(held)
        return [[sorted(tokens) for tokens in heads] for heads in held]


def best(candidates: Candidates, g: int, count: int) -> list[int]:
    """The protected and the ``count`` best others, ties to the lower index."""
    n = candidates.score.shape[2]
    rivals = [p for p in range(n) if candidates.score[0, g, p] < INF]
    chosen = sorted(rivals, key=lambda p: (-float(candidates.score[0, g, p]), p))[:count]
    return sorted({*chosen, *(p for p in range(n) if candidates.score[0, g, p] == INF)})


def two_stages(
    score: Sequence[float], product: Sequence[float], protected: Sequence[bool], count: int, first: float
) -> list[int]:
    """The protected and the best of ``score`` up to a share of the count, then the best of the product; sorted."""
    kept = [p for p, safe in enumerate(protected) if safe]
    for values, limit in ((score, int(first * count)), (product, count)):
        rest = sorted((p for p in range(len(score)) if p not in kept), key=lambda p, v=values: (-v[p], p))  # type: ignore[misc]
        kept += rest[: max(0, limit - len(kept))]
    return sorted(kept)

"""PyramidKV: the lower layers get more."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ag.engine.allocators.base import Allocator, Candidates
from ag.engine.allocators.rounding import largest_remainder
from ag.errors import require


@dataclass(frozen=True, kw_only=True)
class Pyramid(Allocator):
    """Layers share along a line that descends from the first to the last.

    Source: "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling", code KVCache-Factory.

    Attributes:
        beta: steepness.
    """

    beta: int = 20

    def __post_init__(self) -> None:
        require(self, "beta", self.beta >= 1, "1 or more")

    def layer_budget(self, candidates: Candidates, layer_number: int, layers: int) -> Tensor:
        """Return the tokens ``[B]`` that the layer keeps."""
        kept = []
        for mean, num_protected, prompt in zip(
            *(x.tolist() for x in (candidates.capacity, candidates.num_protected, candidates.prompt_lengths)),
            strict=True,
        ):
            own = mean - num_protected
            # a prompt that fits stays; one that is not twice as long as the budget is shared evenly, as officially
            even = prompt < 2 * own
            line = [own] * layers if even else pyramid(own, prompt - num_protected, layers, self.beta)
            kept.append(num_protected + line[layer_number])
        return torch.tensor(kept, device=candidates.capacity.device)


def pyramid(mean: int, num_cached: int, layers: int, beta: int = 20) -> list[int]:
    """Share ``mean * layers`` tokens along a line, lower layers getting more (PyramidKV, Cai et al. 2024).

    Args:
        mean: tokens per layer on average, protected ones not counted (T).
        num_cached: tokens that compete in each layer; no layer gets more.
        layers: number of layers L.
        beta: steepness; the last layer gets ``mean // beta``. 1 is uniform.
    """
    if num_cached < mean or layers == 1:
        return [min(mean, num_cached)] * layers
    low = mean // beta
    high = 2 * mean - low
    if high > num_cached:
        high, low = num_cached, 2 * mean - num_cached
    step = (high - low) / (layers - 1)
    shares = torch.tensor([[high - index * step for index in range(layers)]], dtype=torch.float64)
    caps = torch.full((1, layers), num_cached)
    result: list[int] = largest_remainder(shares, torch.tensor([mean * layers]), caps)[0].tolist()
    return result

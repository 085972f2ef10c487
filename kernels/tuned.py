"""Launching Triton kernels: the configuration is tuned once a machine, or fixed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton

from ag.kernels.dispatch import interpreting

Shape = tuple[int, int, int]
Grid = Callable[[dict[str, Any]], tuple[int, ...]]
LOG2E = 1.4426950408889634


class Tuned:
    """A kernel and the shapes of its tiles.

    The fastest configuration is found by running each once a type, head size and doubling of the length, and is kept on
    disk by Triton. Under ``torch.use_deterministic_algorithms`` it is the first, so that machines of one kind agree to
    the bit; Triton's interpreter gets the smallest tiles.

    Args:
        kernel: a ``triton.jit`` function with a constexpr argument ``ROWS``, arguments that ``key`` names, and ``q``.
        half: (rows, warps, stages) of each configuration for 16-bit arguments; above a head size of 128, half the rows.
        single: those for float32, which does without tensor cores and needs small tiles.
        key: arguments whose change calls for another tuning.
    """

    def __init__(self, kernel: Any, half: list[Shape], single: list[Shape], key: list[str]) -> None:
        self.kernel = kernel
        self.half, self.single = _configs(half), _configs(single)
        self.wide = _configs([(rows // 2, warps, stages) for rows, warps, stages in half])
        prune = {"early_config_prune": self._fitting}
        tune = triton.autotune(self.half + self.wide + self.single, key=key, prune_configs_by=prune, cache_results=True)
        self.tuned = tune(kernel)

    def _fitting(self, _: list[triton.Config], arguments: dict[str, Any], **__: Any) -> list[triton.Config]:
        q = arguments["q"]
        if q.dtype == torch.float32:
            return self.single
        return self.half if q.shape[-1] <= 128 else self.wide

    def __call__(self, grid: Grid, *arguments: Any) -> None:
        """Launch the kernel on the device of ``q``, its first argument."""
        q = arguments[0]
        with torch.cuda.device_of(q):
            if interpreting():
                self.kernel[grid](*arguments, ROWS=16)
            elif torch.are_deterministic_algorithms_enabled():
                first = self._fitting([], {"q": q})[0]
                self.kernel[grid](*arguments, **first.all_kwargs())
            else:
                self.tuned[grid](*arguments)


def _configs(shapes: list[Shape]) -> list[triton.Config]:
    return [triton.Config({"ROWS": rows}, num_warps=warps, num_stages=stages) for rows, warps, stages in shapes]


def key_block(q: torch.Tensor) -> int:
    """Return how many keys a tile holds for the type and head size of ``q``."""
    if interpreting():
        return 16
    return 64 if q.element_size() == 2 and q.shape[-1] <= 128 else 32


def padded(dim: int) -> int:
    """Return the head size of a tile: a power of two that the tensor cores take."""
    return max(16, 1 << (dim - 1).bit_length())


def doublings(length: int) -> int:
    """Return the size class of a length for the tuner's key."""
    return min(length.bit_length(), 15)

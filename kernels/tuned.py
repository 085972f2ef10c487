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
TALLEST = 128  # rows of the largest tile
FARTHEST = (2**31 - 1) // TALLEST  # elements from one row to the next


class Tuned:
    """A kernel and the shapes of its tiles.

    The fastest configuration is found by running each once a type, head size and doubling of the length, and is kept on
    disk by Triton. Under ``torch.use_deterministic_algorithms`` it is the first, so that machines of one kind agree to
    the bit; Triton's interpreter gets the smallest tiles.

    Args:
        kernel: a ``triton.jit`` function with a constexpr argument ``ROWS``, arguments that ``key`` names, and ``q``.
        half: (rows, warps, stages) of each configuration for 16-bit arguments; above a head size of 128, half the rows.
            The first of each list fits the 99 KB of shared memory of sm_86 and sm_89; the tuner drops what does not.
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
        if arguments["q"].dtype == torch.float32:
            return self.single
        return self.half if max(arguments["D"], arguments.get("E", 0)) <= 128 else self.wide

    def first(self, *arguments: Any) -> dict[str, Any]:
        """Return the configuration of the deterministic mode for the arguments of a launch."""
        named = dict(zip(self.kernel.arg_names, arguments, strict=False))
        settings: dict[str, Any] = self._fitting([], named)[0].all_kwargs()
        return settings

    def __call__(self, grid: Grid, *arguments: Any) -> None:
        """Launch the kernel on the device of ``q``, its first argument."""
        q = arguments[0]
        with torch.cuda.device_of(q):
            if interpreting():
                self.kernel[grid](*arguments, ROWS=16)
            elif torch.are_deterministic_algorithms_enabled():
                self.kernel[grid](*arguments, **self.first(*arguments))
            else:
                self.tuned[grid](*arguments)


def _configs(shapes: list[Shape]) -> list[triton.Config]:
    return [triton.Config({"ROWS": rows}, num_warps=warps, num_stages=stages) for rows, warps, stages in shapes]


def readable(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` ``[..., T, D]`` as kernels read it: dimensions adjacent, a tile of rows within 32-bit offsets."""
    return x if x.stride(-1) == 1 and x.stride(-2) <= FARTHEST else x.contiguous()


def padding_bias(key_valid: torch.Tensor | None) -> torch.Tensor | None:
    """Return what padding ``[B, T]`` bool adds to the logits of its keys: float32, 0 or -inf; None without padding."""
    if key_valid is None:
        return None
    bias = torch.zeros(key_valid.shape, dtype=torch.float32, device=key_valid.device)
    return bias.masked_fill_(~key_valid, float("-inf"))


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

"""Launching Triton kernels with the tiles of the table, or with the fastest where tuning was asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import triton

from ag.kernels.configurations import CONFIGURATIONS, Tiles, of_card, of_type
from ag.kernels.dispatch import interpreting

Grid = Callable[[dict[str, Any]], tuple[int, ...]]
Settings = dict[str, Any]
LOG2E = 1.4426950408889634
TALLEST = 128  # rows of the largest tile
FARTHEST = (2**31 - 1) // TALLEST  # elements from one row to the next
VARIABLE = "AG_TUNE"
CLASSES = (2048, 16384)  # lengths up to which tiles are timed together; longer ones are a class of their own
SMALLEST = {"ROWS": 16}


class Tuned:
    """A kernel and the shapes of its tiles.

    They are the first of its entry in :mod:`ag.kernels.configurations`, so that nothing is timed while somebody waits
    and machines of one kind agree to the bit. With ``AG_TUNE=1`` in the environment, and without
    ``torch.use_deterministic_algorithms``, those of the entry are timed once for each type, head size and class of
    lengths (to 2,048 tokens, to 16,384, longer), whatever masks the first call has; Triton keeps the result on disk.
    Triton's interpreter gets the smallest tiles.

    Args:
        kernel: a ``triton.jit`` function with a constexpr argument ``ROWS``, arguments that ``key`` names, and ``q``.
        key: arguments whose change calls for another timing.
        smallest: constexpr arguments for the interpreter.
    """

    def __init__(self, kernel: Any, key: list[str], smallest: Mapping[str, int] = SMALLEST) -> None:
        self.kernel, self.key, self.smallest = kernel, key, smallest
        entries = [entry for cards in CONFIGURATIONS[kernel.__name__].values() for entry in cards.values()]
        self.configs = {tiles: _config(tiles) for entry in entries for tiles in entry}
        every, prune = list(self.configs.values()), {"early_config_prune": self._of_entry}
        self.timed = triton.autotune(every, key=key, prune_configs_by=prune, cache_results=True)(kernel)
        self.fastest: dict[tuple[Any, ...], Settings] = {}
        self._coded = kernel.arg_names.index("CODED") if "CODED" in kernel.arg_names else None
        self._dims = [kernel.arg_names.index(name) for name in ("D", "E") if name in kernel.arg_names]

    def entry(self, q: torch.Tensor, *dims: int, codes: bool = False) -> list[Tiles]:
        """Return the table's tiles for queries and head sizes, and whether keys and values are codes."""
        return CONFIGURATIONS[self.kernel.__name__][of_type(q.dtype, max(dims), codes=codes)][of_card(q.device)]

    def tiles(self, arguments: Sequence[Any]) -> list[Tiles]:
        """Return the table's tiles for the arguments of a launch, the one that is taken first."""
        codes = self._coded is not None and arguments[self._coded]
        return self.entry(arguments[0], *(arguments[i] for i in self._dims), codes=codes)

    def __call__(self, grid: Grid, *arguments: Any) -> None:
        """Launch the kernel on the device of ``q``, its first argument."""
        q = arguments[0]
        with torch.cuda.device_of(q):
            if interpreting():
                self.kernel[grid](*arguments, **self.smallest)
            elif os.environ.get(VARIABLE) != "1" or torch.are_deterministic_algorithms_enabled():
                self.kernel[grid](*arguments, **self.settings(self.tiles(arguments)[0]))
            else:
                self._tune(grid, arguments)

    def settings(self, tiles: Tiles) -> Settings:
        """Return what a launch with these tiles is given by name."""
        settings: Settings = self.configs[tiles].all_kwargs()
        return settings

    def _tune(self, grid: Grid, arguments: tuple[Any, ...]) -> None:
        """Launch the fastest configuration; the first call of its kind times them all."""
        q, named = arguments[0], dict(zip(self.kernel.arg_names, arguments, strict=False))
        key = (q.dtype, q.device, *(named[name] for name in self.key))
        if key in self.fastest:
            self.kernel[grid](*arguments, **self.fastest[key])
        else:
            self.timed[grid](*arguments)
            self.fastest[key] = self.timed.best_config.all_kwargs()

    def _of_entry(self, _: list[triton.Config], named: dict[str, Any], **__: Any) -> list[triton.Config]:
        dims = [named[name] for name in ("D", "E") if name in named]
        return [self.configs[tiles] for tiles in self.entry(named["q"], *dims, codes=named.get("CODED", False))]


def _config(tiles: Tiles) -> triton.Config:
    named = {"ROWS": tiles.rows} | ({"KEYS": tiles.keys} if tiles.keys else {})
    return triton.Config(named, num_warps=tiles.warps, num_stages=tiles.stages)


def readable(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` ``[..., T, D]`` as kernels read it: dimensions adjacent, a tile of rows within 32-bit offsets."""
    return x if x.stride(-1) == 1 and x.stride(-2) <= FARTHEST else x.contiguous()


def padding_bias(key_valid: torch.Tensor | None) -> torch.Tensor | None:
    """Return what padding ``[B, T]`` bool adds to the logits of its keys: float32, 0 or -inf; None without padding."""
    if key_valid is None:
        return None
    bias = torch.zeros(key_valid.shape, dtype=torch.float32, device=key_valid.device)
    return bias.masked_fill_(~key_valid, float("-inf"))


def logits2(sinks: torch.Tensor | None) -> torch.Tensor | None:
    """Return sink logits ``[H]`` in base 2, as kernels take them: float32; None: there are none."""
    return None if sinks is None else (sinks.float() * LOG2E).contiguous()


def key_block(q: torch.Tensor) -> int:
    """Return how many keys a tile holds for the type and head size of ``q``."""
    if interpreting() or q.element_size() == 4:
        return 16
    return 64 if q.shape[-1] <= 128 else 32


def padded(dim: int) -> int:
    """Return the head size of a tile: a power of two that the tensor cores take."""
    return max(16, 1 << (dim - 1).bit_length())


def size_class(length: int) -> int:
    """Return the class of a length for the tuner's key."""
    return sum(length > most for most in CLASSES)

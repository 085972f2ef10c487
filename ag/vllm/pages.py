"""vLLM's pages as minis: the move of what stays, and the memory of gate logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ag.errors import UserError
from ag.vllm.placement import Geometry


class Pages:
    """The pages of all layers, each cut into minis of N tokens of one head.

    Args:
        caches: of the model's layers, in their order, vLLM's ``[B, H, N, 2 D]``, all in one allocation whose layers
            follow each other.
        logits: vLLM's pages of one more layer, in which the gate logits of tokens lie by their slots. None: no gates.
        offsets: ``[N, 2 D]`` long, where the numbers of a token lie within a mini: its key, then its value.
    """

    def __init__(self, caches: list[Tensor], logits: Tensor | None, offsets: Tensor) -> None:
        first = caches[0]
        self.blocks, self.heads, self.block_size, width = first.shape
        self.size, self.mini_size = width // 2, self.block_size * width
        regions = caches if logits is None else [*caches, logits]
        if not all(x.is_contiguous() and x.shape == first.shape for x in regions) or not all(
            x.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() for x in regions
        ):
            raise UserError(
                f"vLLM's KV cache has the shape {tuple(first.shape)} and strides {first.stride()}: expected whole "
                "layers of one allocation; set VLLM_KV_CACHE_LAYOUT=LBHNC."
            )
        count = len(regions) * self.blocks * self.heads
        #: ``[M, 1, N, 2 D]``: all minis, as a cache of M blocks of one head.
        self.minis = first.as_strided((count, 1, self.block_size, width), (self.mini_size, self.mini_size, width, 1), 0)
        self.numbers = self.minis.view(-1)
        self.offsets = offsets.to(first.device)
        lie_in_order = torch.equal(offsets.flatten(), torch.arange(self.mini_size))
        #: ``[M N, 2 D]``, the tokens, where the numbers of one lie together. None: they do not.
        self.tokens = self.minis.view(-1, width) if lie_in_order else None
        bases = torch.tensor([x.storage_offset() // self.mini_size for x in regions], device=first.device)
        #: ``[L, H]`` long, mini of each layer and head in block 0; a block further it is H minis further.
        self.first_mini = (bases[: len(caches), None] + torch.arange(self.heads, device=first.device)).contiguous()
        #: ``[R H]`` long, all minis of block 0, in any order.
        self.all_minis = (bases[:, None] + torch.arange(self.heads, device=first.device)).flatten()
        self.logits: Tensor | None = None
        self.logits_minis = self.all_minis[len(caches) * self.heads :]
        if logits is not None:
            in_floats = logits.flatten(1).view(torch.float32)
            needed = self.block_size * len(caches) * self.heads
            if needed > in_floats.shape[1]:
                raise UserError(
                    f"Gate logits of {len(caches)} layers need {4 * needed} bytes a block, a layer has "
                    f"{4 * in_floats.shape[1]}: expected at most {len(caches) * in_floats.shape[1] // needed} layers "
                    "with this size of heads."
                )
            #: ``[B, N, L, H]`` float32, stored logits.
            self.logits = in_floats[:, :needed].unflatten(1, (self.block_size, len(caches), self.heads))

    def write_logits(self, slots: Tensor, layer: int, logits: Tensor) -> None:
        """Store logits ``[T, H]`` of a layer by the slots ``[T]`` of their tokens."""
        assert self.logits is not None
        self.logits[slots // self.block_size, slots % self.block_size, layer] = logits

    def read_logits(self, slots: Tensor) -> Tensor | None:
        """Return the logits ``[L, H, T]`` of the tokens in some slots ``[T]``; None if there are no gates."""
        if self.logits is None:
            return None
        return self.logits[slots // self.block_size, slots % self.block_size].permute(1, 2, 0)

    def read(self, minis: Tensor, places: Tensor, part: slice = slice(None)) -> Tensor:
        """Return keys and values ``[..., 2 D]``, or a part of these numbers, of tokens at places of minis ``[...]``."""
        if self.tokens is None:
            numbers: Tensor = self.numbers[minis[..., None] * self.mini_size + self.offsets[places][..., part]]
            return numbers
        tokens: Tensor = self.tokens[minis * self.block_size + places]
        return tokens[..., part]

    def write(self, minis: Tensor, places: Tensor, numbers: Tensor) -> None:
        """Store keys and values ``[n, 2 D]`` at places of minis ``[n]``."""
        if self.tokens is not None:
            self.tokens[minis * self.block_size + places] = numbers
            return
        self.numbers[minis[:, None] * self.mini_size + self.offsets[places]] = numbers

    def keys(self, layer: int, slots: Tensor) -> Tensor:
        """Return the keys ``[H, T, D]`` of a layer of the tokens in some slots ``[T]``."""
        minis = self.first_mini[layer][:, None] + slots // self.block_size * self.heads
        return self.read(minis, (slots % self.block_size).expand(self.heads, -1), slice(self.size))

    def pack(self, keep: Tensor, table: Tensor, packed: range) -> tuple[Tensor, Tensor, Tensor]:
        """Move what stays of a prompt.

        Args:
            keep: ``[L, H, T]`` bool.
            table: ``[W]`` long, the request's blocks.
            packed: places of this table whose blocks take the rows.

        Returns:
            Tokens ``[L, H]`` of each row, its minis ``[L, H, W]`` int32, and how many these are ``[L, H]``.
        """
        size, (layers, heads, _) = self.block_size, keep.shape
        row_lengths = keep.sum(-1)
        taken = -(-row_lengths // size)
        free = (self.all_minis + table[packed.start : packed.stop, None] * heads).flatten()
        end = taken.flatten().cumsum(0).view_as(taken)
        assert int(end[-1, -1]) <= len(free), "placement.place counts fewer minis than rows need"
        # kernels multiply what lies behind a row's end by 0, and half of a logit may be NaN as a number of 16 bits
        self.minis[(self.logits_minis + table[packed.start : packed.stop, None] * heads).flatten()] = 0
        index = torch.arange(len(table), device=keep.device)
        inside = index < taken[..., None]
        minis = torch.zeros(layers, heads, len(table), dtype=torch.int32, device=keep.device)
        minis[inside] = free[((end - taken)[..., None] + index)[inside]].int()
        # rows may take blocks that they are read from, if the request has none of its own for them: all is read first
        parts = [range(layers)] if packed.start == 0 else [range(x, x + 1) for x in range(layers)]
        for part in parts:
            layer, head, token = keep[part.start : part.stop].nonzero(as_tuple=True)
            layer = layer + part.start
            order = (keep[part.start : part.stop].cumsum(-1) - 1)[keep[part.start : part.stop]]
            old = self.first_mini[layer, head] + table[token // size] * heads
            numbers = self.read(old, token % size)
            self.write(minis[layer, head, order // size].long(), order % size, numbers)
        return row_lengths, minis, taken


def logits_pages(geometry: Geometry) -> int:
    """Return for how many layers beside the model's own there is memory, which holds gate logits."""
    return geometry.regions - geometry.layers


def measured_offsets(write: Any, block_size: int, size: int, dtype: torch.dtype) -> Tensor:
    """Return where a kernel puts the numbers of a token within a mini, ``[N, 2 D]`` long: its key, then its value.

    Args:
        write: ``write(keys, values, cache, slots)`` stores tokens ``[T, 1, D]`` in the slots ``[T]`` of a cache
            ``[1, 1, N, 2 D]``.
        block_size: N.
        size: D.
        dtype: of the cache.

    Raises:
        UserError: the kernel does not store each number once.
    """
    slots = torch.arange(block_size)
    cache = torch.zeros(1, 1, block_size, 2 * size, dtype=dtype)
    marks = []
    for half in range(2):
        # a 16-bit number is exact up to 256: token, number and half are read one after the other
        for values in (slots[:, None].expand(-1, size), torch.arange(size).expand(block_size, -1), torch.ones(1, 1)):
            x = values.expand(block_size, size).to(dtype)[:, None].contiguous()
            cache.zero_()
            write(*(x, torch.zeros_like(x))[:: 1 - 2 * half], cache, slots)
            marks.append(cache.flatten().float().long())
    offsets = torch.full((block_size, 2 * size), -1)
    for half in range(2):
        token, number, is_marked = marks[3 * half : 3 * half + 3]
        marked = is_marked.nonzero()[:, 0]
        offsets[token[marked], number[marked] + half * size] = marked
    if max(block_size, size) > 256 or sorted(offsets.flatten().tolist()) != [*range(2 * block_size * size)]:
        raise UserError(
            f"vLLM's kernel stores tokens of {size} numbers in blocks of {block_size} in a way that is not known: "
            "expected each number once; choose another --block-size, at most 256."
        )
    return offsets

"""vLLM's pages as minis: the move of what stays, and the memory of gate logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ag.errors import UserError


class Pages:
    """The pages of all layers, each cut into minis of N tokens of one head.

    Args:
        caches: of the model's layers, in their order, vLLM's ``[B, H, N, 2 D]``, all in one allocation whose layers
            follow each other.
        logits: vLLM's pages of one more layer, for the gate logits of the tokens in all other ones. None: no gates.
        rows_take_logits: whether packed rows may take the memory of logits too, because no row's logits are read again.
        offsets: ``[N, 2 D]`` long, where the numbers of a token lie within a mini: its key, then its value.
    """

    def __init__(self, caches: list[Tensor], logits: Tensor | None, offsets: Tensor, *, rows_take_logits: bool) -> None:
        first = caches[0]
        self.blocks, self.heads, self.block_size, width = first.shape
        self.size, self.mini_size = width // 2, self.block_size * width
        regions = caches if logits is None else [*caches, logits]
        offsets_in_order = sorted(x.storage_offset() for x in regions)
        if not all(
            x.is_contiguous()
            and x.shape == first.shape
            and x.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            for x in regions
        ) or offsets_in_order != [first.numel() * number for number in range(len(regions))]:
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
        #: ``[R]`` long, the layer of each region, as they follow each other in memory; any for that of the logits.
        self.layer_of = bases.argsort().clamp_max(len(caches) - 1)
        #: ``[L, H]`` long, mini of each layer and head in block 0; a block further it is H minis further.
        self.first_mini = (bases[: len(caches), None] + torch.arange(self.heads, device=first.device)).contiguous()
        of_block_0 = (bases[:, None] + torch.arange(self.heads, device=first.device)).flatten()
        num_layers = len(caches)
        #: long, all minis of block 0 that rows may take, in any order, and those among them that hold logits before.
        self.row_minis = of_block_0 if rows_take_logits else of_block_0[: num_layers * self.heads]
        self.logits_minis = self.row_minis[num_layers * self.heads :]
        self.logits: Tensor | None = None
        self.rows_take_logits = rows_take_logits
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

    def minis_of(self, table: Tensor) -> Tensor:
        """Return the minis ``[L, H, W]`` long of a whole request, whose blocks are ``table`` ``[W]`` long."""
        return self.first_mini[..., None] + table * self.heads

    def slots_of(self, layer: int, slots: Tensor) -> Tensor:
        """Return the slots ``[T, H]`` among minis of tokens that lie whole in vLLM's ``slots`` ``[T]`` of a layer."""
        minis = self.first_mini[layer] + slots[:, None] // self.block_size * self.heads
        return minis * self.block_size + slots[:, None] % self.block_size

    def logits_at(self, minis: Tensor, slots: Tensor) -> tuple[Tensor, ...]:
        """Return where in ``logits`` those of tokens at places of minis lie."""
        region_size = self.blocks * self.heads
        region, within = minis // region_size, minis % region_size
        return within // self.heads, slots, self.layer_of[region], within % self.heads

    def write_logits(self, slots: Tensor, logits: Tensor) -> None:
        """Store logits by the slots among minis of their tokens."""
        assert self.logits is not None
        self.logits[self.logits_at(slots // self.block_size, slots % self.block_size)] = logits

    def read_logits(self, minis: Tensor, slots: Tensor) -> Tensor | None:
        """Return the logits of tokens at places of minis; None if there are no gates."""
        return None if self.logits is None else self.logits[self.logits_at(minis, slots)]

    def read(self, minis: Tensor, slots: Tensor, part: slice = slice(None)) -> Tensor:
        """Return keys and values ``[..., 2 D]``, or a part of these numbers, of tokens at places of minis ``[...]``."""
        if self.tokens is None:
            numbers: Tensor = self.numbers[minis[..., None] * self.mini_size + self.offsets[slots][..., part]]
            return numbers
        tokens: Tensor = self.tokens[minis * self.block_size + slots]
        return tokens[..., part]

    def write(self, minis: Tensor, slots: Tensor, numbers: Tensor) -> None:
        """Store keys and values ``[n, 2 D]`` at places of minis ``[n]``."""
        if self.tokens is not None:
            self.tokens[minis * self.block_size + slots] = numbers
            return
        self.numbers[minis[:, None] * self.mini_size + self.offsets[slots]] = numbers

    def pack(self, keep: Tensor, minis: Tensor, blocks: Tensor, *, in_place: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Move what stays of a request's rows, with its logits if these are read again.

        Args:
            keep: ``[L, H, S]`` bool, which slots of each row stay.
            minis: ``[L, H, W]`` long, the minis of these slots.
            blocks: long, those that take the rows.
            in_place: whether rows may take minis that they are read from.

        Returns:
            Tokens ``[L, H]`` of each row, its minis ``[L, H, W]`` int32 with room for more, and how many these are
            ``[L, H]``.
        """
        size, (layers, heads, _) = self.block_size, keep.shape
        row_lengths = keep.sum(-1)
        taken = -(-row_lengths // size)
        free = (self.row_minis + blocks[:, None] * heads).flatten()
        end = taken.flatten().cumsum(0).view_as(taken)
        assert int(end[-1, -1]) <= len(free), "placement.place counts fewer minis than rows need"
        # A block that held logits may hold NaN patterns in 16 bits. Kernels multiply what lies past a row's end by 0,
        # and 0 x NaN is NaN: clear them.
        self.minis[(self.logits_minis + blocks[:, None] * heads).flatten()] = 0
        index = torch.arange(int(taken.max()) + 8, device=keep.device)
        inside = index < taken[..., None]
        new_minis = torch.zeros(layers, heads, len(index), dtype=torch.int32, device=keep.device)
        new_minis[inside] = free[((end - taken)[..., None] + index)[inside]].int()
        for part in [range(layers)] if in_place else [range(x, x + 1) for x in range(layers)]:
            chosen = keep[part.start : part.stop]
            layer, head, slot = chosen.nonzero(as_tuple=True)
            layer, order = layer + part.start, (chosen.cumsum(-1) - 1)[chosen]
            old = minis[layer, head, slot // size].long(), slot % size
            new = new_minis[layer, head, order // size].long(), order % size
            numbers = self.read(*old)  # all is read before anything is written
            logits = None if self.rows_take_logits else self.read_logits(*old)
            self.write(*new, numbers)
            if self.logits is not None and logits is not None:
                self.logits[self.logits_at(*new)] = logits
        return row_lengths, new_minis, taken


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

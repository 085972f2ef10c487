"""Appending to rows with a ring on a card, against the reference, to the bit."""

import pytest
import torch

from ag.kernels.ring_append import reference_ring_append
from gpu.cases import DEVICE, cast, here

pytestmark = pytest.mark.gpu


def triton_ring_append(**arguments):
    """Call the kernel; Triton is imported where a test runs."""
    from ag.kernels.ring_append.triton import triton_ring_append as append

    append(**arguments)


def buffers(rows, room, dim, width, dtype):
    """Empty rows in one buffer, with a free slot between them."""
    size = rows * (room + 1)
    keys, values = (torch.zeros(size, wide, device=DEVICE) for wide in (dim, width))
    return {
        "keys": cast(keys, dtype),
        "values": cast(values, dtype),
        "ranks": torch.zeros(size, dtype=torch.int32, device=DEVICE),
        "flags": torch.zeros(size, dtype=torch.bool, device=DEVICE),
        "starts": torch.arange(rows, device=DEVICE) * (room + 1),
        "lengths": torch.zeros(rows, dtype=torch.long, device=DEVICE),
    }


@pytest.mark.parametrize(
    ("dim", "width", "dtype", "window"),
    [(64, 64, torch.bfloat16, None), (80, 33, torch.float16, 100), (256, 256, torch.float32, 64)],
    ids=["bfloat16", "float16-window", "float32-window-is-ring"],
)
def test_steps(dim, width, dtype, window):
    batch, heads, ring, steps = 3, 4, here(64), here(1000)
    window = None if window is None else max(ring, here(window))
    torch.manual_seed(dim)
    mine, theirs = (buffers(batch * heads, steps, dim, width, dtype) for _ in "ab")
    seen = torch.zeros(batch, dtype=torch.long, device=DEVICE)
    for _ in range(steps):
        present = torch.rand(batch, device=DEVICE) < 0.9
        new = {
            "new_keys": cast(torch.randn(batch, heads, dim, device=DEVICE), dtype),
            "new_values": cast(torch.randn(batch, heads, width, device=DEVICE), dtype),
            "new_flags": torch.rand(batch, heads, device=DEVICE) < 0.5,
            "new_ranks": torch.where(present, seen, -1),
        }
        triton_ring_append(**mine, **new, ring=ring, window=window)
        reference_ring_append(**theirs, **new, ring=ring, window=window)
        seen += present
    assert torch.equal(mine["lengths"], theirs["lengths"])
    assert bool((mine["lengths"] > ring).any()) == (window != ring)  # else nothing survives the ring
    for start, length in zip(mine["starts"].tolist(), mine["lengths"].tolist(), strict=True):
        for name in ("keys", "values", "ranks", "flags"):
            assert torch.equal(mine[name][start : start + length], theirs[name][start : start + length]), name

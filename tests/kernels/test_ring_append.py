"""The ring: every version against lists."""

import pytest
import torch
from compiled import needs
from refused import refuses

from ag.errors import UserError
from ag.kernels.ring_append import cpu, reference_ring_append, ring_append

needs_compiler = needs(cpu.KERNEL)
VERSIONS = [
    pytest.param(reference_ring_append, id="reference"),
    pytest.param(cpu.ring_append, id="cpp", marks=needs_compiler),
    pytest.param(ring_append, id="picked"),
]
CASES = {
    "one_slot": {"ring": 1},
    "one_head": {"ring": 4, "batch": 1, "heads": 1},
    "gaps": {"ring": 3, "absent": 0.3},
    "window": {"ring": 5, "window": 9},
    "window_is_ring": {"ring": 6, "window": 6, "absent": 0.2},
    "wide_values": {"ring": 2, "width": 7, "dtype": torch.bfloat16},
    "all_flagged": {"ring": 4, "share": 1.0},
    "none_flagged": {"ring": 4, "share": 0.0},
}


def expected(row, slots, rank, flag, window):
    """Push (rank, flag) onto a list whose first ``slots`` places are the ring."""
    place = rank % slots
    if place < len(row):
        row += [row[place]] if row[place][1] else []
        row[place] = (rank, flag)
    else:
        row.append((rank, flag))
    for at, (old, _) in enumerate(row):
        if window is not None and old == rank - window:
            row[at] = row[-1]
            del row[-1]
            break


@pytest.mark.parametrize("append", VERSIONS)
@pytest.mark.parametrize("case", CASES)
def test_steps_equal_lists(append, case):
    check(append, CASES[case], len(case))


def check(append, case, seed=0):
    """Run the steps of a case; values follow keys, and free slots stay, as do rows without a new token."""
    wanted = {
        "batch": 2,
        "heads": 3,
        "absent": 0.0,
        "share": 0.5,
        "width": 4,
        "window": None,
        "dtype": torch.float32,
        "steps": 40,
    }
    c = wanted | case
    batch, heads, steps = c["batch"], c["heads"], c["steps"]
    generator = torch.Generator().manual_seed(seed)
    count, room = batch * heads, steps + 1
    starts = torch.arange(count) * (room + 2) + 1
    lengths = torch.zeros(count, dtype=torch.long)
    size = count * (room + 2) + 1
    keys = torch.full((size, 4), -7.0, dtype=c["dtype"])
    values = torch.full((size, c["width"]), -7.0, dtype=c["dtype"])
    ranks, flags = torch.full((size,), -7, dtype=torch.int32), torch.zeros(size, dtype=torch.bool)
    rows, seen = [[] for _ in range(count)], [0] * batch
    for _ in range(steps):
        present = torch.rand(batch, generator=generator) >= c["absent"]
        flag = torch.rand(batch, heads, generator=generator) < c["share"]
        rank = torch.where(present, torch.tensor(seen), -1)
        head = torch.arange(heads)[None, :, None] / 8
        new_keys = (rank[:, None, None] + head).expand(batch, heads, 4).to(c["dtype"])
        append(
            keys=keys,
            values=values,
            ranks=ranks,
            flags=flags,
            starts=starts,
            lengths=lengths,
            new_keys=new_keys,
            new_values=(new_keys[..., :1] + 0.5).expand(batch, heads, c["width"]),
            new_flags=flag,
            new_ranks=rank,
            ring=c["ring"],
            window=c["window"],
        )
        for r, row in enumerate(rows):
            if present[r // heads]:
                expected(row, c["ring"], seen[r // heads], bool(flag[r // heads, r % heads]), c["window"])
        seen = [n + bool(here) for n, here in zip(seen, present, strict=True)]
        assert lengths.tolist() == [len(row) for row in rows]
        for r, row in enumerate(rows):
            here = slice(int(starts[r]), int(starts[r]) + len(row))
            assert list(zip(ranks[here].tolist(), flags[here].tolist(), strict=True)) == row
            stored = torch.tensor([rank + (r % heads) / 8 for rank, _ in row]).to(c["dtype"])
            assert torch.equal(keys[here], stored[:, None].expand(-1, 4))
            assert torch.equal(values[here], (stored + 0.5)[:, None].expand(-1, c["width"]))
    for r in range(count):  # what lies between the rows
        assert (keys[starts[r] - 1] == -7).all()


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_c_plus_plus_takes_any_type(dtype):
    check(cpu.ring_append, {"ring": 3, "window": 7, "dtype": dtype})


def test_c_plus_plus_takes_buffers_without_gaps():
    buffer = torch.zeros(4, 8)
    assert cpu.unavailable(buffer, buffer[:, ::2]) == "a buffer is not contiguous"
    assert cpu.unavailable(buffer.to("meta")) == "the tensors are on meta"


def one_row(dtype=torch.float32):
    """The arguments of a step: a row of four tokens in a ring of four."""
    return {
        "keys": torch.ones(6, 4),
        "values": torch.ones(6, 4),
        "ranks": torch.arange(6, dtype=torch.int32),
        "flags": torch.ones(6, dtype=torch.bool),
        "starts": torch.tensor([0]),
        "lengths": torch.tensor([4]),
        "new_keys": torch.zeros(1, 1, 4, dtype=dtype),
        "new_values": torch.zeros(1, 1, 4, dtype=dtype),
        "new_flags": torch.ones(1, 1, dtype=torch.bool),
        "new_ranks": torch.tensor([4]),
        "ring": 4,
    }


@pytest.mark.parametrize("append", VERSIONS)
def test_autograd_notices(append):
    """A product has saved the keys; once some moved, its gradient is refused."""
    row, x = one_row(), torch.ones(6, 4, requires_grad=True)
    out = (x * row["keys"]).sum()
    append(**row)
    with pytest.raises(RuntimeError, match="inplace"):
        out.backward()
    with torch.inference_mode():
        append(**row | {"new_ranks": torch.tensor([5])})
        append(**one_row())


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_c_plus_plus_refuses_new_tokens_of_another_type(dtype):
    """Narrower ones would be read beyond their end."""
    with refuses(UserError, str(dtype), "torch.float32"):
        cpu.ring_append(**one_row(dtype))

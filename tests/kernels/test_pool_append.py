"""New tokens in place of victims: every version against lists."""

import pytest
import torch

from ag.kernels.pages import New, Reach
from ag.kernels.pool_append import cpu, pool_append, reference_pool_append
from tests.support.compiled import needs
from tests.support.paged import pages_of, read

needs_compiler = needs(cpu.KERNEL)
VERSIONS = [
    pytest.param(reference_pool_append, id="reference"),
    pytest.param(cpu.pool_append, id="cpp", marks=needs_compiler),
    pytest.param(pool_append, id="picked"),
]
CASES = {
    "plain": {"victims": 0},
    "one_head": {"heads": 1, "batch": 1},
    "gaps": {"absent": 0.4, "victims": 2},
    "only_victims": {"absent": 1.0, "victims": 3},
    "one_token_pages": {"page": 1},
    "odd_pages": {"page": 3, "victims": 4},
    "wide_values": {"width": 7, "dtype": torch.bfloat16, "gate": torch.bool},
    "probabilities": {"gate": torch.float32, "records": (1, 6)},
    "records": {"records": (2,), "victims": 2},
    "recent": {"reach": Reach(5), "gate": torch.bool, "records": (2,), "absent": 0.2},
    "window": {"reach": Reach(window=9)},
    "both": {"reach": Reach(5, 9), "gate": torch.bool, "page": 1},
    "same": {"reach": Reach(6, 6), "gate": torch.bool, "page": 16},
    "longer_than_all": {"reach": Reach(200, 300), "gate": torch.bool},
}


@pytest.mark.parametrize("append", VERSIONS)
@pytest.mark.parametrize("case", CASES)
def test_steps_equal_lists(append, case):
    check(append, CASES[case], len(case))


def check(append, case, seed=0, steps=40):
    """Run steps on rows that are lists of (rank, gate, numbers by record); keys and values follow rank and row."""
    c = {"batch": 2, "heads": 3, "absent": 0.0, "width": 4, "victims": 1, "page": 4, "records": ()} | case
    dtype, gate = c.get("dtype", torch.float32), c.get("gate")
    reach, most = c.get("reach"), 0 if "reach" in c else c["victims"]
    batch, heads, count = c["batch"], c["heads"], c["batch"] * c["heads"]
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: float(torch.rand((), generator=generator))  # noqa: E731
    room = steps + c["page"]
    pages = pages_of([0] * count, c["page"], -(-room // c["page"]), 4, c["width"], dtype, gate, seed=seed)
    records = [torch.zeros(count, width, room) for width in c["records"]]
    rows, seen = [[] for _ in range(count)], [0] * batch
    for _ in range(steps):
        present = [draw() >= c["absent"] or seen[b] < 5 for b in range(batch)]
        said = [draw() < 0.5 for _ in range(count)]
        keys, values = (torch.zeros(batch, heads, n, dtype=dtype) for n in (4, c["width"]))
        victims = torch.full((count, most), -1, dtype=torch.int32) if most else None
        for r, row in enumerate(rows):
            b = r // heads
            keys[b, r % heads], values[b, r % heads] = seen[b] + r / 8, seen[b] + r / 8 + 0.5
            if present[b]:
                row.append((seen[b], said[r], [0.0] * sum(c["records"])))
            gone = [t for t in range(len(row)) if draw() < 0.15][-most:] if most else []
            if reach is not None and present[b]:
                gone = out_of_reach(row, seen[b], *reach)
            for at in sorted(gone, reverse=True):
                last = row.pop()
                if at < len(row):
                    row[at] = last
            for place, at in enumerate(gone):
                if victims is not None:
                    victims[r, (place + r) % most] = at  # in any order
        ranks = torch.tensor([n if here else -1 for n, here in zip(seen, present, strict=True)])
        flags = None if gate is None else torch.tensor(said).view(batch, heads).to(gate)
        new = New(*(None if x is None else apart(x) for x in (keys, values, ranks, flags)))
        append(pages, new, victims, records, reach)
        seen = [n + here for n, here in zip(seen, present, strict=True)]
        assert pages.lengths.tolist() == [len(row) for row in rows]
        at = 0
        for r, row in enumerate(rows):
            stored = torch.tensor([rank + r / 8 for rank, _, _ in row]).to(dtype)
            assert read(pages, pages.ranks, r).tolist() == [rank for rank, _, _ in row]
            assert torch.equal(read(pages, pages.keys, r), stored[:, None].expand(-1, 4))
            assert torch.equal(read(pages, pages.values, r), (stored + 0.5)[:, None].expand(-1, c["width"]).to(dtype))
            if gate is not None:
                assert read(pages, pages.gate, r).bool().tolist() == [flag for _, flag, _ in row]
        for record in records:  # they are where their tokens are, and 0 on free slots; then each is told something new
            width = record.shape[1]
            for r, row in enumerate(rows):
                wanted = torch.tensor([numbers[at : at + width] for _, _, numbers in row]).view(-1, width).T
                assert torch.equal(record[r, :, : len(row)], wanted)
                assert not record[r, :, len(row) :].any()
                for slot, (rank, _, numbers) in enumerate(row):
                    for w in range(width):
                        numbers[at + w] += rank + w
                        record[r, w, slot] += rank + w
            at += width


def out_of_reach(row, rank, recent, window):
    """Return the places of what a token of this rank no longer sees."""
    leaves = [at for at, (held, flagged, _) in enumerate(row) if held + (recent or -1) == rank and not flagged]
    ends = [at for at, (held, _, _) in enumerate(row) if held + (window or -1) == rank]
    return {*leaves, *ends}


def apart(x):
    """The same numbers, with others between them."""
    return x.repeat_interleave(2, 0)[::2]


@pytest.mark.parametrize("append", VERSIONS)
def test_victims_without_new_tokens(append):
    """The highest slot goes first, so that no victim takes the place of another."""
    pages = pages_of([6], page=4)
    for slot in range(6):
        append(pages._replace(lengths=torch.tensor([slot], dtype=torch.int32)), one(slot), None, [])
    append(pages, None, torch.tensor([[1, -1, 5, 2]], dtype=torch.int32), [])
    assert read(pages, pages.ranks, 0).tolist() == [0, 3, 4]


@pytest.mark.parametrize("append", VERSIONS)
def test_a_new_token_can_be_the_victim(append):
    pages = pages_of([0], page=4)
    for rank in range(3):
        append(pages, one(rank), None, [])
    append(pages, one(3), torch.tensor([[3, 0]], dtype=torch.int32), [])
    assert read(pages, pages.ranks, 0).tolist() == [2, 1]


def one(rank, dtype=torch.float32):
    x = torch.full((1, 1, 4), float(rank), dtype=dtype)
    return New(x, x, torch.tensor([rank]))


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_c_plus_plus_takes_any_type(dtype):
    check(cpu.pool_append, {"victims": 2, "dtype": dtype})


@needs_compiler
def test_c_plus_plus_takes_buffers_without_gaps():
    pages, record = pages_of([3]), torch.zeros(1, 4, 8)
    assert cpu.unavailable(pages, record) is None
    assert cpu.unavailable(pages, record[:, ::2]) == "a buffer is not contiguous"
    assert cpu.unavailable(pages._replace(keys=pages.keys.to("meta"))) == "the tensors are on meta"


@pytest.mark.parametrize("append", VERSIONS)
def test_autograd_notices(append):
    """A product has saved the keys; once some moved, its gradient is refused."""
    pages = pages_of([0], page=4, scattered=False)
    x = torch.ones_like(pages.keys, requires_grad=True)
    out = (x * pages.keys).sum()
    append(pages, one(0), None, [])
    with pytest.raises(RuntimeError, match="inplace"):
        out.backward()
    with torch.inference_mode():
        append(pages, one(1), None, [])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_new_tokens_of_another_type_are_refused(dtype):
    """Narrower ones would be read beyond their end."""
    with pytest.raises(TypeError, match=f"{dtype}.*torch.float32"):
        pool_append(pages_of([0]), one(0, dtype))

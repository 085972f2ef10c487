"""Gaps closed: every version against lists."""

import pytest
import torch
from compiled import needs

from ag.kernels.row_close import cpu, row_close
from ag.kernels.row_close.reference import reference_row_close

needs_compiler = needs(cpu.KERNEL)
VERSIONS = [
    pytest.param(reference_row_close, id="reference"),
    pytest.param(cpu.row_close, id="cpp", marks=needs_compiler),
    pytest.param(row_close, id="picked"),
]
GONE = {
    "one each": [[3], [0], [6], [4]],
    "near the ends": [[8, 5], [4], [6, 5], [4]],
    "near the beginnings": [[0], [0], [1], [0, 1]],
    "anywhere": [[1, 2, 5], [0, 4], [], [2]],
    "none": [[], [], [], []],
    "all": [list(range(9)), list(range(5)), list(range(7)), list(range(5))],
}


def rows():
    """Four rows of 9, 5, 7 and 5 tokens with free slots between; three columns that number the slots."""
    lengths, starts = torch.tensor([9, 5, 7, 5]), torch.tensor([2, 12, 20, 27])
    slots = torch.arange(34)
    columns = [slots[:, None] * torch.ones(1, 3), slots[:, None].expand(-1, 5).bfloat16().contiguous(), slots.int()]
    return columns, starts, lengths


@pytest.mark.parametrize("to_end", [None, False, True])
@pytest.mark.parametrize("case", GONE)
@pytest.mark.parametrize("version", VERSIONS)
def test_rows_equal_lists(version, case, to_end):
    columns, starts, lengths = rows()
    keep = torch.ones(4, 9, dtype=torch.bool)
    kept = []
    for row, gone in enumerate(GONE[case]):
        keep[row, gone] = False
        first, length = int(starts[row]), int(lengths[row])
        kept.append([first + t for t in range(length) if t not in gone])
    side = version(columns, keep, starts, lengths, to_end=to_end)
    down = sum(
        slot != start + i for start, row in zip(starts.tolist(), kept, strict=True) for i, slot in enumerate(row)
    )
    stops = (starts + lengths).tolist()
    up = sum(slot != stop - len(row) + i for stop, row in zip(stops, kept, strict=True) for i, slot in enumerate(row))
    assert side == (up < down if to_end is None else to_end)
    for row, want in enumerate(kept):
        first = stops[row] - len(want) if side else int(starts[row])
        for x in columns:
            found = x.view(34, -1)[first : first + len(want)]
            assert found.long().tolist() == [[slot] * found.shape[1] for slot in want]
    free = [slot for slot in range(34) if not any(a <= slot < b for a, b in zip(starts.tolist(), stops, strict=True))]
    assert columns[2][free].tolist() == free


@pytest.mark.parametrize("to_end", [None, False, True])
@pytest.mark.parametrize("version", VERSIONS)
def test_evenly_spaced_rows_below_the_width(version, to_end):
    """Slots behind a row do not count, whatever ``keep`` says of them: here they are those of the next row."""
    x, keep = torch.arange(12.0), torch.ones(3, 6, dtype=torch.bool)
    keep[1, 0] = keep[2, 1] = False
    starts, lengths = torch.tensor([0, 4, 8]), torch.tensor([3, 3, 3])
    side = version([x], keep, starts, lengths, to_end=to_end)
    assert side == (to_end is not False)
    first = 1 if side else 0
    assert x[[0, 1, 2]].tolist() == [0, 1, 2] and x[[3, 7, 11]].tolist() == [3, 7, 11]
    assert x[[4 + first, 5 + first]].tolist() == [5, 6] and x[[8 + first, 9 + first]].tolist() == [8, 10]


@pytest.mark.parametrize("version", VERSIONS)
def test_autograd_notices(version):
    """A product has saved what lies in the column; once that moved, its gradient is refused."""
    columns, starts, lengths = rows()
    keep = torch.ones(4, 9, dtype=torch.bool)
    keep[:, 1] = False
    x = torch.ones_like(columns[0], requires_grad=True)
    out = (x * columns[0]).sum()
    version(columns, keep, starts, lengths)
    with pytest.raises(RuntimeError, match="inplace"):
        out.backward()
    with torch.inference_mode():
        version([torch.zeros_like(part) for part in columns], keep, starts, lengths)
        version(columns, keep, starts, lengths)


def test_gradients_go_where_the_tokens_came_from():
    """A gradient through a column reaches the token that was moved."""
    columns, starts, lengths = rows()
    x, keep = columns[0].clone().requires_grad_(), torch.ones(4, 9, dtype=torch.bool)
    keep[0, 0] = False
    column = x * 1.0
    row_close([column], keep, starts, lengths, to_end=False)
    column[2].sum().backward()  # the first row begins here, with what was its second token
    assert x.grad.sum(1).nonzero().flatten().tolist() == [3]

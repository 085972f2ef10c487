"""Appending of new tokens to rows: every version against lists."""

import pytest
import torch

from ag.kernels.kv_append import kv_append
from tests.support.compiled import INTERPRETED, versions
from tests.support.paged import pages_of, read

every = versions("kv_append", "reference", "cpp", "triton")
CASES = {
    "one": {"tokens": 1},
    "many": {"tokens": 37},
    "padding": {"tokens": 9, "absent": 0.4},
    "nothing": {"tokens": 3, "absent": 1.0},
    "one_token_blocks": {"page": 1},
    "odd_blocks": {"page": 3, "width": 7, "dim": 5},
    "bfloat16": {"dtype": torch.bfloat16, "gate": torch.bool},
    "float64": {"dtype": torch.float64},
    "two_types": {"values": torch.bfloat16, "tokens": 7},
    "logits": {"gate": torch.float32, "absent": 0.2},
    "not_asked": {"gate": torch.float32, "said": False},
    "flags_not_asked": {"gate": torch.bool, "said": False},
    "strided": {"strided": True, "tokens": 6},
    "large": {"tokens": 190, "page": 16},
}


def check(version, case, seed=0):
    """Append twice, and compare every column with lists of what came."""
    c = {"batch": 2, "heads": 3, "tokens": 5, "absent": 0.0, "page": 4, "dim": 4, "width": 4} | case
    dtype, gate = c.get("dtype", torch.float32), c.get("gate")
    generator = torch.Generator().manual_seed(seed)
    count, spare = c["batch"] * c["heads"], -(-2 * c["tokens"] // c["page"]) + 1
    pages = pages_of([0] * count, c["page"], spare, c["dim"], c["width"], dtype, gate, seed=seed)
    pages = pages._replace(values=pages.values.to(c.get("values", dtype)))
    rows, seen = [[] for _ in range(count)], [0] * c["batch"]
    for _ in range(2):
        there = torch.rand(c["batch"], c["tokens"], generator=generator) >= c["absent"]
        token_indices = torch.full(there.shape, -1)
        for b in range(c["batch"]):
            for t in range(c["tokens"]):
                if there[b, t]:
                    token_indices[b, t], seen[b] = seen[b], seen[b] + 1
        shape = c["batch"], c["heads"], c["tokens"]
        k, v = (torch.randn(*shape, n, generator=generator).to(dtype) for n in (c["dim"], c["width"]))
        v = v.to(pages.values.dtype)
        if c.get("strided"):
            k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
        open_gate = 1.0 if gate != torch.float32 else torch.finfo(gate).max  # where no gate said anything
        said = torch.rand(shape, generator=generator) if gate and c.get("said", True) else None
        said = said > 0.5 if said is not None and gate == torch.bool else said
        version(pages, k, v, token_indices, said)
        for row in range(count):
            b, h = divmod(row, c["heads"])
            for t in range(c["tokens"]):
                if there[b, t]:
                    one = open_gate if said is None else float(said[b, h, t])
                    rows[row].append((k[b, h, t], v[b, h, t], int(token_indices[b, t]), one))
    assert pages.lengths.tolist() == [len(row) for row in rows]
    for r, row in enumerate(rows):
        for column, at in ((pages.keys, 0), (pages.values, 1)):
            want = torch.stack([token[at] for token in row]) if row else column.new_zeros(0, column.shape[2])
            assert torch.equal(read(pages, column, r), want)
        assert read(pages, pages.token_indices, r).tolist() == [token[2] for token in row]
        if pages.gate is not None:
            assert read(pages, pages.gate, r).tolist() == [token[3] for token in row]


by_day = ("padding", "strided", "not_asked") if INTERPRETED else CASES


@every
@pytest.mark.parametrize("case", [pytest.param(x, marks=[] if x in by_day else pytest.mark.nightly) for x in CASES])
def test_rows_equal_lists(version, case):
    check(version, CASES[case], len(case))


@every
def test_the_default_type_of_torch_changes_nothing(version):
    """The gate output of a token on which no gate ran does not fit into 16 bits."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        check(version, CASES["not_asked"] | {"dtype": torch.float32})
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_operation_picks_a_version_and_refuses_another_type(fresh, caplog):
    caplog.set_level("INFO", logger="ag.kernels.dispatch")
    check(kv_append, {"gate": torch.bool})
    assert "kv_append: " in caplog.text
    pages, k = pages_of([0]), torch.zeros(1, 1, 2, 4, dtype=torch.float16)
    with pytest.raises(TypeError, match=r"float16.*float32"):
        kv_append(pages, k, k, torch.zeros(1, 2, dtype=torch.long))
    assert pages.lengths.tolist() == [0]

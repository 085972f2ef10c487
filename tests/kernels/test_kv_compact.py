"""Removal of tokens from rows in blocks: every version against lists."""

import pytest
import torch

from ag import retention
from ag.kernels.kv_compact import kv_compact
from ag.retention import INF, eviction_score
from tests.support.compiled import INTERPRETED, versions
from tests.support.paged import pages_of, places, read

every = versions("kv_compact", "reference", "cpp", "triton")
CASES = {
    "plain": {},
    "one_goes": {"count": 1},
    "ties": {"ties": True},
    "one_score_of_all_heads": {"of_head": False, "ties": True},
    "protected": {"sinks": 2, "recent": 5},
    "more_protected_than_stays": {"sinks": 6, "recent": 9, "left": 4},
    "spans": {"stays": True, "sinks": 1},
    "expired": {"expired": 8, "sinks": 3},
    "records": {"records": (2, 5)},
    "bfloat16": {"dtype": torch.bfloat16, "gate": torch.bool, "width": 7},
    "logits": {"gate": torch.float32, "page": 3},
    "one_token_blocks": {"page": 1, "records": (1,)},
    "wide": {"lengths": (1400, 900, 300, 0, 600, 1), "page": 16, "count": 40, "records": (1,)},
}


def rows_of(c, generator, seed):
    """Rows of random tokens in random order, with what is stored of each token as a list by row."""
    lengths, dtype = c["lengths"], c.get("dtype", torch.float32)
    pages = pages_of(lengths, c["page"], 1, 4, c["width"], dtype, c.get("gate"), seed=seed)
    slots = pages.block_table.shape[1] * c["page"]
    records = [torch.zeros(len(lengths), width, slots) for width in c["records"]]
    for row, length in enumerate(lengths):
        at = places(pages, row)
        for column in pages.columns[:2]:
            column.flatten(0, 1)[at] = torch.randn(length, column.shape[2], generator=generator).to(dtype)
        pages.token_indices.flatten()[at] = (torch.randperm(length + 3, generator=generator)[:length]).int()
        if pages.gate is not None:
            pages.gate.flatten()[at] = (torch.rand(length, generator=generator) > 0.5).to(pages.gate.dtype)
        for record in records:
            record[row, :, :length] = torch.randn(record.shape[1], length, generator=generator)
    return pages, records


def contents(pages, records, row):
    """Return what a row holds, slot by slot."""
    columns = [read(pages, x, row).flatten(1) if x.ndim > 2 else read(pages, x, row)[:, None] for x in pages.columns]
    length = int(pages.lengths[row])
    numbers = [x[row, :, :length].T for x in records]
    return [tuple(float(n) for x in (*columns, *numbers) for n in x[slot]) for slot in range(length)]


def drawn(case, seed):
    c = {"lengths": (20, 17, 0, 23, 20, 1), "page": 4, "width": 4, "records": ()} | case
    generator = torch.Generator().manual_seed(seed)
    return c, generator, *rows_of(c, generator, seed)


def filled(pages):
    """Which slots hold a token."""
    return torch.arange(pages.block_table.shape[1] * pages.keys.shape[1]) < pages.lengths[:, None]


def by_slot(pages, slots):
    """The token index of the token in each slot, 0 on free ones."""
    found = torch.zeros(len(pages.block_table), slots).long()
    for row in range(len(found)):
        token_indices = read(pages, pages.token_indices, row)
        found[row, : len(token_indices)] = token_indices
    return found


@every
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("case", ["records"] if INTERPRETED else ["records", "bfloat16", "logits"])
def test_a_mask_keeps_what_it_marks(version, case, share):
    _, generator, pages, records = drawn(CASES[case], 3)
    keep = (
        torch.rand(len(pages.block_table), pages.block_table.shape[1] * pages.keys.shape[1], generator=generator)
        < share
    )
    before = [contents(pages, records, row) for row in range(len(keep))]
    score, kept = torch.where(keep, INF, -INF)[:, None], (keep & filled(pages)).sum(1).int()
    version(pages, score, kept, records)
    for row, tokens in enumerate(before):
        kept = [token for slot, token in enumerate(tokens) if keep[row, slot]]
        moved = contents(pages, records, row)
        assert sorted(moved) == sorted(kept)
        for slot in range(len(kept)):  # what need not move lies where it lay
            assert not keep[row, slot] or moved[slot] == tokens[slot]
    assert all(bool((x[row, :, int(pages.lengths[row]) :] == 0).all()) for x in records for row in range(len(keep)))


def chosen():
    """Each case; in the interpreter, which takes minutes for `wide`, with both searches, two of them by day."""
    for case in CASES if not INTERPRETED else [x for x in CASES if x != "wide"]:
        for few in (0, 8) if INTERPRETED else (0,):
            by_day = not INTERPRETED or (case, few) in (("spans", 0), ("expired", 8))
            yield pytest.param(case, few, marks=[] if by_day else pytest.mark.nightly)


@every
@pytest.mark.parametrize(("case", "few"), list(chosen()))
def test_the_worst_go(monkeypatch, version, case, few):
    """In Triton one by one, if at most ``few`` go, else by a search bit by bit."""
    if INTERPRETED:
        monkeypatch.setattr("ag.kernels.kv_compact.triton.FEW_EVICTED", few)
    c, generator, pages, records = drawn(CASES[case], len(case))
    batch, heads, slots = 3, 2, pages.block_table.shape[1] * c["page"]
    score = torch.randn(batch, heads if c.get("of_head", True) else 1, slots, generator=generator)
    score = score.round() if c.get("ties") else score
    most = pages.token_indices.max() + 1
    stays = torch.rand(batch, int(most) - 2, generator=generator) < 0.2 if c.get("stays") else None
    left = torch.tensor([c.get("left", max(x - c.get("count", 6), 0)) for x in c["lengths"]]).int()
    whole = lambda n: torch.full((batch,), n)  # noqa: E731
    sinks, recent_from = whole(c.get("sinks", 0)), whole(int(most) - c.get("recent", 0))
    expired_to, found = whole(c.get("expired", 0) - 1), torch.zeros(len(pages.block_table), dtype=torch.int32)
    want = []
    for row in range(len(pages.block_table)):
        b, h = divmod(row, heads)
        tokens, token_indices = contents(pages, records, row), read(pages, pages.token_indices, row).tolist()
        going = []
        for slot, token_index in enumerate(token_indices):
            expired = token_index <= int(expired_to[b])
            span = stays is not None and token_index < stays.shape[1] and bool(stays[b, token_index])
            if expired or not (token_index < sinks[b] or token_index >= recent_from[b] or span):
                number = float("-inf") if expired else float(score[b, h % score.shape[1], slot])
                going.append((number, -token_index, slot))
        gone = {slot for *_, slot in sorted(going)[: max(len(token_indices) - int(left[row]), 0)]}
        want.append(sorted(token for slot, token in enumerate(tokens) if slot not in gone))
    at, tokens = by_slot(pages, slots).view(batch, heads, slots), whole(int(most))
    shield = retention.protected_mask(at, tokens, sinks, tokens - recent_from, stays)
    given = eviction_score(score, shield, retention.expired_mask(at, expired_to + 1, 1))
    version(pages, given if c.get("of_head", True) else given.contiguous(), left, records, found)
    assert [sorted(contents(pages, records, row)) for row in range(len(want))] == want
    assert int(found.sum()) == 0


@every
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_scores_that_are_not_finite_are_found(version, value):
    for sinks, slot, expected in ((0, 3, 1), (5, 3, 0), (0, 19, 1)):
        pages = pages_of([20])
        pages.token_indices.flatten()[places(pages, 0)] = torch.arange(20).int()
        score = torch.zeros(1, 1, 32)
        score[0, 0, slot] = value
        score[0, 0, 25] = value  # a free slot
        found = torch.zeros(1, dtype=torch.int32)
        given = eviction_score(score, torch.arange(32) < sinks)
        version(pages, given, torch.tensor([19]).int(), (), found)
        assert int(found) == expected


@every
@pytest.mark.parametrize("left", [7, 6, 5])
def test_tokens_of_minus_infinity_come_before_free_slots(version, left):
    """Whatever token index a free slot had last; a row that is not longer than what it keeps does not change."""
    pages = pages_of([6])
    token_indices = pages.token_indices.flatten()
    token_indices.zero_()
    token_indices[places(pages, 0)] = torch.arange(10, 16).int()
    score = torch.zeros(1, 1, 32)
    score[0, 0, :6] = torch.tensor([-INF, -INF, 1.0, 2.0, 3.0, 4.0])
    version(pages, score, torch.tensor([left]).int())
    assert int(pages.lengths) == min(left, 6)


def test_rows_that_hold_nothing_lose_nothing():
    pages = pages_of([0, 0], dim=8)
    kv_compact(pages, torch.ones(1, 2, 0), torch.zeros(2).int())
    assert pages.lengths.tolist() == [0, 0]

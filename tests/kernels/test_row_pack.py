"""Records of tokens without those that go, against lists."""

import pytest
import torch
from compiled import needs

from ag.kernels.row_pack import cpu, row_pack

needs_compiler = needs(cpu.KERNEL)


@pytest.mark.parametrize("forced", ["reference", pytest.param("cpp", marks=needs_compiler)])
@pytest.mark.parametrize("shape", [(2, 4, 6), (2, 4, 3, 6)])
@pytest.mark.parametrize("even", [True, False])
def test_records_follow_their_tokens(monkeypatch, forced, shape, even):
    """Two query heads a KV head; what is short ends with 0, and the record itself stays as it was."""
    monkeypatch.setenv("AG_KERNELS", forced)
    x = torch.arange(1.0, 1 + torch.tensor(shape).prod()).view(shape)
    keep = torch.tensor([[[1, 0, 1, 1, 0, 1], [0, 1, 1, 0, 1, 1]], [[1, 1, 0, 0, 1, 1], [1, 1, 1, 1, 0, 0]]]).bool()
    if not even:
        keep[1, 0, 4:] = False
    before, found = x.clone(), row_pack(x, keep, int(keep.sum(-1).max()))
    assert torch.equal(x, before) and found.shape == (*shape[:-1], 4)
    assert found.untyped_storage().nbytes() == found.nbytes  # a view would hold the memory of all six
    for b in range(2):
        for h in range(4):
            kept = keep[b, h // 2]
            for mine, theirs in zip(found[b, h].view(-1, 4), x[b, h].view(-1, 6), strict=True):
                want = theirs[kept].tolist()
                assert mine.tolist() == want + [0.0] * (4 - len(want))


@pytest.mark.parametrize("shape", [(1, 1, 6), (1, 1, 3, 6), (2, 2, 6)])
@pytest.mark.parametrize("gone", [[], [0], [0, 2, 3], list(range(6))])
def test_records_are_as_large_as_what_they_say(shape, gone):
    x, keep = torch.arange(1.0, 1 + torch.tensor(shape).prod()).view(shape), torch.ones(*shape[:2], 6).bool()
    keep[..., gone] = False
    found = row_pack(x, keep, int(keep.sum(-1).max()))
    assert torch.equal(found, x[..., [i for i in range(6) if i not in gone]])
    assert found.untyped_storage().nbytes() == found.nbytes and found.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("forced", ["reference", pytest.param("cpp", marks=needs_compiler)])
def test_a_row_that_keeps_more_than_there_is_room_for_is_cut(monkeypatch, forced):
    """Masks may say anything of free slots, which lie behind the tokens."""
    monkeypatch.setenv("AG_KERNELS", forced)
    x, keep = torch.arange(24.0).view(1, 4, 6), torch.tensor([[[1, 0, 1, 0, 1, 1], [0, 1, 1, 0, 0, 0]]]).bool()
    assert row_pack(x, keep, 2).tolist() == [[[0, 2], [6, 8], [13, 14], [19, 20]]]

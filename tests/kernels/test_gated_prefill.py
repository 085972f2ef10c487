"""Prefill that never meets evicted keys, against masking them."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ag.kernels.gated_attention import reference
from ag.kernels.gated_attention.masks import Masks
from ag.kernels.gated_prefill import gated_prefill
from ag.kernels.softmax import PLAIN, Softmax
from tests.support.bounds import near, right
from tests.support.compiled import INTERPRETED, versions
from tests.support.hard import HARD, SCALING, hard

SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0, 5.0, -3.0])
CASES = {
    "plain": {},
    "recent": {"recent": 5},
    "recent-over-blocks": {"recent": 150},
    "sinks": {"sinks": 3},
    "narrow-window": {"window": 4, "recent": 9},
    "window-sinks-recent": {"window": 140, "sinks": 4, "recent": 3},
    "right-padding-window": {"padding": "right", "sinks": 1, "window": 19},
    "left-padding": {"padding": "left", "sinks": 2, "recent": 2},
    "all": {"padding": "left", "window": 33, "recent": 5, "sinks": 2, "softmax": Softmax(None, SINKS)},
    "all kept": {"share": 1.0},
    "capped": {"softmax": Softmax(3.0), "padding": "left"},
    "capped-beside-sinks": {"softmax": Softmax(3.0, SINKS), "window": 140, "sinks": 4, "recent": 3},
}
SHAPES = [(53, 2, 1, 20)] if INTERPRETED else [(63, 4, 4, 20), (131, 6, 2, 60), (400, 3, 1, 16)]
both = versions("gated_prefill", "chunked", "triton")


def given(length, heads, kv_heads, dim, share=0.3, padding=None, softmax=PLAIN, **masks):
    """Draw q, k, v and flags as a gate makes them, and make the masks; the softmax has a sink logit for each head."""
    make = torch.Generator().manual_seed(length + heads)
    q, k, v = (torch.randn(2, length, n, dim, generator=make).transpose(1, 2) for n in (heads, kv_heads, kv_heads))
    keep = (torch.rand(2, length, kv_heads, generator=make) < share).mT
    keep[0, 0] = share == 1  # a head that keeps nothing
    if padding:
        valid = torch.arange(length).expand(2, length) < torch.tensor([[length], [length - length // 3]])
        masks["key_valid"] = valid if padding == "right" else valid.flip(1)
    return (q, k, v, keep), Masks(**masks), 0.3, softmax.of_heads(slice(heads))


def check(version, operands, *options, dtype=torch.float32):
    *operands, keep = operands
    operands = [x.to(dtype) for x in operands]
    (want,) = right(lambda *x: [reference.gated_attention(*x, keep.double(), *options)], *operands)
    near(version(*operands, keep, *options), want)


def chosen():
    """One shape a case by day, in the interpreter one case that has every mask."""
    for n, shape in enumerate(SHAPES):
        for i, case in enumerate(CASES):
            by_day = case == "all" if INTERPRETED else i % len(SHAPES) == n
            if not (INTERPRETED and "capped" in case):
                yield pytest.param(shape, case, marks=[] if by_day else pytest.mark.nightly)


@both
@pytest.mark.parametrize(("shape", "case"), list(chosen()), ids=str)
def test_versions_equal_the_reference(monkeypatch, version, shape, case):
    """In blocks; up to 256 tokens are one block under a mask too."""
    for short in (256, 0):
        monkeypatch.setattr("ag.kernels.gated_prefill.chunked.SHORT", short)
        check(version, *given(*shape, **CASES[case]))


@both
@pytest.mark.parametrize("dtype", [torch.float16] if INTERPRETED else [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("length", [33, 300] if not INTERPRETED else [33])
def test_half_precision(version, dtype, length):
    check(version, *given(length, 6, 2, 32, recent=3, sinks=4), dtype=dtype)


@both
@pytest.mark.parametrize("name", HARD if not INTERPRETED else HARD[4:])
def test_hard_inputs(version, name):
    q, k, v, keep = hard(name, 40 if INTERPRETED else 300)
    check(version, (q, k, v, keep.bool()), Masks(recent=4, sinks=1), SCALING)


@versions("gated_prefill", "chunked")
@pytest.mark.parametrize("length", [150, 300])
def test_products_beyond_float16_are_scaled_first(version, length):
    """Every query attends to the first key alone, by a product of 100,000."""
    q, k, v = (torch.zeros(1, 2, length, 16, dtype=torch.float16) for _ in range(3))
    q[..., 0], k[:, :, 0, 0], v[:] = 100.0, 1000.0, torch.randn(1, 2, length, 16)
    keep = torch.ones(1, 2, length, dtype=torch.bool)
    assert torch.equal(version(q, k, v, keep, Masks(), 0.1), v[:, :, :1].expand_as(v))


@versions("gated_prefill", "triton")
def test_evicted_keys_are_not_read(version):
    (q, k, v, keep), *options = given(80, 2, 1, 16)
    keep[:, :, 20] = False
    k[:, :, 20] = v[:, :, 20] = torch.nan
    out = version(q, k, v, keep, *options)
    assert out[:, :, :16].isfinite().all() and out[:, :, 32:].isfinite().all()  # tiles of 16 beside its own
    assert not out[:, :, 20].isfinite().any()


@pytest.mark.parametrize("version", ["chunked", "reference"])
def test_each_token_sees_itself_where_nothing_is_kept(monkeypatch, version):
    monkeypatch.setenv("AG_KERNELS", version)
    (q, k, v, keep), *_ = given(300, 4, 2, 8, 0.0)
    assert torch.equal(gated_prefill(q, k, v, keep), v.repeat_interleave(2, 1))


def test_work_falls_with_the_evicted_share():
    counts = {}
    for share in (0.25, 1.0):
        (q, k, v, _), *_ = given(4096, 1, 1, 8)
        keep = torch.arange(4096).expand(2, 1, -1) % 4 < 4 * share
        with FlopCounterMode(display=False) as counter:
            gated_prefill(q, k, v, keep)
        counts[share] = counter.get_total_flops()
    assert counts[1.0] == pytest.approx(4 * 2 * 8 * 4096 * (4096 + 128) / 2, rel=0.05)
    assert counts[0.25] < 0.3 * counts[1.0]


def test_wrong_shapes_are_named():
    q, k = torch.zeros(1, 4, 8, 16), torch.zeros(1, 3, 8, 16)
    keep = torch.ones(1, 2, 8, dtype=torch.bool)
    with pytest.raises(ValueError, match="Hkv"):
        gated_prefill(q, k, k, keep)
    with pytest.raises(ValueError, match=r"float32: .*\(1, 2, 8\), bool"):
        gated_prefill(q, q[:, :2], q[:, :2], keep.float())
    with pytest.raises(ValueError, match="recent=0"):
        gated_prefill(q, q[:, :2], q[:, :2], keep, recent=0)

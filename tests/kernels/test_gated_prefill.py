"""Prefill that never meets evicted keys, against masking them."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ag.kernels.gated_attention import gated_attention
from ag.kernels.gated_prefill import gated_prefill
from ag.kernels.gated_prefill.chunked import chunked_gated_prefill
from ag.kernels.gated_prefill.reference import reference_gated_prefill
from tests.support.bounds import bounded, hold

CASES = {
    "plain": {},
    "recent": {"recent": 5},
    "recent-over-blocks": {"recent": 150},
    "sinks": {"sinks": 3},
    "window": {"window": 17},
    "window-sinks-recent": {"window": 140, "sinks": 4, "recent": 3},
    "right-padding": {"padding": "right", "sinks": 1},
    "left-padding": {"padding": "left", "sinks": 2, "recent": 2},
    "left-padding-window": {"padding": "left", "window": 33},
}


def inputs(length, heads, kv_heads, dim, share=0.3, padding=None, **options):
    make = torch.Generator().manual_seed(length + heads)
    draw = lambda n: torch.randn(2, length, n, dim, generator=make, dtype=torch.float64).transpose(1, 2)  # noqa: E731
    q, k, v = draw(heads), draw(kv_heads), draw(kv_heads)
    keep = (torch.rand(2, length, kv_heads, generator=make) < share).mT  # as a gate makes them
    keep[0, 0] = False  # a head that keeps nothing
    valid = None
    if padding:
        valid = torch.arange(length).expand(2, length) < torch.tensor([[length], [length - length // 3]])
        valid = valid if padding == "right" else valid.flip(1)
    return (q, k, v, keep), options | {"key_valid": valid, "scaling": 0.3}


def exactly(tensors, dtype=torch.float64):
    """q, k and v as operands of a computation in a type, and the flags."""
    return [*(bounded(x, dtype) for x in tensors[:3]), tensors[3]]


@pytest.mark.parametrize("short", [0, 256], ids=["blocks", "short"])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("length", "heads", "kv_heads", "dim"), [(63, 4, 4, 20), (131, 6, 2, 60), (400, 3, 1, 16)])
def test_chunked_equals_reference_and_gated_attention(monkeypatch, length, heads, kv_heads, dim, case, short):
    monkeypatch.setattr("ag.kernels.gated_prefill.chunked.SHORT", short)
    tensors, options = inputs(length, heads, kv_heads, dim, **CASES[case])
    want = reference_gated_prefill(*exactly(tensors), **options)
    hold(chunked_gated_prefill(*tensors, **options), want)
    hold(gated_attention(*tensors[:3], tensors[3].double(), **options), want)


@pytest.mark.parametrize("short", [0, 256], ids=["blocks", "short"])
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_nothing_or_everything_kept(monkeypatch, share, short):
    monkeypatch.setattr("ag.kernels.gated_prefill.chunked.SHORT", short)
    tensors, options = inputs(200, 4, 2, 8, share)
    if share:
        tensors[3][:] = True
    out = gated_prefill(*tensors, **options)
    hold(out, reference_gated_prefill(*exactly(tensors), **options))
    if not share:  # each token sees itself alone
        assert torch.equal(out, tensors[2].repeat_interleave(2, 1))


@pytest.mark.parametrize("short", [0, 256], ids=["blocks", "short"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_lower_precision(monkeypatch, dtype, short):
    monkeypatch.setattr("ag.kernels.gated_prefill.chunked.SHORT", short)
    tensors, options = inputs(131, 6, 2, 32, recent=3, sinks=4)
    rounded = [x.to(dtype) for x in tensors[:3]]
    out = gated_prefill(*rounded, tensors[3], **options)
    assert out.dtype == dtype
    hold(out, reference_gated_prefill(*exactly([*rounded, tensors[3]], dtype), **options))


def test_work_falls_with_the_evicted_share():
    counts = {}
    for share in (0.25, 1.0):
        (q, k, v, _), options = inputs(4096, 1, 1, 8)
        keep = torch.arange(4096).expand(2, 1, -1) % 4 < 4 * share
        with FlopCounterMode(display=False) as counter:
            gated_prefill(q, k, v, keep, **options)
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

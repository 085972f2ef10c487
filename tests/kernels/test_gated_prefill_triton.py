"""Run by test_triton.py in a process of its own."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("elsewhere: test_triton.py runs this file under Triton's interpreter", allow_module_level=True)

from ag.kernels.gated_attention.reference import reference_gated_attention
from ag.kernels.gated_prefill.triton import triton_gated_prefill
from tests.support.bounds import bounded, hold

CASES = {
    "plain": {},
    "protected": {"recent": 21, "sinks": 3},
    "window": {"window": 30, "recent": 5, "sinks": 2},
    "narrow-window": {"window": 4, "recent": 9},
    "left-padding": {"padding": "left", "sinks": 2},
    "right-padding-window": {"padding": "right", "window": 19, "recent": 2},
}


def draw(length, heads, kv_heads, dim, width=None, share=0.4, padding=None, **options):
    generator = torch.Generator().manual_seed(length + heads)
    q, k, v = (
        torch.randn(2, length, h, d, generator=generator).transpose(1, 2)
        for h, d in ((heads, dim), (kv_heads, dim), (kv_heads, width or dim))
    )
    keep = torch.rand(2, kv_heads, length, generator=generator) < share
    options["key_valid"] = None
    if padding:
        valid = torch.arange(length).expand(2, length) < torch.tensor([[length], [length - length // 3]])
        options["key_valid"] = valid if padding == "right" else valid.flip(1)
    return (q, k, v, keep), options | {"scaling": dim**-0.5}


def compare(arguments, options):
    q, k, v, keep = arguments
    want = reference_gated_attention(*map(bounded, (q, k, v)), keep.double(), **options)
    hold(triton_gated_prefill(q, k, v, keep, **options), want)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_reference(case):
    compare(*draw(53, 2, 1, 20, **CASES[case]))


@pytest.mark.parametrize(
    ("length", "heads", "kv_heads", "dim", "width", "share"),
    [(63, 4, 2, 60, 60, 0.2), (40, 3, 3, 16, 24, 0.0), (33, 2, 1, 5, 5, 1.0), (1, 2, 1, 8, 8, 0.5)],
    ids=["B2-T63-H4-D60", "B2-T40-H3-D16-none", "B2-T33-H2-D5-all", "B2-T1-H2-D8"],
)
def test_odd_shapes_and_shares(length, heads, kv_heads, dim, width, share):
    compare(*draw(length, heads, kv_heads, dim, width, share, recent=2))


def test_evicted_keys_are_not_read():
    (q, k, v, keep), options = draw(80, 2, 1, 16)
    keep[:, :, 20] = False
    k[:, :, 20], v[:, :, 20] = torch.nan, torch.nan
    out = triton_gated_prefill(q, k, v, keep, **options)
    assert torch.isfinite(out[:, :, :16]).all() and torch.isfinite(out[:, :, 32:]).all()  # tiles of 16 beside its own
    assert not torch.isfinite(out[:, :, 20]).any()

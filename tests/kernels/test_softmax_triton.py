"""Run by test_triton.py in a process of its own."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("elsewhere: test_triton.py runs this file under Triton's interpreter", allow_module_level=True)

from ag.kernels.gated_attention.triton import triton_gated_attention
from ag.kernels.gated_prefill.reference import reference_gated_prefill
from ag.kernels.gated_prefill.triton import triton_gated_prefill
from ag.kernels.paged_attend.triton import triton_paged_attend
from ag.kernels.paged_decode.triton import triton_paged_decode
from ag.kernels.softmax import Softmax
from tests.kernels import test_gated_prefill
from tests.kernels.test_gated_attention import inputs
from tests.kernels.test_paged_attend import check, given
from tests.kernels.test_softmax import BOTH, KINDS, kinds
from tests.support.bounds import bounded, hold
from tests.support.paged import attended, filled, hold_rows


@kinds
def test_decoding(softmax):
    q, pages = filled([200, 0, 33, 70], 6, 2, dim=20)
    weights = torch.full((*q.shape[:2], pages.table.shape[1] * 16), torch.nan)
    out = triton_paged_decode(q, pages, 0.3, weights, softmax)
    outs, shares = attended(q, pages, 0.3, softmax=softmax)
    hold_rows(out, outs)
    hold_rows(weights, shares)


@kinds
@pytest.mark.parametrize("case", [{"window": 40}, {"recent": 6, "batch": 2}])
def test_several_new_tokens(softmax, case):
    check(triton_paged_attend, *given([90, 40], 6, 20, dim=16, **case), softmax=softmax)


def test_every_size_of_logit_is_capped():
    logits = torch.cat([torch.logspace(-6, 4, 60), -torch.logspace(-6, 4, 60), torch.zeros(1)])
    q, pages = filled([1] * len(logits), len(logits), dim=1)
    pages.keys.nan_to_num_().fill_(1.0)
    weights = torch.empty(1, len(logits), pages.table.shape[1] * 16)
    triton_paged_decode(logits[None, :, None, None], pages, 1.0, weights, Softmax(2.0, torch.zeros(len(logits))))
    hold(weights[0, :, 0], ((bounded(logits) / 2.0).tanh() * 2.0).sigmoid())


@pytest.mark.parametrize("case", ["plain", "left-padding", "window-sinks-recent"])
def test_prefill_beside_sink_logits(case):
    tensors, options = test_gated_prefill.inputs(50, 6, 2, 12, **test_gated_prefill.CASES[case])
    rounded = [*(x.float() for x in tensors[:3]), tensors[3]]
    options["softmax"] = KINDS["sinks"]
    want = reference_gated_prefill(*test_gated_prefill.exactly(rounded, torch.float32), **options)
    hold(triton_gated_prefill(*rounded, **options), want)


def test_gradients_of_sink_logits():
    """Minus the sum over queries of what a sink is paid, times ``<dO, o>``."""
    (q, k, v, _), options = inputs(21, 6, 2, 16)
    q, k, v = (x.detach().float() for x in (q, k, v))
    sinks = BOTH.sinks.clone().requires_grad_()
    out = triton_gated_attention(q, k, v, None, **options, softmax=Softmax(sinks=sinks))
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    (out * weight).sum().backward()
    exact = [bounded(x) for x in (q, k, v)]
    s = exact[0] @ exact[1].repeat_interleave(3, 1).mT * options["scaling"]
    e = s.masked_fill(torch.ones(21, 21, dtype=torch.bool).triu(1), float("-inf")).exp()
    beside = bounded(BOTH.sinks)[:, None, None].exp()
    total = e.sum(-1, keepdim=True) + beside
    mixed = e / total @ exact[2].repeat_interleave(3, 1)
    paid = beside / total * (mixed * weight.double()).sum(-1, keepdim=True)
    hold(sinks.grad, -paid.sum((0, 2, 3)))

"""Run by test_triton.py in a process of its own."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("elsewhere: test_triton.py runs this file under Triton's interpreter", allow_module_level=True)

from ag.kernels.gated_attention.triton import triton_gated_attention
from ag.kernels.gated_prefill.reference import reference_gated_prefill
from ag.kernels.gated_prefill.triton import triton_gated_prefill
from ag.kernels.paged_attention.triton import triton_paged_attention
from ag.kernels.softmax import Softmax
from tests.kernels import test_gated_prefill
from tests.kernels.test_gated_attention import inputs
from tests.kernels.test_paged_attention import check, check_held, given, weighed
from tests.kernels.test_softmax import BOTH, KINDS, kinds, single
from tests.support.bounds import bounded, hold
from tests.support.paged import filled


@kinds
def test_one_new_token(softmax):
    check_held(triton_paged_attention, *filled([200, 0, 33, 70], 6, 2, dim=20), softmax=softmax)


@kinds
@pytest.mark.parametrize("count", [1, 20])
@pytest.mark.parametrize("case", [{"window": 40}, {"recent": 6, "batch": 2}])
def test_new_tokens_behind_masks(softmax, count, case):
    check(triton_paged_attention, *given([90, 40], 6, count, dim=16, **case), softmax=softmax)


def test_every_size_of_logit_is_capped():
    logits = torch.cat([torch.logspace(-6, 4, 60), -torch.logspace(-6, 4, 60), torch.zeros(1)])
    _, weights = weighed(triton_paged_attention, *single(logits), 1.0, Softmax(2.0, torch.zeros(len(logits))))
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

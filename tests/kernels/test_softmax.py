"""Capped logits and sink logits: each operation and version against their definition."""

import math

import pytest
import torch

from ag.kernels.gated_attention import gated_attention
from ag.kernels.gated_attention.chunked import chunked_gated_attention
from ag.kernels.gated_attention.reference import reference_gated_attention
from ag.kernels.gated_prefill.chunked import chunked_gated_prefill
from ag.kernels.gated_prefill.reference import reference_gated_prefill
from ag.kernels.paged_attention import cpu as paged_cpu
from ag.kernels.paged_attention import reference_paged_attention
from ag.kernels.softmax import PLAIN, Softmax, weigh
from tests.kernels import test_gated_prefill
from tests.kernels.test_gated_attention import CAPPED, SINKS, inputs
from tests.kernels.test_paged_attention import check, check_held, given, weighed
from tests.support.bounds import bounded, hold
from tests.support.compiled import needs
from tests.support.paged import filled

BOTH = Softmax(cap=3.0, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0, 5.0, -3.0]))
KINDS = {"cap": BOTH._replace(sinks=None), "sinks": BOTH._replace(cap=None), "both": BOTH}
PAGED = [
    pytest.param(reference_paged_attention, id="reference"),
    pytest.param(paged_cpu.paged_attention, id="cpp", marks=needs(paged_cpu.KERNEL)),
]
kinds = pytest.mark.parametrize("softmax", KINDS.values(), ids=KINDS)


def by_hand(q, k, v, softmax, scaling):
    """Causal attention of one sequence, one query at a time, in Python's numbers: ``[H, T, D]`` each."""
    group, out, weights = len(q) // len(k), torch.zeros_like(v.repeat_interleave(len(q) // len(k), 0)), []
    for h, queries in enumerate(q):
        weights.append(torch.zeros(len(queries), k.shape[1], dtype=torch.float64))
        for i, query in enumerate(queries):
            s = [scaling * float(query @ key) for key in k[h // group, : i + 1]]
            s = s if softmax.cap is None else [softmax.cap * math.tanh(x / softmax.cap) for x in s]
            total = sum(math.exp(x) for x in s) + (0 if softmax.sinks is None else math.exp(float(softmax.sinks[h])))
            weights[h][i, : i + 1] = torch.tensor([math.exp(x) / total for x in s], dtype=torch.float64)
        out[h] = weights[h] @ v[h // group]
    return out


@kinds
def test_the_reference_equals_attention_by_hand(softmax):
    draw = torch.Generator().manual_seed(0)
    q, k, v = (2 * torch.randn(1, n, 23, 8, generator=draw, dtype=torch.float64) for n in (6, 2, 2))
    want = by_hand(q[0], k[0], v[0], softmax, 0.4)
    out = reference_gated_attention(q, k, v, None, None, 0.4, softmax=softmax)
    torch.testing.assert_close(out[0], want, rtol=1e-12, atol=1e-12)


@kinds
@pytest.mark.parametrize("short", [0, 256], ids=["blocks", "short"])
@pytest.mark.parametrize("case", ["plain", "left-padding", "window-sinks-recent"])
def test_prefill(monkeypatch, softmax, short, case):
    monkeypatch.setattr("ag.kernels.gated_prefill.chunked.SHORT", short)
    tensors, options = test_gated_prefill.inputs(150, 6, 2, 12, **test_gated_prefill.CASES[case])
    options["softmax"] = softmax
    want = reference_gated_prefill(*test_gated_prefill.exactly(tensors), **options)
    hold(chunked_gated_prefill(*tensors, **options), want)
    hold(gated_attention(*tensors[:3], tensors[3].double(), **options), want)


@kinds
@pytest.mark.parametrize("attend", PAGED)
@pytest.mark.parametrize("case", [{"lengths": [700, 0, 33, 256], "batch": 2}, {"lengths": [5, 290], "dim": 60}])
def test_one_new_token(softmax, attend, case):
    q, pages = filled(**{"heads": 6, "dim": 64} | case)
    check_held(attend, q, pages, 0.1, softmax=softmax)
    assert (weighed(attend, q, pages, 0.1, softmax)[0] - weighed(attend, q, pages, 0.1)[0]).abs().max() > 0.01


@kinds
@pytest.mark.parametrize("attend", PAGED)
@pytest.mark.parametrize("count", [1, 30])
@pytest.mark.parametrize("case", [{"window": 40}, {"recent": 6, "batch": 2}])
def test_new_tokens_behind_masks(softmax, attend, count, case):
    check(attend, *given([200, 90], 6, count, dim=64, **case), softmax=softmax)


def single(logits):
    """Return queries that meet one key of 1 each, so that their logits are these."""
    _, pages = filled([1] * len(logits), len(logits), dim=1)
    pages.keys.nan_to_num_().fill_(1.0)
    return logits[None, :, None, None], pages


@pytest.mark.parametrize("cap", [0.5, 50.0])
def test_cpp_caps_every_size_of_logit(cap):
    """Rows of one token: beside a sink of 0 its weight is the sigmoid of its capped logit, to a few roundings."""
    logits = torch.cat([torch.logspace(-6, 4, 400), -torch.logspace(-6, 4, 400), torch.zeros(1)])
    _, weights = weighed(paged_cpu.paged_attention, *single(logits), 1.0, Softmax(cap, torch.zeros(len(logits))))
    hold(weights[0, :, 0], ((bounded(logits) / cap).tanh() * cap).sigmoid())


@pytest.mark.slow
@pytest.mark.parametrize("attend", [reference_gated_attention, chunked_gated_attention])
@pytest.mark.parametrize("cap", [None, 1.5])
def test_gradients_of_sink_logits(attend, cap):
    (q, k, v, keep), options = inputs(13, 4, 2, 5, soft=True, padding="left", recent=2)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64, requires_grad=True)

    def run(q, k, v, sinks):
        return attend(q, k, v, keep.detach(), **options, softmax=Softmax(cap, sinks))

    assert torch.autograd.gradcheck(run, (q, k, v, sinks))


def test_a_sink_that_takes_everything_and_one_that_takes_nothing():
    (q, k, v, keep), options = inputs(20, 4, 2, 8)
    plain = chunked_gated_attention(q, k, v, keep, **options)
    for sink, want in ((80.0, torch.zeros_like(plain)), (-1e4, plain)):
        out = chunked_gated_attention(q, k, v, keep, **options, softmax=Softmax(sinks=torch.full((4,), sink)))
        torch.testing.assert_close(out, want, rtol=1e-9, atol=1e-9)


def test_a_row_that_sees_nothing():
    assert not weigh(torch.full((2, 3), float("-inf")), torch.zeros(2, 1)).any()


def test_versions_that_do_not_know_a_cap_are_left_out():
    assert PLAIN.bent is None and SINKS.bent is None and isinstance(CAPPED.bent, str)

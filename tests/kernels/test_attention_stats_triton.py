"""Run by test_triton.py in a process of its own."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("elsewhere: test_triton.py runs this file under Triton's interpreter", allow_module_level=True)

from ag.kernels.attention_stats import reference_attention_stats
from ag.kernels.attention_stats.triton import triton_attention_stats
from tests.kernels.test_attention_stats import CASES, by_reference, inputs, kinds
from tests.support.bounds import hold
from tests.support.hard import HARD, check_stats


def check(kind, given, options, *others):
    """Hold Triton to the reference; ``others``: arguments that say the same."""
    got = triton_attention_stats(kind, *(others or given), **options)
    assert got.dtype == torch.float32
    hold(got, by_reference(kind, given, options, torch.float32))


def single(q, k, *rest, dtype=torch.float32):
    """The arguments, with queries and keys in this type."""
    return q.to(dtype), k.to(dtype), *rest


@kinds
@pytest.mark.parametrize("case", CASES)
def test_equals_reference(kind, case):
    given, options = inputs(37, 2, 1, **CASES[case])
    check(kind, single(*given), options)


@kinds
@pytest.mark.parametrize(("length", "heads", "kv_heads", "dim"), [(63, 4, 2, 60), (48, 3, 3, 16), (1, 2, 1, 5)])
def test_odd_shapes(kind, length, heads, kv_heads, dim):
    given, options = inputs(length, heads, kv_heads, dim, padding="left", scattered=True)
    q, *rest = single(*given)
    check(kind, (q, *rest), options, q.transpose(1, 2).contiguous().transpose(1, 2), *rest)


@kinds
def test_transposed_ranks(kind):
    given, options = inputs(37, 2, 1, padding="left", queries="some")
    q, k, own, held, scaling = single(*given)
    check(kind, (q, k, own, held, scaling), options, q, k, own.mT.contiguous().mT, held.mT.contiguous().mT, scaling)


@kinds
def test_half_precision(kind):
    given, options = inputs(37, 2, 1, 32, skip=2)
    check(kind, single(*given, dtype=torch.float16), options)


@kinds
def test_no_query_counts(kind):
    q, k, own, *rest = single(*inputs(20, 2, 1)[0])
    assert not triton_attention_stats(kind, q, k, own * 0 - 1, *rest).any()


@pytest.mark.parametrize("hard", HARD)
@kinds
def test_hard_inputs(kind, hard):
    check_stats(triton_attention_stats, reference_attention_stats, kind, hard, 40)

"""Run by test_triton.py in a process of its own."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("elsewhere: test_triton.py runs this file under Triton's interpreter", allow_module_level=True)

from ag.kernels.column_sums.reference import reference_column_sums
from ag.kernels.column_sums.triton import triton_column_sums
from tests.kernels.test_column_sums import OPTIONS, inputs
from tests.support.bounds import bounded, hold
from tests.support.hard import HARD, check_column_sums


@pytest.mark.parametrize("case", OPTIONS, ids=str)
def test_equals_reference(case):
    q, k, options = inputs(37, 2, 1, **OPTIONS[case])
    got = triton_column_sums(q.float(), k.float(), **options)
    assert got.dtype == torch.float32
    hold(got, reference_column_sums(bounded(q.float()), bounded(k.float()), **options))


@pytest.mark.parametrize(("length", "heads", "kv_heads", "dim"), [(63, 4, 2, 60), (48, 3, 3, 16), (1, 2, 1, 5)])
def test_odd_shapes(length, heads, kv_heads, dim):
    q, k, options = inputs(length, heads, kv_heads, dim, padding="left", power=2, mean=True)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    got = triton_column_sums(q.float(), k.float(), **options)
    hold(got, reference_column_sums(bounded(q.float()), bounded(k.float()), **options))


def test_half_precision():
    q, k, options = inputs(37, 2, 1, 32, skip=2)
    q, k = q.half(), k.half()
    got = triton_column_sums(q, k, **options)
    assert got.dtype == torch.float32
    hold(got, reference_column_sums(bounded(q), bounded(k), **options))


def test_no_query_counts():
    q, k, options = inputs(20, 2, 1)
    options["queries"] = torch.zeros(2, 20, dtype=torch.bool)
    assert triton_column_sums(q.float(), k.float(), **options, mean=True).abs().sum() == 0


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("power", [1, 2])
def test_hard_inputs(name, power):
    check_column_sums(triton_column_sums, reference_column_sums, name, 40, power)

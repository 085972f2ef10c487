"""Run by test_triton.py in a process of its own."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("elsewhere: test_triton.py runs this file under Triton's interpreter", allow_module_level=True)

from ag.kernels.column_max.triton import triton_column_max
from ag.kernels.column_sums.triton import triton_column_sums
from tests.kernels.test_columns import CASES, OPERATIONS, by_reference, inputs
from tests.support.bounds import hold
from tests.support.hard import HARD, check_columns

TRITON = {"sums": triton_column_sums, "max": triton_column_max}
each = pytest.mark.parametrize("name", TRITON)


def check(name, q, k, options, more=None):
    """Hold Triton to the reference; ``more``: other arguments that say the same."""
    got = TRITON[name](q, k, **options | (more or {}))
    assert got.dtype == torch.float32
    hold(got, by_reference(name, q, k, options, torch.float32))


@pytest.mark.parametrize(("name", "options"), CASES)
def test_equals_reference(name, options):
    q, k, options = inputs(37, 2, 1, **options)
    check(name, q.float(), k.float(), options)


@each
@pytest.mark.parametrize(("length", "heads", "kv_heads", "dim"), [(63, 4, 2, 60), (48, 3, 3, 16), (1, 2, 1, 5)])
def test_odd_shapes(name, length, heads, kv_heads, dim):
    own = {"power": 2, "mean": True} if name == "sums" else {}
    q, k, options = inputs(length, heads, kv_heads, dim, padding="left", **own)
    check(name, q.float().transpose(1, 2).contiguous().transpose(1, 2), k.float(), options)


@each
def test_transposed_masks(name):
    q, k, options = inputs(37, 2, 1, padding="left", queries="some")
    turned = {mask: options[mask].mT.contiguous().mT for mask in ("queries", "key_valid")}
    check(name, q.float(), k.float(), options, turned)


@each
def test_half_precision(name):
    q, k, options = inputs(37, 2, 1, 32, **({"skip": 2} if name == "sums" else {}))
    check(name, q.half(), k.half(), options)


@each
def test_no_query_counts(name):
    q, k, options = inputs(20, 2, 1, **({"mean": True} if name == "sums" else {}))
    options["queries"] = torch.zeros(2, 20, dtype=torch.bool)
    assert TRITON[name](q.float(), k.float(), **options).abs().sum() == 0


@pytest.mark.parametrize("hard", HARD)
@pytest.mark.parametrize(("name", "options"), [("sums", {}), ("sums", {"power": 2}), ("max", {})])
def test_hard_inputs(name, options, hard):
    check_columns(TRITON[name], OPERATIONS[name][1], hard, 40, **options)

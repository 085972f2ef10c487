"""The bounds of the numerical tests: errors of real sums keep to them, and faults do not."""

import math

import pytest
import torch

from tests.support.bounds import conditioned, hold, near, right

FAULTS = {
    "a term left out": lambda a, b: a[:, 1:] @ b[1:],
    "sums in half precision": lambda a, b: (a.bfloat16() @ b.bfloat16()).float(),
    "a term twice": lambda a, b: a @ b + a[:, :1] @ b[:1],
    "not a number": lambda a, b: a @ b * math.nan,
    "another shape": lambda a, b: (a @ b)[:1],
}


def test_faults_are_found_and_float32_keeps_to_the_bound():
    make = torch.Generator().manual_seed(0)
    a, b = torch.randn(20, 300, generator=make), torch.randn(300, 20, generator=make)
    want, bound = a.double() @ b.double(), conditioned(torch.matmul, a, b)
    (of_norm,) = right(lambda *x: [torch.matmul(*x)], a, b)
    hold(a @ b, want, bound)
    near(a @ b, of_norm)
    for fault in FAULTS.values():
        with pytest.raises(AssertionError):
            hold(fault(a, b), want, bound)
        with pytest.raises(AssertionError):
            near(fault(a, b), of_norm)

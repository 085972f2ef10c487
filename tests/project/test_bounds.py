"""The bounds of the numerical tests: errors of real sums keep to them, and faults do not."""

import math

import pytest
import torch

from tests.support.bounded import bounded
from tests.support.bounds import hold


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


FAULTS = {
    "a term left out": lambda a, b: a[:, 1:] @ b[1:],
    "sums in half precision": lambda a, b: (a.bfloat16() @ b.bfloat16()).float(),
    "a term twice": lambda a, b: a @ b + a[:, :1] @ b[:1],
    "not a number": lambda a, b: a @ b * math.nan,
    "another shape": lambda a, b: (a @ b)[:1],
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_faults_are_found(fault):
    a, b = draw(20, 300), draw(300, 20, seed=1)
    want = bounded(a) @ bounded(b)
    hold(a @ b, want)
    with pytest.raises(AssertionError):
        hold(fault(a, b), want)


def test_float32_keeps_to_the_bound_and_so_do_gradients():
    x, y, results = draw(40, 40), draw(40, 40, seed=1), []
    for of in (torch.clone, bounded):
        leaves = [of(t).requires_grad_() for t in (x, y)]
        a, b = (t * 1.0 for t in leaves)
        out = (a @ b.mT).softmax(-1) @ b + torch.nn.functional.silu(a)
        grads = torch.autograd.grad((out * draw(40, 40, seed=2)).sum(), leaves)
        results.append([out.detach(), *grads])
    for got, want in zip(*results, strict=True):
        hold(got, want)
        assert float((want.error / want.exact.abs().mean()).median()) < 1e-3, "a bound that says nothing"

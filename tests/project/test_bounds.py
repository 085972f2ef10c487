"""The bounds of the numerical tests: errors of real sums keep to them, and faults do not."""

import math

import pytest
import torch

from tests.support.bounded import FUNCTION, STORED, bounded
from tests.support.bounds import hold

EPS = torch.finfo(torch.float32).eps


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_bounds_are_those_of_the_rules():
    """Of a sum, of what follows by a derivative, and of counts, which are exact."""
    found = bounded(torch.tensor([[3.0, 4.0]])) @ bounded(torch.tensor([[2.0], [-1.0]]))  # 6 - 4 = 2, 36 + 16 = 52
    assert found.exact.item() == 2
    assert found.error.item() == pytest.approx(2 * EPS * math.sqrt(2 * (4 + 52 / 2)) + STORED * EPS * 2)
    x = bounded(torch.tensor([1.5, -0.7])) * bounded(torch.tensor([2.0, 3.0]))
    assert x.error.tolist() == pytest.approx([STORED * EPS * 3, STORED * EPS * 2.1])
    rounded = (STORED + FUNCTION) * EPS
    assert x.exp().error.tolist() == pytest.approx((x.exact.exp() * (x.error + rounded)).tolist())
    count = torch.tensor([4, 5])
    assert (x / count).error.tolist() == pytest.approx(
        (x.error / count + STORED * EPS * (x.exact / count).abs()).tolist()
    )
    with pytest.raises(NotImplementedError, match=r"tests/support/bounded.py has no rule for aten.erfinv"):
        torch.erfinv(x)


FORMULAS = {
    "softmax": lambda x, y: (x @ y.mT).softmax(-1) @ y,
    "logsumexp": lambda x, y: (x * y).logsumexp(-1),
    "log_softmax": lambda x, y: (3 * x).log_softmax(-1),
    "norms": lambda x, y: torch.stack([(x / y).norm(p, dim=-1) for p in (1, 2, math.inf)]),
    "mean": lambda x, y: (x - y).square().mean(1),
    "elementary": lambda x, y: torch.nn.functional.silu(x) + torch.tanh(y) + (1 + x * x).sqrt().log(),
    "sums far from 0": lambda x, y: (x + 100).sum(1) - 50 * y.shape[1],
    "ranked": lambda x, y: (x * y).topk(3, 1).values,
    "moved": lambda x, y: torch.where(x > 0, x * y, 0.0).flip(1)[:, 2:],
    "in place": lambda x, y: (x * y).mul_(x).add_(y).masked_fill_(y > 1, 0.0),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_float32_keeps_to_the_bound_and_so_do_gradients(name):
    x, y, weight, results = draw(40, 40), draw(40, 40, seed=1), None, []
    for of in (torch.clone, bounded):
        leaves = [of(t).requires_grad_() for t in (x, y)]
        out = FORMULAS[name](*(t * 1.0 for t in leaves))
        weight = draw(*out.shape, seed=2) if weight is None else weight
        grads = torch.autograd.grad((out * weight).sum(), leaves, allow_unused=True)
        results.append([out.detach(), *(g for g in grads if g is not None)])
    for got, want in zip(*results, strict=True):
        hold(got, want)
        assert float((want.error / want.exact.abs().mean()).median()) < 1e-3, "a bound that says nothing"


FAULTS = {
    "a term left out": lambda a, b: a[:, 1:] @ b[1:],
    "sums in half precision": lambda a, b: (a.bfloat16() @ b.bfloat16()).float(),
    "a term twice": lambda a, b: a @ b + a[:, :1] @ b[:1],
    "not a number": lambda a, b: a @ b * math.nan,
    "infinite": lambda a, b: a @ b + math.inf,
    "another shape": lambda a, b: (a @ b)[:1],
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_faults_are_found(fault):
    a, b = draw(20, 300), draw(300, 20, seed=1)
    want = bounded(a) @ bounded(b)
    hold(a @ b, want)
    with pytest.raises(AssertionError):
        hold(fault(a, b), want)


def test_half_precision_is_bounded_by_its_own_eps_and_one_wrong_number_is_named():
    x, y = draw(50, 60).bfloat16(), draw(60, 50, seed=1).bfloat16()
    want = bounded(x, torch.bfloat16) @ bounded(y, torch.bfloat16)
    hold(x @ y, want)
    with pytest.raises(AssertionError, match="of the bound"):
        hold(x @ y, want.at(torch.float32).exact, want.at(torch.float32).error)
    zeros, wrong = torch.zeros(2, 4, 5, dtype=torch.float64)
    wrong[2, 3] = 3e-5
    with pytest.raises(AssertionError, match=r"logits\[2, 3\]: 3.*e-05, expected 0.0, is 3 of the bound"):
        hold(wrong, zeros, 1e-5, "logits")
    hold(wrong, zeros, 3.1e-5)

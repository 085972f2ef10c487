"""The bounds of the numerical tests: errors of real sums keep to them, and faults do not."""

import math

import pytest
import torch

from tests.support.bounded import FUNCTION, STORED, bounded
from tests.support.bounds import hold

EPS = torch.finfo(torch.float32).eps
LEAST = torch.finfo(torch.float32).smallest_normal * EPS


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_product_is_bounded_by_the_square_of_its_sum_and_the_sum_of_squares():
    a, b = torch.tensor([[3.0, 4.0]]), torch.tensor([[2.0], [-1.0]])  # 6 - 4 = 2, 36 + 16 = 52
    found = bounded(a) @ bounded(b)
    assert found.exact.item() == 2
    assert found.error.item() == pytest.approx(2 * EPS * math.sqrt(2 * (4 + 52 / 2)) + STORED * EPS * 2)


def test_errors_go_on_by_the_derivative():
    x = bounded(torch.tensor([1.5, -0.7])) * bounded(torch.tensor([2.0, 3.0]))
    assert x.error.tolist() == pytest.approx([STORED * EPS * 3, STORED * EPS * 2.1])
    rounded = (STORED + FUNCTION) * EPS
    assert x.exp().error.tolist() == pytest.approx((x.exact.exp() * (x.error + rounded)).tolist())
    assert (x - x).exact.tolist() == [0, 0] and (x - x).error.tolist() == (2 * x.error).tolist()
    assert x.amax().error.item() == x.error.max().item()


FORMULAS = {
    "softmax": lambda x, y: (x @ y.mT).softmax(-1) @ y,
    "logsumexp": lambda x, y: (x * y).logsumexp(-1),
    "log_softmax": lambda x, y: (3 * x).log_softmax(-1),
    "norm": lambda x, y: (x / y).norm(dim=-1),
    "norms": lambda x, y: torch.stack([x.norm(p, dim=-1) for p in (1, 2, math.inf)]),
    "mean": lambda x, y: (x - y).square().mean(1),
    "elementary": lambda x, y: torch.nn.functional.silu(x) + torch.tanh(y) + (1 + x * x).sqrt().log(),
    "sums far from 0": lambda x, y: (x + 100).sum(1) - 50 * y.shape[1],
    "ranked": lambda x, y: (x * y).topk(3, 1).values,
    "moved": lambda x, y: torch.where(x > 0, x * y, 0.0).flip(1)[:, 2:],
    "in place": lambda x, y: (x * y).mul_(x).add_(y).masked_fill_(y > 1, 0.0),
}


@pytest.mark.parametrize("shape", [(40, 40), (3, 700)], ids=str)
@pytest.mark.parametrize("name", FORMULAS)
def test_float32_keeps_to_the_bound_and_so_do_gradients(name, shape):
    x, y, weight = draw(*shape), draw(*shape, seed=1), None
    if name == "softmax" and shape[0] < 40:
        x, y = x.mT, y.mT
    results = []
    for of in (torch.clone, bounded):
        leaves = [of(t).requires_grad_() for t in (x, y)]
        moved = [t * 1.0 for t in leaves] if name == "in place" else leaves
        out = FORMULAS[name](*moved)
        weight = draw(*out.shape, seed=2) if weight is None else weight
        grads = torch.autograd.grad((out * weight).sum(), leaves, allow_unused=True)
        results.append([out.detach(), *(g for g in grads if g is not None)])
    for got, want in zip(*results, strict=True):
        hold(got, want)
        assert float((want.error / want.exact.abs().mean()).median()) < 1e-3, "a bound that says nothing"


def test_half_precision_is_bounded_by_its_own_eps():
    x, y = draw(50, 60).bfloat16(), draw(60, 50, seed=1).bfloat16()
    want = bounded(x, torch.bfloat16) @ bounded(y, torch.bfloat16)
    hold(x @ y, want)
    with pytest.raises(AssertionError, match="of the bound"):
        hold(x @ y, want.at(torch.float32).exact, want.at(torch.float32).error)
    hold((x.float() @ y.float()).bfloat16(), bounded(x) @ bounded(y))  # sums in float32, one rounding at the end


FAULTS = {
    "a term left out": lambda a, b: a[:, 1:] @ b[1:],
    "sums in half precision": lambda a, b: (a.bfloat16() @ b.bfloat16()).float(),
    "a term twice": lambda a, b: a @ b + a[:, :1] @ b[:1],
    "not a number": lambda a, b: a @ b * math.nan,
    "infinite": lambda a, b: a @ b + math.inf,
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_faults_are_found(fault):
    a, b = draw(20, 300), draw(300, 20, seed=1)
    want = bounded(a) @ bounded(b)
    hold(a @ b, want)
    with pytest.raises(AssertionError, match="of the bound"):
        hold(fault(a, b), want)


def test_one_wrong_number_among_many_is_named():
    want = torch.zeros(4, 5, dtype=torch.float64)
    got = want.clone()
    got[2, 3] = 3e-5
    with pytest.raises(AssertionError, match=r"logits\[2, 3\]: 3.*e-05, expected 0.0, is 3 of the bound"):
        hold(got, want, 1e-5, "logits")
    hold(got, want, 3.1e-5)
    with pytest.raises(AssertionError):
        hold(got[0], want, 1.0)  # another shape


def test_what_is_exact_must_be_equal():
    hold(torch.ones(3), torch.ones(3), 0.0)
    with pytest.raises(AssertionError, match="is inf of the bound"):
        hold(torch.ones(3) + EPS, torch.ones(3), 0.0)


def test_an_operation_without_a_rule_is_named():
    with pytest.raises(NotImplementedError, match=r"tests/support/bounded.py has no rule for aten.erfinv"):
        torch.erfinv(bounded(torch.zeros(2)))

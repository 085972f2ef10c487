"""How far a number may be from the right one: bounds that follow from operands, and the assertion that uses them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

CHANGES = 8  # random changes of the operands, of which the mean square is taken
STEP = 2.0**-10  # of a change: far above roundings of float32, far below what bends a result
ROUNDINGS = 16  # of every operand and of the result
STORED_16 = 4  # of operands and results in 16 bits
PASSES = 8  # differences of a pass in float32 to one in float64
carried: WeakKeyDictionary[Any, float] = WeakKeyDictionary()  # bounds by random tokens, once a model


def hold(got: Tensor | float, want: Tensor | float, bound: Tensor | float, name: object = "") -> None:
    """Assert that a result is within a bound of the right one.

    Args:
        got: the result, a number, or of any shape and type.
        want: the right result.
        bound: largest absolute difference: a number, or one for each element.
        name: what an error message calls the result.
    """
    got, want = (x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64) for x in (got, want))
    assert got.shape == want.shape, (name, got.shape, want.shape)
    mine, right = got.detach().double(), want.detach().double()
    error = (mine - right).abs().masked_fill(mine == right, 0.0)  # infinities too
    share = torch.where(error == 0, 0.0, error / bound) if error.numel() else torch.zeros(1)
    worst = float(share.max())
    place = [int(i) for i in torch.unravel_index(share.argmax(), share.shape)]
    found = f"{name}{place}: {got[tuple(place)]}, expected {want[tuple(place)]}" if error.numel() else ""
    assert worst <= 1, f"{found}, is {worst:.3g} of the bound"


class Right(NamedTuple):
    """What is right, and how far a computation in a smaller type may be from it.

    Attributes:
        value: float64.
        moved: norm of what a relative change of 1 of all operands, up or down at random, and of the result would do.
        terms: of the longest sum.
    """

    value: Tensor
    moved: float
    terms: int

    def allowed(self, dtype: torch.dtype) -> float:
        """Return the norm of what rounding may do where operands and results have a type, and sums at least float32.

        A sum of n terms in any order moves by some sqrt(n) of its roundings.
        """
        eps, single = torch.finfo(dtype).eps, torch.finfo(torch.float32).eps
        in_16_bits = STORED_16 * eps if eps > single else 0.0
        return (in_16_bits + (ROUNDINGS + math.sqrt(self.terms)) * min(eps, single)) * self.moved


def right(function: Callable[..., Sequence[Tensor]], *operands: Tensor) -> list[Right]:
    """Compute what a function gives in float64, and by how much that moves with its operands."""
    operands = tuple(x.detach().double() for x in operands)
    draw = torch.Generator(operands[0].device).manual_seed(0)
    signs = (torch.randint(0, 2, x.shape, generator=draw, device=x.device) * 2 - 1 for x in operands)
    plain = function(*operands)
    moved = function(*(x * (1 + STEP * sign) for x, sign in zip(operands, signs, strict=True)))
    terms = max(max(x.shape, default=1) for x in operands)
    return [Right(x, float((y - x).norm()) / STEP + float(x.norm()), terms) for x, y in zip(plain, moved, strict=True)]


def near(got: Tensor, want: Right, what: object = "", dtype: torch.dtype | None = None) -> None:
    """Hold a result to what is right, by the norm of the difference.

    Args:
        got: the result.
        want: what it should be.
        what: a name for messages.
        dtype: of the operands; None means that of the result.
    """
    assert got.shape == want.value.shape, (what, got.shape, want.value.shape)
    error, allowed = float((got.detach().double() - want.value).norm()), want.allowed(dtype or got.dtype)
    assert error <= allowed, f"{what}: off by {error:.3g}, allowed {allowed:.3g}"


def conditioned(function: Callable[..., Tensor], *operands: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Bound a computation by what its operands' roundings do to the result.

    A computation that is as good as its type allows gives what is right for operands that are a few roundings off, and
    rounds that a few times. So the bound of an element is ROUNDINGS times the root mean square of what it moves by when
    every operand moves up or down at random by one, and as many roundings of itself. That follows from the function and
    the operands, not from how it is computed: cancellation that a better formula avoids is found.

    Args:
        function: of the operands, linear where they move by a thousandth.
        operands: what is given, floating.
        dtype: that is computed in, if no operand has a better one.

    Returns:
        Bounds of the result's elements, float64.
    """
    eps, draw = torch.finfo(dtype).eps, torch.Generator().manual_seed(0)
    operands = tuple(x.detach().to(torch.promote_types(x.dtype, dtype)) for x in operands)
    plain, squares = function(*operands).double(), []
    for _ in range(CHANGES):
        signs = (torch.randint(0, 2, x.shape, generator=draw) * 2 - 1 for x in operands)
        moved = function(*(x * (1 + STEP * sign) for x, sign in zip(operands, signs, strict=True)))
        squares.append((moved.double() - plain).square())
    return ROUNDINGS * eps * (torch.stack(squares).mean(0).sqrt() / STEP + plain.abs())


@torch.no_grad()
def of_pass(model: Any, logits: Callable[[], Tensor], dtype: torch.dtype | None = None) -> float:
    """Bound how far the logits of two passes over the same tokens may be apart, summed in whatever order.

    How far a model carries roundings is measured by a reference: in float32 against itself in float64. The bound is
    PASSES times the largest difference: two for two passes, and four for tokens, orders and machines.

    Args:
        model: a model in float32 or float64, which is as before when this returns.
        logits: the reference, a pass of the model as it is when called.
        dtype: of the passes that are compared; that of the model unless given.
    """
    own, found = model.dtype, []
    for kind in (torch.float64, torch.float32):
        model.to(kind)
        found.append(logits().double())
    model.to(own)
    eps = torch.finfo(dtype or own).eps / torch.finfo(torch.float32).eps
    return of_float32(found[1], found[0]) * eps


def of_float32(plain: Tensor, exact: Tensor) -> float:
    """Bound a float32 computation by how far another one, the reference's, is from its own result in float64."""
    return PASSES * float((plain.double() - exact.double()).abs().max())


def of_logits(model: Any, *rows: Tensor) -> float:
    """Bound logits as :func:`of_pass` does, by plain passes.

    Args:
        model: a causal model in float32.
        rows: tokens ``[T]`` of a kind with those of the test; random ones, once a model, if there are none.
    """
    if rows:
        there = [row[None].to(model.device) for row in rows]
        return max(of_pass(model, lambda ids=ids: model(ids, use_cache=False).logits) for ids in there)  # type: ignore[misc]
    if model not in carried:
        draw = torch.Generator().manual_seed(0)
        carried[model] = of_logits(model, *torch.randint(3, model.config.vocab_size, (2, 48), generator=draw))
    return carried[model]


def of_nats(model: Any, *rows: Tensor) -> float:
    """Bound how far the nats of a token, or a mean of several, may be apart: a logit and the sum of all move them."""
    return 2 * of_logits(model, *rows)


def of_weights(q: Tensor, k: Tensor, scaling: float, rows: int = 1) -> float:
    """Bound attention weights in float32, or sums of what several queries pay, relative to themselves.

    A logit is a sum of products, which float32 rounds by 4 eps sum |q k|; a weight, a quotient of exponentials, moves
    by twice that; a sum of M weights by M eps more.

    Args:
        q: queries ``[..., T, D]``.
        k: the keys ``[..., N, D]`` that they see.
        scaling: factor of the logits.
        rows: queries that are summed.
    """
    largest = scaling * float((q.double().abs() @ k.double().abs().mT).max())
    return torch.finfo(torch.float32).eps * (4 * (2 + 2 * largest) + rows)


def in_float64(model: Any) -> Any:
    """Turn a Llama into float64, its norms too, which transformers computes in float32."""
    for part in model.double().modules():
        if isinstance(part, LlamaRMSNorm):
            part.forward = functools.partial(rms_norm, part)  # type: ignore[method-assign]
    return model


def rms_norm(part: LlamaRMSNorm, x: Tensor) -> Tensor:
    """Compute a norm in the type of its input."""
    return part.weight * (x * (x.square().mean(-1, keepdim=True) + part.variance_epsilon).rsqrt())

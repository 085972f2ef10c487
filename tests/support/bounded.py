"""Float64 tensors that carry how far a computation in a smaller type may be from them.

``bounded(x)`` is an operand that is known exactly. What a reference, an oracle or autograd computes from it carries an
elementwise bound, which every operation derives from its operands:

- A product or a sum of n terms ``t_i = a_i b_i``: ``2 eps sqrt(n ((sum t_i)^2 + sum t_i^2 / 2))``, about
  ``4 eps sum |t_i|`` where signs are mixed and ``2 eps sqrt(n) sum |t_i|`` where they agree. It is twelve standard
  deviations of n independent roundings, each of at most ``eps / 2`` of a partial sum, one after the other in an order
  that does not depend on the terms: the mean square of partial sums is ``(sum t_i)^2 / 3 + sum t_i^2 / 6``. Vectors,
  blocks and threads make partial sums smaller. Sums are made in float32 or better.
- An elementary function, such as exp: ``FUNCTION eps |f(x)|``.
- Every result: ``STORED eps |result|`` of the type that it is stored in.
- Errors of the operands go on by the derivative, with absolute values. Products of errors are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
FUNCTION = 8  # roundings of an elementary function: exp of native.h promises 1e-6, which is 8.4 eps of float32
STORED = 1.5  # a rounding is at most eps / 2, and no error may take more than a third of its bound
UNDERFLOW = math.exp(-87)  # below which exp in float32 may be 0


class Bounded(Tensor):
    """A float64 tensor and a bound of its error.

    Attributes:
        exact: what it is, in float64.
        error: how far the same number in the smaller type may be from it, of the same shape.
        eps: of the type in which results are stored.
    """

    exact: Tensor
    error: Tensor
    eps: float

    @staticmethod
    def __new__(cls, exact: Tensor, error: Tensor, eps: float) -> Bounded:
        made: Bounded = Tensor._make_wrapper_subclass(
            cls, exact.shape, dtype=exact.dtype, strides=exact.stride(), storage_offset=exact.storage_offset()
        )
        made.exact, made.error, made.eps = exact, error, eps
        return made

    def at(self, dtype: torch.dtype) -> Bounded:
        """Return the same numbers for results that are stored in another type: errors are multiples of its eps."""
        eps = torch.finfo(dtype).eps
        return Bounded(self.exact, self.error * eps / self.eps, eps)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Bounded({self.exact}, error={self.error})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        if name.endswith("_") and not name.startswith("_"):
            made = getattr(aten, name[:-1])(*args, **kwargs)
            args[0].exact.copy_(exact_of(made))
            args[0].error.copy_(error_of(made))
            return args[0]
        if name in COMPOSED:
            return COMPOSED[name](*args, **kwargs)
        exact = func(*map_tensors(exact_of, args), **map_tensors(exact_of, kwargs))
        parts = list(exact) if isinstance(exact, list | tuple) else [exact]
        if not any(isinstance(x, Tensor) and x.is_floating_point() for x in parts):
            return exact  # comparisons, indices, numbers of Python
        eps = max(x.eps for x in tensors((args, kwargs)) if isinstance(x, Bounded))
        if name in MOVES:
            errors = moved(func, name, args, kwargs)
        elif name in RULES:
            errors = RULES[name](exact, eps, *args, **kwargs)
        else:
            raise NotImplementedError(f"tests/support/bounded.py has no rule for aten.{name}")
        errors = list(errors) if isinstance(errors, list | tuple) else [errors]
        errors += [None] * (len(parts) - len(errors))  # of indices
        found = [Bounded(x, e, eps) if x.is_floating_point() else x for x, e in zip(parts, errors, strict=True)]
        return found[0] if isinstance(exact, Tensor) else found


def bounded(x: Tensor, dtype: torch.dtype = torch.float32) -> Bounded:
    """Return an operand, known exactly, of a computation whose results are stored in ``dtype``."""
    exact = x.detach().double()
    return Bounded(exact, torch.zeros_like(exact), torch.finfo(dtype).eps)


def exact_of(x: Any) -> Any:
    """Return a tensor's numbers."""
    return x.exact if isinstance(x, Bounded) else x


def error_of(x: Any) -> Any:
    """Return the bound of a tensor's errors: 0 for one that is no :class:`Bounded`, itself for one that counts."""
    if isinstance(x, Bounded):
        return x.error
    return torch.zeros_like(x) if isinstance(x, Tensor) and x.is_floating_point() else x


def map_tensors(change: Callable[[Any], Any], x: Any) -> Any:
    """Change the tensors among arguments."""
    if isinstance(x, list | tuple):
        return type(x)(map_tensors(change, y) for y in x)
    if isinstance(x, dict):
        return {name: map_tensors(change, y) for name, y in x.items()}
    return change(x)


def tensors(x: Any) -> Iterator[Tensor]:
    """Yield the tensors among arguments."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, list | tuple | dict):
        for y in x.values() if isinstance(x, dict) else x:
            yield from tensors(y)


#: What moves numbers, or puts exact ones in their place: bounds move alike, and those are 0.
MOVES = {
    "view", "_unsafe_view", "expand", "transpose", "t", "permute", "unsqueeze", "squeeze", "slice", "select", "unbind",
    "split", "alias", "detach", "clone", "index", "index_select", "gather", "cat", "stack", "flip", "repeat", "tril",
    "triu", "copy", "index_put", "zeros_like", "empty_like", "new_zeros", "new_empty_strided", "zero", "diagonal",
    "slice_backward", "select_backward", "masked_fill", "scatter", "full_like", "ones_like", "constant_pad_nd", "fill",
    "where",
}  # fmt: skip
#: The argument that is such a number.
FILLS = {"masked_fill": 2, "scatter": 3, "full_like": 1, "constant_pad_nd": 2, "fill": 1}


def moved(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Move bounds as numbers are moved."""
    if name == "ones_like":
        return torch.zeros_like(exact_of(args[0]))
    if name in ("view", "_unsafe_view"):  # bounds may lie otherwise in memory
        return error_of(args[0]).reshape(args[1])
    plain = [0.0 if i == FILLS.get(name) and not isinstance(x, Tensor) else x for i, x in enumerate(args)]
    return func(*map_tensors(error_of, plain), **map_tensors(error_of, kwargs))


def single(eps: float) -> float:
    """Return what sums and functions are made in: float32, or the type itself if it is better."""
    return min(eps, torch.finfo(torch.float32).eps)


def summed(out: Tensor, eps: float, terms: int, squares: Tensor) -> Tensor:
    """Bound what the roundings of a sum add, given it and the sum of squared terms."""
    return 2 * single(eps) * (terms * (out.square() + squares / 2)).sqrt() + STORED * eps * out.abs()


def size(x: Any) -> Any:
    """Return absolute values."""
    return abs(exact_of(x) * 1.0)


def error(x: Any) -> Any:
    """Return the bound of a tensor's or a number's error; counts are exact."""
    return error_of(x) if isinstance(x, Tensor) and x.is_floating_point() else 0.0


def finite_error(x: Any) -> Tensor:
    """Return the bounds of errors, 0 for what is infinite, as it is exactly that."""
    found: Tensor = error(x).masked_fill(exact_of(x).isinf(), 0.0)
    return found


def product(out: Tensor, eps: float, a: Any, b: Any) -> Tensor:
    """Bound a matrix product."""
    passed = size(a) @ error(b) + error(a) @ size(b)
    squares = exact_of(a).square() @ exact_of(b).square()
    found: Tensor = passed + summed(out, eps, exact_of(a).shape[-1], squares)
    return found


def total(out: Tensor, eps: float, x: Bounded, dim: Any = (), keepdim: bool = False, **_: Any) -> Tensor:
    """Bound a sum."""
    over, terms = dim or (), x.numel() // max(out.numel(), 1)
    return x.error.sum(over, keepdim) + summed(out, eps, terms, x.exact.square().sum(over, keepdim))


def added(out: Tensor, eps: float, a: Any, b: Any, alpha: float = 1) -> Tensor:
    """Bound a sum or a difference of two."""
    found: Tensor = error(a) + abs(alpha) * error(b) + STORED * eps * out.abs()
    return found


def times(out: Tensor, eps: float, a: Any, b: Any) -> Tensor:
    """Bound products of numbers; an error that is multiplied by 0 is 0."""
    found = STORED * eps * out.abs()
    for x, y in ((a, b), (b, a)):
        if isinstance(y, Bounded):
            found = found + (size(x) * y.error).nan_to_num(0.0, torch.inf)
    return found


def quotient(out: Tensor, eps: float, a: Any, b: Any) -> Tensor:
    """Bound quotients of numbers."""
    passed: Tensor = (error(a) + out.abs() * error(b)) / size(b)
    return passed.nan_to_num(0.0, torch.inf) + STORED * eps * out.abs()


def power(out: Tensor, eps: float, x: Bounded, exponent: float) -> Tensor:
    """Bound powers."""
    passed = (exponent * x.exact.pow(exponent - 1)).abs() * x.error
    return passed.nan_to_num(0.0, torch.inf) + (STORED * eps + (exponent != 2) * FUNCTION * single(eps)) * out.abs()


def function(slope: Callable[[Tensor, Tensor], Tensor], least: float = 0.0) -> Callable[..., Tensor]:
    """Return the rule of an elementary function from its derivative, given ``x`` and ``f(x)``, and what may be 0.

    What is infinite is exact: the exponential and the logarithm of a mask.
    """

    def rule(out: Tensor, eps: float, x: Bounded) -> Tensor:
        rounded = (STORED * eps + FUNCTION * single(eps)) * out.abs()
        found = (rounded + slope(x.exact, out).abs() * x.error).nan_to_num_(0.0, 0.0)
        return found + least * (out != 0) if least and eps > 1e-9 else found

    return rule


def root(out: Tensor, eps: float, x: Bounded) -> Tensor:
    """Bound a square root, whose derivative at 0 is infinite."""
    return (x.exact + x.error).sqrt() - out + (STORED * eps + FUNCTION * single(eps)) * out


def limited(out: Tensor, eps: float, x: Any, *_: Any, **__: Any) -> Tensor:
    """Bound what moves numbers no further apart: signs, absolute values, limits."""
    return finite_error(x)


def largest(out: Any, eps: float, x: Any, dim: Any = (), keepdim: bool = False, *_: Any) -> Tensor:
    """Bound the largest or the least number along dimensions: the largest bound there."""
    return finite_error(x).amax(() if dim is None else dim, keepdim)


def ranked(out: Any, eps: float, x: Any, count: Any = None, dim: int = -1, *_: Any) -> Tensor:
    """Bound the largest numbers in their order: the largest bound there."""
    return finite_error(x).amax(dim, keepdim=True).expand_as(out[0])


RULES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(["mm", "bmm", "mv", "dot"], product),
    **dict.fromkeys(["add", "sub", "rsub"], added),
    **dict.fromkeys(["neg", "abs", "clamp", "clamp_min", "clamp_max", "relu", "nan_to_num"], limited),
    **dict.fromkeys(["amax", "amin", "max", "min"], largest),
    "topk": ranked,
    "sgn": lambda out, eps, x: torch.zeros_like(out),
    "maximum": lambda out, eps, a, b: torch.maximum(*(error_of(x).expand_as(out) for x in (a, b))),
    "mul": times,
    "div": quotient,
    "sum": total,
    "pow": power,
    "exp": function(lambda x, y: y, UNDERFLOW),
    "log": function(lambda x, y: 1 / x),
    "sqrt": root,
    "rsqrt": function(lambda x, y: 0.5 * y**3),
    "reciprocal": function(lambda x, y: y**2),
    "sigmoid": function(lambda x, y: y * (1 - y)),
    "tanh": function(lambda x, y: 1 - y**2),
}


def converted(x: Bounded, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    """Keep float64 for every floating type: what rounding to it adds was counted with the result."""
    if dtype is not None and not dtype.is_floating_point:
        return x.exact.to(dtype)
    return Bounded(x.exact.clone(), x.error.clone(), x.eps)


def softmax(x: Bounded, dim: int, *_: Any) -> Any:
    """Compose a softmax."""
    if x.shape[dim] == 0:
        return x.clone()
    e = (x - x.exact.amax(dim, keepdim=True)).exp()
    return e / e.sum(dim, keepdim=True)


def logsumexp(x: Bounded, dim: Any, keepdim: bool = False) -> Any:
    """Compose the logarithm of a sum of exponentials."""
    top = x.exact.amax(dim, keepdim=True)
    found = (x - top).exp().sum(dim, keepdim=True).log() + top
    return found if keepdim else found.squeeze(dim)


def mean(x: Bounded, dim: Any = (), keepdim: bool = False, **_: Any) -> Any:
    """Compose a mean."""
    found = x.sum(dim, keepdim=keepdim)
    return found / (x.numel() // found.numel())


def norm(x: Bounded, order: float = 2, dim: Any = (), keepdim: bool = False, **_: Any) -> Any:
    """Compose a norm."""
    if order == torch.inf:
        return x.abs().amax(dim or (), keepdim=keepdim)
    return x.abs().sum(dim or (), keepdim=keepdim) if order == 1 else (x * x).sum(dim or (), keepdim=keepdim).sqrt()


#: What is made of others.
COMPOSED: dict[str, Callable[..., Any]] = {
    "_to_copy": converted,
    "_softmax": softmax,
    "_log_softmax": lambda x, dim, *_: x - x.logsumexp(dim, keepdim=True),
    "_softmax_backward_data": lambda g, y, dim, *_: y * (g - (g * y).sum(dim, keepdim=True)),
    "_log_softmax_backward_data": lambda g, y, dim, *_: g - y.exp() * g.sum(dim, keepdim=True),
    "sigmoid_backward": lambda g, y: g * (y * (1 - y)),
    "tanh_backward": lambda g, y: g * (1 - y * y),
    "silu": lambda x: x * x.sigmoid(),
    "silu_backward": lambda g, x: g * (x.sigmoid() * (1 + x * (1 - x.sigmoid()))),
    "logsumexp": logsumexp,
    "mean": mean,
    "linalg_vector_norm": norm,
    "addmm": lambda bias, a, b: bias + a @ b,
}

"""A plugin that lists the bounds which tests meet with little to spare: `pytest -p margins --margins FILE`.

Such a bound fails on another processor, whose sums round in another order. `torch.testing.assert_close`,
`torch.allclose` and `pytest.approx` (with a number) are watched; the file gets the worst share of a bound by test.
"""

import json
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch

APPROX = type(pytest.approx(1.0))
WORST: dict[str, float] = {}
CURRENT = [""]


def note(got: Any, want: Any, rtol: float, atol: float) -> None:
    """Remember the largest share of a bound that a comparison of this test took."""
    got, want = (torch.as_tensor(x, dtype=torch.float64).detach() for x in (got, want))
    error, bound = (got - want).abs(), atol + rtol * want.abs()
    share = torch.where(error == 0, 0.0, error / bound)
    if share.numel() and bool(share.isfinite().all()):
        WORST[CURRENT[0]] = max(WORST.get(CURRENT[0], 0.0), float(share.max()))


def watched(function: Callable[..., Any], defaults: Callable[[torch.dtype], tuple[float, float]]) -> Callable[..., Any]:
    """Wrap a comparison of two tensors."""

    def compare(got: Any, want: Any, *args: Any, **options: Any) -> Any:
        if isinstance(got, torch.Tensor) and isinstance(want, torch.Tensor) and got.is_floating_point():
            rtol, atol = (options.get(name) for name in ("rtol", "atol"))
            usual = defaults(got.dtype)
            note(got, want, usual[0] if rtol is None else rtol, usual[1] if atol is None else atol)
        return function(got, want, *args, **options)

    return compare


def of_type(dtype: torch.dtype) -> tuple[float, float]:
    """The bounds of assert_close."""
    return {torch.float64: (1e-7, 1e-7), torch.float32: (1.3e-6, 1e-5), torch.bfloat16: (1.6e-2, 1e-5)}.get(
        dtype, (1e-3, 1e-5)
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--margins", help="file for the worst share of a bound, by test")


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--margins"):
        return
    torch.testing.assert_close = watched(torch.testing.assert_close, of_type)
    torch.allclose = watched(torch.allclose, lambda dtype: (1e-5, 1e-8))
    plain = APPROX.__eq__

    def equal(self: Any, actual: object) -> bool:
        if isinstance(actual, (int, float)) and isinstance(self.expected, (int, float)):
            note(actual, self.expected, 0.0, self.tolerance or 1e-300)
        return plain(self, actual)

    APPROX.__eq__ = equal  # type: ignore[method-assign]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    CURRENT[0] = item.nodeid
    return (yield)


def pytest_sessionfinish(session: pytest.Session) -> None:
    file = session.config.getoption("--margins")
    if file:
        listed = sorted(WORST.items(), key=lambda x: -x[1])
        Path(file).write_text(json.dumps(dict(listed), indent=1))

"""What scripts/margins.py asks of pytest: other random numbers, and the share of a bound that each test takes.

``AG_SEED=N`` moves every seed that a test draws from; 0 moves none. ``AG_MARGINS=FOLDER`` watches ``bounds.hold``,
``torch.testing.assert_close``, ``torch.allclose``, ``pytest.approx`` with a number, and assertions that a number is
below one that is small; each process leaves there, by test, the largest share of a bound (1e9 where a test failed) and
the seconds that it took.
``AG_MARGINS_ONLY=FILE`` leaves out the tests that are not in the file, a line each.
"""

import json
import os
import re
import sys
import uuid
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import TESTS, bounds

APART = 1_000_003  # between the seeds of one AG_SEED and the next
SMALL = 1e-2  # of what a bare assertion compares with: larger numbers are shares and counts
FAILED = 1e9
APPROX = type(pytest.approx(1.0))
NUMBER = r"(?:tensor\()?([-+]?[0-9.]+(?:e[-+]?[0-9]+)?)(?:, dtype=torch\.\w+)?\)?"
BELOW = re.compile(rf"^{NUMBER} <=? {NUMBER}(?:\n|$)")

worst: dict[str, float] = {}
seconds: dict[str, float] = {}
current = ""


def note(share: float) -> None:
    """Remember the largest share of a bound that a comparison of this test took."""
    if current:
        worst[current] = max(worst.get(current, 0.0), share if share == share else FAILED)


def compared(got: Any, want: Any, rtol: float, atol: float) -> None:
    """Note the share of a bound that two tensors, or numbers, take."""
    got, want = (torch.as_tensor(x, dtype=torch.float64).detach() for x in (got, want))
    error, bound = (got - want).abs(), atol + rtol * want.abs()
    share = torch.where((error == 0) | ~error.isfinite(), 0.0, error / bound)
    if share.numel() and bool((bound > 0).any()):  # else they must be equal
        note(float(share.max()))


def watched(function: Callable[..., Any], defaults: Callable[[torch.dtype], tuple[float, float]]) -> Callable[..., Any]:
    """Wrap a comparison of two tensors."""

    def compare(got: Any, want: Any, *args: Any, **options: Any) -> Any:
        if isinstance(got, torch.Tensor) and isinstance(want, torch.Tensor) and got.is_floating_point():
            given = (options.get(name) for name in ("rtol", "atol"))
            tolerances = (usual if x is None else x for x, usual in zip(given, defaults(got.dtype), strict=True))
            compared(got, want, *tolerances)
        return function(got, want, *args, **options)

    return compare


def usual(dtype: torch.dtype) -> tuple[float, float]:
    """Return the bounds of assert_close."""
    return {torch.float64: (1e-7, 1e-7), torch.float32: (1.3e-6, 1e-5), torch.bfloat16: (1.6e-2, 1e-5)}.get(
        dtype, (1e-3, 1e-5)
    )


def approximately(self: Any, actual: object) -> bool:
    """Compare as pytest.approx does."""
    if isinstance(actual, (int, float)) and isinstance(self.expected, (int, float)):
        compared(actual, self.expected, 0.0, self.tolerance)
    return plain_equal(self, actual)


plain_equal = APPROX.__eq__
plain_manual_seed = torch.manual_seed
PlainGenerator = torch.Generator


def moved(seed: int) -> int:
    """Return the seed that takes the place of one that a test gives; the library's own stay."""
    of_test = sys._getframe(2).f_code.co_filename.startswith(str(TESTS))
    return seed + APART * int(os.environ.get("AG_SEED", "0")) * of_test


class MovedGenerator(PlainGenerator):
    """A generator whose seed moves."""

    def manual_seed(self, seed: int) -> "MovedGenerator":
        super().manual_seed(moved(seed))
        return self


def manual_seed(seed: int) -> torch.Generator:
    """Seed PyTorch with what takes a seed's place."""
    return plain_manual_seed(moved(seed))


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("AG_SEED", "0") != "0":
        torch.Generator = MovedGenerator  # type: ignore[misc]
        torch.manual_seed = manual_seed
    if "AG_MARGINS" in os.environ:
        bounds.watchers.append(note)
        torch.testing.assert_close = watched(torch.testing.assert_close, usual)
        torch.allclose = watched(torch.allclose, lambda dtype: (1e-5, 1e-8))
        APPROX.__eq__ = approximately  # type: ignore[method-assign]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "AG_MARGINS_ONLY" in os.environ:
        only = set(Path(os.environ["AG_MARGINS_ONLY"]).read_text().splitlines())
        left_out = [item for item in items if item.nodeid not in only]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.nodeid in only]


def pytest_assertion_pass(item: pytest.Item, lineno: int, orig: str, expl: str) -> None:
    found = BELOW.match(expl)
    if found and 0 < float(found[2]) < SMALL:
        note(abs(float(found[1])) / float(found[2]))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    global current
    current = item.nodeid
    return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    seconds[report.nodeid] = seconds.get(report.nodeid, 0.0) + report.duration
    if report.failed:
        worst[report.nodeid] = FAILED


def pytest_sessionfinish(session: pytest.Session) -> None:
    if "AG_MARGINS" in os.environ and worst:
        found = {test: [share, seconds.get(test, 0.0)] for test, share in worst.items()}
        (Path(os.environ["AG_MARGINS"]) / f"{uuid.uuid4().hex}.json").write_text(json.dumps(found))

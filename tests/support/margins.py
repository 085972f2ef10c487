"""What scripts/margins.py asks of pytest: other random numbers, and the share of a bound that each test takes.

``AG_SEED=N`` moves every seed that a test draws from; 0 moves none. ``AG_MARGINS=FOLDER`` watches ``bounds.hold``; each
process leaves there, by test, the largest share of a bound (1e9 where a test failed).
"""

import json
import os
import sys
import uuid
from collections.abc import Generator
from pathlib import Path

import pytest
import torch

from tests.support import TESTS, bounds

APART = 1_000_003  # between the seeds of one AG_SEED and the next
FAILED = 1e9

worst: dict[str, float] = {}
current = ""


def note(share: float) -> None:
    """Remember the largest share of a bound that a comparison of this test took."""
    worst[current] = max(worst.get(current, 0.0), share if share == share else FAILED)


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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    global current
    current = item.nodeid
    return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        worst[report.nodeid] = FAILED


def pytest_sessionfinish(session: pytest.Session) -> None:
    if "AG_MARGINS" in os.environ and worst:
        (Path(os.environ["AG_MARGINS"]) / f"{uuid.uuid4().hex}.json").write_text(json.dumps(worst))

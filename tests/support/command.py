"""`python -m ag.fit` in this process or another one, and the files of its run."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
from pathlib import Path
from typing import Any

import torch

from ag import fit
from ag.callbacks.checkpoint_files import checkpoints
from ag.files import read_metrics
from tests.support.bounds import ROUNDINGS, hold
from tests.support.undrawn import UNDRAWN
from tests.support.warm import started

EPS = torch.finfo(torch.float32).eps


def train(recipe: Path, output: Path, *overrides: str) -> Path:
    """Run the command here, expect success, return the run folder."""
    before = runs(output)
    assert fit.main([f"recipe={recipe}", f"output={output}", *overrides]) == 0
    [run] = runs(output) - before
    return run


def resume(run: Path, *overrides: str) -> Path:
    assert fit.main([f"resume={run}", *overrides]) == 0
    return run


def start(*arguments: str | Path, script: Path | None = UNDRAWN, **options: Any) -> subprocess.Popen[str]:
    """Start a script in another process; None means the command itself."""
    program = ["-m", "ag.fit"] if script is None else [str(script)]
    return subprocess.Popen(
        [started(), *program, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "MASTER_PORT": str(free_port())},
        **options,
    )


def free_port() -> int:
    """Return a port for the ranks of a run that is free, and below those that Linux gives to the ends of clients.

    A rank that connects before the first rank listens could otherwise be given this port for its own end: it would be
    connected to itself, and the first rank could not listen.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as tried:
            tried.bind(("127.0.0.1", port))
            return port


def runs(output: Path) -> set[Path]:
    """The run folders of the tests' recipes, all named after their file."""
    return set(output.glob("*/*"))


def logged(run: Path) -> list[dict[str, float]]:
    """metrics.csv without the column that depends on the clock."""
    return [
        {name: value for name, value in row.items() if name != "train/tokens_per_second"}
        for row in read_metrics(run / "metrics.csv")
    ]


def column(run: Path, name: str) -> list[float]:
    return [row[name] for row in logged(run) if name in row]


def same_rows(rows: list[dict[str, float]], expected: list[dict[str, float]], moved: list[dict[str, float]]) -> None:
    """Assert that two runs log the same but for rounding.

    The bound of a column comes from a third run, whose weights are off by a rounding (``moved_base``).
    """
    assert [list(row) for row in rows] == [list(row) for row in expected]
    for name in dict.fromkeys(name for row in expected for name in row):
        found, wanted, off = (
            torch.tensor([row[name] for row in x if name in row], dtype=torch.float64) for x in (rows, expected, moved)
        )
        hold(found, wanted, ROUNDINGS * ((off - wanted).abs().max() + EPS * wanted.abs()), name)


def same_weights(run: Path, expected: Path, moved: Path) -> None:
    """Assert that two runs train the same weights but for rounding: the largest move of any weight in a third run."""
    found, wanted, off = map(weights, (run, expected, moved))
    assert found.keys() == wanted.keys() == off.keys()
    apart = max(float((off[name] - x).abs().max()) for name, x in wanted.items())
    for name, x in wanted.items():
        hold(found[name], x, ROUNDINGS * (apart + EPS * x.abs()), name)


def weights(run: Path) -> dict[str, torch.Tensor]:
    """Trained weights in the newest checkpoint."""
    state = torch.load(checkpoints(run)[0], weights_only=True, map_location="cpu")
    found: dict[str, torch.Tensor] = state["state_dict"]
    return found

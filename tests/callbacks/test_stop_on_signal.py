"""Signals to a real process."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ag.callbacks.checkpoint_files import newest_valid
from ag.callbacks.stop import SIGNALS
from ag.files import read_metrics
from tests.support.tiny_run import command, fit, weights

pytestmark = pytest.mark.usefixtures("no_figures")


def start(run_dir: Path, **options: Any) -> subprocess.Popen[str]:
    words = command(run_dir, **options)
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(process: subprocess.Popen[str], line: str) -> None:
    """Wait until a line is printed."""
    assert process.stdout is not None and process.stderr is not None
    if not any(printed.strip() == line for printed in process.stdout):
        raise AssertionError(f"{line!r} was never printed: {process.stderr.read()}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signum", "code", "accumulate"),
    [
        (signal.SIGTERM, 143, 4),
        pytest.param(signal.SIGUSR1, 138, 1, marks=pytest.mark.nightly),
        pytest.param(signal.SIGINT, 130, 1, marks=pytest.mark.nightly),
    ],
)
def test_signal_saves_and_resumes_exactly(tmp_path: Path, signum: int, code: int, accumulate: int) -> None:
    options = {"trainer": {"accumulate": accumulate}, "batches": 12}
    process = start(tmp_path / "cut", module={"pause": 0.2}, **options)
    wait_for(process, "batch 4")
    process.send_signal(signum)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors

    newest = newest_valid(tmp_path / "cut")
    steps = torch.load(newest, weights_only=True)["global_step"]
    assert newest.name == f"step={steps:06d}.ckpt"
    # the fifth batch is finished; with accumulation its optimiser step, of batches 4 to 7, is finished
    assert steps == (5 if accumulate == 1 else 2)
    assert [row["step"] for row in read_metrics(tmp_path / "cut" / "metrics.csv")] == list(range(1, steps + 1))

    _, resumed = fit(tmp_path / "cut", ckpt_path=newest, **options)
    _, whole = fit(tmp_path / "whole", **options)
    torch.testing.assert_close(weights(resumed), weights(whole), rtol=0, atol=0)
    rows = read_metrics(tmp_path / "cut" / "metrics.csv")
    assert [row["step"] for row in rows] == list(range(1, 12 // accumulate + 1))


@pytest.mark.slow
@pytest.mark.nightly
def test_second_interrupt_does_not_wait(tmp_path: Path) -> None:
    process = start(tmp_path, module={"pause": 20.0})
    wait_for(process, "batch 0")
    time.sleep(0.5)
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 1
    assert time.monotonic() - begin < 15


def test_handlers_are_given_back(tmp_path: Path) -> None:
    before = [signal.getsignal(signum) for signum in SIGNALS]
    fit(tmp_path / "done", trainer={"max_steps": 1})
    with pytest.raises(RuntimeError, match="a bug"):
        fit(tmp_path / "failed", module={"fail_batch": 1})
    assert [signal.getsignal(signum) for signum in SIGNALS] == before

"""`python -m ag.fit` on the tiny recipe, and the files of its run."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ag import fit
from ag.callbacks.checkpoint_files import checkpoints
from ag.files import read_metrics
from tests.gpu.cases import REHEARSAL
from tests.support.command import weights as weights
from tests.support.undrawn import UNDRAWN
from tests.support.warm import started

STEPS = 4


def train(recipe: Path, output: Path, *overrides: str, alone: bool = False) -> Path:
    """Run the command, in another process if ``alone``; expect success, return the run folder."""
    _fit([f"recipe={recipe}", f"output={output}", *overrides], alone)
    [run] = output.glob("tiny/*")
    return run


def continued(run: Path, folder: Path, alone: bool = False) -> Path:
    """Copy a run, forget its newest checkpoint, and resume it."""
    again = Path(shutil.copytree(run, folder / "tiny" / "run"))
    checkpoints(again)[0].unlink()
    assert checkpoints(again)[0].name == "step=000002.ckpt"
    _fit([f"resume={again}"], alone)
    return again


def _fit(arguments: list[str], alone: bool) -> None:
    pytest.importorskip("omegaconf", reason="python -m ag.fit needs omegaconf")
    with pytest.MonkeyPatch.context() as patch:
        if REHEARSAL:  # in Triton's interpreter a run would take minutes
            patch.setenv("AG_KERNELS", "chunked")
        if not alone:
            assert fit.main(arguments) == 0
            return
        python = started() if REHEARSAL else sys.executable
        program = [str(UNDRAWN)] if REHEARSAL else ["-m", "ag.fit"]
        command = [python, *program, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-4000:]


def check_losses(run: Path) -> list[float]:
    """Every step has a loss and a gradient, both finite, and the weights are finite too."""
    rows = read_metrics(run / "metrics.csv")
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    assert len(losses) == STEPS and all(map(math.isfinite, losses)), losses
    norms = [value for row in rows for name, value in row.items() if "grad_norm" in name]
    assert norms and all(math.isfinite(x) and x > 0 for x in norms)
    assert all(bool(torch.isfinite(x).all()) for x in weights(run).values())
    return losses

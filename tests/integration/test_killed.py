"""Two ranks, one of which ends in the middle of a step: resumed, they leave what an undisturbed run leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from ag.callbacks.checkpoint_files import checkpoints
from tests.support.command import logged, runs, start, weights
from tests.support.undrawn import WITHOUT_PICTURES

pytestmark = pytest.mark.slow

RUN = ["train=gates+lora", "gate.estimator=soft", "lora.dropout=0.1", "trainer.val_every=4", "checkpoint.every_steps=3"]
RUN += ["trainer.devices=2", "trainer.strategy=ddp", "data.batch_size=1"]
STEP = 7  # a checkpoint lies behind it (6), and a validation ahead (8)

SCRIPT = """
import os
from itertools import count
from pathlib import Path
from ag import fit
from ag.training.module import GatedLM

PLACE, LOCAL_RANK, calls, step = Path("{place}"), os.environ.get("LOCAL_RANK", "0"), count(1), GatedLM.training_step


def training_step(self, batch, batch_idx):
    (PLACE / f"pid-{{LOCAL_RANK}}").write_text(str(os.getpid()))
    if next(calls) == {step} and LOCAL_RANK == "{rank}":
        (PLACE / "fault").touch()
        if not {signum}:
            raise RuntimeError("this rank is broken")
        os.kill(os.getpid(), {signum})
    return step(self, batch, batch_idx)


GatedLM.training_step = training_step
{undraw}
raise SystemExit(fit.main())
"""


@pytest.fixture(scope="module")
def whole_of_two(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("two")
    process = start(f"recipe={recipe}", f"output={output}", *RUN)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    [run] = runs(output)
    return run


def broken(recipe: Path, place: Path, signum: int, rank: int) -> tuple[Path, int, str]:
    """Run with a signal to one rank, or an error in it; returns the run folder, the exit code and its stderr."""
    script = place / "broken.py"
    script.write_text(SCRIPT.format(signum=int(signum), rank=rank, place=place, step=STEP, undraw=WITHOUT_PICTURES))
    process = start(f"recipe={recipe}", f"output={place / 'runs'}", *RUN, script=script)
    try:
        _, errors = process.communicate(timeout=400)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert time.time() - (place / "fault").stat().st_mtime < 60
    [run] = runs(place / "runs")
    assert len(logged(run)) < 12
    return run, process.returncode, errors


def equal(run: Path, whole: Path) -> None:
    assert logged(run) == logged(whole)
    torch.testing.assert_close(weights(run), weights(whole), rtol=0, atol=0)
    assert {path.name for path in checkpoints(run)} == {path.name for path in checkpoints(whole)}
    best, expected = (torch.load(r / "checkpoints" / "best.ckpt", weights_only=True) for r in (run, whole))
    assert best["global_step"] == expected["global_step"]


@pytest.mark.parametrize(
    ("signum", "rank", "code"),
    [(signal.SIGKILL, 0, -9), (signal.SIGKILL, 1, None), (signal.SIGTERM, 1, 143), (0, 0, None), (0, 1, None)],
)
def test_two_ranks(signum: int, rank: int, code: int | None, recipe: Path, whole_of_two: Path, tmp_path: Path) -> None:
    run, found, errors = broken(recipe, tmp_path, signum, rank)
    assert found == code if code is not None else found != 0, errors
    deadline = time.monotonic() + 60
    for pid in ((tmp_path / f"pid-{other}").read_text() for other in (0, 1)):
        while os.path.exists(f"/proc/{pid}") and not is_zombie(pid):
            assert time.monotonic() < deadline, f"process {pid} is still there"
            time.sleep(0.1)
    process = start(f"resume={run}")
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    equal(run, whole_of_two)


def is_zombie(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True

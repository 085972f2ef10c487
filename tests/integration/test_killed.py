"""Runs that end in the middle of a step, as real processes: resumed, they leave what an undisturbed run leaves."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ag.callbacks.checkpoint_files import checkpoints
from tests.support.command import logged, resume, runs, start, train, weights
from tests.support.undrawn import WITHOUT_PICTURES

pytestmark = pytest.mark.slow

RUN = ["train=gates+lora", "gate.estimator=soft", "lora.dropout=0.1", "trainer.val_every=4", "checkpoint.every_steps=3"]
TWO_RANKS = ["trainer.devices=2", "trainer.strategy=ddp", "data.batch_size=1"]
STEP = 7  # a checkpoint lies behind it (6), and a validation ahead (8)

SCRIPT = """
import os, signal
from pathlib import Path
from ag import fit
from ag.callbacks.throughput import Throughput
from ag.training.module import GatedLM

FAULT, RANK, PLACE = "{fault}", "{rank}", Path("{place}")
step, after = GatedLM.training_step, Throughput.on_train_batch_end
calls = 0


def is_time(count):
    return count == {step} and os.environ.get("LOCAL_RANK", "0") == RANK


def training_step(self, batch, batch_idx):
    global calls
    calls += 1
    (PLACE / f"pid-{{os.environ.get('LOCAL_RANK', '0')}}").write_text(str(os.getpid()))
    if is_time(calls):
        (PLACE / "fault").touch()
        if FAULT == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if FAULT == "term":
            os.kill(os.getpid(), signal.SIGTERM)
        if FAULT == "disk":
            with open(PLACE / "filler", "wb", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(4096))
                except OSError:
                    pass
    return step(self, batch, batch_idx)


def on_train_batch_end(self, *arguments):
    if FAULT == "callback" and is_time(calls):
        raise RuntimeError("a callback is broken")
    after(self, *arguments)


GatedLM.training_step, Throughput.on_train_batch_end = training_step, on_train_batch_end
{undraw}
raise SystemExit(fit.main())
"""


@pytest.fixture(scope="module")
def whole(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(recipe, tmp_path_factory.mktemp("whole"), *RUN)


@pytest.fixture(scope="module")
def whole_of_two(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("two")
    process = start(f"recipe={recipe}", f"output={output}", *RUN, *TWO_RANKS)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    [run] = runs(output)
    return run


def broken(recipe: Path, place: Path, fault: str, *overrides: str, rank: int = 0) -> tuple[Path, int, str]:
    """Run with a fault; returns the run folder, the exit code and what was written to stderr."""
    script = place / "broken.py"
    script.write_text(SCRIPT.format(fault=fault, rank=rank, place=place, step=STEP, undraw=WITHOUT_PICTURES))
    process = start(f"recipe={recipe}", f"output={place / 'runs'}", *RUN, *overrides, script=script)
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


def test_an_error_of_a_callback(recipe: Path, whole: Path, tmp_path: Path) -> None:
    run, code, errors = broken(recipe, tmp_path, "callback")
    assert code == 1 and "a callback is broken" in errors
    assert checkpoints(run)[0].name == "step=000006.ckpt"
    equal(resume(run), whole)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root; failing writes are tested at the boundary in test_bad_input.py")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_full_disk(recipe: Path, whole: Path, small_disk: Path) -> None:
    run, code, errors = broken(recipe, small_disk, "disk")
    assert code == 2 and "No space left on device" in errors and "Traceback" not in errors
    assert not list((run / "checkpoints").glob("*.partial"))
    (small_disk / "filler").unlink()
    equal(resume(run), whole)


@pytest.mark.parametrize(
    ("fault", "rank", "code"),
    # an error in one rank: test_ranks.py
    [("kill", 0, -9), ("kill", 1, None), ("term", 1, 143)],
)
def test_two_ranks(fault: str, rank: int, code: int | None, recipe: Path, whole_of_two: Path, tmp_path: Path) -> None:
    run, found, errors = broken(recipe, tmp_path, fault, *TWO_RANKS, rank=rank)
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

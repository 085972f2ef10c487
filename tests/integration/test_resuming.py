"""A run that was cut short and resumed leaves the numbers of one that was not."""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ag import fit
from ag.callbacks.checkpoint_files import checkpoints, step_of
from ag.config import Config
from ag.data import DataModule
from ag.gates import export
from ag.gates.gate import AttentionGates
from ag.training.module import GatedLM
from tests.support.bounds import hold
from tests.support.command import EPS, column, logged, resume, runs, start, train, weights
from tests.support.undrawn import UNDRAWN

# noise in the gates and the adapters, a target that falls, optimiser steps of two batches, two epochs of 12 batches
RUN = [
    "train=gates+lora",
    "gate.estimator=soft",
    "loss.anneal_steps=8",
    "lora.dropout=0.1",
    "trainer.accumulate=2",
    "trainer.max_epochs=2",
    "trainer.val_every=4",
    "checkpoint.every_steps=3",
]
STEPS = 12


@pytest.fixture(scope="module")
def whole(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing interrupted."""
    run = train(recipe, tmp_path_factory.mktemp("whole"), *RUN)
    assert column(run, "step") == list(range(1, STEPS + 1))
    return run


def equal(run: Path, whole: Path) -> None:
    assert logged(run) == logged(whole)
    torch.testing.assert_close(weights(run), weights(whole), rtol=0, atol=0)


def interrupted(monkeypatch: pytest.MonkeyPatch, step: str, number: int, *arguments: str) -> None:
    """Run the command here, with a SIGTERM in the n-th call, counted from 0, of a step of the module."""
    calls = iter(range(10_000))
    original = getattr(GatedLM, step)

    def wrapper(self, batch, batch_idx):
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(GatedLM, step, wrapper)
        assert fit.main([*arguments]) == 143


# in the second half of an accumulation, where a validation is due; nightly: in a validation at the end of an epoch, in
# the first half of an accumulation, and at the end of the run
@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "number", "step"),
    [
        ("training", 15, 8),
        pytest.param("validation", 5, 12, marks=pytest.mark.nightly),
        pytest.param("training", 12, 7, marks=pytest.mark.nightly),
        pytest.param("training", 23, 12, marks=pytest.mark.nightly),
    ],
)
def test_terminated_anywhere(
    where: str, number: int, step: int, recipe: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(monkeypatch, f"{where}_step", number, f"recipe={recipe}", f"output={tmp_path}", *RUN)
    [run] = runs(tmp_path)
    assert checkpoints(run)[0].name == f"step={step:06d}.ckpt"
    assert not (run / "export").exists()
    resume(run)
    equal(run, whole)


REMEMBER = """
data.kind=text data.name=words data.packing=repeated data.max_length=200 data.copy_max=40 data.train_samples=12
gate.kind=mlp gate.hidden=8 gate.scope=causal gate.covers=all loss.objective=kl loss.share_high=0.8
warmup.regress_steps=2 warmup.target=kvzip warmup.scale=global
trainer.max_steps=8 trainer.val_every=4 checkpoint.every_steps=2
"""


@pytest.mark.slow
@pytest.mark.nightly
def test_drawn_shares_are_drawn_again(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(recipe, tmp_path / "whole", *REMEMBER.split())
    shares = column(whole, "train/share")
    assert len(set(shares)) == 6 and all(0.1 <= share <= 0.8 for share in shares)
    interrupted(monkeypatch, "training_step", 4, f"recipe={recipe}", f"output={tmp_path / 'cut'}", *REMEMBER.split())
    [run] = runs(tmp_path / "cut")
    resume(run)
    equal(run, whole)
    exported = [AttentionGates.from_pretrained(folder / "export") for folder in (run, whole)]
    assert exported[0].layers["0"].outer.bias.abs().sum() > 0
    torch.testing.assert_close(exported[0].state_dict(), exported[1].state_dict(), rtol=0, atol=0)
    assert exported[0].calibration is not None and exported[0].calibration == exported[1].calibration


@pytest.mark.slow
def test_killed_with_workers(recipe: Path, whole: Path, tmp_path: Path) -> None:
    process = start(f"recipe={recipe}", f"output={tmp_path}", *RUN, "data.num_workers=2")
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(f"step 7/{STEPS} "):
            break
    process.kill()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, errors
    [run] = runs(tmp_path)
    assert len(logged(run)) < STEPS
    resume(run)
    equal(run, whole)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(("signum", "ranks"), [(signal.SIGTERM, 2), (signal.SIGINT, 1)])
def test_a_signal_to_all_processes(signum: signal.Signals, ranks: int, recipe: Path, tmp_path: Path) -> None:
    """As timeout, a terminal and SLURM send it: to workers and other ranks as well, and SIGTERM twice at times."""
    more = [] if ranks == 1 else ["data.batch_size=1", "trainer.devices=2", "trainer.strategy=ddp"]
    words = [f"recipe={recipe}", f"output={tmp_path}", *RUN, *more, "data.num_workers=2"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, str(UNDRAWN), *words], start_new_session=True, **pipes)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(f"step 7/{STEPS} "):
            break
    os.killpg(process.pid, signum)
    if signum == signal.SIGTERM:
        os.killpg(process.pid, signum)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + signum, errors
    assert "Traceback" not in errors
    [run] = runs(tmp_path)
    stopped = re.search(rf"^ag\.fit: stopped by {signum.name} after step (\d+);", errors, re.M)
    assert stopped is not None, errors
    assert checkpoints(run)[0].name == f"step={int(stopped[1]):06d}.ckpt" and 7 <= int(stopped[1]) < STEPS


@pytest.mark.slow
def test_a_finished_run_is_left_as_it_is_and_one_without_checkpoints_refused(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert fit.main([f"resume={run}", "--dry-run"]) == 0
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    before = (run / "metrics.csv").read_bytes(), (run / "export" / "gate_config.json").read_bytes()
    resume(run)
    assert ((run / "metrics.csv").read_bytes(), (run / "export" / "gate_config.json").read_bytes()) == before
    equal(run, whole)
    shutil.rmtree(run / "checkpoints")
    assert fit.main([f"resume={run}"]) == 2
    assert "holds no intact checkpoints" in capsys.readouterr().err


@pytest.mark.slow
def test_checkpoint_of_another_recipe(
    recipe: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The configuration fits, the checkpoint in the folder does not."""
    run = train(recipe, tmp_path, "trainer.max_steps=1", "data.val_samples=2")
    for path in checkpoints(run):
        path.unlink()
    shutil.copy(checkpoints(whole)[0], run / "checkpoints")
    assert fit.main([f"resume={run}", "trainer.max_steps=99"]) == 2
    assert "16 tensors are missing or unknown" in capsys.readouterr().err


def forget(run: Path, step: int) -> None:
    """Leave what a run had when it was killed after this step, its metrics aside: they reach the end."""
    for path in checkpoints(run):
        if step_of(path) > step:
            path.unlink()
    shutil.rmtree(run / "export")


@pytest.mark.slow
def test_one_process_at_a_time_trains_in_a_run_folder(
    recipe: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second one is refused at once, and the first one is not disturbed, be it a new run or a resumed one."""
    process = start(f"recipe={recipe}", f"output={tmp_path}", *RUN, "checkpoint.keep_last=9")
    for again in (False, True):
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(("step 1/", "step 7/")):
                break
        else:
            pytest.fail(process.communicate()[1])
        [run] = runs(tmp_path)
        assert fit.main([f"resume={run}"]) == 2
        said = capsys.readouterr().err
        assert str(run) in said and "another process" in said and f"resume={run}" in said
        if again:  # which has a checkpoint; a dry run writes nothing
            assert fit.main([f"resume={run}", "--dry-run"]) == 0
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        if not again:
            forget(run, 6)
            process = start(f"resume={run}")
    equal(run, whole)


@pytest.mark.slow
def test_the_best_checkpoint_knows_its_metrics(recipe: Path, tmp_path: Path) -> None:
    """A run with patience exports the best weights with their metrics, also without metrics.csv."""
    run = train(recipe, tmp_path, "checkpoint.patience=9", "trainer.max_steps=4", "trainer.val_every=2")
    info = export.read_info(run / "export")
    best = torch.load(run / "checkpoints" / "best.ckpt", weights_only=True)["global_step"]
    [row] = [row for row in logged(run) if row["step"] == best]
    assert info["metrics"]["loss"] == row["val/loss"] == min(column(run, "val/loss"))
    assert info["metrics"].keys() == {name.removeprefix("val/") for name in row if name.startswith("val/")}
    (run / "metrics.csv").unlink()
    shutil.rmtree(run / "export")
    resume(run)
    assert export.read_info(run / "export") == info
    path = run / "checkpoints" / "best.ckpt"
    torch.save({key: x for key, x in torch.load(path, weights_only=True).items() if key != "validated"}, path)
    shutil.rmtree(run / "export")
    resume(run)  # a checkpoint of an earlier version
    assert not export.read_info(run / "export").get("metrics")


@pytest.mark.slow
def test_a_finished_run_that_is_continued_has_the_learning_rates_of_its_new_length(
    recipe: Path, tmp_path: Path
) -> None:
    run = train(recipe, tmp_path, "trainer.max_steps=3", "trainer.log_every=1")
    resume(run, "trainer.max_steps=6")
    optim = Config().optim
    assert (optim.schedule, optim.warmup_steps) == ("cosine", 0)
    rates = [row["lr-AdamW/gates"] for row in logged(run)]
    expected = torch.tensor([1e-2 * 0.5 * (1 + math.cos(math.pi * step / 6)) for step in range(6)])
    hold(torch.tensor(rates[3:]), expected[3:], 8 * EPS * expected[:1])
    assert rates[3] > rates[4] > rates[5] > 0


@pytest.mark.slow
def test_changed_settings_are_those_of_the_next_resume(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(recipe, tmp_path, "trainer.max_steps=2")
    shutil.rmtree(run / "export")
    interrupted(monkeypatch, "training_step", 0, f"resume={run}", "trainer.max_steps=5")
    assert f"go on with: python -m ag.fit resume={run}" in capsys.readouterr().err
    resume(run)
    assert step_of(checkpoints(run)[0]) == 5


@pytest.mark.slow
def test_a_run_that_patience_ended_does_not_train_on(recipe: Path, tmp_path: Path) -> None:
    settings = "checkpoint.patience=1", "trainer.val_every=2", "optim.gate_lr=0", "trainer.max_steps=20"
    run = train(recipe, tmp_path, *settings)
    [last] = {step_of(path) for path in checkpoints(run)[:1]}
    assert last < 20
    shutil.rmtree(run / "export")
    resume(run)
    assert step_of(checkpoints(run)[0]) == last and (run / "export").exists()


@pytest.mark.slow
def test_a_run_that_patience_ended_trains_on_with_more_patience(recipe: Path, tmp_path: Path) -> None:
    settings = "checkpoint.patience=1", "trainer.val_every=1", "optim.gate_lr=0", "trainer.max_steps=20"
    run = train(recipe, tmp_path, *settings)
    last = step_of(checkpoints(run)[0])
    resume(run, "checkpoint.patience=4")
    assert step_of(checkpoints(run)[0]) == last + 3


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("owner", [GatedLM, DataModule])
def test_a_signal_beside_the_training_loses_nothing(
    owner: type, signum: signal.Signals, code: int, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the validation after the last step; and SIGTERM before the first step, which Lightning's handler has noted."""
    name = "validation_step" if owner is GatedLM else "train_dataloader"
    if owner is DataModule and signum == signal.SIGINT:
        pytest.skip("before the first step Ctrl-C interrupts at once")
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stopped:
        own = getattr(owner, name)

        def signalled(self: Any, *given: Any) -> Any:
            patch.setattr(owner, name, own)
            os.kill(os.getpid(), signum)
            return own(self, *given)

        patch.setattr(owner, name, signalled)
        raise SystemExit(fit.main([f"recipe={recipe}", f"output={tmp_path}", "trainer.max_steps=2"]))
    assert stopped.value.code == code
    [run] = runs(tmp_path)
    assert not (run / "export").exists()
    resume(run)
    assert (run / "export").exists() and step_of(checkpoints(run)[0]) == 2


@pytest.mark.slow
def test_tensorboard_has_each_step_once(recipe: Path, tmp_path: Path) -> None:
    """After a kill, after a resume of a finished run, and after one that goes on."""
    run = train(recipe, tmp_path, *RUN, "logger=[tensorboard]", "checkpoint.keep_last=9")
    whole = scalars(run)
    assert whole["train/loss"] == [*range(STEPS)] and whole["val/loss"] == [3, 7, 11]
    forget(run, 6)
    resume(run)
    assert scalars(run) == whole
    resume(run)
    assert scalars(run) == whole
    resume(run, "trainer.max_epochs=3")
    assert scalars(run)["train/loss"] == [*range(STEPS + 6)] and scalars(run)["val/loss"] == [3, 7, 11, 15, 17]


def scalars(run: Path) -> dict[str, list[int]]:
    """The steps of each curve in TensorBoard, counted from 0."""
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {name: [event.step for event in events.Scalars(name)] for name in events.Tags()["scalars"]}

"""Checkpoints: which are written, damage, and resumed runs that equal uninterrupted ones."""

from __future__ import annotations

import math
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from ag.callbacks.checkpoint import RunCheckpoint
from ag.callbacks.checkpoint_files import AtomicCheckpointIO, checkpoints, newest_valid
from ag.callbacks.steps import Throughput
from ag.config import CheckpointConfig
from ag.files import read_metrics
from tests.support.full_disk import full_disk
from tests.support.refused import refuses
from tests.support.tiny_run import Tiny, fit, weights

pytestmark = pytest.mark.usefixtures("no_figures")


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def load(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(path, weights_only=True)
    return loaded


def test_newest_k_and_best_stay(tmp_path: Path) -> None:
    # validation after steps 2, 4, 6 (loss 0.5, 0.9, nan), saves after 3 and 6 too
    fit(
        tmp_path,
        checkpoint={"every_steps": 3, "keep_last": 2},
        trainer={"val_every": 2},
        val_loss=[9.0, 0.5, 0.5, 0.9, 0.9, math.nan],
    )
    assert names(tmp_path) == ["best.ckpt", "step=000004.ckpt", "step=000006.ckpt"]
    best, last = load(tmp_path / "checkpoints/best.ckpt"), load(tmp_path / "checkpoints/step=000006.ckpt")
    assert best["global_step"] == 2 and last["global_step"] == 6
    (state,) = [state for name, state in last["callbacks"].items() if "RunCheckpoint" in name]
    assert state == {"best": 0.5, "monitor": "val/loss"}
    for monitor, best_before in {"val/loss": 0.5, "val/perplexity": math.inf}.items():  # that of another metric is none
        resumed = RunCheckpoint(tmp_path, CheckpointConfig(monitor=monitor))
        resumed.load_state_dict(state)
        assert resumed.state_dict() == {"best": best_before, "monitor": monitor}


def test_only_files_with_a_number_of_steps_are_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    for name in ("best", "step=000100", "step=1000000", "step=000100-backup", "step=x", "old-step=000200"):
        (tmp_path / "checkpoints" / f"{name}.ckpt").touch()
    assert [path.stem for path in checkpoints(tmp_path)] == ["step=1000000", "step=000100"]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_resumed_equals_unbroken(tmp_path: Path, accumulate: int) -> None:
    trainer = {"max_epochs": 2, "accumulate": accumulate}
    _, whole = fit(tmp_path / "whole", trainer=trainer)
    # the failing batch is in the middle of an accumulation window
    with pytest.raises(RuntimeError, match="a bug"):
        fit(tmp_path / "cut", trainer=trainer, module={"fail_batch": 4})
    newest = newest_valid(tmp_path / "cut")
    assert newest.name == f"step=00000{4 // accumulate}.ckpt"
    _, resumed = fit(tmp_path / "cut", trainer=trainer, ckpt_path=newest)
    torch.testing.assert_close(weights(resumed), weights(whole), rtol=0, atol=0)

    def logged(run: str) -> list[dict[str, float]]:
        rows = read_metrics(tmp_path / run / "metrics.csv")
        return [{k: v for k, v in row.items() if "second" not in k} for row in rows]

    assert logged("cut") == logged("whole")
    assert [row["step"] for row in logged("cut")] == list(range(1, 12 // accumulate + 1))


@pytest.mark.parametrize("failing", [5, 9])
def test_validations_lie_between_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    """Steps of 4 and 2 batches in each epoch: each is validated, and a failed run resumes exactly."""
    trainer = {"max_epochs": 2, "accumulate": 4, "val_every": 1}
    _, whole = fit(tmp_path / "whole", trainer=trainer)
    calls, step = iter(range(1000)), Tiny.training_step

    def broken(self: Tiny, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        if next(calls) == failing:
            raise RuntimeError("a bug")
        return step(self, batch, batch_idx)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="a bug"):
        patch.setattr(Tiny, "training_step", broken)
        fit(tmp_path / "cut", trainer=trainer)
    _, resumed = fit(tmp_path / "cut", trainer=trainer, ckpt_path=newest_valid(tmp_path / "cut"))
    torch.testing.assert_close(weights(resumed), weights(whole), rtol=0, atol=0)
    for run in ("whole", "cut"):
        rows = read_metrics(tmp_path / run / "metrics.csv")
        assert [row["step"] for row in rows if "val/loss" in row] == [1, 2, 3, 4]


def test_a_run_interrupted_around_a_validation_twice_validates_whole_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First inside the validation of step 2, then in the step after it. A validation has two batches."""
    validated: list[int] = []
    validation_step, training_step = Tiny.validation_step, Tiny.training_step

    def broken(self: Tiny, *arguments: Any) -> None:
        raise RuntimeError("a bug")

    def recorded(self: Tiny, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        validated.append(self.global_step)
        validation_step(self, batch, batch_idx)

    def broken_in_step_3(self: Tiny, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return broken(self) if self.global_step == 2 else training_step(self, batch, batch_idx)

    for patches in ({"validation_step": broken}, {"training_step": broken_in_step_3}, {}):
        newest = newest_valid(tmp_path) if (tmp_path / "checkpoints").exists() else None
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="a bug") if patches else nullcontext():
            for name, method in ({"validation_step": recorded} | patches).items():
                patch.setattr(Tiny, name, method)
            fit(tmp_path, trainer={"val_every": 2}, ckpt_path=newest)
    assert validated == [2, 2, 4, 4, 6, 6]


def test_an_error_after_the_optimisers_step_saves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop counters would be too old, and a resumed run would repeat the step."""

    def broken(self: Throughput, trainer: Any, pl_module: Any) -> None:
        if trainer.global_step == 3:
            raise RuntimeError("a bug")

    monkeypatch.setattr(Throughput, "on_step_end", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        fit(tmp_path, checkpoint={"every_steps": 2})
    assert names(tmp_path) == ["step=000002.ckpt"]


def test_raised_max_steps_continues_in_the_epoch(tmp_path: Path) -> None:
    fit(tmp_path / "more", trainer={"max_steps": 4})
    _, more = fit(tmp_path / "more", ckpt_path=newest_valid(tmp_path / "more"))
    _, whole = fit(tmp_path / "whole")
    torch.testing.assert_close(weights(more), weights(whole), rtol=0, atol=0)


@pytest.mark.slow
def test_patience_stops_early_and_counts_across_a_resume(tmp_path: Path) -> None:
    losses = [0.5, 0.6, 0.6, 0.6, 0.6, 0.6]
    options = {"checkpoint": {"patience": 3}, "val_loss": losses}
    fit(tmp_path, **options, trainer={"val_every": 1, "max_steps": 3})
    runner, _ = fit(tmp_path, **options, trainer={"val_every": 1}, ckpt_path=newest_valid(tmp_path))
    assert runner.global_step == 4


@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_a_damaged_checkpoint_is_skipped(tmp_path: Path, damage: str) -> None:
    fit(tmp_path, checkpoint={"every_steps": 2}, trainer={"max_steps": 4})
    newest = tmp_path / "checkpoints/step=000004.ckpt"
    content = bytearray(newest.read_bytes())
    if damage == "truncated":
        content = content[: len(content) * 2 // 3]
    else:  # a byte of the first tensor
        offset = content.index(load(newest)["state_dict"]["model.1.weight"].numpy().tobytes())
        content[offset] ^= 1
    newest.write_bytes(content)
    with pytest.warns(UserWarning, match="step=000004.ckpt"):
        found = newest_valid(tmp_path)
    assert found.name == "step=000002.ckpt"
    # the damaged file is removed, not counted as the newest
    fit(tmp_path, checkpoint={"every_steps": 1, "keep_last": 1}, trainer={"max_steps": 3}, ckpt_path=found)
    assert names(tmp_path) == ["step=000003.ckpt"]


def test_failing_write_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.ckpt"
    AtomicCheckpointIO().save_checkpoint({"x": 1}, path)

    def disk_full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(OSError, match="No space left"):
        AtomicCheckpointIO().save_checkpoint({"x": 2}, path)
    assert load(path) == {"x": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["x.ckpt"]


def test_a_full_disk_leaves_the_old_checkpoint_and_is_named(tmp_path: Path) -> None:
    """torch.save raises a RuntimeError then, which the command would not print as one line."""
    path = tmp_path / "x.ckpt"
    AtomicCheckpointIO().save_checkpoint({"x": 1}, path)
    with full_disk(room=10_000), refuses(OSError, "File too large", str(path)):
        AtomicCheckpointIO().save_checkpoint({"x": torch.zeros(10_000)}, path)
    assert load(path) == {"x": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["x.ckpt"]


def test_half_written_files_of_a_killed_run_are_removed(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/step=000009.ckpt.partial").write_bytes(b"half")
    fit(tmp_path, trainer={"max_steps": 1})
    assert names(tmp_path) == ["step=000001.ckpt"]

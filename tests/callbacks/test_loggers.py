"""metrics.csv and TensorBoard."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ag.files import read_metrics, replacing
from ag.training.loggers import MetricsFile
from tests.support.tiny_run import fit


def test_rows_are_on_disk_at_once_and_share_a_step(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path)
    metrics.log_metrics({"train/loss": 2.5}, 0)
    assert (tmp_path / "metrics.csv").read_text() == "step,train/loss\n1,2.5\n"
    metrics.log_metrics({"train/loss": 2.0}, 1)
    metrics.log_metrics({"val/loss": 1e-9}, 1)
    metrics.log_metrics({"train/loss": 1.5}, 2)
    metrics.log_metrics({"val/loss": 0.125}, 2)
    assert (tmp_path / "metrics.csv").read_text() == ("step,train/loss,val/loss\n1,2.5,\n2,2.0,1e-09\n3,1.5,0.125\n")


def test_a_resumed_run_replaces_the_rows_after_its_checkpoint(tmp_path: Path) -> None:
    killed = MetricsFile(tmp_path)
    for step in range(5):
        killed.log_metrics({"x": step, "old": 1.0}, step)
    with open(tmp_path / "metrics.csv", "a") as file:
        file.write("6,7")  # killed in the middle of a line
    resumed = MetricsFile(tmp_path)
    for step in (3, 4):
        resumed.log_metrics({"x": 10 * step}, step)
    rows = read_metrics(tmp_path / "metrics.csv")
    assert [(row["step"], row["x"], row.get("old")) for row in rows] == [
        (1, 0, 1.0),
        (2, 1, 1.0),
        (3, 2, 1.0),
        (4, 30, None),
        (5, 40, None),
    ]


def test_only_a_new_column_rewrites_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rewritten: list[Path] = []
    monkeypatch.setattr("ag.training.loggers.replacing", lambda path: rewritten.append(path) or replacing(path))
    metrics, steps = MetricsFile(tmp_path), range(5)
    for step in steps:
        for loss in (1 / 3, 2.0):  # two batches; the second value is shorter
            metrics.log_metrics({"lr": 0.5}, step)  # LearningRateMonitor, before each batch
            metrics.log_metrics({"train/loss": loss}, step)
    for loss in (1 / 3, 0.25):
        metrics.log_metrics({"val/loss": loss}, steps[-1])
    assert len(rewritten) == len(["lr", "train/loss", "val/loss"])
    rows = [{"step": step + 1, "lr": 0.5, "train/loss": 2.0} for step in steps]
    assert read_metrics(tmp_path / "metrics.csv") == [*rows[:-1], rows[-1] | {"val/loss": 0.25}]


@pytest.mark.slow
def test_it_is_written_whatever_loggers_are_chosen(tmp_path: Path) -> None:
    fit(tmp_path, logger=["tensorboard"], trainer={"val_every": 3})
    with open(tmp_path / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["1", "2", "3", "4", "5", "6"]
    assert [row["val/loss"] for row in rows] == ["", "", "1.0", "", "", "1.0"]

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    logged = [event.value for event in events.Scalars("train/lm_loss")]
    np.testing.assert_allclose(logged, [float(row["train/lm_loss"]) for row in rows], rtol=np.finfo(np.float32).eps)
    assert {"figures/evicted", "figures/keep-0", "figures/curves"} == set(events.Tags()["images"])

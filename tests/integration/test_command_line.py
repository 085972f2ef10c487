"""Dry runs, sweeps and run folders."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from command import column, logged, runs, start, train

from ag import fit
from ag.config import Config
from ag.config.recipes import load_config


def tree(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize(
    "overrides",
    [["train=gates+lora"], ["train=lora", "logger=[csv,tensorboard,wandb]"], ["warmup.regress_steps=2"]],
    ids=["gates+lora", "lora", "warm start"],
)
def test_dry_run_writes_nothing(
    overrides: list[str], recipe: Path, tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").write_text("mine")
    before = tree(tmp_path), tree(tiny_base)
    assert fit.main([f"recipe={recipe}", "--dry-run", *overrides]) == 0
    assert fit.main([f"recipe={recipe}", "output=elsewhere", "--dry-run", *overrides]) == 0
    assert (tree(tmp_path), tree(tiny_base)) == before


def test_dry_run_of_a_finished_run_leaves_it(recipe: Path, tmp_path: Path) -> None:
    run = train(recipe, tmp_path, "trainer.max_steps=2")
    before = tree(tmp_path)
    assert fit.main([f"resume={run}", "--dry-run"]) == 0
    assert tree(tmp_path) == before


def test_dry_run_finds_what_is_wrong(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit.main([f"recipe={recipe}", f"output={tmp_path}", "--dry-run", "lora.targets=[up]", "train=lora"]) == 2
    assert "no linear layer ['up']" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_runs_in_one_second_have_folders_of_their_own(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit.time, "strftime", lambda _: "now")
    names = [train(recipe, tmp_path, "trainer.max_steps=1", f"seed={seed}").name for seed in range(3)]
    assert names == ["now", "now-1", "now-1-1"]
    seeds = [load_config(tmp_path / "tiny" / name / "config.yaml", Config).seed for name in names]
    assert seeds == [0, 1, 2]
    assert "AG_RUN" not in os.environ


@pytest.mark.parametrize("variable", ["SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"])
def test_processes_with_a_common_id_share_a_folder(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(output=str(tmp_path), recipe="tiny")
    monkeypatch.setenv(variable, "4711")
    first = fit.run_folder(config)
    monkeypatch.setenv("RANK", "1")
    assert fit.run_folder(config) == first == tmp_path / "tiny" / "4711"
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(fit.UserError, match=r"4711.*resume=.*4711"):
        fit.run_folder(config)


def test_torchrun_without_an_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(fit.UserError, match="--rdzv-id=NAME"):
        fit.run_folder(Config(output=str(tmp_path)))


@pytest.mark.slow
def test_sweep(recipe: Path, tmp_path: Path) -> None:
    arguments = [f"recipe={recipe}", "trainer.max_steps=2", "loss.beta=0.3,0.4", f"output={tmp_path}"]
    process = start("-m", *arguments)
    output, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    swept = {load_config(run / "config.yaml", Config).loss.beta: run for run in runs(tmp_path)}
    assert swept.keys() == {0.3, 0.4}
    assert output.count("  ok  ") == 2
    alone = train(recipe, tmp_path, "trainer.max_steps=2")
    assert column(swept[0.4], "train/loss") == pytest.approx(column(alone, "train/loss"), rel=1e-5)
    assert logged(swept[0.3])[0]["train/eviction_loss"] != logged(swept[0.4])[0]["train/eviction_loss"]

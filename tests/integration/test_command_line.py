"""Dry runs, sweeps and run folders."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from ag import fit, run
from ag.config import Config, GateConfig
from ag.config.recipes import load_config
from ag.errors import UserError
from ag.gates import export
from ag.gates.gate import AttentionGates
from ag.run import run_folder
from ag.training.module import GatedLM
from tests.support.command import column, logged, runs, start, train
from tests.support.refused import names


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


def test_dry_run_on_a_gpu_says_what_it_took(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"recipe={recipe}", f"output={tmp_path}", "--dry-run"]
    assert fit.main(words) == 0
    assert "peak" not in capsys.readouterr().out
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 5 << 29)
    assert fit.main(words) == 0
    assert "at its peak: 2.50 GiB" in capsys.readouterr().out


def test_dry_run_finds_what_is_wrong(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit.main([f"recipe={recipe}", f"output={tmp_path}", "--dry-run", "lora.targets=[up]", "train=lora"]) == 2
    assert "no linear layer ['up']" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_runs_in_one_second_have_folders_of_their_own(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run.time, "strftime", lambda *_: "now")
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
    first = run_folder(config)
    monkeypatch.setenv("RANK", "1")
    assert run_folder(config) == first == tmp_path / "tiny" / "4711"
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match=r"4711.*resume=.*4711"):
        run_folder(config)


def test_torchrun_without_an_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(UserError, match="--rdzv-id=NAME"):
        run_folder(Config(output=str(tmp_path)))


@pytest.mark.slow
def test_sweep(recipe: Path, tmp_path: Path) -> None:
    arguments = [f"recipe={recipe}", "trainer.max_steps=2", "loss.beta=0.3,0.4", f"output={tmp_path}"]
    process = start("-m", *arguments, script=None)
    output, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    swept = {load_config(run / "config.yaml", Config).loss.beta: run for run in runs(tmp_path)}
    assert swept.keys() == {0.3, 0.4}
    assert output.count("  ok  ") == 2
    alone = train(recipe, tmp_path, "trainer.max_steps=2")
    assert column(swept[0.4], "train/loss") == column(alone, "train/loss")
    assert logged(swept[0.3])[0]["train/eviction_loss"] != logged(swept[0.4])[0]["train/eviction_loss"]


@pytest.mark.slow
def test_a_run_says_nothing_of_other_projects(recipe: Path, tmp_path: Path) -> None:
    """Lightning's advertisements, deprecations that only libraries can mend, and bars in a log file."""
    process = start(f"recipe={recipe}", "train=gates+lora", "trainer.max_steps=1", f"output={tmp_path}", script=None)
    output, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    assert "step 1/1" in output
    own = re.compile("(GPU|TPU) available|`Trainer.fit` stopped")
    assert [line for line in errors.splitlines() if not own.match(line)] == []


FORKED = ("ddp_spawn", "ddp_fork", "ddp_notebook", "ddp_fork_find_unused_parameters_true")


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("trainer.strategy=ddpp", ("trainer.strategy=ddpp", "did you mean ddp?")),
        *((f"trainer.strategy={name}", (f"trainer.strategy={name}:", "trainer.strategy=ddp.")) for name in FORKED),
        ("trainer.accelerator=gpu", ("trainer.accelerator=gpu", "trainer.accelerator=cpu")),
        ("trainer.strategy=fsdp", ("trainer.strategy=fsdp", "trainer.accelerator=cpu", "GPU")),
    ],
)
def test_hardware_that_is_not_there(
    override: str, parts: tuple[str, ...], recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if override == "trainer.accelerator=gpu" and torch.cuda.is_available():
        pytest.skip("a CUDA device is there: CUDA_VISIBLE_DEVICES= bash scripts/test.sh")
    assert fit.main([f"recipe={recipe}", f"output={tmp_path}", override]) == 2
    names(capsys.readouterr().err.splitlines()[-1], "ag.fit: error: ", *parts)


def test_gates_of_another_geometry_to_start_from(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gates = AttentionGates(
        LlamaConfig(num_hidden_layers=2, hidden_size=48, num_attention_heads=2), GateConfig(num_heads=3, head_dim=8)
    )
    export.save(tmp_path / "other", gates)
    assert fit.main([f"recipe={recipe}", f"output={tmp_path}", f"init={tmp_path / 'other'}"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    names(
        error, f"init={tmp_path / 'other'}", "hidden_size=48", "hidden_size=32", "gate.num_heads=3", "gate.num_heads=2"
    )
    assert "num_layers" not in error  # which are the same


def test_ctrl_c_before_the_first_step(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside Lightning, which would leave with 1: one line that names the folder."""

    def stop(self: GatedLM) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(GatedLM, "configure_optimizers", stop)
    handler = signal.getsignal(signal.SIGINT)
    try:
        assert fit.main([f"recipe={recipe}", f"output={tmp_path}"]) == 130
    finally:
        signal.signal(signal.SIGINT, handler)  # Lightning ignores it from then on
    [folder] = runs(tmp_path)
    error = capsys.readouterr().err.splitlines()
    assert error[-1] == f"ag.fit: stopped by Ctrl-C; {folder} holds no checkpoint: start the recipe anew"
    assert not any("KeyboardInterrupt" in line for line in error)

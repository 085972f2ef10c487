"""Dry runs, sweeps and run folders."""

from __future__ import annotations

import re
import signal
import subprocess
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
from ag.hardware import lacks_bfloat16
from ag.run import run_folder
from ag.training.module import GatedLM
from tests.support.command import logged, runs, train
from tests.support.refused import names
from tests.support.warm import started


def tree(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize(
    "overrides",
    [
        ["train=gates+lora", "warmup.regress_steps=2"],
        ["train=lora", "logger=[csv,tensorboard,wandb]"],
        ["data.kind=text", "data.name=.", "data.root=.", "data.packing=packed", "data.max_length=9", "data.cache=rows"],
    ],
    ids=["gates+lora", "lora", "cache"],
)
def test_dry_run_writes_nothing_and_ends_with_rows_memory_and_ready(
    overrides: list[str],
    recipe: Path,
    tiny_base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text('{"text": "the old bridge over the river"}\n' * 40)
    before = tree(tmp_path), tree(tiny_base)
    for took, said in ((0, r"\d+\.\d\d GiB of this process"), (5 << 29, "2.50 GiB of the GPU")):
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda took=took: took)
        assert fit.main([f"recipe={recipe}", "output=elsewhere", "gate.scope=causal", "--dry-run", *overrides]) == 0
        training, validation, memory, ready = capsys.readouterr().out.splitlines()
        assert re.match(r"training: \d+ rows", training) and re.match(r"validation: \d+ rows", validation)
        assert re.fullmatch(f"memory at its peak: {said}", memory) and ready.startswith("ready: ")
    assert (tree(tmp_path), tree(tiny_base)) == before
    assert [record for record in caplog.records if record.name.startswith("lightning")] == []


def test_runs_in_one_second_have_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.time, "strftime", lambda *_: "now")
    folders = [run_folder(Config(output=str(tmp_path), recipe="tiny", seed=seed)) for seed in range(3)]
    assert [folder.name for folder in folders] == ["now", "now-1", "now-1-1"]
    assert [load_config(folder / "config.yaml", Config).seed for folder in folders] == [0, 1, 2]


def test_processes_with_a_common_id_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(output=str(tmp_path), recipe="tiny")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    first = run_folder(config)
    monkeypatch.setenv("RANK", "1")
    assert run_folder(config) == first == tmp_path / "tiny" / "4711"
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match=r"4711.*resume=.*4711.*AG_RUN="):
        run_folder(config)
    monkeypatch.delenv("SLURM_JOB_ID")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(UserError, match="--rdzv-id=NAME"):
        run_folder(config)


@pytest.mark.slow
def test_a_sweep_of_a_real_run_which_says_nothing_of_other_projects(recipe: Path, tmp_path: Path) -> None:
    """Without Lightning's lines and tips, deprecations that only libraries can mend, and bars in a log file.

    A processor without bfloat16 instructions adds the warning that says so.
    """
    given = ["trainer.max_steps=2", "loss.beta=0.3", "trainer.log_every=50", "trainer.precision=bf16-mixed"]
    arguments = [f"recipe={recipe}", f"output={tmp_path}", *given]
    command = [started(), "-m", "ag.fit", "-m", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    [swept] = runs(tmp_path)
    assert done.stdout.count("  ok  ") == 1 and done.stdout.count("validation at step 2/2") == 1
    alone = train(recipe, tmp_path, *given)
    assert logged(swept) == logged(alone)
    warnings = ["ag.fit: warning: trainer.precision=bf16-mixed"] if lacks_bfloat16() else []
    assert [line.rpartition(": this processor")[0] for line in done.stderr.splitlines()] == warnings


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

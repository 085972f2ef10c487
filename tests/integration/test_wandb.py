"""Weights & Biases without a network: what a run and its report leave there, and the sweep of scripts/sweep.yaml."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ag.config import Config
from ag.config.command_line import parse
from tests.support import ROOT
from tests.support.warm import started

wandb_agent = pytest.importorskip("wandb.wandb_agent", reason="needs W&B: pip install wandb")
SWEEP = ROOT / "scripts" / "sweep.yaml"


def logged(run: Path) -> list[bytes]:
    """What W&B wrote of each process that logged to a run folder."""
    found = sorted((run / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    assert {path.stem for path in found} == {f"run-{(run / 'wandb_id.txt').read_text()}"}
    return [path.read_bytes() for path in found]


def holds(record: bytes, name: str, kind: str, folder: Path, files: list[str]) -> None:
    """Check that an artifact of these files, by their hashes, was written down."""
    assert name.encode() in record and kind.encode() in record
    for file in files:
        digest = base64.b64encode(hashlib.md5((folder / file).read_bytes()).digest())
        assert file.encode() in record and digest in record, file


def command(place: Path, *words: str, **environment: str) -> None:
    told = {name: value for name, value in os.environ.items() if name not in ("WANDB_MODE", "WANDB_DIR")}
    told |= {"HOME": str(place / "home"), "WANDB_DATA_DIR": str(place / "home"), **environment}
    done = subprocess.run([started(), *words], capture_output=True, text=True, env=told, cwd=place)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.nightly
def test_export_report_and_pictures(recipe: Path, tmp_path: Path) -> None:
    """Offline, of ag.fit and of ag.evaluate of that run."""
    offline = ["output=runs", "logger=[wandb]", "wandb.offline=true"]
    command(tmp_path, "-m", "ag.fit", f"recipe={recipe}", *offline, "trainer.max_steps=2", "data.val_samples=2")
    [run] = (tmp_path / "runs" / "tiny").iterdir()
    holds(logged(run)[0], "tiny-export", "export", run / "export", ["gates.safetensors", "gate_config.json"])
    sent = {re.sub(r"_\d+_\w+$", "", path.stem) for path in (run / "wandb").rglob("figures/*.png")}
    assert sent == {re.sub(r"-\d{6}$", "", path.stem) for path in (run / "figures").iterdir()}
    command(tmp_path, "-m", "ag.evaluate", f"run={run}", "device=cpu")
    holds(logged(run)[1], "tiny-report", "comparison", run / "evaluation", ["report.html", "table.md", "results.jsonl"])


def composed(monkeypatch: pytest.MonkeyPatch, **values: Any) -> tuple[list[str], dict[str, str]]:
    """The command and the environment of a trial, as W&B's own agent makes them of the sweep."""
    utils = pytest.importorskip("wandb.sdk.launch.sweeps.utils", reason="needs W&B: pip install wandb")
    sweep, made = utils.load_sweep_config(str(SWEEP)), {}
    monkeypatch.setattr(wandb_agent, "AgentProcess", lambda **told: made.update(told) or type("", (), {})())
    for name in ("WANDB_SWEEP_ID", "WANDB_RUN_ID", "WANDB_SWEEP_PARAM_PATH"):  # which the agent sets
        monkeypatch.setenv(name, "abc")
    agent: Any = object.__new__(wandb_agent.Agent)
    vars(agent).update(_sweep_command=sweep["command"], _in_jupyter=False, _function=None, _run_processes={})
    agent._forward_signals = False
    arguments = {name: {"value": value} for name, value in values.items()}
    agent._command_run({"run_id": "trial1", "program": sweep["program"], "args": arguments})
    return made["command"], made["env"]


@pytest.mark.slow
def test_sweep_names_keys_of_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each value, or end of a range, that it may draw is one that the recipe takes; the program is there."""
    utils = pytest.importorskip("wandb.sdk.launch.sweeps.utils", reason="needs W&B: pip install wandb")
    sweep = utils.load_sweep_config(str(SWEEP))
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    assert (ROOT / sweep["program"]).is_file()
    assert sweep["metric"] == {"name": Config().checkpoint.monitor, "goal": "minimize"}
    for name, drawn in sweep["parameters"].items():
        for value in drawn.get("values") or [drawn["min"], drawn["max"]]:
            words, _ = composed(monkeypatch, **{name: value})
            assert words[:3] == ["python", "-m", "ag.fit"]
            config = parse(words[3:], Config, "ag.fit").config
            section, _, key = name.partition(".")
            assert getattr(getattr(config, section), key) == value and config.logger == ["wandb"]


@pytest.mark.slow
@pytest.mark.nightly
def test_a_trial_of_the_sweep(monkeypatch: pytest.MonkeyPatch, recipe: Path, tmp_path: Path) -> None:
    """The very command of the agent, offline under the id that the agent chose."""
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    words, told = composed(monkeypatch, **{"optim.gate_lr": 1e-3, "gate.head_dim": 16, "warmup.regress_steps": 1})
    small = [f"recipe={recipe}", "trainer.max_steps=2", "data.val_samples=2", "wandb.offline=true"]
    environment = {name: told[name] for name in ("WANDB_RUN_ID", "WANDB_SWEEP_ID", "WANDB_SWEEP_PARAM_PATH")}
    command(tmp_path, *words[1:], *small, **environment)
    [run] = (tmp_path / "runs" / "tiny").iterdir()
    assert (run / "wandb_id.txt").read_text() == "trial1"
    [record] = logged(run)
    assert b"optim.gate_lr" in record

"""Weights & Biases without a network: the files of a run and its report, and the sweep of scripts/sweep.yaml."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from ag.config import Config
from ag.config.command_line import parse
from tests.support import ROOT
from tests.support.warm import started


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


def test_sweep_draws_values_that_keys_of_fit_take() -> None:
    """Each value, or end of a range, that it may draw; its words are those of the sweep's command."""
    sweep = yaml.safe_load((ROOT / "scripts" / "sweep.yaml").read_text())
    assert (ROOT / sweep["program"]).is_file()
    assert sweep["metric"] == {"name": Config().checkpoint.monitor, "goal": "minimize"}
    words = [word for word in sweep["command"] if not word.startswith("$")]
    assert words[:2] == ["-m", "ag.fit"] and sweep["command"][-1] == "${args_no_hyphens}"
    for name, drawn in sweep["parameters"].items():
        for value in drawn.get("values") or [drawn["min"], drawn["max"]]:
            config = parse([*words[2:], f"{name}={value}"], Config, "ag.fit").config
            section, _, key = name.partition(".")
            assert getattr(getattr(config, section), key) == value and config.logger == ["wandb"]

"""Weights & Biases without a network: what a run and its report leave there, and the sweep of scripts/sweep.yaml."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ag.config import Config
from ag.config.command_line import parse
from tests.support import ROOT
from tests.support.warm import started

wandb_agent = pytest.importorskip("wandb.wandb_agent", reason="needs W&B: pip install wandb")
SWEEP = ROOT / "scripts" / "sweep.yaml"
ALONE = ("WANDB_RUN_ID", "WANDB_SWEEP_ID", "WANDB_MODE", "WANDB_PROJECT", "WANDB_DIR")


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[tuple[dict[str, str], list[Any]]]:
    """The environment of a process whose W&B is a port here, and the connections that came to it."""
    came: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def listen() -> None:
            while True:
                try:
                    came.append(server.accept())
                except OSError:
                    return

        threading.Thread(target=listen, daemon=True).start()
        home = tmp_path / "home"
        told = {name: value for name, value in os.environ.items() if name not in ALONE}
        told |= {"WANDB_BASE_URL": f"http://127.0.0.1:{server.getsockname()[1]}", "WANDB_API_KEY": "x" * 40}
        yield told | {"HOME": str(home), "WANDB_DATA_DIR": str(home), "WANDB_CACHE_DIR": str(home)}, came
        server.shutdown(socket.SHUT_RDWR)


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


@pytest.mark.slow
def test_export_report_and_pictures(recipe: Path, tmp_path: Path, outside: tuple[dict[str, str], list[Any]]) -> None:
    """Offline, of ag.fit, of ag.evaluate of that run, and of ag.compare; nothing goes out, or to the home folder."""
    environment, came = outside

    def command(*words: str) -> None:
        done = subprocess.run([started(), "-m", *words], capture_output=True, text=True, env=environment, cwd=tmp_path)
        assert done.returncode == 0, done.stderr

    offline = ["logger=[wandb]", "wandb.offline=true"]
    command("ag.fit", f"recipe={recipe}", "output=runs", *offline, "trainer.max_steps=2", "data.val_samples=2")
    [run] = (tmp_path / "runs" / "tiny").iterdir()
    files = ["gates.safetensors", "gate_config.json", "README.md"]
    holds(logged(run)[0], "tiny-export", "export", run / "export", files)
    sent = {re.sub(r"_\d+_\w+$", "", path.stem) for path in (run / "wandb").rglob("figures/*.png")}
    assert sent == {re.sub(r"-\d{6}$", "", path.stem) for path in (run / "figures").iterdir()}
    assert {"evicted", "keep-0", "curves"} <= sent

    command("ag.evaluate", f"run={run}", "device=cpu")
    holds(logged(run)[1], "tiny-report", "comparison", run / "evaluation", ["report.html", "table.md", "results.jsonl"])

    data = tmp_path / "data" / "corpus"
    data.mkdir(parents=True)
    (data / "validation.jsonl").write_text('{"text": "' + "ash birch elm oak yew " * 12 + '"}\n')
    model = parse([f"recipe={recipe}"], Config, "ag.fit").config.model.name
    command(
        "ag.compare",
        f"model={model}",
        "policies=[full,knorm]",
        "budgets=[0.5]",
        f"root={tmp_path / 'data'}",
        "task_options.ppl.prompt=40",
        "task_options.ppl.continuation=8",
        "output=compared",
        *offline,
    )
    folder = tmp_path / "compared"
    holds(logged(folder)[0], "compare-report", "comparison", folder, ["report.html", "config.yaml", "results.jsonl"])
    assert list((folder / "wandb").rglob("comparison/table*.json"))
    assert came == [] and not list((tmp_path / "home").rglob("*.safetensors"))


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
    drawn = {name: p.get("values") or [p["min"], p["max"]] for name, p in sweep["parameters"].items()}
    for name, values in drawn.items():
        for value in values:
            command, _ = composed(monkeypatch, **{name: value})
            assert command[:3] == ["python", "-m", "ag.fit"]
            config = parse(command[3:], Config, "ag.fit").config
            section, _, key = name.partition(".")
            assert getattr(getattr(config, section), key) == value and config.logger == ["wandb"]


@pytest.mark.slow
def test_a_trial_of_the_sweep(
    monkeypatch: pytest.MonkeyPatch, recipe: Path, tmp_path: Path, outside: tuple[dict[str, str], list[Any]]
) -> None:
    """The very command of the agent: as a dry run, and offline under the id that the agent chose."""
    environment, came = outside
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    values = {"optim.gate_lr": 1e-3, "gate.head_dim": 16, "warmup.regress_steps": 1}
    command, told = composed(monkeypatch, **values)
    small = [f"recipe={recipe}", "trainer.max_steps=2", "data.val_samples=2", "wandb.offline=true"]
    environment |= {name: told[name] for name in ("WANDB_RUN_ID", "WANDB_SWEEP_ID", "WANDB_SWEEP_PARAM_PATH")}
    for more in (["--dry-run"], []):
        done = subprocess.run(
            [started(), *command[1:], *small, *more], capture_output=True, text=True, env=environment, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "runs").exists() == (not more)
    [run] = (tmp_path / "runs" / "tiny").iterdir()
    assert (run / "wandb_id.txt").read_text() == "trial1"
    [record] = logged(run)
    assert b"optim.gate_lr" in record and came == []

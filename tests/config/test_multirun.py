"""``-m``: the product of several values, run in fresh processes."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ag.config.keys import parse_yaml
from tests.support import ROOT
from tests.support.refused import names
from tests.support.schemas import fit

PROGRAM = """
import json, os, sys
from dataclasses import dataclass, field
from ag.config.command_line import parse

@dataclass
class Schema:
    a: int = field(default=0, metadata={"doc": "first", "low": 0})
    b: str = field(default="x", metadata={"doc": "second"})
    c: list[int] = field(default_factory=list, metadata={"doc": "third"})

call = parse(sys.argv[1:], Schema, "sweeper")
config = call.config
with open(os.environ["SWEEP_LOG"], "a") as log:
    log.write(json.dumps([config.a, config.b, config.c, call.dry_run, os.getpid()]) + "\\n")
sys.exit(3 if config.a == 1 else 0)
"""


@pytest.fixture
def sweeper(tmp_path: Path) -> Any:
    """Run a small program with its own schema in a sweep; returns how to start it, and its records."""
    (tmp_path / "sweeper.py").write_text(PROGRAM)
    log = tmp_path / "log"
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    env = {**os.environ, "SWEEP_LOG": str(log), "PYTHONPATH": path}

    def start(*argv: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "sweeper", *argv], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def runs() -> list[Any]:
        return [parse_yaml(line) for line in log.read_text().splitlines()] if log.exists() else []

    return start, runs


@pytest.mark.slow
def test_sweep_runs_the_product_in_fresh_processes_and_goes_on_after_a_failure(sweeper: Any) -> None:
    start, runs = sweeper
    process = start("-m", "a=1,2", """b="p,q",it's""", "c=[1,2]", "--dry-run")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 1, err
    expected = [[a, b, [1, 2], True] for a in (1, 2) for b in ("p,q", "it's")]
    assert [run[:4] for run in runs()] == expected
    assert len({process.pid, *(run[4] for run in runs())}) == 5
    table = out[out.index(" run  result") :].splitlines()[1:]
    assert [line.split()[:3] for line in table] == [
        ["1", "exit", "3"],
        ["2", "exit", "3"],
        ["3", "ok", table[2].split()[2]],
        ["4", "ok", table[3].split()[2]],
    ]
    assert "a=2" in table[2]


@pytest.mark.slow
def test_sweep_starts_nothing_when_one_combination_is_bad(sweeper: Any) -> None:
    start, runs = sweeper
    process = start("-m", "a=0,2,-1")
    _, err = process.communicate(timeout=300)
    assert process.returncode == 2
    assert err.count("\n") == 1
    names(err, "sweeper: error:", "a=-1", "0")
    assert runs() == []


def test_sweep_validates_every_recipe_first(error: Any) -> None:
    names(error("-m", "recipe=quickstart,nope"), "'nope'")
    names(error("-m", "loss.alpha=1,"), "loss.alpha= ")
    names(error("loss.alpha=1,2"), "loss.alpha='1,2'", "-m")
    many = ",".join(map(str, range(40)))
    names(error("-m", f"seed={many}", f"loss.alpha={many}"), "1600", "1000")


def test_print_of_a_sweep_shows_each_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        fit("-m", "--print", "loss.alpha=0.5,1", "seed=0,1,2")
    assert stopped.value.code == 0
    documents = [parse_yaml(text) for text in capsys.readouterr().out.split("---\n")]
    order = [(tree["loss"]["alpha"], tree["seed"]) for tree in documents]
    assert order == [(0.5, 0), (0.5, 1), (0.5, 2), (1.0, 0), (1.0, 1), (1.0, 2)]

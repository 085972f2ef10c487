"""Runs whose values Optuna chooses, here and on the machines of a cluster."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

optuna = pytest.importorskip("optuna", reason="needs ag[cluster]: bash scripts/test.sh")

from ag.config import Config  # noqa: E402
from ag.config.keys import ConfigError, keys  # noqa: E402
from ag.config.search import Search, _Asha, _study, search, searched  # noqa: E402
from ag.config.sweep import Run  # noqa: E402
from tests.support import ROOT  # noqa: E402
from tests.support.refused import refuses  # noqa: E402

# stands for ag.fit: its val/loss is its learning rate, or it fails where it is told to
PROGRAM = """
import os, pathlib, sys
given = dict(word.partition("=")[::2] for word in sys.argv[1:])
place = pathlib.Path(__file__).parent
with open(place / "log", "a") as log:
    log.write(f"{given['optim.gate_lr']} {given['train']} {given['cluster']}\\n")
folder = place / "runs" / "fit" / os.environ["AG_RUN"]
folder.mkdir(parents=True)
(folder / "metrics.csv").write_text(f"step,val/loss\\n1,{float(given['optim.gate_lr'])}\\n")
sys.exit(3 if (place / "fail").exists() else 0)
"""
SPACE = {"train": ["gates", "lora"], "optim.gate_lr": (1e-4, 1e-1), "seed": ["3"]}


@pytest.fixture
def place(tmp_path, monkeypatch):
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{tmp_path}")
    return tmp_path


def rates(place):
    rows = [line.split() for line in (place / "log").read_text().splitlines()]
    assert {row[1] for row in rows} <= {"gates", "lora"} and {row[2] for row in rows} == {"null"}
    return [float(row[0]) for row in rows]


def test_values_are_chosen_and_the_same_command_goes_on(place, capsys):
    config = Config(output=str(place / "runs"))
    (place / "fail").touch()
    assert search(Search(2, False, SPACE), config, "program") == 1
    (place / "fail").unlink()
    assert search(Search(2, False, SPACE), config, "program") == 0
    found = rates(place)
    assert found[:2] == found[2:] and len(found) == 4  # what failed is tried again
    capsys.readouterr()
    assert search(Search(5, False, SPACE), config, "program") == 0
    found = rates(place)
    assert len(found) == 7 and len(set(found)) == 5 and all(1e-4 <= rate <= 1e-1 for rate in found)
    out = capsys.readouterr().out
    assert "3 of 5 runs" in out and f"best: run {found[2:].index(min(found)) + 1}, val/loss {min(found):.4f}" in out
    assert search(Search(5, False, SPACE), config, "program") == 0 and len(rates(place)) == 7


@pytest.mark.slow
def test_machines_share_a_search(place, machines, capsys):
    pytest.importorskip("ray", reason="needs ag[cluster]: bash scripts/test.sh")
    config = Config(output=str(place / "runs"), cluster=machines.address)
    assert search(Search(4, True, SPACE), config, "program") == 0
    assert len(set(rates(place))) == 4
    assert f"val/loss {min(rates(place)):.4f}" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_that_is_behind_is_stopped(tmp_path):
    """After its first validation: of five the best quarter goes on, and the others have been told before."""
    journal = str(tmp_path / "trials.jsonl")
    study = _study(journal)
    for loss in (1.0, 2.0, 3.0, 4.0):
        trial = study.ask()
        trial.report(loss, 1)
        trial.should_prune()  # which enters it among those that the next is compared with
    for loss, program, state in (
        (5.0, "import time; time.sleep(600)", optuna.trial.TrialState.PRUNED),
        (0.5, f"while '0.5' not in open({journal!r}).read(): pass", optuna.trial.TrialState.RUNNING),  # till it is told
    ):
        index = study.ask().number
        run = Run(index, (sys.executable, "-c", program), Config(output=str(tmp_path)), f"{index}", str(tmp_path))
        run.folder.mkdir(parents=True)
        (run.folder / "metrics.csv").write_text(f"step,val/loss\n10,\n10,{loss}\n")
        run = replace(run, wait=_Asha(journal))
        process = run.start(stdout=subprocess.DEVNULL)
        assert run.ended(process) == 0 and (process.returncode == 0) == (loss < 1)
        trial = study.trials[index]
        assert trial.state == state and trial.intermediate_values == {1: loss}


def test_what_is_searched():
    given = {"search": "optuna", "trials": "7", "asha": "true"}
    pieces = {"trials": ["7"], "optim.gate_lr": ["1e-4..1e-1"], "gate.num_heads": ["1..4"], "seed": ["0", "1"]}
    pieces["loss.beta"] = ["0..1"]
    asked = searched(given, pieces, keys(Config))
    space = {"optim.gate_lr": (1e-4, 1e-1), "gate.num_heads": (1, 4), "seed": ["0", "1"], "loss.beta": (0.0, 1.0)}
    assert asked == Search(7, True, space)
    assert {name: type(asked.space[name][0]) for name in ("gate.num_heads", "loss.beta")} == {
        "gate.num_heads": int,
        "loss.beta": float,
    }
    first = {"optim.gate_lr": "0.0001", "gate.num_heads": "1", "seed": "0", "loss.beta": "0.0"}
    ends = [{"optim.gate_lr": "0.1"}, {"gate.num_heads": "4"}, {"seed": "1"}, {"loss.beta": "1.0"}]
    assert asked.corners() == [first, *(first | end for end in ends)]
    assert searched({}, pieces, keys(Config)) is None and searched({"search": "grid"}, pieces, keys(Config)) is None


@pytest.mark.parametrize(
    ("given", "pieces", "named"),
    [
        ({"search": "random"}, {"seed": ["0", "1"]}, "search='random'"),
        ({"search": "optuna", "trials": "0"}, {"seed": ["0", "1"]}, "trials='0'"),
        ({"search": "optuna", "asha": "yes"}, {"seed": ["0", "1"]}, "asha='yes'"),
        ({"search": "optuna"}, {"seed": ["0"], "data.root": ["../data"]}, "LOW..HIGH"),
        ({"search": "optuna"}, {"seed": ["4..1"]}, "seed='4..1'"),
    ],
)
def test_what_cannot_be_searched(given, pieces, named):
    with refuses(ConfigError, named):
        searched(given, pieces, keys(Config))

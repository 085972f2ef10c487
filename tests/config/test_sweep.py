"""Sweeps, in this process and on a cluster."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import replace

import pytest

from ag.cluster import Resources
from ag.commands.compare import CompareConfig
from ag.config import Config, TrainerConfig
from ag.config.keys import ConfigError
from ag.config.sweep import Run, _resources, _resume_arguments, sweep
from tests.support import ROOT
from tests.support.machines import MACHINE
from tests.support.refused import refuses

RUNS = [{"seed": str(seed)} for seed in range(6)]
# a program that writes its seed, then waits or fails as the file "orders" says
PROGRAM = """
import os, sys, time
seed = int(next(word for word in sys.argv if word.startswith("seed=")).partition("=")[2])
with open(f"{os.path.dirname(__file__)}/log", "a") as log:
    log.write(f"{seed} {os.getpid()} {sys.argv[1]}\\n")
orders = f"{os.path.dirname(__file__)}/orders"
words = open(orders).read().split() if os.path.exists(orders) else ["0", "-1"]
print("seed", seed)
time.sleep(float(words[0]))
sys.exit(3 if seed == int(words[1]) else 0)
"""
WORKER = """
import sys
from ag.config import Config
from ag.config.sweep import sweep
runs = [{"seed": str(seed)} for seed in range(6)]
sys.exit(sweep(runs, [Config(seed=s) for s in range(6)], "program", []))
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{tmp_path}")
    return tmp_path


def seeds(place):
    log = place / "log"
    return [int(line.split()[0]) for line in log.read_text().splitlines()] if log.exists() else []


def order(place, wait=0.0, fails=-1):
    (place / "orders").write_text(f"{wait} {fails}")


def wait_for(condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def configs(place, address=None):
    return [Config(seed=seed, cluster=address, output=str(place / "runs")) for seed in range(6)]


def on(machines):
    pytest.importorskip("ray", reason="needs ag[cluster]: bash scripts/test.sh")
    return [run | {"cluster": machines.address} for run in RUNS]


@pytest.mark.slow
@pytest.mark.nightly
def test_machines_share_a_sweep_and_one_of_them_dies(place, machines, capsys):
    """Every run is done, and the same command runs a failed one again."""
    order(place, wait=2.0, fails=4)
    third = machines.add_node(**MACHINE)
    killed = threading.Thread(
        target=lambda: (wait_for(lambda: len(seeds(place)) == 3), machines.remove_node(third, allow_graceful=False))
    )
    killed.start()
    assert sweep(on(machines), configs(place, machines.address), "program", []) == 1
    killed.join()
    out = capsys.readouterr().out
    assert "6 of 6 runs" in out and "exit 3" in out and out.count(" ok ") == 5
    assert set(seeds(place)) == set(range(6)) and len(seeds(place)) == 7
    order(place)
    assert sweep(on(machines), configs(place, machines.address), "program", []) == 0
    assert "1 of 6 runs" in capsys.readouterr().out
    assert seeds(place)[7:] == [4]
    [folder] = (place / "runs" / "sweeps").iterdir()
    assert (folder / "0004.log").read_text().endswith("seed 4\n")


def test_signal_reaches_the_run_and_ends_the_sweep(place):
    signum = signal.SIGUSR1
    order(place, wait=60)
    process = subprocess.Popen([sys.executable, "-c", WORKER], stdout=subprocess.PIPE, text=True)
    wait_for(lambda: seeds(place) == [0])
    process.send_signal(signum)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signum and seeds(place) == [0]
    assert f"exit {-signum}" in out


def test_what_a_run_takes_of_a_machine(monkeypatch):
    monkeypatch.setattr("ag.cluster.machines", lambda: [{"GPU": 4.0}])
    assert _resources(Config(trainer=TrainerConfig(devices=2))) == Resources(gpus=2)
    assert _resources(Config(trainer=TrainerConfig(devices=2, accelerator="cpu"))) == Resources()
    assert _resources(CompareConfig(device="cuda")) == Resources(gpus=1)
    with refuses(ConfigError, "trainer.num_nodes=2", "cluster=auto"):
        _resources(Config(trainer=TrainerConfig(num_nodes=2), cluster="auto"))


def test_a_dry_run_on_a_cluster_leaves_the_sweep_to_be_done(place, monkeypatch):
    """It runs all, whatever is done already, and marks nothing as done."""
    monkeypatch.setattr("ag.cluster.connected", nullcontext)
    monkeypatch.setattr("ag.cluster.machines", list)
    monkeypatch.setattr("ag.cluster.share", lambda runs, make, room: ((run, make()(run)) for run in runs))
    for options, total in ((["--dry-run"], 2), ([], 4), (["--dry-run"], 6), ([], 6)):
        assert sweep(RUNS[:2], configs(place, "auto")[:2], "program", options) == 0
        assert len(seeds(place)) == total


def test_a_run_does_not_see_the_task_of_slurm_that_started_it(tmp_path, monkeypatch):
    """It would take itself for a rank of that task: the first one alone writes a run folder."""
    for name, value in (("SLURM_PROCID", "2"), ("SLURM_NTASKS", "4"), ("SLURM_JOB_ID", "77")):
        monkeypatch.setenv(name, value)
    code = "import os; from ag.run import run_folder, Config; run_folder(Config()); print(os.getenv('SLURM_NTASKS'))"
    run = Run(0, (sys.executable, "-c", code), None, "name", str(tmp_path))
    out, _ = run.start(cwd=tmp_path, stdout=subprocess.PIPE, text=True).communicate(timeout=120)
    assert out == "None\n" and (tmp_path / "runs" / Config().recipe / "name" / "config.yaml").is_file()


def test_begun_run_goes_on_from_its_checkpoint(tmp_path):
    run = Run(0, (), Config(output=str(tmp_path), recipe="tiny"), "name", str(tmp_path))
    folder = tmp_path / "tiny" / "name"
    assert _resume_arguments(run) == []
    (folder / "checkpoints").mkdir(parents=True)
    assert _resume_arguments(run) == [] and not folder.exists()
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "step=000002.ckpt").touch()
    assert _resume_arguments(run) == [f"resume={folder}"]
    assert _resume_arguments(replace(run, command=("--dry-run",))) == []
    (tmp_path / "mine").mkdir()
    assert _resume_arguments(replace(run, config=Config(resume=str(tmp_path / "mine")))) == []
    assert (tmp_path / "mine").exists()


def test_runs_are_processes_and_a_table_shows_their_metrics_and_folders(place, capsys):
    """A program that writes what a run does, with its seed as the loss; one run ends before its first validation."""
    (place / "program.py").write_text(
        "import os, pathlib, sys\n"
        "assert sys.argv[1] == '--dry-run'\n"
        "seed = int(sys.argv[2].partition('=')[2])\n"
        "folder = pathlib.Path('runs/fit') / os.environ['AG_RUN']\n"
        "folder.mkdir(parents=True)\n"
        "rows = ['step,train/loss,val/loss,val/evicted', '0,9.5,,', f'1,,{seed}.5,0.25', '2,8.5,,']\n"
        "(folder / 'metrics.csv').write_text('\\n'.join(rows if seed else rows[:2]))\n"
        "sys.exit(0 if seed else 3)\n"
    )
    assert sweep(RUNS[:3], [Config(seed=seed) for seed in range(3)], "program", ["--dry-run"]) == 1
    head, *lines = capsys.readouterr().out.partition(" run  ")[2].splitlines()
    assert head.split() == ["result", "seconds", "val/loss", "val/evicted", "folder", "overrides"]
    folders = sorted((place / "runs" / "fit").iterdir())
    rows = [line.split() for line in lines]
    assert [row[1] for row in rows] == ["exit", "ok", "ok"]
    assert [row[-2:] for row in rows] == [[str(x.relative_to(place)), f"seed={i}"] for i, x in enumerate(folders)]
    assert [row[3:-2] for row in rows[1:]] == [["1.5000", "0.2500"], ["2.5000", "0.2500"]]

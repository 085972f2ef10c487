"""One sweep shared by several workers."""

import os
import signal
import subprocess
import sys
import time

import pytest

from ag.config import Config
from ag.config.keys import ConfigError
from ag.config.sweep import Share, _begun, share, sweep
from tests.support import ROOT
from tests.support.refused import refuses

RUNS = [{"seed": str(seed)} for seed in range(6)]
# stands for a program: writes its seed, and waits where it is told to
PROGRAM = """
import os, sys, time
seed = int(sys.argv[1].partition("=")[2])
with open("log", "a") as log:
    log.write(f"{seed} {os.environ['AG_RUN']} {sys.argv[2:]}\\n")
time.sleep(float(os.environ.get("WAIT", "0")))
sys.exit(3 if seed == int(os.environ.get("FAIL", "-1")) else 0)
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


def worker(task, **environment):
    return subprocess.Popen(
        [sys.executable, "-c", WORKER],
        env=os.environ | {"AG_TASK": task} | environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def seeds(place):
    log = place / "log"
    return [int(line.split()[0]) for line in log.read_text().splitlines()] if log.exists() else []


def wait_for(condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_every_run_is_done_once_by_one_of_the_workers(place):
    workers = [worker(f"{i}/3", WAIT="0.1") for i in range(3)]
    printed = [process.communicate(timeout=240)[0] for process in workers]
    assert sorted(seeds(place)) == list(range(6))
    assert [process.returncode for process in workers] == [0, 0, 0]
    assert sum(text.count(" ok ") for text in printed) == 6
    again = worker("0/1")
    assert again.communicate(timeout=120)[0].count(" ok ") == 0
    assert len(seeds(place)) == 6


def test_what_a_killed_worker_leaves_is_done_by_the_next(place):
    first = worker("0/2", WAIT="600")
    wait_for(lambda: seeds(place) == [0])
    # its process lives on for the moment, and keeps the run
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    second = worker("1/2")
    second.communicate(timeout=240)
    assert sorted(seeds(place)) == list(range(6))
    os.killpg(first.pid, signal.SIGKILL)
    wait_for(lambda: is_free(Share(share_folder(place), 0, 1), 0))
    third = worker("1/2")
    third.communicate(timeout=120)
    assert sorted(seeds(place)) == [0, 0, 1, 2, 3, 4, 5]


def is_free(shared, index):
    lock = shared.take(index)
    if lock is not None:
        os.close(lock)
    return lock is not None


def share_folder(place):
    [folder] = (place / "runs" / "sweeps").iterdir()
    return folder


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_reaches_the_run_and_ends_the_sweep(place, signum):
    process = worker("0/1", WAIT="60")
    wait_for(lambda: seeds(place) == [0])
    process.send_signal(signum)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signum and seeds(place) == [0]
    assert f"exit {-signum}" in out


def test_failed_run_is_tried_again_by_the_same_command(place, monkeypatch, capsys):
    monkeypatch.setenv("AG_TASK", "0/1")
    configs = [Config(seed=seed) for seed in range(6)]
    monkeypatch.setenv("FAIL", "4")
    assert sweep(RUNS, configs, "program", []) == 1
    assert "exit 3" in capsys.readouterr().out
    monkeypatch.delenv("FAIL")
    assert sweep(RUNS, configs, "program", []) == 0
    assert seeds(place) == [0, 1, 2, 3, 4, 5, 4]


def test_parts_begin_at_different_runs(tmp_path):
    orders = [Share(tmp_path, part, 4).order(6) for part in range(4)]
    assert [order[0] for order in orders] == [0, 1, 3, 4]
    assert all(sorted(order) == list(range(6)) for order in orders)


def test_slurm_arrays(tmp_path, monkeypatch):
    assert share(RUNS, "p", str(tmp_path)) is None
    tasks = {"ID": "14", "MIN": "10", "MAX": "16", "STEP": "2"}
    for name, value in tasks.items():
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", value)
    found = share(RUNS, "p", str(tmp_path))
    assert (found.part, found.parts) == (2, 4)
    assert share(RUNS[:3], "p", str(tmp_path)).folder != found.folder == share(RUNS, "p", str(tmp_path)).folder


@pytest.mark.parametrize("text", ["1", "2/2", "a/b", "-1/2", "/", "0/0"])
def test_task_that_makes_no_sense(tmp_path, monkeypatch, text):
    monkeypatch.setenv("AG_TASK", text)
    with refuses(ConfigError, "AG_TASK", "i/n"):
        share(RUNS, "p", str(tmp_path))


def test_begun_run_goes_on_from_its_checkpoint(tmp_path):
    config = Config(output=str(tmp_path), recipe="tiny")
    folder = tmp_path / "tiny" / "name"
    assert _begun(config, "name") == []
    (folder / "checkpoints").mkdir(parents=True)
    assert _begun(config, "name") == [] and not folder.exists()
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "step=000002.ckpt").touch()
    assert _begun(config, "name") == [f"resume={folder}"]


def test_the_table_of_a_sweep_shows_metrics_and_folders(place, capsys):
    """A program that writes what a run does, with its seed as the loss; one run ends before its first validation."""
    (place / "program.py").write_text(
        "import os, pathlib, sys\n"
        "seed = int(sys.argv[1].partition('=')[2])\n"
        "folder = pathlib.Path('runs/none') / os.environ['AG_RUN']\n"
        "folder.mkdir(parents=True)\n"
        "rows = ['step,train/loss,val/loss,val/evicted', '0,9.5,,', f'1,,{seed}.5,0.25', '2,8.5,,']\n"
        "(folder / 'metrics.csv').write_text('\\n'.join(rows if seed else rows[:2]))\n"
    )
    assert sweep(RUNS[:3], [Config(seed=seed) for seed in range(3)], "program", []) == 0
    head, *lines = capsys.readouterr().out.partition(" run  ")[2].splitlines()
    assert head.split() == ["result", "seconds", "val/loss", "val/evicted", "folder", "overrides"]
    folders = sorted((place / "runs" / "none").iterdir())
    expected = [[], ["1.5000", "0.2500"], ["2.5000", "0.2500"]]
    for seed, (line, folder, numbers) in enumerate(zip(lines, folders, expected, strict=True)):
        assert line.split()[3:] == [*numbers, str(folder.relative_to(place)), f"seed={seed}"]

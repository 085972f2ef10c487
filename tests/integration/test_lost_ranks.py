"""Two ranks, of which one is lost in the middle of a step: what goes on leaves what an undisturbed run leaves.

On one machine they are started by Lightning, and on two machines of a Ray cluster, each a process here, by Ray.
"""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
import yaml  # type: ignore[import-untyped]

from ag import cluster, run_on_cluster
from ag.callbacks.checkpoint_files import checkpoints, step_of
from ag.config import Config
from ag.errors import UserError
from tests.support import ROOT
from tests.support.command import logged, runs, start, weights
from tests.support.refused import refuses

RUN = ["train=gates+lora", "gate.estimator=soft", "lora.dropout=0.1", "trainer.val_every=4", "checkpoint.every_steps=3"]
RUN += [
    "trainer.devices=2",
    "trainer.strategy=ddp",
    "data.batch_size=1",
    "plugins=[with_faults]",
    "trainer.max_steps=8",
]
PLUGIN = f"import sys\n\nsys.path.append({str(ROOT)!r})\nimport tests.support.faulty\n"  # found as a user's


@pytest.fixture(scope="module")
def whole(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing disturbs."""
    place = tmp_path_factory.mktemp("whole")
    finished(begun(place, f"recipe={recipe}", *RUN))
    [run] = runs(place / "runs")
    return run


def begun(place: Path, *arguments: str, fault: str = "") -> subprocess.Popen[str]:
    """Start the command; ``fault`` happens to rank 1 in the seventh step."""
    (place / "with_faults.py").write_text(PLUGIN)
    if fault:
        (place / "fault").write_text(fault)
    return start(*arguments, cwd=place)


def finished(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    """Wait for a command; returns what it says."""
    out, errors = process.communicate(timeout=400)
    assert process.returncode == code, errors
    return out, errors


def reached(place: Path, name: str) -> None:
    deadline = time.monotonic() + 400  # Ray gives its processes what others leave
    while not (place / name).exists():
        assert time.monotonic() < deadline, f"{name} does not come"
        time.sleep(0.1)


def equal(run: Path, whole: Path, *also: int) -> None:
    """Assert that a run is the undisturbed one; ``also`` are steps at which a signal had it save."""
    assert logged(run) == logged(whole)
    torch.testing.assert_close(weights(run), weights(whole), rtol=0, atol=0)
    steps = sorted({*map(step_of, checkpoints(whole)), *also})[-len(checkpoints(whole)) :]  # the newest stay
    assert sorted(map(step_of, checkpoints(run))) == steps
    best, expected = (torch.load(r / "checkpoints" / "best.ckpt", weights_only=True) for r in (run, whole))
    assert best["global_step"] == expected["global_step"]
    assert (run / "export" / "gate_config.json").is_file()


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_command_which_goes_on(recipe: Path, whole: Path, tmp_path: Path) -> None:
    process = begun(tmp_path, f"recipe={recipe}", *RUN, fault="kill")
    process.communicate(timeout=400)
    assert process.returncode != 0 and (tmp_path / "fault-done").exists()
    [run] = runs(tmp_path / "runs")
    assert len(logged(run)) < 8
    finished(begun(tmp_path, f"resume={run}"))
    equal(run, whole)


@pytest.mark.slow
@pytest.mark.nightly
def test_a_rank_on_a_cluster_that_is_killed(recipe: Path, whole: Path, tmp_path: Path, machines) -> None:
    """All start again from the last checkpoint and go on with the very next batch; what they print is shown."""
    out, _ = finished(begun(tmp_path, f"recipe={recipe}", *RUN, f"cluster={machines.address}", fault="kill"))
    [run] = runs(tmp_path / "runs")
    assert (tmp_path / "fault-done").exists() and f"on from {run.relative_to(tmp_path)}/checkpoints/step=000006" in out
    equal(run, whole)
    shown = [
        [line for line in text.splitlines() if line.startswith(("step", "validation", "run"))]
        for text in (out, (run / run_on_cluster.LOG).read_text())
    ]
    assert shown[0] == shown[1] and out.count("validation at step 8/8") == 1


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_command_on_a_cluster(
    signum: signal.Signals, recipe: Path, whole: Path, tmp_path: Path, machines
) -> None:
    """The ranks save and end, or end with the command; the run goes on elsewhere, or on the cluster again."""
    process = begun(tmp_path, f"recipe={recipe}", *RUN, f"cluster={machines.address}", fault="wait")
    reached(tmp_path, "fault-done")
    process.send_signal(signum)
    more = []
    if signum == signal.SIGTERM:
        time.sleep(1)
        (tmp_path / "go-on").touch()
        _, errors = finished(process, 143)
        [run] = runs(tmp_path / "runs")
        assert "SIGTERM" in errors and f"resume={run.relative_to(tmp_path)}" in errors
        assert checkpoints(run)[0].name == "step=000007.ckpt"
        more = ["cluster=null"]
    else:
        process.communicate()
        [run] = runs(tmp_path / "runs")
    finished(begun(tmp_path, f"resume={run}", *more))
    equal(run, whole, *([7] if signum == signal.SIGTERM else []))
    assert yaml.safe_load((run / "config.yaml").read_text())["cluster"] == (None if more else machines.address)


@pytest.mark.slow
@pytest.mark.nightly
def test_what_is_refused(tmp_path: Path, machines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before there is a run folder, or by a machine."""
    config = Config(cluster=machines.address, output=str(tmp_path / "runs"))
    config.trainer.accelerator = "cpu"
    monkeypatch.setattr(run_on_cluster, "versions", lambda *names: dict.fromkeys(names, "0.1"))
    with refuses(UserError, "torch", "0.1", "equal versions"):
        run_on_cluster.run_on_cluster(config, lambda: None, print)
    monkeypatch.undo()
    with refuses(UserError, "does not see", str(tmp_path / "gone"), "output="):
        run_on_cluster.run_on_cluster(config, lambda: tmp_path / "gone", print)
    config.trainer.devices = 3
    with refuses(UserError, "trainer.devices=3", "CPU 2"):
        run_on_cluster.run_on_cluster(config, lambda: pytest.fail("a run folder"), print)


@pytest.mark.slow
def test_who_runs_where(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPUs of a run of one machine are of one machine."""
    pytest.importorskip("ray", reason="needs ag[cluster]: bash scripts/test.sh")
    monkeypatch.setattr(cluster, "machines", lambda: [{"CPU": 32.0, "GPU": 4.0}] * 2)
    config = Config(cluster="auto")
    config.trainer.devices = 4
    one = run_on_cluster._scaling(config)
    assert (one.num_workers, one.placement_strategy, one.num_gpus_per_worker) == (4, "STRICT_PACK", 1)
    config.trainer.devices = 8
    with refuses(UserError, "trainer.devices=8", "GPU 8", "2 machines", "one machine"):
        run_on_cluster._scaling(config)
    config.trainer.devices, config.trainer.num_nodes = 4, 2
    two = run_on_cluster._scaling(config)
    assert (two.num_workers, two.placement_strategy) == (8, "PACK")

"""Ranks on two machines of a Ray cluster, each a process here, leave what ranks of one machine leave."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("ray", reason="needs ag[cluster]: bash scripts/test.sh")

from ag import cluster, run_on_cluster  # noqa: E402
from ag.callbacks.checkpoint_files import checkpoints  # noqa: E402
from ag.config import Config  # noqa: E402
from ag.errors import UserError  # noqa: E402
from ag.run_on_cluster import Ended  # noqa: E402
from tests.support import ROOT  # noqa: E402
from tests.support.command import logged, runs, start, weights  # noqa: E402
from tests.support.refused import refuses  # noqa: E402

RUN = ["train=gates+lora", "gate.estimator=soft", "lora.dropout=0.1", "trainer.val_every=4", "checkpoint.every_steps=3"]
RUN += ["trainer.devices=2", "trainer.strategy=ddp", "data.batch_size=1", "plugins=[with_faults]"]
PLUGIN = f"import sys\n\nsys.path.append({str(ROOT)!r})\nimport tests.support.faulty\n"  # found as a user's


@pytest.fixture(scope="module")
def whole(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of two ranks that Lightning starts here."""
    place = tmp_path_factory.mktemp("whole")
    assert finished(begun(place, f"recipe={recipe}", *RUN)) == (0, "")
    [run] = runs(place / "runs")
    return run


def begun(place: Path, *arguments: str) -> subprocess.Popen[str]:
    (place / "with_faults.py").write_text(PLUGIN)
    return start(*arguments, cwd=place)


def finished(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for a command; returns its exit code and what it says of its own, without the lines of libraries."""
    _, errors = process.communicate(timeout=400)
    return process.returncode, "\n".join(x for x in errors.splitlines() if x.startswith("ag.fit:"))


def reached(place: Path, name: str) -> None:
    deadline = time.monotonic() + 400  # Ray gives its processes what others leave
    while not (place / name).exists():
        assert time.monotonic() < deadline, f"{name} does not come"
        time.sleep(0.1)


def equal(run: Path, whole: Path) -> None:
    assert logged(run) == logged(whole)
    torch.testing.assert_close(weights(run), weights(whole), rtol=0, atol=0)
    assert {path.name for path in checkpoints(run)} == {path.name for path in checkpoints(whole)}
    assert (run / "export" / "gate_config.json").is_file()


@pytest.mark.slow
def test_a_rank_that_is_killed(recipe: Path, whole: Path, tmp_path: Path, machines) -> None:
    """All start again from the last checkpoint and go on with the very next batch; what they print is shown."""
    (tmp_path / "fault").write_text("kill")
    process = begun(tmp_path, f"recipe={recipe}", *RUN, f"cluster={machines.address}")
    out, errors = process.communicate(timeout=400)
    assert process.returncode == 0, errors
    assert (tmp_path / "fault-done").exists() and "on from the last checkpoint" in errors
    [run] = runs(tmp_path / "runs")
    equal(run, whole)
    assert out.count("validation at step 12/12") == 1
    lines = (run / run_on_cluster.LOG).read_text().splitlines()
    assert [line for line in out.splitlines() if line.startswith(("step", "validation", "run"))] == [
        line for line in lines if line.startswith(("step", "validation", "run"))
    ]


@pytest.mark.slow
def test_a_shard_that_is_killed(recipe: Path, tmp_path: Path, machines) -> None:
    """With FSDP2 too, whose checkpoint is gathered from the ranks."""
    there, here = tmp_path / "there", tmp_path / "here"
    for place, more in ((there, [f"cluster={machines.address}"]), (here, [])):
        place.mkdir()
        if more:
            (place / "fault").write_text("kill")
        process = begun(place, f"recipe={recipe}", *RUN, "trainer.strategy=fsdp2", *more)
        _, errors = process.communicate(timeout=400)
        assert process.returncode == 0, errors
    assert (there / "fault-done").exists()
    equal(*runs(there / "runs"), *runs(here / "runs"))


@pytest.mark.slow
def test_a_signal_to_the_command(recipe: Path, whole: Path, tmp_path: Path, machines) -> None:
    """The ranks save and end; the run goes on elsewhere."""
    (tmp_path / "fault").write_text("wait")
    process = begun(tmp_path, f"recipe={recipe}", *RUN, f"cluster={machines.address}")
    reached(tmp_path, "fault-done")
    process.send_signal(signal.SIGTERM)
    time.sleep(1)
    (tmp_path / "go-on").touch()
    code, said = finished(process)
    [run] = runs(tmp_path / "runs")
    assert code == 143 and "SIGTERM" in said and f"resume={run.relative_to(tmp_path)}" in said
    assert checkpoints(run)[0].name == "step=000007.ckpt"
    assert finished(begun(tmp_path, f"resume={run}", "cluster=null")) == (0, "")
    equal(run, whole)


@pytest.mark.slow
def test_a_command_that_is_killed(recipe: Path, whole: Path, tmp_path: Path, machines) -> None:
    """Its ranks end with it, and another goes on where they were."""
    (tmp_path / "fault").write_text("wait")
    process = begun(tmp_path, f"recipe={recipe}", *RUN, f"cluster={machines.address}")
    reached(tmp_path, "fault-done")
    process.kill()
    process.communicate()
    [run] = runs(tmp_path / "runs")
    assert finished(begun(tmp_path, f"resume={run}")) == (0, "")  # on the cluster, as its config.yaml says
    equal(run, whole)


@pytest.mark.slow
def test_what_is_refused(tmp_path: Path, machines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before there is a run folder, or by a machine."""
    config = Config(cluster=machines.address, output=str(tmp_path / "runs"))
    config.trainer.accelerator = "cpu"
    monkeypatch.setattr(run_on_cluster, "versions", lambda *names: dict.fromkeys(names, "0.1"))
    with refuses(UserError, "torch", "0.1", "same versions"):
        run_on_cluster.run_on_cluster(config, lambda: None, print)
    monkeypatch.undo()
    with refuses(UserError, "does not see", str(tmp_path / "gone"), "output="):
        run_on_cluster.run_on_cluster(config, lambda: tmp_path / "gone", print)
    config.trainer.devices = 3
    with refuses(UserError, "trainer.devices=3", "CPU 2"):
        run_on_cluster.run_on_cluster(config, lambda: pytest.fail("a run folder"), print)


def test_which_end_is_told() -> None:
    """Of ranks that end together: what no other attempt mends, then the one that died."""
    wrong, moved, failed, died = (
        Ended(2, "no data"),
        Ended(-1, "it goes"),
        Ended(1, "reset by peer"),
        OSError("died\nof"),
    )
    told = run_on_cluster._ended
    assert told({0: failed, 1: wrong}) == (2, "no data")
    assert told({0: failed, 1: died}) == (1, "died")
    assert told({0: failed, 1: moved}) == (-1, "it goes")
    assert told({0: failed}) == (1, "reset by peer")


def test_who_runs_where(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPUs of a run of one machine are of one machine."""
    monkeypatch.setattr(cluster, "resources", lambda: {"CPU": 64.0, "GPU": 8.0})
    config = Config(cluster="auto")
    config.trainer.devices = 4
    one = run_on_cluster._scaling(config)
    assert (one.num_workers, one.placement_strategy, one.num_gpus_per_worker) == (4, "STRICT_PACK", 1)
    config.trainer.num_nodes = 2
    two = run_on_cluster._scaling(config)
    assert (two.num_workers, two.placement_strategy) == (8, "PACK")

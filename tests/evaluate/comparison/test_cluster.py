"""Cells on the machines of a cluster: the same results as in this process, whatever ends in the middle."""

import json
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="needs ag[cluster]: bash scripts/test.sh")

from ag import cluster  # noqa: E402
from ag.errors import UserError  # noqa: E402
from ag.evaluate.comparison.compare import compare  # noqa: E402
from ag.evaluate.comparison.folder import Folder  # noqa: E402
from tests.evaluate.conftest import lines  # noqa: E402
from tests.support.machines import MACHINE  # noqa: E402
from tests.support.refused import refuses  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_charts")


def rows(folder):
    """The rows by key, each of which is there once."""
    found = {row["key"]: row for row in lines(folder)}
    assert len(found) == len(lines(folder))
    return found


@pytest.mark.slow
@pytest.mark.nightly
def test_a_cluster_has_the_same_results(config, quiet, machines, monkeypatch, tmp_path):
    """To the last bit; a machine that is killed in the middle loses no cell, and none is done twice."""
    third, append = machines.add_node(**MACHINE), Folder.append

    def killed(self, ended):
        if third in machines.list_all_nodes():
            machines.remove_node(third, allow_graceful=False)
        append(self, ended)

    alone = compare(config(output=str(tmp_path / "alone")), quiet)
    monkeypatch.setattr(Folder, "append", killed)
    shared = compare(config(cluster=machines.address, batch_policies=1), quiet)
    assert rows(shared.folder) == rows(alone.folder) and len(rows(alone.folder)) == 5
    for row in rows(alone.folder):
        samples = [(folder / "samples" / f"{row}.jsonl").read_text() for folder in (shared.folder, alone.folder)]
        scores = [[json.loads(line)["score"] for line in text.splitlines()] for text in samples]
        assert scores[0] == scores[1]


def test_a_cell_that_ends_its_workers_has_a_row(config, quiet, monkeypatch):
    """Such as one that runs out of memory; it is run again where that is asked."""
    lost = cluster.Lost(3, "out of memory")
    monkeypatch.setattr(cluster, "connected", lambda address: quiet.capture())
    rooms = []
    monkeypatch.setattr(
        cluster, "share", lambda units, make, room: rooms.append(room) or ((unit, lost) for unit in units)
    )
    told = config(cluster="auto")
    found = compare(told, quiet)
    weights = sum(x.stat().st_size for x in Path(told.model).glob("*.safetensors"))
    assert [room.memory for room in rooms] == [2 * weights] and weights
    assert len(found.failed) == 5
    assert all("3 workers ended" in x.summary.problem and "out of memory" in x.summary.problem for x in found.failed)
    monkeypatch.setattr(cluster, "share", lambda units, make, room: ((unit, make()(unit)) for unit in units))
    again = compare(config(cluster="auto", retry=True), quiet)
    assert not again.failed and all(result.summary.n == 6 for result in again.results)


def test_one_gpu_has_no_number_on_a_cluster(config, quiet):
    with refuses(UserError, "device=cuda:1", "cuda with cluster="):
        compare(config(device="cuda:1", cluster="auto"), quiet)
    assert cluster.Room.on("cuda").gpus == 1

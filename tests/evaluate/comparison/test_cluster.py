"""Cells on the machines of a cluster: the same results as in this process, also where machines end."""

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


@pytest.mark.slow
@pytest.mark.nightly
def test_a_cluster_has_the_same_results(config, quiet, machines, monkeypatch, tmp_path):
    """To the last bit; a machine that is killed in the middle loses no cell, and none is run twice."""
    third, append = machines.add_node(**MACHINE), Folder.append

    def killed(self, ended):
        if third in machines.list_all_nodes():
            machines.remove_node(third, allow_graceful=False)
        append(self, ended)

    alone = compare(config(output=str(tmp_path / "alone")), quiet)
    monkeypatch.setattr(Folder, "append", killed)
    shared = compare(config(cluster=machines.address, batch_policies=1), quiet)
    rows, mine = (sorted(lines(one.folder), key=lambda row: row["key"]) for one in (shared, alone))
    assert rows == mine and len(rows) == 5
    for row in rows:
        samples = [(one.folder / "samples" / f"{row['key']}.jsonl").read_text() for one in (shared, alone)]
        scores = [[json.loads(line)["score"] for line in text.splitlines()] for text in samples]
        assert scores[0] == scores[1]


def test_a_cell_that_ends_its_workers_has_a_row(config, quiet, monkeypatch):
    """Such as one that runs out of memory; with retry=true it runs again."""
    with refuses(UserError, "device=cuda:1", "cuda with cluster="):
        compare(config(device="cuda:1", cluster="auto"), quiet)
    lost = cluster.LostUnit(3, "out of memory")
    monkeypatch.setattr(cluster, "connected", lambda address: quiet.capture())
    rooms = []
    monkeypatch.setattr(
        cluster, "share", lambda units, make, room: rooms.append(room) or ((unit, lost) for unit in units)
    )
    given = config(cluster="auto")
    found = compare(given, quiet)
    weights = sum(x.stat().st_size for x in Path(given.model).glob("*.safetensors"))
    assert [room.memory for room in rooms] == [2 * weights] and weights
    assert len(found.failed) == 5
    assert all("3 workers ended" in x.problem and "out of memory" in x.problem for x in found.failed)
    monkeypatch.setattr(cluster, "share", lambda units, make, room: ((unit, make()(unit)) for unit in units))
    again = compare(config(cluster="auto", retry=True), quiet)
    assert not again.failed and all(result.n == 6 for result in again.results)

"""What dealing a comparison out costs is measured as it says."""

import json

import pytest

pytest.importorskip("ray", reason="needs ag[cluster]: bash scripts/test.sh")

from benchmarks import cluster  # noqa: E402


def test_a_plan_has_the_cells():
    told = cluster.plan(cluster.Config(cells=50))
    assert len(told.budgets) == 3 and all(0 < budget < 1 for budget in told.budgets)


@pytest.mark.slow
def test_every_cell_is_dealt_out_written_and_shown(tmp_path, warm_workers):
    assert cluster.main(["cells=20", "machines=[1]", "seconds=0", "samples=3", f"output={tmp_path}"]) == 0
    (found,) = json.loads((tmp_path / "cluster.json").read_text())["found"]
    assert (found["machines"], found["cells"]) == (1, 20)
    assert all(found[name] > 0 for name in ("begin", "work", "overhead", "read", "page"))
    assert set(found["bytes"]) == {"results.jsonl", "samples/*", "report.html"} and min(found["bytes"].values()) > 0

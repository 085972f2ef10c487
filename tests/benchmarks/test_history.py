"""The history of measurements, release by release."""

import json

import pytest

from benchmarks import history


def measured(folder, cpu, values):
    rows = [{"contestant": name, "batch": 1, "context": 8192, "x full": value} for name, value in values.items()]
    machine = {"cpu": cpu, "cores": 2, "threads": 2, "load": 0.1, "torch": "2.13.0"}
    (folder / "decode.json").write_text(json.dumps({"date": "2026-01-01", "machine": machine, "rows": rows}))


def test_history_of_benchmarks_by_version_and_machine(tmp_path):
    out = tmp_path / "benchmarks"
    with pytest.raises(SystemExit, match=r"decode\.json"):
        history.record(tmp_path, "0.9.0", out)
    for version, cpu, value in (("0.10.0", "A", 1.8), ("0.9.0", "A", 1.5), ("0.11.0", "B", 3.0)):
        measured(tmp_path, cpu, {"full": 1.0, "random 20%": value})
        assert history.record(tmp_path, version, out) == out / f"{version}.json"
    releases = [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]
    drawn = history.lines(releases, "decode")
    assert drawn["random 20%, 8,192 x 1", "A, 2, 2"] == {"0.9.0": 1.5, "0.10.0": 1.8}
    assert drawn["random 20%, 8,192 x 1", "B, 2, 2"] == {"0.11.0": 3.0} and len(drawn) == 4
    assert history.lines(releases, "prefill") == {}
    assert history.draw(out).read_bytes()[:4] == b"\x89PNG"

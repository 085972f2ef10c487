"""The results folder: what is written comes back, and what is damaged is named and skipped."""

import json
from dataclasses import asdict, replace
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ag.errors import UserError
from ag.evaluate.comparison import folder
from ag.evaluate.comparison.folder import FinishedCell, Folder, parse
from ag.evaluate.tasks import Outcome
from tests.support.made_up import SUMMARY
from tests.support.refused import refuses

OUTCOME = Outcome("3", 3.25, 512, 0.498, 1024, 1.5, {"length": 512, "depth": 0.5, "subset": "a"})
LINE = json.dumps(asdict(SUMMARY))
SAMPLES = json.dumps(asdict(OUTCOME)) + "\n"
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


def test_what_is_written_comes_back(tmp_path):
    """Of a key the last line; unknown fields, such as the checksum of earlier versions, are ignored."""
    results = Folder(tmp_path)
    results.append(FinishedCell(replace(SUMMARY, seconds=2.0), [OUTCOME], []))
    other = replace(SUMMARY, key="f", problem="out of memory: 3 GiB", mean=None, kept=None, n=0)
    results.append(FinishedCell(other, [], []))
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write(json.dumps(asdict(SUMMARY) | {"checksum": "9" * 64}) + "\n")
    found = Folder(tmp_path).read()
    assert found == {SUMMARY.key: (SUMMARY, [OUTCOME], []), "f": (other, [], [])}
    assert [type(x) for x in found[SUMMARY.key].outcomes[0].tags.values()] == [int, float, str]


@pytest.mark.parametrize("samples", [None, "", SAMPLES[:40], SAMPLES * 2, SAMPLES.replace("3.25", "NaN")])
def test_samples_that_are_damaged_take_their_cell_alone(tmp_path, samples, caplog):
    results, other = Folder(tmp_path), replace(SUMMARY, key="f")
    for summary in (SUMMARY, other):
        results.append(FinishedCell(summary, [OUTCOME], []))
    file = tmp_path / "samples" / f"{SUMMARY.key}.jsonl"
    file.unlink() if samples is None else file.write_text(samples)
    assert results.read() == {"f": (other, [OUTCOME], [])}
    assert "line 1 is skipped, and its cell runs again" in caplog.text
    results.append(FinishedCell(SUMMARY, [OUTCOME], []))
    assert results.read().keys() == {"f", SUMMARY.key}


def test_a_row_after_a_torn_one_stands_on_its_own_line(tmp_path, caplog):
    results = Folder(tmp_path)
    (tmp_path / "results.jsonl").write_text(LINE[:40])
    results.append(FinishedCell(SUMMARY, [OUTCOME], []))
    assert results.read() == {SUMMARY.key: (SUMMARY, [OUTCOME], [])}
    assert "line 1 is skipped" in caplog.text
    torn, line = (tmp_path / "results.jsonl").read_text().splitlines()
    assert torn == LINE[:40] and parse(folder.SUMMARY, line) == SUMMARY


@pytest.mark.parametrize("num_written", range(2))
def test_a_cell_that_is_measured_again_is_never_half_new(tmp_path, num_written, monkeypatch):
    """The process dies before it writes the views or the samples, one of which comes first."""
    results, before = Folder(tmp_path), FinishedCell(SUMMARY, [OUTCOME], [])
    results.append(before)
    again = FinishedCell(replace(SUMMARY, mean=7.0), [replace(OUTCOME, score=7.0)], [])
    written, write = [], folder._write

    def die(path, text):
        if len(written) == num_written:
            raise KeyboardInterrupt
        written.append(path)
        write(path, text)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(folder, "_write", die)
        results.append(again)
    assert [*results.read().values()] in ([], [before], [again])
    results.append(again)
    assert results.read() == {SUMMARY.key: again}


def test_outcomes_of_an_unfinished_cell_come_back_up_to_a_torn_line(tmp_path):
    results, second = Folder(tmp_path), replace(OUTCOME, sample="4")
    assert results.unfinished("f") == []
    results.begin("f", [OUTCOME])
    results.add("f", second)
    with (tmp_path / "unfinished" / "f.jsonl").open("a") as file:
        file.write(SAMPLES[:40])
    assert results.unfinished("f") == [OUTCOME, second] and results.read() == {}
    failed = replace(SUMMARY, key="f", problem="out of memory: 3 GiB", mean=None, kept=None, n=0)
    results.append(FinishedCell(failed, [], []))
    assert results.unfinished("f") == [OUTCOME, second]
    results.append(FinishedCell(replace(SUMMARY, key="f"), [OUTCOME], []))
    assert results.unfinished("f") == [] and results.read().keys() == {"f"}


def test_reading_leaves_a_folder_as_it_is(tmp_path):
    assert Folder(tmp_path).read() == Folder(tmp_path / "absent").read() == {}
    assert not list(tmp_path.iterdir())


def test_a_key_cannot_lead_out_of_the_folder(tmp_path, caplog):
    results = Folder(tmp_path / "out")
    (tmp_path / "out" / "samples").mkdir(parents=True)
    (tmp_path / "secret.jsonl").write_text(SAMPLES)
    (tmp_path / "out" / "results.jsonl").write_text(json.dumps(asdict(SUMMARY) | {"key": "../../secret"}) + "\n")
    assert results.read() == {}
    assert "key=" in caplog.text


def test_one_process_writes(tmp_path):
    one, other = Folder(tmp_path), Folder(tmp_path)
    with one.writing(), refuses(UserError, str(tmp_path), "cluster=local"), other.writing():
        pass
    with other.writing():
        pass


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("{}", "key"),
        (LINE.replace("3.25", "1e999"), "mean"),
        (LINE.replace('"n": 1', '"n": true'), "n"),
        ("[" * 9999, "Invalid JSON"),
    ],
)
def test_what_is_no_row_is_refused(line, field):
    with pytest.raises(ValueError, match=f"^{field}"):
        parse(folder.SUMMARY, line)


@settings(max_examples=25)
@given(st.lists(st.binary(max_size=40) | st.just(LINE.encode()) | VALUES.map(lambda v: json.dumps(v).encode())))
@pytest.mark.slow
def test_of_any_file_the_rows_are_read_and_the_rest_is_named(tmp_path_factory, pieces):
    path = tmp_path_factory.mktemp("results")
    results = Folder(path)
    results.append(FinishedCell(SUMMARY, [OUTCOME], []))
    found = b"\n".join(pieces)
    (path / "results.jsonl").write_bytes(found)
    with patch.object(folder.log, "warning") as skipped:
        rows = results.read()
    written = [(number, line) for number, line in enumerate(found.split(b"\n"), 1) if line]
    good = [line for _, line in written if line == LINE.encode()]
    assert rows == ({SUMMARY.key: (SUMMARY, [OUTCOME], [])} if good else {})
    named = [call.args[2] for call in skipped.call_args_list]
    assert named == [number for number, line in written if line != LINE.encode()]
    assert (path / "results.jsonl").read_bytes() == found

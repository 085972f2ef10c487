"""The results folder: what is written comes back, and whatever else is in its files is put aside."""

import json
import warnings
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ag.errors import UserError
from ag.evaluate.comparison.folder import CorruptRowWarning, Folder, Summary, read_line
from ag.evaluate.tasks import Outcome
from tests.support.made_up import SUMMARY
from tests.support.refused import refuses

OUTCOME = Outcome("3", 3.25, 512, 0.498, 1024, 1.5, {"length": 512, "depth": 0.5, "subset": "a"})
LINE = json.dumps(asdict(SUMMARY))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


def test_what_is_written_comes_back(tmp_path):
    results = Folder(tmp_path)
    results.append(SUMMARY, [OUTCOME], [])
    later = replace(SUMMARY, seconds=2.0)
    results.append(later, [OUTCOME], [])
    other = replace(SUMMARY, key="f", problem="out of memory: 3 GiB", mean=None, kept=None, n=0)
    results.append(other, [], [])
    assert Folder(tmp_path).summaries() == {SUMMARY.key: later, "f": other}
    assert Folder(tmp_path).outcomes(SUMMARY) == [OUTCOME]
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 3


def test_nats_that_do_not_fit_their_samples_are_refused(tmp_path):
    results = Folder(tmp_path)
    outcome = replace(OUTCOME, tags={"nats": 2.5, "hits": 1.0})
    results.append(replace(SUMMARY, nats=2.5, hits=1.0), [outcome], [])
    assert Folder(tmp_path).summaries()[SUMMARY.key].nats == 2.5
    with (tmp_path / "results.jsonl").open("a") as file:  # a row of an earlier version
        file.write(json.dumps(asdict(replace(SUMMARY, nats=2.0, hits=1.0))) + "\n")
    with pytest.warns(CorruptRowWarning, match="does not fit its samples"):
        assert Folder(tmp_path).summaries()[SUMMARY.key].nats == 2.5


@pytest.mark.parametrize("name", ["results.jsonl", f"samples/{SUMMARY.key}.jsonl"])
def test_what_was_changed_after_it_was_written_is_refused(tmp_path, name):
    Folder(tmp_path).append(SUMMARY, [OUTCOME], [])
    assert Folder(tmp_path).outcomes(Folder(tmp_path).summaries()[SUMMARY.key]) == [OUTCOME]
    file = tmp_path / name
    changed = file.read_text().replace("0.498", "0.499")
    file.write_text(changed)
    with pytest.warns(CorruptRowWarning, match="have changed"):
        assert Folder(tmp_path).summaries() == {}


def test_a_row_after_a_torn_one_stands_on_its_own_line(tmp_path):
    results = Folder(tmp_path)
    (tmp_path / "results.jsonl").write_text(LINE[:40])
    results.append(SUMMARY, [OUTCOME], [])
    with pytest.warns(CorruptRowWarning, match="a row cannot be used"):
        assert results.summaries() == {SUMMARY.key: SUMMARY}
    assert (tmp_path / "results.corrupt.jsonl").read_text() == LINE[:40] + "\n"
    assert read_line((tmp_path / "results.jsonl").read_text(), Summary) == SUMMARY


def test_a_key_cannot_lead_out_of_the_folder(tmp_path):
    results = Folder(tmp_path / "out")
    (tmp_path / "secret.jsonl").write_text("")
    (tmp_path / "out" / "results.jsonl").write_text(
        json.dumps(asdict(SUMMARY) | {"key": "../../secret", "n": 0}) + "\n"
    )
    with pytest.warns(CorruptRowWarning, match="key="):
        assert results.summaries() == {}


def test_one_process_writes(tmp_path):
    one, other = Folder(tmp_path), Folder(tmp_path)
    with one.writing(), refuses(UserError, str(tmp_path), "cluster=local"), other.writing():
        pass
    with other.writing():
        pass


@pytest.mark.parametrize(
    "line",
    [
        "",
        "null",
        "[]",
        "{}",
        "NaN",
        LINE[:-2],
        LINE.replace("3.25", "NaN"),
        LINE.replace("3.25", "1e999"),
        LINE.replace("3.25", '"3.25"'),
        LINE.replace('"n": 1', '"n": 1.5'),
        LINE.replace('"n": 1', '"n": true'),
        LINE.replace("false", "0"),
        LINE.replace('"task"', '"tusk"'),
        LINE.replace('{"ag": "0.1.0"}', '{"ag": 1}'),
        LINE.replace('"problem": null', '"problem": null, "more": 1'),
        "[" * 100_000,
    ],
)
def test_what_is_no_row_is_refused(line):
    with pytest.raises(ValueError):
        read_line(line, Summary)


@pytest.mark.slow
@settings(max_examples=150)
@given(st.sampled_from(list(asdict(SUMMARY))), VALUES)
def test_a_changed_value_is_refused_or_of_the_right_type(name, value):
    number = (int, float)
    maybe = ("budget", "error", "nats", "hits", "floor", "prompt_mean")
    allowed = dict.fromkeys(maybe, (*number, type(None))) | {"seconds": number, "kv_bytes": number}
    text = name in ("problem", "question", "dtype", "quantization", "hardware", "date", "command", "checksum")
    allowed["task_options"] = (dict, type(None))
    expected = allowed.get(name, (type(getattr(SUMMARY, name)), str if text else int, type(None)))
    try:
        row = read_line(json.dumps(asdict(SUMMARY) | {name: value}), Summary)
    except ValueError as error:
        assert str(error)
    else:
        assert asdict(row) == asdict(SUMMARY) | {name: value}
        assert isinstance(value, expected)


@settings(max_examples=60)
@given(st.lists(st.binary(max_size=40) | st.just(LINE.encode()) | VALUES.map(lambda v: json.dumps(v).encode())))
@pytest.mark.slow
def test_any_file_is_sorted_into_rows_and_the_rest(tmp_path_factory, pieces):
    folder = tmp_path_factory.mktemp("results")
    results = Folder(folder)
    results.append(SUMMARY, [OUTCOME], [])
    found = b"\n".join(pieces)
    (folder / "results.jsonl").write_bytes(found)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CorruptRowWarning)
        rows = results.summaries()
    written = [line for line in found.split(b"\n") if line]
    good = [line for line in written if line == LINE.encode()]
    assert rows == ({SUMMARY.key: SUMMARY} if good else {})
    assert (folder / "results.jsonl").read_bytes().split() == b"\n".join(good).split() or len(good) == len(written)
    corrupt = folder / "results.corrupt.jsonl"
    kept_aside = corrupt.read_bytes().split(b"\n")[:-1] if corrupt.exists() else []
    assert kept_aside == [line for line in written if line != LINE.encode()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert results.summaries() == rows

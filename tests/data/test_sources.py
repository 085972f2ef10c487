import gzip

import pytest

from ag.data.sources import DataError, MissingSplitError, Source, local_folder
from tests.support.refused import refuses

ROWS = [{"text": "one"}, {"text": "zwei – drei"}]


@pytest.mark.parametrize("zipped", [False, True])
def test_folder_gives_its_rows_in_order(tmp_path, write, zipped):
    file = write(tmp_path, "train", ROWS, zipped)
    source = Source("x", folder=tmp_path)
    assert list(source.read("train")) == ROWS
    assert source.where("train") == str(file)


def test_missing_split(tmp_path, write):
    write(tmp_path, "train", ROWS)
    with refuses(MissingSplitError, "validation", "validation.jsonl"):
        Source("x", folder=tmp_path).read("validation")


def test_missing_folder(tmp_path):
    with refuses(DataError, f"data.root={tmp_path}", "boolq"):
        local_folder(str(tmp_path), "boolq")


def test_root_may_be_the_folder_itself(tmp_path, write):
    write(tmp_path / "boolq", "train", ROWS)
    assert local_folder(str(tmp_path), "boolq") == local_folder(str(tmp_path / "boolq"), "boolq") == tmp_path / "boolq"


@pytest.mark.parametrize(
    "line, parts",
    [
        ("{broken", ("train.jsonl line 3", "JSON")),
        ("[1]", ("train.jsonl line 3", "list", "JSON object")),
    ],
)
def test_damaged_line(tmp_path, write, line, parts):
    file = write(tmp_path, "train", ROWS)
    file.write_text(file.read_text() + line + "\n")
    with refuses(DataError, *parts):
        list(Source("x", folder=tmp_path).read("train"))


def test_truncated_archive(tmp_path):
    whole = gzip.compress(b'{"text": "a"}\n' * 1000)
    (tmp_path / "train.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with refuses(DataError, "train.jsonl.gz"):
        list(Source("x", folder=tmp_path).read("train"))


def test_not_utf8(tmp_path):
    (tmp_path / "train.jsonl").write_bytes(b'{"text": "\xff"}\n')
    with refuses(DataError, "train.jsonl", "line 0"):
        list(Source("x", folder=tmp_path).read("train"))


def test_hub_gets_name_subset_split_and_revision(monkeypatch):
    calls = []

    def load_dataset(*args, **kwargs):
        calls.append((args, kwargs))
        return ROWS

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    source = Source("some/set", "main", "abc")
    assert list(source.read("train", streaming=True)) == ROWS
    assert calls == [(("some/set", "main"), {"split": "train", "revision": "abc", "streaming": True})]
    assert source.where("train") == "some/set[train]"


@pytest.mark.parametrize(
    "error, kind",
    [
        (ValueError("Unknown split \"validation\". Should be one of ['train']."), MissingSplitError),
        (ValueError("Bad split: validation. Available splits: ['train']"), MissingSplitError),
        (ConnectionError("Couldn't reach the Hub"), DataError),
        (RuntimeError("Dataset scripts are no longer supported, but found x.py"), DataError),
    ],
)
def test_hub_errors_are_one_sentence(monkeypatch, error, kind):
    def load_dataset(*_, **__):
        raise error

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    with refuses(kind, "some/set", str(error)) as caught:
        Source("some/set").read("validation")
    assert str(error) in str(caught.value)

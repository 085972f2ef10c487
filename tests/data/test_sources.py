"""Files of rows, and the hub: what is read, and what is refused with file and row."""

import csv
import gzip
import io
import json
import sys

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from ag.data.sources import DataError, MissingSplitError, Source, dataset_name, dataset_of
from tests.support.refused import refuses

ROWS = [{"prompt": f"Word {i}:", "response": f" the old bridge {i}"} for i in range(7)]
LINE = json.dumps(ROWS[0]).encode() + b"\n"


def read(folder, split="train"):
    return list(Source("x", folder=folder).read(split))


@pytest.mark.parametrize("ending", ["jsonl.gz", "json", "lines.json", "parquet", "csv", "saved"])
def test_files_of_every_kind(tmp_path, ending):
    """In two shards, but for what ``save_to_disk`` wrote; the values are those that were written."""
    rows = [*ROWS, {"prompt": 'a "b"\nc,\r\nd', "response": "x" * 200_000}, {"prompt": "2024-01-01", "response": "NA"}]
    if not ending.startswith("csv"):
        rows = [row | {"n": n, "deep": [{"b": 1, "a": 2.5}]} for n, row in enumerate(rows)]
    if ending == "saved":
        datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path))
    for shard, part in enumerate((rows[:3], rows[3:]) if ending != "saved" else ()):
        file = tmp_path / f"train-0000{shard}.{ending.removeprefix('lines.')}"
        if ending == "parquet":
            parquet.write_table(pyarrow.Table.from_pylist(part), file)
            continue
        text = "".join(json.dumps(row) + "\n" for row in part) if ending != "json" else json.dumps(part, indent=1)
        if ending.startswith("csv"):
            table = csv.DictWriter(written := io.StringIO(newline=""), list(rows[0]))
            table.writeheader()
            table.writerows(part)
            text = written.getvalue()
        file.write_bytes(gzip.compress(text.encode()) if ending.endswith("gz") else text.encode())
    found = read(tmp_path)
    assert found == rows and [list(row["deep"][0]) for row in found if "deep" in row][-1:] in ([], [["b", "a"]])


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "txt"])
def test_blank_lines_and_a_byte_order_mark_are_skipped(tmp_path, ending):
    """Spreadsheets write the mark before a table's header."""
    lines, rows = [json.dumps(row) for row in ROWS], ROWS
    if ending == "csv":
        lines = ["prompt,response", *(",".join(row.values()) for row in ROWS)]
    elif ending == "txt":
        lines, rows = ["a\n\nb"], [{"text": "\n \na\n\nb\n\n"}]
    for mark in ("", "\ufeff"):
        (tmp_path / f"train.{ending}").write_text(mark + "\n \n" + "\n\n".join(lines) + "\n\n")
        assert read(tmp_path) == rows


def test_texts_of_other_splits_are_not_trained_on_and_all_others_are(tmp_path):
    """A name that only begins like that of a split is no other split's."""
    other = {"validation": ["validation-1", "validation-2"], "test": ["test"]}
    for name in ("alpha", "testament", "validation_of_parking", *other["validation"], *other["test"]):
        (tmp_path / f"{name}.txt").write_text(name)
    for split, names in {"train": ["alpha", "testament", "validation_of_parking"], **other}.items():
        assert [row["text"] for row in read(tmp_path, split)] == names


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("train.json", b"[1, 2]", "train.json row 1 int"),
        ("train.parquet", b"no parquet", "train.parquet"),
        ("train.jsonl", LINE + b"{broken\n", "train.jsonl line 2 JSON"),
        ("train.jsonl", b'{"text": "\xff"}\n', "train.jsonl line 0"),
        ("train.jsonl.gz", gzip.compress(LINE * 1000)[:-9], "train.jsonl.gz line"),
        ("train.jsonl", LINE + b'\n{"prompt": "a", "response": "\\ud83d"}\n', "train.jsonl line 3 surrogates"),
        ("train.jsonl", LINE + b'{"a": ' + b"[" * 5000 + b"]" * 5000 + b"}", "train.jsonl line 2 deep"),
        ("train.csv", b"\xef\xbb\xbf\n\nprompt,completion\n\na,b\na\n", "train.csv line 6 cells prompt, completion"),
        ("train.csv", b'prompt,completion\na,"b\n', "train.csv CSV line 2"),
        ("train.csv", b"prompt,completion,prompt\na,b,c\n", "train.csv prompt twice"),
        ("data-0.arrow", b"no arrow", "save_to_disk"),
    ],
)
def test_files_that_are_damaged(tmp_path, name, content, parts):
    (tmp_path / name).write_bytes(content)
    if name.endswith("arrow"):
        (tmp_path / "state.json").write_text("{}")
    with refuses(DataError, str(tmp_path), *parts.split(maxsplit=4)):
        read(tmp_path)


def test_which_files_are_of_a_split(tmp_path, write):
    write(tmp_path, "train", ROWS[:2])
    (tmp_path / "trainings.csv").write_text("a,b\n")
    for other in ("train-00001.jsonl", "train.csv"):
        (tmp_path / other).write_text("prompt,response\na,b\n")
        with refuses(DataError, str(tmp_path), "train.jsonl", other):
            read(tmp_path)
        (tmp_path / other).unlink()
    assert read(tmp_path) == ROWS[:2]
    with refuses(MissingSplitError, "validation", "save_to_disk"):
        read(tmp_path, "validation")
    whole = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": whole, "validation": whole.select([0])}).save_to_disk(str(tmp_path / "splits"))
    source = Source("x", folder=tmp_path / "splits")
    assert (list(source.read("train")), list(source.read("validation"))) == (ROWS, ROWS[:1])
    assert source.where("train") == str(tmp_path / "splits" / "train")
    assert source.identity("train") == Source("x", folder=tmp_path / "splits").identity("train")
    assert source.identity("train") != source.identity("validation")


@pytest.mark.parametrize("given", [{"root": "rows"}, {"root": ".", "name": "rows"}])
def test_a_folder_for_each_split_that_save_to_disk_wrote(make_config, tmp_path, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    for split, number in (("train", 7), ("validation", 1)):
        datasets.Dataset.from_list(ROWS[:number]).save_to_disk(f"rows/{split}")
    source = dataset_of(make_config(kind="text", **given).data)
    assert (list(source.read("train")), list(source.read("validation"))) == (ROWS, ROWS[:1])


def test_what_messages_call_the_data(make_config, tmp_path, write):
    """The folder where it holds the rows."""
    write(tmp_path / "corpus", "train", ROWS)
    told = [{"name": "a/b"}, {"root": str(tmp_path), "name": "corpus"}, {"root": str(tmp_path / "corpus")}]
    expected = ["a/b", f"corpus in {tmp_path}", str(tmp_path / "corpus")]
    assert [dataset_name(make_config(kind="text", **one).data) for one in told] == expected


@pytest.mark.parametrize(
    "error, kind",
    [
        (ValueError("Unknown split \"validation\". Should be one of ['train']."), MissingSplitError),
        (ConnectionError("Couldn't reach the Hub"), DataError),
    ],
)
def test_hub_errors_are_one_sentence(monkeypatch, error, kind):
    def load_dataset(*_, **__):
        raise error

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    with refuses(kind, "some/set", str(error)):
        Source("some/set").read("validation")


def test_a_row_at_the_edge_of_what_python_reads_is_read_or_named(tmp_path):
    """JSON is read and then checked, and the one may stand more levels than the other."""
    refused = []
    for depth in range(sys.getrecursionlimit() - 150, sys.getrecursionlimit() + 1):
        (tmp_path / "train.jsonl").write_text(f'{{"a": {"[" * depth}{"]" * depth}}}\n')
        try:
            read(tmp_path)
        except DataError as error:
            refused.append(str(error))
    assert refused and all("line 1 has objects inside objects too deep" in error for error in refused)

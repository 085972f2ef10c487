"""``ag data sample``: the tasks of the README read what it writes."""

import io

import pytest
from rich.console import Console

from ag.compare import CompareConfig
from ag.data.__main__ import main
from ag.evaluate.comparison.compare import compare


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sample") / "DATA"
    assert main(["sample", str(folder)]) == 0
    return folder


def contents(folder):
    return {file.relative_to(folder): file.read_text() for file in folder.rglob("*") if file.is_file()}


def test_the_same_files_each_time_and_none_overwritten(folder, tmp_path, capsys):
    assert main(["sample", str(tmp_path)]) == 0  # an empty folder
    assert contents(tmp_path) == contents(folder)
    assert main(["sample", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err
    assert main(["samples"]) == 2
    assert "ag.data sample FOLDER" in capsys.readouterr().err


def test_tasks_read_it(folder, tiny_folder, tmp_path):
    config = CompareConfig(
        model=str(tiny_folder),
        root=str(folder),
        policies=["full", "h2o"],
        budgets=[0.5],
        tasks=["ppl", "boolq", "needle_books_1"],
        task_options={"ppl": {"prompt": 40, "continuation": 8}, "needle_books_1": {"lengths": [300], "repeats": 2}},
        samples=2,
        output=str(tmp_path / "out"),
    )
    results = compare(config, Console(file=io.StringIO())).results
    assert len(results) == 6 and all(row.n == 2 for row in results)

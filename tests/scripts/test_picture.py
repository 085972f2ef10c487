"""The README's picture shows the numbers of comparisons, and is drawn again from its own."""

import hashlib
from dataclasses import replace

import pandas
import pytest

from ag.config.exports import shipped
from ag.evaluate.comparison.folder import Folder
from scripts import picture
from tests.support import ROOT
from tests.support.made_up import BUDGETS, COSTS, N, comparison


@pytest.fixture
def numbers(tmp_path):
    """Of a comparison of two tasks, written to a folder."""
    made = comparison(tmp_path)
    folder = Folder(tmp_path)
    for key, cell in made.cells.items():
        folder.append(cell._replace(summary=replace(cell.summary, key=hashlib.sha256(key.encode()).hexdigest()[:20])))
    return made, picture.read("mine", tmp_path)


def test_numbers_are_those_of_the_comparison(numbers):
    made, found = numbers
    assert len(found) == len(made.rows) == 2 * (1 + len(COSTS) * len(BUDGETS))
    for row, number in zip(made.results, found.itertuples(), strict=True):
        asked = row.task == "needle_books"
        assert number.experiment == ("answers" if asked else "continuation") and number.samples == N
        assert number.policy == ("trained gates" if row.label == "mine" else row.label)
        assert number.memory == pytest.approx(row.kept, abs=5e-7)
        assert number.quality == pytest.approx(row.mean if asked or not row.evicts else row.difference, abs=5e-7)


def test_other_gates_are_left_out(tmp_path, numbers):
    assert "trained gates" not in set(picture.read("former", tmp_path).policy)


def test_every_number_is_a_point_of_the_picture(numbers):
    _, found = numbers
    answers, continuation = picture.draw(found).axes
    for axes, experiment in ((answers, "answers"), (continuation, "continuation")):
        rows = found[(found.experiment == experiment) & (found.policy != "full")]
        drawn = {point for line in axes.lines for point in zip(*line.get_data(), strict=True)}
        assert drawn >= set(zip(rows.memory, rows.quality, strict=True))


def test_it_is_drawn_again_from_its_numbers(tmp_path, numbers, monkeypatch, capsys):
    monkeypatch.setattr(picture, "NUMBERS", tmp_path / "quality.csv")
    monkeypatch.setattr(picture, "PICTURE", tmp_path / "quality.png")
    picture.main(["mine", str(tmp_path)])
    (tmp_path / "quality.png").unlink()
    picture.main([])
    assert (tmp_path / "quality.png").stat().st_size > 0 and "quality.png" in capsys.readouterr().out
    again = pandas.read_csv(tmp_path / "quality.csv", dtype={"budget": str})
    pandas.testing.assert_frame_equal(again.fillna({"budget": ""}), numbers[1], check_dtype=False)


def test_the_readme_has_the_numbers_of_the_picture():
    """A row of its first table of results for each policy, a column for each budget."""
    numbers = pandas.read_csv(picture.NUMBERS, dtype={"budget": str})
    rows = numbers[(numbers.experiment == "continuation") & (numbers.policy != "full")]
    lines = (ROOT / "README.md").read_text().replace("**", "").splitlines()
    (model,) = rows.model.unique()
    assert model in shipped()
    for policy, points in rows.groupby("policy"):
        name = f"gates:{model}" if policy == picture.GATES else policy
        by_budget = points.set_index("budget").quality[["0.5", "0.3", "0.2", "0.1"]]
        cells = " | ".join(f"{x:+.3f}" for x in by_budget)
        assert [line for line in lines if line.startswith(f"| `{name}`") and line.endswith(f"| {cells} |")], policy

"""The notebook of docs/: what is stored came from the code that is stored, and the code runs."""

import pytest

from scripts import docs_site
from tests.support import ROOT

nbformat = pytest.importorskip("nbformat", reason="needs the notebook's libraries: pip install -e '.[dev]'")
pytest.importorskip("nbclient", reason="needs the notebook's libraries: pip install -e '.[dev]'")

from scripts import tour  # noqa: E402


@pytest.fixture(scope="module")
def stored():
    return nbformat.read(tour.TOUR, as_version=4)


def code_of(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def forms(notebook):
    """Of each output the form, and a text's number of lines."""
    return [
        [("text", one.text.count("\n")) if one.output_type == "stream" else tuple(one.data) for one in cell.outputs]
        for cell in code_of(notebook)
    ]


def test_what_is_stored_came_from_this_code_and_the_site_shows_it(stored):
    assert stored.metadata["code"] == tour.digest(stored), "run python scripts/tour.py"
    assert tour.TOUR.stat().st_size < 300_000
    assert [line for cell in stored.cells for line in cell.source.splitlines() if len(line) > 120] == []
    page = docs_site.text_of(tour.TOUR)
    for cell in stored.cells:
        assert cell.source in page
    for one in (one for cell in code_of(stored) for one in cell.outputs):
        assert (one.text if one.output_type == "stream" else one.data["image/png"]).strip() in page
    assert "(docs/tour.ipynb)" in (ROOT / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.nightly
def test_it_runs(stored, smollm2, tmp_path):
    """Away from the checkout, on the packaged model: each cell prints and draws what is stored, but for numbers."""
    ran = tour.executed(tour.TOUR, tmp_path)
    assert forms(ran) == forms(stored)
    [answers] = [cell.outputs[0].text for cell in code_of(ran) if "def answer" in cell.source]
    right = [line.partition(":")[0] for line in answers.splitlines() if "4817362" in line]
    assert right == ["full", "gates"]
    assert (next((tmp_path / "runs" / "quickstart").iterdir()) / "export" / "gate_config.json").is_file()

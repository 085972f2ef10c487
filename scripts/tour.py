"""Runs docs/tour.ipynb and writes into it what its cells printed and drew: python scripts/tour.py.

GitHub and the site show what is stored. A test runs the notebook as it is here, and holds that what is stored came from
this very code.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

TOUR = Path(__file__).resolve().parents[1] / "docs" / "tour.ipynb"
SECONDS = 600  # for each cell
COLOUR = re.compile(r"\x1b\[[\d;]*m")


def digest(notebook: NotebookNode) -> str:
    """Return the hash of a notebook's code."""
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256("\0".join(code).encode()).hexdigest()


def executed(path: Path, folder: str | Path) -> NotebookNode:
    """Run a notebook in a folder; returns it with what was printed and drawn, as plain texts and pictures.

    Raises:
        nbclient.exceptions.CellExecutionError: when a cell fails.
    """
    notebook = nbformat.read(path, as_version=4)
    told = {"timeout": SECONDS, "record_timing": False, "resources": {"metadata": {"path": str(folder)}}}
    NotebookClient(notebook, kernel_name="python3", **told).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = _plain(cell.outputs)
    notebook.metadata = {name: value for name, value in notebook.metadata.items() if name == "kernelspec"} | {
        "language_info": {"name": "python"},
        "code": digest(notebook),
    }
    return notebook


def _plain(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Return outputs in one form each, without what went to standard error; texts that follow each other are one."""
    found: list[NotebookNode] = []
    for output in outputs:
        if output.output_type == "stream" and output.name != "stdout":
            continue
        text = output.text if output.output_type == "stream" else output.get("data", {}).get("text/plain", "") + "\n"
        if "image/png" in output.get("data", {}):
            output.data = {"image/png": output.data["image/png"]}
            found.append(output)
        elif found and found[-1].output_type == "stream":
            found[-1].text += COLOUR.sub("", text)
        else:
            found.append(nbformat.v4.new_output("stream", name="stdout", text=COLOUR.sub("", text)))
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as runs:
        nbformat.write(executed(TOUR, runs), TOUR)

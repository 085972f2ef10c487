"""The gates that come with the package: whole, small, found by name, and as good as their card says."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import ag
from ag.compare import main
from ag.config import exports
from ag.config.recipes import RECIPES, load_config
from ag.config.schema import Config
from ag.gates import export
from ag.gates.export import ExportError
from tests.support.refused import refuses

NAMES = exports.shipped()
MOST = 3 * 2**20


def test_each_is_whole_and_small() -> None:
    assert NAMES == ["smollm2"]
    for name in NAMES:
        folder = export.local(name)
        assert sum(file.stat().st_size for file in folder.iterdir()) <= MOST
        gates = ag.AttentionGates.from_pretrained(name)  # checks the hash
        assert gates.calibration is not None
        assert gates.calibration.boundary(0.5) == 0  # the flags alone keep half


def test_each_is_what_its_recipe_trains() -> None:
    """But for the boundary of the flags, which lies at a share of one half."""
    for name in NAMES:
        recipe = load_config(RECIPES / "fit" / f"{name}_remember.yaml", Config)
        gate = ag.AttentionGates.from_pretrained(name).config
        assert gate.kind == "mlp"  # which has no heads of its own
        assert replace(gate, head_dim=recipe.gate.head_dim) == recipe.gate
        assert recipe.export.weights == "int8" == export.read_info(name)["weights"]


def test_a_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "smollm2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert export.local("smollm2") == Path("smollm2")
    with refuses(ExportError, "gate_config.json"):
        export.read_info("smollm2")


@pytest.mark.parametrize("wrong", ["smolm2", "smollm"])
def test_a_name_that_is_not_there_suggests_the_nearest(wrong: str) -> None:
    with refuses(ExportError, wrong, "did you mean smollm2?"):
        ag.policy(f"gates:{wrong}")


@pytest.mark.slow
def test_they_saw_nothing_of_what_they_are_measured_on(shared_data: Path) -> None:
    """By ids, those of the documents whose continuation is scored; by runs of 12 words, all books that hide numbers."""
    train, validation, books = (
        [json.loads(line) for line in lines(shared_data / name)]
        for name in ("corpus/train.jsonl.gz", "corpus/validation.jsonl", "pg19_style/test.jsonl.gz")
    )
    assert len(train) > 4000 and not {row["id"] for row in train} & {row["id"] for row in validation}
    read = {run for row in books for run in runs(row["text"])}
    assert len(read) > 100_000 and not any(run in read for row in train for run in runs(row["text"]))


def lines(path: Path) -> list[str]:
    content = path.read_bytes()
    return (gzip.decompress(content) if path.suffix == ".gz" else content).decode().strip().split("\n")


def runs(text: str) -> Iterator[int]:
    """The hash of each 12 words in a row."""
    words = text.split()
    return (hash(tuple(words[i : i + 12])) for i in range(len(words) - 11))


@pytest.mark.slow
def test_they_remember_what_is_asked_later(smollm2: Path, tmp_path: Path) -> None:
    """Of 12 numbers hidden in 256 tokens, at 30 % of the cache: the full cache's hits, which snapkv does not have."""
    words = [
        f"model={smollm2}", "policies=[full,gates:smollm2@global,snapkv]", "budgets=[0.3]", "tasks=[needle_books_1]",
        "task_options.needle_books_1.haystack=noise", "task_options.needle_books_1.lengths=[256]",
        "samples=12", "view_samples=0", f"output={tmp_path}",
    ]  # fmt: skip
    assert main(words) == 0
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    full, gates, snapkv = (
        {row["label"]: row for row in rows}[name] for name in ("full", "gates:smollm2@global", "snapkv")
    )
    assert 0.29 < gates["kept"] < 0.31
    assert full["hits"] >= 0.75
    assert gates["hits"] >= full["hits"] - 0.1
    assert gates["nats"] <= full["nats"] + 0.1 < snapkv["nats"] - 0.5

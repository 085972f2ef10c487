"""The gates that come with the package: whole, small, found by name, and as good as their card says."""

from __future__ import annotations

import json
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


def test_each_is_small_and_what_its_recipe_trains() -> None:
    assert NAMES == ["smollm2"]
    for name in NAMES:
        assert sum(file.stat().st_size for file in export.local(name).iterdir()) <= MOST
        recipe = load_config(RECIPES / "fit" / f"{name}_remember.yaml", Config)
        gates = ag.AttentionGates.from_pretrained(name)
        assert gates.calibration.boundary(0.35) < 0 < gates.calibration.boundary(0.3)  # what the flags alone keep
        assert gates.config.kind == "mlp"  # has no heads
        assert replace(gates.config, head_dim=recipe.gate.head_dim) == recipe.gate
        assert recipe.export.weights == "int8" == export.read_info(name)["weights"]
    with refuses(ExportError, "smolm2", "did you mean smollm2?"):
        ag.policy("gates:smolm2")


@pytest.mark.slow
@pytest.mark.nightly
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

"""Twenty steps of a tiny run against a file: a change of any number of training shows.

After a change that is meant, write the file anew: AG_UPDATE_GOLDEN=1 python -m pytest tests/integration/test_golden.py
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.support import TESTS
from tests.support.bounds import ROUNDINGS, hold
from tests.support.command import logged, train

GOLDEN = TESTS / "golden" / "loss_curve.txt"
COLUMNS = ("train/lm_loss", "train/eviction_loss", "train/grad_norm_gates", "train/grad_norm_lora")
OVERRIDES = [
    *("train=gates+lora", "trainer.max_steps=20"),
    *("optim.gate_lr=1e-4", "optim.lora_lr=1e-3", "optim.schedule=constant"),
]
# No gate comes nearer than 1e-5 to its threshold, so that rounding flips no flag.
PRINTED = 5e-6  # half a unit of the sixth digit, of the number at most


def curve_of(run: Path) -> list[list[float]]:
    return [[row["step"], *(row[name] for name in COLUMNS)] for row in logged(run)]


@pytest.mark.slow
def test_loss_curve(recipe: Path, moved_base: Path, tmp_path: Path) -> None:
    """Within what roundings of the weights do to it, and what was printed."""
    curve = curve_of(train(recipe, tmp_path, *OVERRIDES))
    if os.environ.get("AG_UPDATE_GOLDEN"):
        lines = [" ".join(["step", *COLUMNS]), *(f"{row[0]} " + " ".join(f"{x:.6g}" for x in row[1:]) for row in curve)]
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text("\n".join(lines) + "\n")
    header, *expected = [line.split() for line in GOLDEN.read_text().splitlines()]
    assert header == ["step", *COLUMNS] and len(curve) == len(expected) == 20
    moved = curve_of(train(recipe, tmp_path / "moved", *OVERRIDES, f"model.name={moved_base}"))
    found, off = (torch.tensor(x, dtype=torch.float64) for x in (curve, moved))
    wanted = torch.tensor([[float(cell) for cell in line] for line in expected], dtype=torch.float64)
    hold(found, wanted, ROUNDINGS * (found - off).abs().amax(0) + PRINTED * wanted.abs(), "step, column")

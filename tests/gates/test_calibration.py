"""The table of shares and boundaries that an export records."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ag.config.gate import GateConfig
from ag.errors import UserError
from ag.gates import export
from ag.gates.calibration import Calibration
from ag.gates.export import ExportError
from ag.gates.gate import AttentionGates
from tests.support.exports import assert_same, make_gates, read_json, reseal, reweigh
from tests.support.refused import refuses

TABLE = Calibration((0.2, 0.3, 0.7), (3.0, 1.0, -1.0))


@pytest.mark.parametrize(
    ("share", "boundary"), [(0.2, 3.0), (0.25, 2.0), (0.3, 1.0), (0.4, 0.5), (0.6, -0.5), (0.7, -1.0)]
)
def test_between_two_rows(share: float, boundary: float) -> None:
    assert TABLE.boundary(share) == pytest.approx(boundary)


@pytest.mark.parametrize("share", [0.19, 0.71, 0.0, 1.0, -1.0, float("nan")])
def test_outside_of_the_table(share: float) -> None:
    with refuses(UserError, f"share={share}", "0.2", "0.7"):
        TABLE.boundary(share)


def test_an_export_keeps_it(tmp_path: Path) -> None:
    gates = make_gates()
    gates.calibration = TABLE
    export.save(tmp_path / "a", gates)
    loaded = AttentionGates.from_pretrained(tmp_path / "a")
    assert loaded.calibration is not None and loaded.calibration.record() == TABLE.record()
    loaded.save_pretrained(tmp_path / "b")
    assert read_json(tmp_path / "b")["calibration"] == {"shares": [0.2, 0.3, 0.7], "boundaries": [3.0, 1.0, -1.0]}
    card = (tmp_path / "a" / "README.md").read_text()
    assert "| 0.20 | 3 |\n| 0.30 | 1 |\n| 0.70 | -1 |" in card and "share=0.3" in card
    assert make_gates().calibration is None
    export.save(tmp_path / "a", make_gates())
    assert AttentionGates.from_pretrained(tmp_path / "a").calibration is None
    assert "share=" not in (tmp_path / "a" / "README.md").read_text()


def test_gates_of_two_layers_from_before_have_biases_of_0(tmp_path: Path) -> None:
    gates = make_gates(config=GateConfig(kind="mlp", hidden=9))
    export.save(tmp_path / "e", gates)
    biases = [f"layers.{layer}.{part}.bias" for layer in range(3) for part in ("inner", "outer")]
    reweigh(lambda tensors: [tensors.pop(name) for name in biases].clear())(tmp_path / "e")
    with refuses(ExportError, "gates.safetensors: 7624 bytes", "7756"):
        AttentionGates.from_pretrained(tmp_path / "e")
    info = read_json(tmp_path / "e")
    del info["calibration"], info["weights"]
    reseal(tmp_path / "e", info | {"schema_version": "1.2"})
    loaded = AttentionGates.from_pretrained(tmp_path / "e")
    assert_same(loaded, gates)  # whose biases are 0, being fresh
    hidden = torch.randn(2, 5, 64)
    assert torch.equal(loaded.layers["1"](hidden), gates.layers["1"](hidden))

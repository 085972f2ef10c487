"""Exports in eight bits: what is rounded, by how much, and what a damaged one says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ag.config.gate import GateConfig
from ag.gates import export, packed
from ag.gates.export import ExportError
from ag.gates.gate import AttentionGates
from tests.support.bounds import hold
from tests.support.exports import change, make_gates, reweigh
from tests.support.refused import refuses

EPS = torch.finfo(torch.float32).eps
MLP = GateConfig(kind="mlp", hidden=9)


def test_a_matrix_by_hand() -> None:
    rows = torch.tensor([[254.0, -1.0, 3.1], [0.0, 0.0, 0.0], [-0.5, 0.25, 0.125]])
    found = packed.pack({"inner.weight": rows, "inner.bias": torch.tensor([0.3])})
    assert found["inner.weight"].tolist() == [[127, 0, 2], [0, 0, 0], [-127, 64, 32]]  # half to even
    assert found["inner.weight.scale"].tolist() == torch.tensor([2, 0, 0.5 / 127]).tolist()
    back = packed.unpack(found)
    assert back["inner.weight"][0].tolist() == [254, 0, 4]
    assert back["inner.bias"].tolist() == torch.tensor([0.3]).tolist()


@pytest.mark.parametrize("config", [MLP, GateConfig(num_heads=2, head_dim=4, shortcut=True)])
def test_each_weight_is_within_half_a_step_of_its_row(tmp_path: Path, config: GateConfig) -> None:
    gates = make_gates(config=config)
    export.save(tmp_path / "e", gates, weights="int8")
    loaded = AttentionGates.from_pretrained(tmp_path / "e")
    for name, tensor in loaded.state_dict().items():
        exact = gates.state_dict()[name]
        step = exact.abs().amax(-1, keepdim=True) / 127 if exact.dim() == 2 else torch.zeros(1)
        assert ((tensor - exact).abs() <= (0.5 + 127 * EPS) * step).all(), name  # the largest is 127 steps, rounded
        assert tensor.dtype == torch.float32
    again = tmp_path / "again"
    export.save(again, loaded, weights="int8")
    for name, tensor in AttentionGates.from_pretrained(again).state_dict().items():
        hold(tensor, loaded.state_dict()[name], 2 * EPS * tensor.abs())  # the same steps, of a scale that is rounded
    size = sum(file.stat().st_size for file in (tmp_path / "e").glob("*.safetensors"))
    export.save(tmp_path / "wide", gates)
    wide = sum(file.stat().st_size for file in (tmp_path / "wide").glob("*.safetensors"))
    assert size < 0.6 * wide  # the header is most of the rest


def test_damages(tmp_path: Path) -> None:
    def make(name: str) -> Path:
        export.save(tmp_path / name, make_gates(config=MLP), weights="int8")
        return tmp_path / name

    change("weights", value="int4")(make("a"))
    with refuses(ExportError, "gate_config.json", "weights='int4'", "float32", "int8"):
        AttentionGates.from_pretrained(tmp_path / "a")
    change("weights", value="float32")(make("b"))
    with refuses(ExportError, "gates.safetensors"):
        AttentionGates.from_pretrained(tmp_path / "b")
    scale = next(name for name in load_file(make("c") / "gates.safetensors") if name.endswith(".scale"))
    reweigh(lambda tensors: tensors.update({scale: tensors[scale] * float("nan")}))(tmp_path / "c")
    with refuses(ExportError, scale, "NaN"):
        AttentionGates.from_pretrained(tmp_path / "c")
    reweigh(lambda tensors: tensors.pop(scale))(make("d"))
    with refuses(ExportError, "gates.safetensors"):
        AttentionGates.from_pretrained(tmp_path / "d")

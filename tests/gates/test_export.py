"""Exports: what is written is what is read, and what is in the way is left alone."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from ag.config.gate import GateConfig
from ag.errors import UserError
from ag.gates import export
from ag.gates.calibration import Calibration
from ag.gates.export import ExportError
from ag.gates.gate import KINDS, AttentionGates, TokenGate
from tests.support.exports import (
    MODEL,
    assert_same,
    change,
    hidden,
    make_adapter,
    make_export,
    make_gates,
    read_json,
    reseal,
    reweigh,
    snapshot,
)
from tests.support.refused import refuses

MLP = GateConfig(kind="mlp", hidden=9)
PNG = b"\x89PNG\r\n\x1a\n picture"


@pytest.mark.parametrize(
    "config",
    [
        GateConfig(num_heads=3, head_dim=5, shortcut=True, granularity="query_head", recent_tokens=7, sink_tokens=2),
        GateConfig(num_heads=1, head_dim=8, layer_offset=1, first_layer=2, scope="prompt", prefill="dense"),
        GateConfig(kind="mlp", hidden=9, covers="all", granularity="query_head"),
        GateConfig(kind="affine", bias=0.0, threshold=0.3),
        GateConfig(kind="fast_kvzip", head_dim=4, hidden=3, granularity="query_head"),
    ],
    ids=lambda config: config.kind + config.scope,
)
def test_round_trip_is_bit_exact(tmp_path: Path, config: GateConfig) -> None:
    gates = make_gates(config=config)
    gates.save_pretrained(tmp_path / "a" / "e")
    loaded = AttentionGates.from_pretrained(tmp_path / "a" / "e", MODEL)
    assert_same(loaded, gates)
    assert not loaded.training and all(parameter.requires_grad for parameter in loaded.parameters())
    hidden_states = torch.randn(2, 5, 64)
    for ours, theirs in zip(loaded.layers.values(), gates.layers.values(), strict=True):
        assert torch.equal(ours(hidden_states), theirs(hidden_states))


def test_content_of_the_folder(tmp_path: Path) -> None:
    figure = tmp_path / "heat.png"
    figure.write_bytes(PNG)
    folder = tmp_path / "e"
    metrics = {"kept": 0.4375, "val/loss": torch.tensor(2.5), "val/perplexity": float("inf")}
    gates = make_gates()
    base = {"base_model": "org/base", "base_revision": "abc"}
    export.save(folder, gates, **base, adapter=make_adapter(), metrics=metrics, figure=figure)
    files = "README.md adapter/adapter_config.json adapter/adapter_model.safetensors figure.png gate_config.json"
    assert sorted(snapshot(folder)) == [*files.split(), "gates.safetensors"]
    assert hidden(folder) == []
    info = export.read_info(folder)
    assert (info["schema_version"], info["versions"]["torch"]) == ("1.4", version("torch"))
    assert (info["base_model"]["name"], info["base_model"]["revision"]) == ("org/base", "abc")
    assert info["keep_rate"] == 0.4375
    assert info["metrics"] == {"val/loss": 2.5, "val/perplexity": None}
    names = {f"layers.{i}.{part}_proj.weight" for i in range(3) for part in "qkvo"}
    assert load_file(folder / "gates.safetensors").keys() == names
    assert (folder / "figure.png").read_bytes() == PNG
    assert json.loads((folder / "adapter/adapter_config.json").read_text())["base_model_name_or_path"] == "org/base"

    card = (folder / "README.md").read_text()
    _, front, body = card.split("---\n", 2)
    assert yaml.safe_load(front)["base_model"] == "org/base"
    for part in (
        "| kept share of the prompt's entries | 0.4375 |",
        "| head_dim | 4 |",
        "(figure.png)",
        "revision `abc`",
    ):
        assert part in body


@pytest.mark.parametrize("extra", ["thesis.txt", "export/thesis.txt"], ids=["folder", "export"])
def test_foreign_content_is_left_alone(tmp_path: Path, extra: str) -> None:
    if extra.startswith("export"):
        make_export(tmp_path / "work" / "export")
    file = tmp_path / "work" / extra
    file.parent.mkdir(exist_ok=True, parents=True)
    file.write_text("years of work")
    before = snapshot(tmp_path)
    with refuses(ExportError, str(file.parent), file.name):
        export.save(file.parent, make_gates(3))
    with refuses(ExportError, str(file)):
        export.save(file, make_gates(3))
    assert snapshot(tmp_path) == before


def test_the_python_lines_of_the_card_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = Tokenizer(WordLevel({word: index for index, word in enumerate(["?", "Once", "upon", "a", "time"])}, "?"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "base")
    LlamaForCausalLM(MODEL).save_pretrained(tmp_path / "base")
    export.save(tmp_path / "e", make_gates(), adapter=make_adapter())
    card = (tmp_path / "e" / "README.md").read_text()
    code = card.split("```python\n")[1].split("```")[0]
    code = code.replace("PATH", str(tmp_path / "e")).replace("BASE", str(tmp_path / "base"))
    exec(code, {})
    assert capsys.readouterr().out.startswith("Once upon a time")


TABLE = Calibration((0.2, 0.3, 0.7), (3.0, 1.0, -1.0))


def test_a_boundary_between_two_rows_of_the_table() -> None:
    assert [TABLE.boundary(share) for share in (0.2, 0.25, 0.4, 0.7)] == pytest.approx([3.0, 2.0, 0.5, -1.0])
    for share in (0.19, float("nan")):
        with refuses(UserError, f"share={share}", "0.2", "0.7"):
            TABLE.boundary(share)


def test_an_export_keeps_the_table_of_shares(tmp_path: Path) -> None:
    gates = make_gates()
    gates.calibration = TABLE
    export.save(tmp_path / "a", gates)
    loaded = AttentionGates.from_pretrained(tmp_path / "a")
    assert loaded.calibration is not None and loaded.calibration.record() == TABLE.record()
    card = (tmp_path / "a" / "README.md").read_text()
    assert "| 0.20 | 3 |\n| 0.30 | 1 |\n| 0.70 | -1 |" in card and "share=0.3" in card
    export.save(tmp_path / "a", make_gates(7))  # of which nothing was measured
    assert AttentionGates.from_pretrained(tmp_path / "a").calibration is None
    assert_same(AttentionGates.from_pretrained(tmp_path / "a"), make_gates(7))
    assert "share=" not in (tmp_path / "a" / "README.md").read_text() and hidden(tmp_path / "a") == []


def test_gates_of_two_layers_from_before_have_biases_of_0(tmp_path: Path) -> None:
    gates = make_gates(config=MLP)
    export.save(tmp_path / "e", gates)
    biases = [f"layers.{layer}.{part}.bias" for layer in range(3) for part in ("inner", "outer")]
    reweigh(lambda tensors: [tensors.pop(name) for name in biases].clear())(tmp_path / "e")
    with refuses(ExportError, "gates.safetensors", "layers.0.inner.bias"):
        AttentionGates.from_pretrained(tmp_path / "e")
    info = read_json(tmp_path / "e")
    del info["calibration"], info["weights"]
    reseal(tmp_path / "e", info | {"schema_version": "1.2"})
    assert_same(AttentionGates.from_pretrained(tmp_path / "e"), gates)  # whose biases are 0, being fresh


def test_a_matrix_in_eight_bits_by_hand() -> None:
    rows = torch.tensor([[254.0, -1.0, 3.1], [0.0, 0.0, 0.0], [-0.5, 0.25, 0.125]])
    found = export.quantise_weights({"inner.weight": rows, "inner.bias": torch.tensor([0.3])})
    assert found["inner.weight"].tolist() == [[127, 0, 2], [0, 0, 0], [-127, 64, 32]]  # half to even
    assert found["inner.weight.scale"].tolist() == torch.tensor([2, 0, 0.5 / 127]).tolist()
    back = export.dequantise_weights(found)
    assert back["inner.weight"][0].tolist() == [254, 0, 4]
    assert back["inner.bias"].tolist() == torch.tensor([0.3]).tolist()


class Scaled(TokenGate):
    """A gate with a vector and a matrix called ``scale``."""

    def build(self, hidden_size: int, heads: int) -> None:
        self.scale = torch.nn.Parameter(torch.randn(hidden_size))
        self.inner = torch.nn.ParameterDict({"scale": torch.randn(heads, hidden_size)})

    def start(self) -> None:
        pass


@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_a_gate_may_have_tensors_called_scale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: Literal["float32", "int8"]
) -> None:
    monkeypatch.setitem(KINDS, "scaled", Scaled)
    gates = AttentionGates(MODEL, GateConfig(kind="scaled"))
    export.save(tmp_path / "e", gates, weights=weights)
    exact = gates.state_dict()
    for name, tensor in AttentionGates.from_pretrained(tmp_path / "e", MODEL).state_dict().items():
        step = exact[name].abs().amax() / 127 if weights == "int8" and tensor.dim() == 2 else 0.0
        assert (tensor - exact[name]).abs().amax() <= step, name
    with refuses(ExportError, "inner.scale", "rename", "export.weights=float32"):
        export.quantise_weights({"inner": torch.ones(2, 2), "inner.scale": torch.ones(2)})


class Sized(TokenGate):
    """A gate with a buffer."""

    persistent = True

    def build(self, hidden_size: int, heads: int) -> None:
        self.linear = torch.nn.Linear(hidden_size, heads, bias=False)
        self.register_buffer("size", torch.tensor(float(hidden_size)), persistent=self.persistent)


def test_a_buffer_of_a_gate_is_exported_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "sized", Sized)
    config = GateConfig(kind="sized")
    gates = make_gates(config=config)
    export.save(tmp_path / "e", gates)
    assert_same(AttentionGates.from_pretrained(tmp_path / "e"), gates)
    monkeypatch.setattr(Sized, "persistent", False)
    gates = make_gates(config=config)
    for refused in (
        lambda: export.check(gates, None),
        lambda: export.save(tmp_path / "other", gates),
        lambda: AttentionGates.from_pretrained(tmp_path / "e"),
    ):
        with refuses(ExportError, "layers.0.size", "persistent=False"):
            refused()
    assert not (tmp_path / "other").exists()


def test_an_export_in_eight_bits(tmp_path: Path) -> None:
    """Each weight is within half a step of its row; damaged files are refused."""
    gates = make_gates(config=MLP)
    export.save(tmp_path / "e", gates, weights="int8")
    for name, tensor in AttentionGates.from_pretrained(tmp_path / "e").state_dict().items():
        exact = gates.state_dict()[name]
        step = exact.abs().amax(-1, keepdim=True) / 127 if exact.dim() == 2 else torch.zeros(1)
        rounded = 127 * torch.finfo(torch.float32).eps  # the largest is 127 steps, rounded
        assert ((tensor - exact).abs() <= (0.5 + rounded) * step).all() and tensor.dtype == torch.float32, name
    scale = "layers.0.inner.weight.scale"
    for damage, parts in (
        (change("weights", value="int4"), ["gate_config.json", "weights='int4'", "float32", "int8"]),
        (change("weights", value="float32"), ["gates.safetensors"]),
        (reweigh(lambda tensors: tensors.update({scale: tensors[scale] * float("nan")})), [scale, "NaN"]),
        (reweigh(lambda tensors: tensors.__delitem__(scale)), ["gates.safetensors"]),
    ):
        export.save(tmp_path / "e", gates, weights="int8")
        damage(tmp_path / "e")
        with refuses(ExportError, *parts):
            AttentionGates.from_pretrained(tmp_path / "e")

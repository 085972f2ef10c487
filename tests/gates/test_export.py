"""Exports: what is written is what is read, and what is in the way is left alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import Gemma2Config, LlamaForCausalLM, PreTrainedTokenizerFast

from ag.config.gate import GateConfig
from ag.errors import UserError
from ag.gates import export
from ag.gates.calibration import Calibration
from ag.gates.export import ExportError
from ag.gates.gate import AttentionGates
from tests.support.exports import (
    MODEL,
    SMALL,
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
        SMALL,
        GateConfig(kind="linear", bias=0.0, threshold=0.3),
        GateConfig(num_heads=3, head_dim=5, shortcut=True, granularity="query_head", recent_tokens=7, sink_tokens=2),
        GateConfig(num_heads=1, head_dim=8, layer_offset=1, first_layer=2, scope="prompt", prefill="dense"),
        GateConfig(kind="mlp", hidden=9, covers="all", granularity="query_head"),
        GateConfig(num_heads=2, head_dim=4, window=3, covers="all", shortcut=True),
        GateConfig(kind="affine"),
        GateConfig(kind="fast_kvzip", head_dim=4, hidden=3, granularity="query_head"),
    ],
    ids=[
        "attention",
        "linear",
        "query_head-shortcut",
        "offset-first_layer",
        "mlp-all",
        "window-all",
        "affine",
        "fast_kvzip",
    ],
)
def test_round_trip_is_bit_exact(tmp_path: Path, config: GateConfig) -> None:
    gates = make_gates(config=config)
    gates.save_pretrained(tmp_path / "a" / "e")
    loaded = AttentionGates.from_pretrained(tmp_path / "a" / "e", MODEL)
    assert_same(loaded, gates)
    assert not loaded.training
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    hidden_states = torch.randn(2, 5, 64)
    for ours, theirs in zip(loaded.layers.values(), gates.layers.values(), strict=True):
        assert torch.equal(ours(hidden_states), theirs(hidden_states))


def test_alternating_windows_survive_without_the_model(tmp_path: Path) -> None:
    model = Gemma2Config(num_hidden_layers=5, hidden_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    windowed = [index for index, kind in enumerate(model.layer_types) if kind == "sliding_attention"]
    assert 0 < len(windowed) < 5
    export.save(tmp_path / "e", make_gates(model=model))
    loaded = AttentionGates.from_pretrained(tmp_path / "e", model)
    assert loaded.layer_indices == [index for index in range(5) if index not in windowed]


def test_content_of_the_folder(tmp_path: Path) -> None:
    figure = tmp_path / "heat.png"
    figure.write_bytes(PNG)
    folder = tmp_path / "e"
    metrics = {"kept": 0.4375, "val/loss": torch.tensor(2.5), "val/perplexity": float("inf")}
    gates = make_gates()
    export.save(
        folder,
        gates,
        base_model="org/base",
        base_revision="abc",
        adapter=make_adapter(),
        metrics=metrics,
        figure=figure,
    )
    assert sorted(snapshot(folder)) == [
        "README.md",
        "adapter/adapter_config.json",
        "adapter/adapter_model.safetensors",
        "figure.png",
        "gate_config.json",
        "gates.safetensors",
    ]
    assert hidden(folder) == []
    info = export.read_info(folder)
    assert info["schema_version"] == "1.4"
    assert info["versions"]["torch"] == torch.__version__
    assert info["base_model"]["name"] == "org/base"
    assert info["base_model"]["revision"] == "abc"
    assert info["keep_rate"] == 0.4375
    assert info["metrics"] == {"val/loss": 2.5, "val/perplexity": None}
    weights = load_file(folder / "gates.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == {
        f"layers.{layer}.{name}.weight": shape
        for layer in range(3)
        for name, shape in {"q_proj": (8, 64), "k_proj": (8, 64), "v_proj": (8, 64), "o_proj": (2, 8)}.items()
    }
    assert (folder / "figure.png").read_bytes() == PNG
    assert json.loads((folder / "adapter/adapter_config.json").read_text())["base_model_name_or_path"] == "org/base"

    card = (folder / "README.md").read_text()
    _, front, body = card.split("---\n", 2)
    assert yaml.safe_load(front)["base_model"] == "org/base"
    for part in (
        'ag.EvictionCache(model, "gates:PATH")',
        "python -m ag.generate gates=PATH prompt=",
        'ag.gates.export.load_adapter(model, "PATH")',
        "| kept share of the prompt's entries | 0.4375 |",
        "| val/loss | 2.5 |",
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


def test_gates_with_nan_are_not_written(tmp_path: Path) -> None:
    gates = make_gates()
    gates.layers["1"].o_proj.weight.data[0, 0] = float("inf")
    with refuses(ExportError, "layers.1.o_proj.weight"):
        export.save(tmp_path / "e", gates)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("adapter", [True, False], ids=["adapter", "plain"])
def test_the_python_lines_of_the_card_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], adapter: bool) -> None:
    words = Tokenizer(WordLevel({word: index for index, word in enumerate(["?", "Once", "upon", "a", "time"])}, "?"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "base")
    LlamaForCausalLM(MODEL).save_pretrained(tmp_path / "base")
    export.save(tmp_path / "e", make_gates(), adapter=make_adapter() if adapter else None)
    card = (tmp_path / "e" / "README.md").read_text()
    code = card.split("```python\n")[1].split("```")[0]
    assert ("load_adapter" in code) == adapter
    code = code.replace("PATH", str(tmp_path / "e")).replace("BASE", str(tmp_path / "base"))
    exec(code, {})
    assert capsys.readouterr().out.startswith("Once upon a time")


TABLE = Calibration((0.2, 0.3, 0.7), (3.0, 1.0, -1.0))


@pytest.mark.parametrize(
    ("share", "boundary"), [(0.2, 3.0), (0.25, 2.0), (0.3, 1.0), (0.4, 0.5), (0.6, -0.5), (0.7, -1.0)]
)
def test_a_boundary_between_two_rows_of_the_table(share: float, boundary: float) -> None:
    assert TABLE.boundary(share) == pytest.approx(boundary)


@pytest.mark.parametrize("share", [0.19, 0.71, float("nan")])
def test_a_share_outside_of_the_table(share: float) -> None:
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
    found = export.pack({"inner.weight": rows, "inner.bias": torch.tensor([0.3])})
    assert found["inner.weight"].tolist() == [[127, 0, 2], [0, 0, 0], [-127, 64, 32]]  # half to even
    assert found["inner.weight.scale"].tolist() == torch.tensor([2, 0, 0.5 / 127]).tolist()
    back = export.unpack(found)
    assert back["inner.weight"][0].tolist() == [254, 0, 4]
    assert back["inner.bias"].tolist() == torch.tensor([0.3]).tolist()


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

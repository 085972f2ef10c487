"""What is read is checked: every damage has its own message, and none loads as something else."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ag.gates.export import ExportError, read_info
from ag.gates.gate import AttentionGates
from tests.support.exports import (
    MODEL,
    assert_same,
    change,
    make_export,
    make_gates,
    read_json,
    rehash,
    reseal,
    reweigh,
)
from tests.support.refused import refuses


def truncate(folder: Path) -> None:
    file = folder / "gates.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def corrupt_header(folder: Path) -> None:
    file = folder / "gates.safetensors"
    file.write_bytes(file.read_bytes().replace(b"{", b"[", 1))
    rehash(folder)


def link_outside(folder: Path) -> None:
    outside = folder.parent / "outside"
    shutil.move(folder / "gates.safetensors", outside)
    (folder / "gates.safetensors").symlink_to(outside)


def put(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None


def grow(folder: Path) -> None:
    with (folder / "gates.safetensors").open("ab") as file:
        file.truncate(10 << 20)


def edit_threshold(folder: Path) -> None:
    file = folder / "gate_config.json"
    file.write_text(file.read_text().replace('"threshold": 0.5', '"threshold": 0.6'))


def geometry(key: str, value: Any) -> Callable[[Path], None]:
    return change("base_model", "fingerprint", key, value=value)


def o_proj(value: torch.Tensor) -> Callable[[Path], None]:
    return reweigh(lambda tensors: tensors.update({"layers.0.o_proj.weight": value}))


def rename_weight(tensors: dict[str, torch.Tensor]) -> None:
    tensors["layers.3.q_proj.weight"] = tensors.pop("layers.2.q_proj.weight")


NAN = float("nan")
JSON_FILE, WEIGHTS_FILE = "gate_config.json", "gates.safetensors"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (shutil.rmtree, "gates.safetensors gate_config.json"),
    "no weights": (lambda folder: (folder / WEIGHTS_FILE).unlink(), "gates.safetensors:"),
    "no config": (lambda folder: (folder / JSON_FILE).unlink(), "gate_config.json:"),
    "not JSON": (put(JSON_FILE, b"[" * 100_000), "gate_config.json: JSON"),
    "a list": (put(JSON_FILE, b"[1]"), "content=[1]: JSON"),
    "huge config": (put(JSON_FILE, b" " * (1 << 20) + b"{}"), "1048578 1048576"),
    "schema 2": (change("schema_version", value="2.0"), "schema_version='2.0' 1.x"),
    "missing key": (change("metrics", delete=True), "missing ['metrics'] []"),
    "extra gate key": (change("gate", "beta", value=1), "gate: unknown [] ['beta']"),
    "gate list": (change("gate", value=[]), "gate=[]: JSON"),
    "gate range": (change("gate", "threshold", value=1.5), "gate.threshold=1.5: 0 1"),
    "gate type": (change("gate", "num_heads", value=True), "gate.num_heads=True: whole number"),
    "gate forged": (change("gate", "head_dim", value=1 << 40), "gate.head_dim=1099511627776: 1048576"),
    "first layer": (change("gate", "first_layer", value=3), "gate.first_layer=3: 3"),
    "layers": (geometry("num_layers", 10**6), "num_layers=1000000: 1 4096"),
    "kv heads": (geometry("num_kv_heads", 3), "num_kv_heads=3: num_heads=4"),
    "metric": (change("metrics", value={"loss": NAN}), "metrics={'loss': nan}: mapping"),
    "keep rate": (change("keep_rate", value=1.5), "keep_rate=1.5: 0 1"),
    "path in hash": (change("sha256", "../x", value=""), "sha256: unknown ['../x']"),
    "hash": (change("sha256", WEIGHTS_FILE, value="0" * 64), f"gates.safetensors: sha256 {'0' * 64}"),
    "edited": (edit_threshold, "gate_config.json: checksum="),
    "truncated": (truncate, "gates.safetensors: sha256"),
    "too long": (grow, "gates.safetensors: 10485760"),
    "corrupt": (corrupt_header, "gates.safetensors: safetensors header"),
    "renamed weight": (reweigh(rename_weight), "missing ['layers.2.q_proj.weight'] unknown ['layers.3.q_proj.weight']"),
    "shape": (o_proj(torch.ones(2, 9)), "layers.0.o_proj.weight 9)) 8))"),
    "dtype": (o_proj(torch.ones(2, 8).double()), "layers.0.o_proj.weight float64 float32"),
    "NaN": (o_proj(torch.full((2, 8), NAN)), "layers.0.o_proj.weight finite"),
    "link": (link_outside, "gates.safetensors: outside:"),
    "table": (
        change("calibration", value={"shares": [0.2, 0.1], "boundaries": [1, 0]}),
        "calibration.shares rising",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_has_its_own_message(tmp_path: Path, damage: str) -> None:
    folder = make_export(tmp_path / "e")
    apply, parts = DAMAGES[damage]
    apply(folder)
    with refuses(ExportError, *parts.split()) as caught:
        AttentionGates.from_pretrained(folder)
    text = str(caught.value)
    assert text.startswith(str(folder)) and text.endswith(".") and "\n" not in text
    assert re.search("expected|choose", text)


def test_another_base_model_is_refused(tmp_path: Path) -> None:
    folder, other = make_export(tmp_path / "e"), copy.deepcopy(MODEL)
    other.layer_types = ["sliding_attention", "full_attention", "full_attention"]
    with refuses(ExportError, "org/base", "'windowed_layers': []", "'windowed_layers': [0]"):
        AttentionGates.from_pretrained(folder, other)


@pytest.mark.parametrize("place", [("gate",), ()], ids=["gate", "content"])
def test_keys_of_a_newer_schema_are_named(tmp_path: Path, place: tuple[str, ...]) -> None:
    folder = make_export(tmp_path / "e")
    change("schema_version", value="1.7")(folder)
    assert_same(AttentionGates.from_pretrained(folder), make_gates())
    change(*place, "warp", value=3)(folder)
    with refuses(ExportError, "schema_version='1.7'", "1.4", "warp", "update ag"):
        AttentionGates.from_pretrained(folder)


#: What each schema brought: in the content, and in the gate.
BROUGHT = {"1.1": ["adapter"], "1.2": ["hidden", "window", "covers"], "1.3": ["calibration"], "1.4": ["weights"]}


@pytest.mark.parametrize("schema", ["1.0", "1.1", "1.2", "1.3"])
def test_exports_from_before(tmp_path: Path, schema: str) -> None:
    """They load with what was the case then; a file with a key of a later schema is none."""
    folder = make_export(tmp_path / "e")
    info, later = read_json(folder), sum((names for since, names in BROUGHT.items() if since > schema), [])
    old = {name: value for name, value in info.items() if name not in later} | {"schema_version": schema}
    old["gate"] = {name: value for name, value in info["gate"].items() if name not in later}
    reseal(folder, old)
    loaded = AttentionGates.from_pretrained(folder)
    assert_same(loaded, make_gates())
    assert (loaded.config.covers, loaded.config.window, loaded.calibration) == ("prompt", 0, None)
    assert read_info(folder)["gate"]["covers"] == "prompt"
    for name in later:
        gate = name in info["gate"]
        reseal(folder, old | ({"gate": old["gate"] | {name: info["gate"][name]}} if gate else {name: info[name]}))
        with refuses(ExportError, "unknown", name):
            AttentionGates.from_pretrained(folder)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    folder = make_export(tmp_path_factory.mktemp("fuzz") / "e")
    return folder, (folder / "gate_config.json").read_bytes()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=50)
@given(data=st.data(), value=JSON | st.integers(0, 5000))
def test_another_value_is_refused_or_nothing(fuzzed: tuple[Path, bytes], data: st.DataObject, value: Any) -> None:
    folder, raw = fuzzed
    info = json.loads(raw)
    inner = info
    while True:
        key = data.draw(st.sampled_from(sorted(inner)))
        if not isinstance(inner[key], dict) or not inner[key] or data.draw(st.integers(0, 4)) == 0:
            break
        inner = inner[key]
    inner[key] = value
    reseal(folder, info)
    try:
        gates = AttentionGates.from_pretrained(folder)
    except ExportError:
        return
    for parameter, expected in zip(gates.parameters(), make_gates().parameters(), strict=True):
        assert torch.equal(parameter, expected)

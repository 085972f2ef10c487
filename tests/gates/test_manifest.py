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


def flip(folder: Path) -> None:
    file = folder / "gates.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)


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


def table(shares: Any, *boundaries: Any) -> Callable[[Path], None]:
    value = {"shares": shares, "boundaries": boundaries[0]} if boundaries else shares
    return change("calibration", value=value)


def o_proj(value: torch.Tensor) -> Callable[[Path], None]:
    return reweigh(lambda tensors: tensors.update({"layers.0.o_proj.weight": value}))


def rename_weight(tensors: dict[str, torch.Tensor]) -> None:
    tensors["layers.3.q_proj.weight"] = tensors.pop("layers.2.q_proj.weight")


NAN, INF = float("nan"), float("inf")
JSON_FILE, WEIGHTS_FILE = "gate_config.json", "gates.safetensors"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (shutil.rmtree, "gates.safetensors gate_config.json"),
    "no weights": (lambda folder: (folder / WEIGHTS_FILE).unlink(), "gates.safetensors:"),
    "no config": (lambda folder: (folder / JSON_FILE).unlink(), "gate_config.json:"),
    "empty config": (put(JSON_FILE, b""), "gate_config.json: JSON"),
    "not JSON": (put(JSON_FILE, b"{'a': 1}"), "gate_config.json: JSON"),
    "not UTF-8": (put(JSON_FILE, b'{"a": "\xff\xfe"}'), "gate_config.json: JSON"),
    "nested": (put(JSON_FILE, b"[" * 100_000), "gate_config.json: JSON"),
    "a list": (put(JSON_FILE, b"[1]"), "content=[1]: JSON"),
    "huge config": (put(JSON_FILE, b" " * (1 << 20) + b"{}"), "1048578 1048576"),
    "schema 2": (change("schema_version", value="2.0"), "schema_version='2.0' 1.x"),
    "no schema": (change("schema_version", delete=True), "schema_version=None 1.x"),
    "schema number": (change("schema_version", value=1.0), "schema_version=1.0 1.x"),
    "missing key": (change("metrics", delete=True), "missing ['metrics'] []"),
    "extra key": (change("colour", value="red"), "unknown [] ['colour']"),
    "missing gate key": (change("gate", "bias", delete=True), "gate: missing ['bias'] []"),
    "extra gate key": (change("gate", "beta", value=1), "gate: unknown [] ['beta']"),
    "gate list": (change("gate", value=[]), "gate=[]: JSON"),
    "gate range": (change("gate", "threshold", value=1.5), "gate.threshold=1.5: 0 1"),
    "gate infinite": (change("gate", "bias", value=INF), "gate.bias=inf: number"),
    "gate huge": (change("gate", "bias", value=10**400), f"gate.bias=1{'0' * 79}: number"),
    "gate choice": (change("gate", "scope", value="all"), "gate.scope='all': causal prompt"),
    "gate type": (change("gate", "shortcut", value=1), "gate.shortcut=1: true false"),
    "gate bool": (change("gate", "num_heads", value=True), "gate.num_heads=True: whole number"),
    "gate forged": (change("gate", "head_dim", value=1 << 40), "gate.head_dim=1099511627776: 1048576"),
    "gate covers": (change("gate", "covers", value="some"), "gate.covers='some': prompt all"),
    "gate without covers": (change("gate", "covers", delete=True), "covers"),
    "gate zero": (change("gate", "num_heads", value=0), "gate.num_heads=0: 1"),
    "first layer": (change("gate", "first_layer", value=3), "gate.first_layer=3: 3"),
    "layers": (geometry("num_layers", 10**6), "num_layers=1000000: 1 4096"),
    "kv heads": (geometry("num_kv_heads", 3), "num_kv_heads=3: num_heads=4"),
    "windows": (geometry("windowed_layers", ["a"]), "windowed_layers='a': whole number"),
    "all windowed": (geometry("windowed_layers", [0, 1, 2]), "gate.first_layer=0: 3"),
    "base name": (change("base_model", "name", value=None), "base_model.name=None: text"),
    "keep rate": (change("keep_rate", value=1.5), "keep_rate=1.5: 0 1"),
    "metric": (change("metrics", "loss", value=NAN), "metrics.loss=nan: number null"),
    "versions": (change("versions", "torch", value=2), "versions.torch=2: text"),
    "no hash": (change("sha256", value={}), "sha256: missing ['gates.safetensors']"),
    "path in hash": (change("sha256", "../x", value=""), "sha256: unknown ['../x']"),
    "hash": (change("sha256", WEIGHTS_FILE, value="0" * 64), f"gates.safetensors: sha256 {'0' * 64}"),
    "edited": (edit_threshold, "gate_config.json: checksum="),
    "bit flip": (flip, "gates.safetensors: sha256"),
    "truncated": (truncate, "gates.safetensors: 19540 19640"),
    "too long": (grow, "gates.safetensors: 10485760"),
    "corrupt": (corrupt_header, "gates.safetensors: safetensors header"),
    "renamed weight": (reweigh(rename_weight), "missing ['layers.2.q_proj.weight'] unknown ['layers.3.q_proj.weight']"),
    "extra weight": (reweigh(lambda t: t.update(extra=torch.ones(1))), "gates.safetensors: unknown ['extra']"),
    "shape": (o_proj(torch.ones(2, 9)), "layers.0.o_proj.weight 9)) 8))"),
    "transposed": (o_proj(torch.ones(8, 2)), "layers.0.o_proj.weight 2)) 8))"),
    "dtype": (o_proj(torch.ones(2, 8).double()), "layers.0.o_proj.weight float64 float32"),
    "NaN": (o_proj(torch.full((2, 8), NAN)), "layers.0.o_proj.weight finite"),
    "infinite": (o_proj(torch.full((2, 8), INF)), "layers.0.o_proj.weight finite"),
    "link": (link_outside, "gates.safetensors: outside:"),
    "table list": (table([]), "calibration=[]: JSON"),
    "table without boundaries": (table({"shares": [0.1, 0.2]}), "calibration: missing ['boundaries']"),
    "table of text": (table([0.1, 0.2], [1.0, "a"]), "calibration.boundaries='a': number"),
    "table infinite": (table([0.1, 0.2], [1.0, INF]), "calibration.boundaries=inf: number"),
    "table number": (table(3, [1.0]), "calibration.shares=3: number"),
    "table falling": (table([0.2, 0.1], [1.0, 0.0]), "calibration.shares=[0.2, rising"),
    "table to 1": (table([0.1, 1.0], [1.0, 0.0]), "calibration.shares=[0.1, 1.0]: between 1"),
    "table short": (table([0.1, 0.2], [1.0]), "calibration.shares=[0.1, boundaries 1"),
    "table rising": (table([0.1, 0.2], [1.0, 2.0]), "calibration.boundaries=[1.0, falling"),
    "table empty": (table([], []), "calibration.shares=[]: two"),
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


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"num_hidden_layers": 4}, ("'num_layers': 3", "'num_layers': 4")),
        (
            {"layer_types": ["sliding_attention", "full_attention", "full_attention"]},
            ("'windowed_layers': []", "'windowed_layers': [0]"),
        ),
    ],
)
def test_another_base_model_is_refused(tmp_path: Path, changes: dict[str, Any], parts: tuple[str, ...]) -> None:
    folder = make_export(tmp_path / "e")
    other = copy.deepcopy(MODEL)
    for name, value in changes.items():
        setattr(other, name, value)
    with refuses(ExportError, "org/base", *parts):
        AttentionGates.from_pretrained(folder, other)


def test_minor_schema_with_known_keys_loads(tmp_path: Path) -> None:
    folder = make_export(tmp_path / "e")
    change("schema_version", value="1.7")(folder)
    assert_same(AttentionGates.from_pretrained(folder), make_gates())


@pytest.mark.parametrize("place", [("gate",), ()], ids=["gate", "content"])
def test_keys_of_a_newer_schema_are_named(tmp_path: Path, place: tuple[str, ...]) -> None:
    folder = make_export(tmp_path / "e")
    change(*place, "warp", value=3)(folder)
    change("schema_version", value="1.7")(folder)
    with refuses(ExportError, "schema_version='1.7'", "1.4", "warp", "update ag"):
        AttentionGates.from_pretrained(folder)


#: What each schema brought: in the content, and in the gate.
BROUGHT = {"1.1": ["adapter"], "1.2": ["hidden", "window", "covers"], "1.3": ["calibration"], "1.4": ["weights"]}


@pytest.mark.parametrize("schema", ["1.0", "1.1", "1.2", "1.3"])
def test_exports_from_before(tmp_path: Path, schema: str) -> None:
    """They load with what was the case then; a file with a key of a later schema, or without its own, is none."""
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
    for name in BROUGHT.get(schema, []):
        gate = {key: value for key, value in old["gate"].items() if key != name}
        reseal(folder, {key: value for key, value in old.items() if key != name} | {"gate": gate})
        with refuses(ExportError, "missing", name):
            AttentionGates.from_pretrained(folder)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    folder = make_export(tmp_path_factory.mktemp("fuzz") / "e")
    return folder, (folder / "gate_config.json").read_bytes()


def load_or_refuse(folder: Path) -> None:
    try:
        gates = AttentionGates.from_pretrained(folder)
    except ExportError:
        return
    for parameter, expected in zip(gates.parameters(), make_gates().parameters(), strict=True):
        assert torch.equal(parameter, expected)


FUZZ = settings(max_examples=150)


@FUZZ
@given(start=st.integers(0, 2000), length=st.integers(0, 50), insert=st.binary(max_size=30))
def test_fuzzed_bytes_of_the_configuration(fuzzed: tuple[Path, bytes], start: int, length: int, insert: bytes) -> None:
    folder, raw = fuzzed
    (folder / "gate_config.json").write_bytes(raw[:start] + insert + raw[start + length :])
    load_or_refuse(folder)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@FUZZ
@given(data=st.data(), value=JSON | st.integers(0, 5000))
def test_fuzzed_values_of_the_configuration(fuzzed: tuple[Path, bytes], data: st.DataObject, value: Any) -> None:
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
    load_or_refuse(folder)

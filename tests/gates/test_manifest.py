"""What is read is checked: every damage has its own message, and none loads as something else."""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ag.gates.export import ExportError, read_info
from ag.gates.gate import AttentionGates
from tests.support.exports import (
    MODEL,
    assert_same,
    change,
    make_export,
    make_gates,
    read_json,
    reseal,
    reweigh,
)
from tests.support.refused import refuses


def truncate(folder: Path) -> None:
    file = folder / "gates.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


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


NAN = float("nan")
JSON_FILE, WEIGHTS_FILE = "gate_config.json", "gates.safetensors"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (shutil.rmtree, "gates.safetensors gate_config.json"),
    "no config": (lambda folder: (folder / JSON_FILE).unlink(), "gate_config.json:"),
    "not JSON": (put(JSON_FILE, b"[" * 100_000), "gate_config.json: JSON"),
    "missing key": (change("metrics", delete=True), "missing ['metrics'] []"),
    "extra gate key": (change("gate", "beta", value=1), "gate: unknown [] ['beta']"),
    "gate range": (change("gate", "threshold", value=1.5), "gate.threshold=1.5: 0 1"),
    "gate forged": (change("gate", "head_dim", value=1 << 40), "gate.head_dim=1099511627776: 1048576"),
    "layers": (geometry("num_layers", 10**6), "num_layers=1000000: 1 4096"),
    "path in hash": (change("sha256", "../x", value=""), "sha256: unknown ['../x']"),
    "hash": (change("sha256", WEIGHTS_FILE, value="0" * 64), f"gates.safetensors: sha256 {'0' * 64}"),
    "edited": (edit_threshold, "gate_config.json: checksum="),
    "truncated": (truncate, "gates.safetensors: sha256"),
    "too long": (grow, "gates.safetensors: 10485760"),
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


def test_keys_of_a_newer_schema_are_named(tmp_path: Path) -> None:
    folder = make_export(tmp_path / "e")
    change("schema_version", value="1.7")(folder)
    assert_same(AttentionGates.from_pretrained(folder), make_gates())
    change("gate", "warp", value=3)(folder)
    with refuses(ExportError, "1.4", "warp", "update ag"):
        AttentionGates.from_pretrained(folder)


def test_exports_from_before(tmp_path: Path) -> None:
    """An export of schema 1.0 lacks the keys of later ones, and loads with what was the case then."""
    folder = make_export(tmp_path / "e")
    later = ("adapter", "hidden", "window", "covers", "calibration", "weights")
    old = {name: value for name, value in read_json(folder).items() if name not in later} | {"schema_version": "1.0"}
    old["gate"] = {name: value for name, value in old["gate"].items() if name not in later}
    reseal(folder, old)
    loaded = AttentionGates.from_pretrained(folder)
    assert_same(loaded, make_gates())
    assert (loaded.config.covers, loaded.config.window, loaded.calibration) == ("prompt", 0, None)
    assert read_info(folder)["gate"]["covers"] == "prompt"

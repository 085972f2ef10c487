"""The content of ``gate_config.json`` in an export: keys, types, ranges, checksum."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ag.config.gate import GateConfig
from ag.errors import UserError
from ag.gates.calibration import Calibration

SCHEMA_VERSION = "1.4"
WEIGHTS = "gates.safetensors"
CONFIG, CARD, FIGURE = "gate_config.json", "README.md", "figure.png"
ADAPTER = "adapter"
CALIBRATION = "calibration"
PRECISION = "weights"
ADAPTER_FILES = (f"{ADAPTER}/adapter_config.json", f"{ADAPTER}/adapter_model.safetensors")

KEYS = ("schema_version", "versions", "base_model", "gate", "keep_rate", "metrics", "sha256", "checksum")
#: What gates of schemas before 1.2, which did not write these keys, were trained with.
BEFORE_1_2: dict[str, Any] = {"hidden": 64, "window": 0, "covers": "prompt"}
SIZES = ("num_layers", "num_heads", "num_kv_heads", "head_dim", "hidden_size")
MOST = 1 << 20  # bounds the memory that a forged size can allocate
MOST_LAYERS = 4096


class ExportError(UserError):
    """An export cannot be written or read; the message names the file, what was expected and the fix."""


def checksum(info: Mapping[str, Any]) -> str:
    """Return the sha256 of everything in ``info`` but its checksum, independent of order and white space."""
    rest = {name: value for name, value in info.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def minor(schema: str) -> int:
    """Return the second number of a schema."""
    return int(schema.partition(".")[2])


def check_keys(where: object, found: Iterable[str], expected: Iterable[str]) -> None:
    """Raise an :class:`ExportError` unless both have the same names."""
    missing, unknown = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing or unknown:
        raise ExportError(
            f"{where}: missing keys {missing[:3]}, unknown keys {unknown[:3]!r:.200}: expected exactly those "
            f"of schema {SCHEMA_VERSION} and of the gate configuration; export the gates again."
        )


def validate(file: Path, info: Any) -> None:
    """Check every key, type and range, then the checksum.

    Args:
        file: where the content comes from, for the messages.
        info: parsed content of ``gate_config.json``.

    Raises:
        ExportError: for the first thing that is wrong.
    """
    check = _Checker(file)
    check(isinstance(info, dict), "content", info, "a JSON object")
    schema = info.get("schema_version")
    readable = isinstance(schema, str) and re.fullmatch(r"1\.\d{1,4}", schema) is not None
    check(readable, "schema_version", schema, "1.x", "update ag, or export the gates with this version")
    if minor(schema) > minor(SCHEMA_VERSION):
        check.newer(info, schema)
    since = {ADAPTER: 1, CALIBRATION: 3, PRECISION: 4}  # the schemas that these came with
    check.keys("content", info, (*KEYS, *(name for name, first in since.items() if minor(schema) >= first)))
    check(isinstance(info.get(ADAPTER, []), list), ADAPTER, info.get(ADAPTER), "a list")
    _validate_calibration(check, info.get(CALIBRATION))
    precision = info.get(PRECISION, "float32")
    check(precision in ("float32", "int8"), PRECISION, precision, "float32 or int8")
    check.texts("versions", info["versions"])
    keep_rate = info["keep_rate"]
    share = keep_rate is None or (_is_number(keep_rate) and 0 <= keep_rate <= 1)
    check(share, "keep_rate", keep_rate, "a number from 0 to 1, or null")
    check(isinstance(info["metrics"], dict), "metrics", info["metrics"], "a JSON object")
    for name, value in info["metrics"].items():
        check(value is None or _is_number(value), f"metrics.{name}", value, "a finite number or null")
    _validate_base(check, info["base_model"])
    _validate_gate(check, info["gate"], () if minor(schema) >= 2 else BEFORE_1_2)
    check.texts("sha256", info["sha256"])
    check.keys("sha256", info["sha256"], (WEIGHTS, *(ADAPTER_FILES if len(info["sha256"]) > 1 else ())))
    expected = checksum(info)
    check(
        info["checksum"] == expected,
        "checksum",
        info["checksum"],
        f"{expected}, that of the rest of the file",
        "a value was changed or damaged: copy the file again, or export gates with the values you want",
    )


def _validate_base(check: _Checker, base: Any) -> None:
    check.keys("base_model", base, ("name", "revision", "fingerprint"))
    check(isinstance(base["name"], str), "base_model.name", base["name"], "text")
    revision = base["revision"]
    check(revision is None or isinstance(revision, str), "base_model.revision", revision, "text or null")
    geometry = base["fingerprint"]
    check.keys("fingerprint", geometry, ("model_type", *SIZES, "windowed_layers"))
    check(isinstance(geometry["model_type"], str), "fingerprint.model_type", geometry["model_type"], "text")
    for name in SIZES:
        check.integer(f"fingerprint.{name}", geometry[name], 1, MOST_LAYERS if name == "num_layers" else MOST)
    heads, kv_heads = geometry["num_heads"], geometry["num_kv_heads"]
    check(heads % kv_heads == 0, "fingerprint.num_kv_heads", kv_heads, f"a divisor of num_heads={heads}")
    windowed = geometry["windowed_layers"]
    check(isinstance(windowed, list), "fingerprint.windowed_layers", windowed, "a list of layer indices")
    for index in windowed:
        check.integer("fingerprint.windowed_layers", index, 0, geometry["num_layers"] - 1)


def _validate_gate(check: _Checker, gate: Any, unwritten: Collection[str]) -> None:
    """Check the keys of the gate but those that this schema did not write."""
    written = [item for item in fields(GateConfig) if item.name not in unwritten]
    check.keys("gate", gate, [item.name for item in written])
    for item in written:
        name, value, kind = f"gate.{item.name}", gate[item.name], type(item.default)
        if kind is int:
            check.integer(name, value, 0, MOST)
        elif kind is float:
            check(_is_number(value), name, value, "a finite number")
        else:
            check(type(value) is kind, name, value, f"a {kind.__name__}")
    try:
        GateConfig(**gate)
    except ValueError as error:
        raise ExportError(f"{check.file}: {error}") from error


def _validate_calibration(check: _Checker, table: Any) -> None:
    if table is None:
        return
    check.keys(CALIBRATION, table, ("shares", "boundaries"))
    for name, values in table.items():
        check(isinstance(values, list) and all(map(_is_number, values)), f"{CALIBRATION}.{name}", values, "numbers")
    try:
        Calibration(**table)
    except ValueError as error:
        raise ExportError(f"{check.file}: {error}") from error


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


class _Checker:
    """Raises an :class:`ExportError` that names ``file`` when a check fails."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __call__(self, ok: bool, name: str, value: Any, expected: str, fix: str = "export the gates again") -> None:
        if not ok:
            raise ExportError(f"{self.file}: {name}={value!r:.80}: expected {expected}; {fix}.")

    def keys(self, name: str, value: Any, expected: Iterable[str]) -> None:
        self(isinstance(value, dict), name, value, "a JSON object")
        check_keys(f"{self.file}: {name}", value, expected)

    def newer(self, info: Mapping[str, Any], schema: str) -> None:
        """Refuse keys that only a newer version of ag can have written."""
        gate = info.get("gate")
        known = {*KEYS, ADAPTER, CALIBRATION, PRECISION, *(item.name for item in fields(GateConfig))}
        unknown = sorted({*info, *(gate if isinstance(gate, dict) else ())} - known)
        self(
            not unknown,
            "schema_version",
            schema,
            f"at most {SCHEMA_VERSION}, which knows no {', '.join(unknown)[:80]}",
            "a newer ag wrote it: update ag",
        )

    def texts(self, name: str, value: Any) -> None:
        self(isinstance(value, dict), name, value, "a JSON object")
        for key, text in value.items():
            self(isinstance(text, str), f"{name}.{key}", text, "text")

    def integer(self, name: str, value: Any, least: int, most: int) -> None:
        ok = type(value) is int and least <= value <= most
        self(ok, name, value, f"an integer from {least} to {most}")

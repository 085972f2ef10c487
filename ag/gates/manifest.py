"""The content of ``gate_config.json`` in an export: keys, types, ranges, checksum."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_type_hints

from ag.config.exports import CONFIG as CONFIG
from ag.config.exports import WEIGHTS as WEIGHTS
from ag.config.gate import GateConfig
from ag.config.keys import Key
from ag.errors import UserError
from ag.gates.calibration import Calibration

SCHEMA_VERSION = "1.4"
CARD, FIGURE = "README.md", "figure.png"
ADAPTER = "adapter"
CALIBRATION = "calibration"
PRECISION = "weights"
ADAPTER_FILES = (f"{ADAPTER}/adapter_config.json", f"{ADAPTER}/adapter_model.safetensors")

MODEL_SIZES = ("num_layers", "num_heads", "num_kv_heads", "head_dim", "hidden_size")
MAX_SIZE, MAX_LAYERS = 1 << 20, 4096  # limit the time and memory that a forged size can cost
#: The keys, with the types of their values. A dict must have exactly these keys.
CONTENT: dict[str, Any] = {
    "schema_version": str,
    "versions": dict[str, str],
    "base_model": {
        "name": str,
        "revision": str | None,
        "fingerprint": {"model_type": str, **dict.fromkeys(MODEL_SIZES, int), "windowed_layers": list[int]},
    },
    "gate": get_type_hints(GateConfig),
    "keep_rate": float | None,
    "metrics": dict[str, float | None],
    "sha256": dict[str, str],
    "checksum": str,
    ADAPTER: list[Any],
    CALIBRATION: {"shares": list[float], "boundaries": list[float]},  # or null
    PRECISION: Literal["float32", "int8"],
}
#: Defaults of keys that earlier schemas lack: new in 1.1, 1.3 and 1.4; the keys of the gate are new in 1.2.
EARLIER_DEFAULTS: dict[str, Any] = {ADAPTER: [], CALIBRATION: None, PRECISION: "float32"}
EARLIER_GATE_DEFAULTS: dict[str, Any] = {"hidden": 64, "window": 0, "covers": "prompt"}


class ExportError(UserError):
    """An export cannot be written or read; the message names the file and the fix."""


def checksum(info: Mapping[str, Any]) -> str:
    """Return the sha256 of ``info`` without its checksum; the order of the keys does not matter."""
    content = {name: value for name, value in info.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def minor_version(schema: str) -> int:
    """Return the second number of a schema."""
    return int(schema.partition(".")[2])


def check_keys(location: object, names: Iterable[str], expected: Iterable[str]) -> None:
    """Raise an :class:`ExportError` unless ``names`` equal the ``expected`` names."""
    missing, unknown = sorted(set(expected) - set(names)), sorted(set(names) - set(expected))
    if missing or unknown:
        raise ExportError(
            f"{location}: missing keys {missing[:3]}, unknown keys {unknown[:3]!r:.200}: expected the keys of "
            f"schema {SCHEMA_VERSION} and of the gate configuration; export the gates again, or update ag."
        )


def validate(file: Path, info: Any) -> dict[str, Any]:
    """Check every key, type and range, then the checksum; return the content with all keys of this schema.

    Raises:
        ExportError: names the file and the first wrong value.
    """

    def expect(ok: bool, name: str, value: Any, expected: str, fix: str = "export the gates again") -> None:
        if not ok:
            raise ExportError(f"{file}: {name}={value!r:.80}: expected {expected}; {fix}.")

    def check(name: str, value: Any, kind: Any) -> None:
        if not isinstance(kind, dict):
            key = Key(name, kind)
            return expect(key.accepts(value), name, value, key.expected())
        expect(isinstance(value, dict), name, value, "a JSON object")
        check_keys(f"{file}: {name}", value, kind)
        for key in value:
            check(f"{name}.{key}".removeprefix("content."), value[key], kind[key])

    expect(isinstance(info, dict), "content", info, "a JSON object")
    schema = info.get("schema_version")
    readable = isinstance(schema, str) and re.fullmatch(r"1\.\d{1,4}", schema) is not None
    expect(readable, "schema_version", schema, "1.x", "update ag, or export the gates with this version")
    written, info = info, EARLIER_DEFAULTS | info
    if isinstance(info.get("gate"), dict):
        info["gate"] = EARLIER_GATE_DEFAULTS | info["gate"]
    check("content", info, CONTENT | ({CALIBRATION: NoneType} if info[CALIBRATION] is None else {}))

    expect(0 <= (info["keep_rate"] or 0) <= 1, "keep_rate", info["keep_rate"], "a number from 0 to 1, or null")
    geometry = info["base_model"]["fingerprint"]
    sizes = {f"gate.{name}": value for name, value in info["gate"].items() if CONTENT["gate"][name] is int}
    for name, value in (sizes | {f"fingerprint.{name}": geometry[name] for name in MODEL_SIZES}).items():
        low, high = int("fingerprint" in name), MAX_LAYERS if "num_layers" in name else MAX_SIZE
        expect(low <= value <= high, name, value, f"a whole number from {low} to {high}")
    heads, kv_heads = geometry["num_heads"], geometry["num_kv_heads"]
    expect(heads % kv_heads == 0, "fingerprint.num_kv_heads", kv_heads, f"a divisor of num_heads={heads}")
    try:
        GateConfig(**info["gate"])
        if info[CALIBRATION] is not None:
            Calibration(**info[CALIBRATION])
    except ValueError as error:
        raise ExportError(f"{file}: {error}") from error
    files = (WEIGHTS, *(ADAPTER_FILES if len(info["sha256"]) > 1 else ()))
    check_keys(f"{file}: sha256", info["sha256"], files)
    digest = checksum(written)
    fix = "a value was changed or damaged: copy the file again, or export gates with the values you want"
    expect(info["checksum"] == digest, "checksum", info["checksum"], f"{digest}, the hash of the other keys", fix)
    return dict(info)

"""Names and folders of exported gates, resolved without torch and without the network."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ag.config.recipes import RECIPES
from ag.errors import nearest

WEIGHTS, CONFIG = "gates.safetensors", "gate_config.json"
SHIPPED = RECIPES / "gates"
HUB_ID = re.compile(r"(?P<repository>\w[\w.-]*/\w[\w.-]*)(:(?P<revision>\S+))?")

StrPath = str | os.PathLike[str]


def shipped() -> list[str]:
    """Return the names of the shipped exports."""
    return sorted(entry.parent.name for entry in SHIPPED.glob(f"*/{CONFIG}"))


def on_hub(path: StrPath) -> re.Match[str] | None:
    """Return repository and revision if a text names an export of the hub. None: it names a local folder."""
    match = HUB_ID.fullmatch(str(path))
    if match is None or os.path.exists(path) or os.path.exists(Path(match["repository"]).parent):
        return None
    return match


def export_folder(path: StrPath) -> Path:
    """Return the local folder of an export: a path, or the name of a shipped export. It need not exist."""
    folder = Path(path)
    is_shipped = not os.path.exists(folder) and len(folder.parts) == 1 and os.path.isfile(SHIPPED / folder / CONFIG)
    return SHIPPED / folder if is_shipped else folder


def missing_export_error(folder: Path) -> str | None:
    """Return the message for a missing folder of an export, with a suggestion. None: the folder exists."""
    if os.path.isdir(folder):  # pathlib raises for a long name, and in a folder that may not be searched
        return None
    old = hidden_sibling(folder.resolve(), "old")
    hint = f"; a killed export left the earlier one in {old}: rename it back" if os.path.isdir(old) else ""
    hint += (nearest(folder.name, shipped()) if len(folder.parts) == 1 else "") or "."
    return f"{folder}: no such folder: expected an export with {WEIGHTS} and {CONFIG}{hint}"


def hidden_sibling(target: Path, role: str) -> Path:
    """Return the hidden folder of the new or the old version while an export is replaced."""
    return target.with_name(f".{target.name}.ag-{role}")

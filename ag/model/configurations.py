"""Configurations of models of the hub that come with the package: plans and random weights need no network."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "recipes" / "models"


def find(name: str) -> Path | None:
    """Return the file with the configuration of a model of the hub, ``OWNER/NAME``; None if the package has none."""
    path = FOLDER / f"{name.replace('/', '--')}.json"
    return path if "/" in name and os.path.isfile(path) else None


def names() -> list[str]:
    """Return the models that have a file."""
    return sorted(path.stem.replace("--", "/") for path in FOLDER.glob("*.json"))

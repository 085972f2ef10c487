"""Which card, driver, versions and commit; and why nothing can run here."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ag.errors import UserError
from ag.versions import versions
from scripts.gpu import ROOT

PACKAGES = ("torch", "triton", "transformers", "lightning", "peft", "bitsandbytes", "flash-attn")
REHEARSE = "`scripts/gpu.sh all --cpu-rehearsal` runs every part with tiny shapes on a CPU"


@dataclass(frozen=True)
class Machine:
    """Where rows come from.

    Attributes:
        card: name; "CPU rehearsal" where there is none.
        driver: version of its driver.
        gib: its memory in 2^30 bytes; None in a rehearsal.
        commit: of this repository, with a + where files were changed.
        versions: of packages and Python.
    """

    card: str
    driver: str
    gib: float | None
    commit: str
    versions: dict[str, str]


def machine(rehearsal: bool) -> Machine:
    """Describe this machine without touching the card's memory.

    Raises:
        UserError: when nothing can run on a card here, with the reason.
    """
    found = versions(*PACKAGES) | {"python": platform.python_version(), "cuda": str(torch.version.cuda)}
    if rehearsal:
        return Machine("CPU rehearsal", "none", None, commit(), found)
    name, driver, gib = _card()
    usable(name, driver, torch.version.cuda, torch.cuda.is_available())
    return Machine(str(name), driver, gib, commit(), found)


def usable(name: str | None, driver: str, built_for: str | None, available: bool) -> None:
    """Raise a UserError that says why torch cannot use a card.

    Args:
        name: of the card that the driver lists; None: no card.
        driver: its version.
        built_for: the CUDA version of this torch; None: a build without CUDA.
        available: whether torch can use it.
    """
    if name is None:
        raise UserError(f"no CUDA device is there: {REHEARSE}.")
    if built_for is None:
        raise UserError(f"{name} is there, but torch {torch.__version__} was built without CUDA: install a CUDA build.")
    if not available:
        raise UserError(
            f"{name} is there, but its driver {driver} is too old for torch {torch.__version__} (CUDA {built_for}), or "
            f"hidden by CUDA_VISIBLE_DEVICES: update the driver, or install a torch for an older CUDA; {REHEARSE}."
        )


def _card() -> tuple[str | None, str, float]:
    """Return name, driver and memory in GiB of the first visible card, as the driver tells them."""
    if shutil.which("nvidia-smi") is None:
        if not torch.cuda.is_available():
            return None, "", 0.0
        found = torch.cuda.get_device_properties(0)
        return found.name, "unknown", found.total_memory / (1 << 30)
    index = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0").split(",")[0]
    query = ["nvidia-smi", f"--id={index}", "--query-gpu=name,driver_version,memory.total"]
    done = subprocess.run([*query, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=60)
    cells = [cell.strip() for cell in done.stdout.strip().partition("\n")[0].split(",")]
    if done.returncode or len(cells) != 3:
        return None, "", 0.0
    return cells[0], cells[1], float(cells[2]) / 1024


def commit() -> str:
    """Return the commit of the checkout, or the one that its pack was made from."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    if shutil.which("git") and (found := git("rev-parse", "--short", "HEAD")):
        return f"{found}+" if git("status", "--porcelain", "--untracked-files=no") else found
    note = Path(os.environ.get("AG_PACK") or "/nowhere") / "pack.json"
    if note.is_file():
        content: dict[str, Any] = json.loads(note.read_text())
        return str(content["commit"])
    return "unknown"

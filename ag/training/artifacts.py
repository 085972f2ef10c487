"""Exports and reports as artifacts of Weights & Biases: their files are uploaded in place, or by ``wandb sync``."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ag.config import WandbConfig
from ag.files import LOCK

ID, FILES = "wandb_id.txt", "wandb"  # in a run folder: the id of its W&B run, and W&B's own files
NOT_SHARED = (ID, FILES, LOCK)


def run_id(folder: Path) -> str:
    """Return the id of a folder's W&B run, which later runs there continue. A sweep's agent gives its own id."""
    path = folder / ID
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4))
    return path.read_text()


def log_folder(run: Any, folder: Path, name: str, kind: str, metadata: Mapping[str, Any]) -> None:
    """Log the files of a folder, without W&B's own, as one artifact of ``run``, the result of ``wandb.init``.

    Artifacts of several runs with one name are its versions; ``kind`` is the artifact's type.
    """
    import wandb

    artifact = wandb.Artifact(re.sub(r"[^\w.-]", "-", name), kind, metadata=dict(metadata))
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if path.is_file() and inside.parts[0] not in NOT_SHARED:
            artifact.add_file(str(path), str(inside), policy="immutable")  # other policies copy it to the home folder
    run.log_artifact(artifact)


def log_report(
    folder: Path,
    run_folder: Path,
    name: str,
    settings: WandbConfig,
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
) -> None:
    """Log a comparison to the W&B run of a folder, new or continued: a table, the pictures, and all files.

    ``run_folder`` is the comparison's folder again, or the run folder of ``ag.fit`` whose gates are compared; ``name``
    is the artifact's name.
    """
    if settings.offline:  # the environment, as Lightning does: W&B then sends nothing when it ends
        os.environ["WANDB_MODE"] = "offline"
    import wandb

    with wandb.init(
        project=settings.project,
        name=run_folder.name,
        dir=run_folder,
        id=run_id(run_folder),
        resume="allow",
        job_type="compare",
    ) as run:
        table = wandb.Table(columns=[*columns], data=[[*row] for row in rows])
        pictures = {f"comparison/{path.stem}": wandb.Image(str(path)) for path in sorted(folder.glob("*.png"))}
        run.log({"comparison/table": table, **pictures})
        log_folder(run, folder, name, "comparison", {})

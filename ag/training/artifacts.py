"""What runs and comparisons leave, as artifacts of Weights & Biases.

Files of an artifact are uploaded from where they lie. Offline they are written down only, and ``wandb sync`` uploads
them later.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ag.config import WandbConfig

ID, FILES = "wandb_id.txt", "wandb"  # in a run folder: the id of its W&B run, and that run's own files
NOT_SHARED = (ID, FILES, "lock")


def run_id(folder: Path) -> str:
    """Return the id of the W&B run of a folder, which later runs there continue; an agent of a sweep has chosen it."""
    path = folder / ID
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4))
    return path.read_text()


def log_folder(run: Any, folder: Path, name: str, kind: str, about: Mapping[str, Any]) -> None:
    """Log the files of a folder as one artifact of a W&B run.

    Args:
        run: what ``wandb.init`` returned.
        folder: whose files it gets, in folders as they are; without what W&B itself wrote there.
        name: of the artifact; another run's is a version of it.
        kind: its type.
        about: its metadata.
    """
    import wandb

    artifact = wandb.Artifact(re.sub(r"[^\w.-]", "-", name), kind, metadata=dict(about))
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if path.is_file() and inside.parts[0] not in NOT_SHARED:
            artifact.add_file(str(path), str(inside), policy="immutable")  # else it is copied to the home folder
    run.log_artifact(artifact)


def log_report(
    folder: Path,
    run_folder: Path,
    name: str,
    settings: WandbConfig,
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
) -> None:
    """Log a comparison to the W&B run of a folder, begun or continued: a table, the pictures, and all files.

    Args:
        folder: of the comparison.
        run_folder: the same, or that of the run of ``ag.fit`` whose gates are compared.
        name: of the artifact.
        settings: of W&B.
        columns: names of the table's columns.
        rows: of the table.
    """
    if settings.offline:  # in the environment, else it counts its users as it ends; as Lightning does
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

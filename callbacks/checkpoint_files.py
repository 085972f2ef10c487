"""Checkpoint files: written atomically, listed, and checked for damage."""

from __future__ import annotations

import os
import re
import shutil
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from ag.errors import UserError
from ag.files import replacing

STEP_FILE = re.compile(r"step=\d+\.ckpt")


def checkpoints(run_dir: Path) -> list[Path]:
    """Return the checkpoints `step=NUMBER.ckpt` of a run, most optimiser steps first; other files are left out."""
    files = (Path(run_dir) / "checkpoints").glob("step=*.ckpt")
    return sorted((file for file in files if STEP_FILE.fullmatch(file.name)), key=step_of, reverse=True)


def step_of(path: Path) -> int:
    """Return the number of optimiser steps in the name of a checkpoint, `step=000123.ckpt`."""
    return int(path.stem.removeprefix("step="))


def newest_valid(run_dir: Path) -> Path:
    """Return the newest checkpoint whose checksums are right; warn about each newer one.

    Raises:
        UserError: the run has no intact checkpoint.
    """
    for path in checkpoints(run_dir):
        try:
            with zipfile.ZipFile(path) as archive:
                damage = archive.testzip()
        except (zipfile.BadZipFile, EOFError, NotImplementedError, OSError) as error:
            damage = str(error)
        if damage is None:
            return path
        warnings.warn(f"{path} is damaged ({damage}); trying the one before it", stacklevel=2)
    raise UserError(f"{run_dir} holds no intact checkpoints/step=*.ckpt; start the recipe anew, without resume")


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint under a temporary name in the same folder, syncs it and renames it.

    Lightning's own writer builds the file in memory and moves it from the system's temporary folder; on another file
    system this is a copy, not a rename.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Write `checkpoint` to `path`; after a failure or a kill the earlier file is still there.

        Raises:
            OSError: the disk refuses, for example because it is full; the error names `path`.
        """
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with replacing(target) as partial, partial.open("wb") as file:
                torch.save(checkpoint, file)
        except (OSError, RuntimeError) as error:
            cause = error if isinstance(error, OSError) else error.__context__  # torch.save fails once more as it ends
            if not isinstance(cause, OSError):
                raise
            raise OSError(cause.errno, cause.strerror, str(target)) from error


def hard_link(source: Path, target: Path) -> None:
    """Make `target` a hard link to `source`, or a copy if the file system has no hard links, atomically."""
    with replacing(target) as partial:
        try:
            os.link(source, partial)
        except OSError:
            shutil.copyfile(source, partial)

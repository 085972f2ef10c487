"""Exports on the Hugging Face hub: brought here, and sent there."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled

from ag.gates.manifest import ADAPTER, CARD, CONFIG, FIGURE, WEIGHTS, ExportError

REFUSALS = (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, LocalTokenNotFoundError, OSError)


@functools.cache
def download(repository: str, revision: str | None) -> Path:
    """Return the local folder of an export on the hub, fetched at the first call.

    Args:
        repository: hub id, such as ``name/gates``.
        revision: branch, tag or commit; None: the newest.

    Raises:
        ExportError: the hub has none of that name or revision, or cannot be reached.
    """
    wanted = [WEIGHTS, CONFIG, CARD, FIGURE, f"{ADAPTER}/*"]
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=wanted))
    except REFUSALS as error:
        at = "" if revision is None else f" at {revision}"
        raise ExportError(
            f"{repository}{at}: no such folder, and the hub does not give it ({str(error).splitlines()[0]}): expected "
            "the folder of an export, or ORG/NAME or ORG/NAME:REVISION of one on the hub."
        ) from error


def upload(folder: Path, repository: str, files: Sequence[str]) -> str:
    """Send files of an export to a repository, which is private where it is new; returns the address.

    Raises:
        ExportError: the hub refuses.
    """
    try:
        hub = HfApi()
        hub.create_repo(repository, private=True, exist_ok=True)
        done = hub.upload_folder(repo_id=repository, folder_path=str(folder), allow_patterns=list(files))
    except REFUSALS as error:
        raise ExportError(
            f"export.push_to_hub={repository}: the hub refuses ({str(error).splitlines()[0]}): expected a repository "
            f"that you may write to; log in with `hf auth login`, then upload {folder}."
        ) from error
    return str(done)

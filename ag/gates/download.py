"""Exports of the Hugging Face hub, brought here."""

from __future__ import annotations

import functools
from pathlib import Path

from huggingface_hub import snapshot_download
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

"""Exports on the Hugging Face hub."""

from __future__ import annotations

from huggingface_hub import HfApi

from ag.gates.download import REFUSALS
from ag.gates.export import StrPath, adapter_path
from ag.gates.gate import AttentionGates
from ag.gates.manifest import ADAPTER_FILES, CARD, CONFIG, FIGURE, WEIGHTS, ExportError


def push(path: StrPath, repository: str) -> str:
    """Upload a finished export with its model card to the Hugging Face hub, with the user's own login.

    Args:
        path: folder of an export.
        repository: hub id, such as ``name/gates``; a new one is private.

    Returns:
        The address of the upload.

    Raises:
        ExportError: the folder is no whole export, or the hub refuses.
    """
    AttentionGates.from_pretrained(path)
    adapter = adapter_path(path)
    files = [WEIGHTS, CONFIG, CARD, FIGURE, *(() if adapter is None else ADAPTER_FILES)]
    try:
        hub = HfApi()
        hub.create_repo(repository, private=True, exist_ok=True)
        done = hub.upload_folder(repo_id=repository, folder_path=str(path), allow_patterns=files)
    except REFUSALS as error:
        raise ExportError(
            f"export.push_to_hub={repository}: the hub refuses ({str(error).splitlines()[0]}): expected a repository "
            f"that you may write to; log in with `hf auth login`, then upload {path}."
        ) from error
    return str(done)

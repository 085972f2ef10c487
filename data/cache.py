"""Tokenised rows on disk: made once for a source, a tokenizer and settings, and mapped into memory by every process."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from filelock import FileLock

from ag.data.collate import Row
from ag.data.sources import DataError
from ag.files import fsync

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = 4  # raise it when rows are cut in another way: a cache that was made before is not read again
MANIFEST, TOKENS, ENDS, PLACES = "manifest.json", "tokens.bin", "ends.bin", "places.bin"
NONE = -1  # no prompt, nothing copied


class CachedRows(Sequence[Row]):
    """The rows of a folder that :func:`cached` wrote, each read from disk when it is used."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tokens, self._ends, places = (
            np.memmap(folder / name, dtype=kind, mode="r")
            for name, kind in ((TOKENS, np.int32), (ENDS, np.int64), (PLACES, np.int32))
        )
        self._places = places.reshape(-1, 3)

    def __reduce__(self) -> tuple[type[CachedRows], tuple[Path]]:
        return CachedRows, (self.folder,)

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        start = int(self._ends[index - 1]) if index else 0
        prompt, *copied = self._places[index].tolist()
        return Row(
            np.array(self._tokens[start : self._ends[index]]),
            None if prompt == NONE else prompt,
            copied=None if NONE in copied else tuple(copied),
        )


def cached(
    root: Path, identity: dict[str, Any], make: Callable[[], Iterable[Row]], measured: Callable[[], dict[str, int]]
) -> tuple[Sequence[Row], dict[str, int]]:
    """Return the rows of ``identity``, made and written at the first call, and what was measured then.

    Several processes may ask at once: one works, the others wait. Files of a killed process are removed. The identity
    is all that the rows depend on; ``measured`` is called after they were made, and its result stored with them.

    Raises:
        DataError: the folder cannot be written.
    """
    identity = {"format": FORMAT} | identity
    folder = root / hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            manifest = _manifest(folder)
            if manifest is None or manifest["identity"] != identity:
                manifest = _write(folder, identity, make(), measured)
    except OSError as error:
        raise DataError(
            f"data.cache={root} cannot be used ({error}): name a folder with room and permission"
        ) from error
    rows: Sequence[Row] = CachedRows(folder) if manifest["rows"] else []
    return rows, manifest["measured"]


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of everything that decides which tokens a text becomes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = json.dumps(tokenizer.get_vocab(), sort_keys=True) if backend is None else backend.to_str()
    special = [tokenizer.bos_token, tokenizer.eos_token, type(tokenizer).__name__]
    return hashlib.sha256(json.dumps([text, *special]).encode()).hexdigest()


def _manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of a complete cache, else None."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
        whole = all((folder / name).stat().st_size == size for name, size in manifest["bytes"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return manifest if whole else None


def _write(
    folder: Path, identity: dict[str, Any], rows: Iterable[Row], measured: Callable[[], dict[str, int]]
) -> dict[str, Any]:
    work = folder.with_name(f"{folder.name}.partial")
    for leftover in (work, folder):
        shutil.rmtree(leftover, ignore_errors=True)
    work.mkdir()
    ends, places, end = [], [], 0
    try:
        with open(work / TOKENS, "wb") as file:
            for row in rows:
                file.write(np.ascontiguousarray(row.tokens, dtype=np.int32).tobytes())
                end += len(row.tokens)
                ends.append(end)
                places.append((NONE if row.prompt_length is None else row.prompt_length, *(row.copied or (NONE, NONE))))
        np.array(ends, dtype=np.int64).tofile(work / ENDS)
        np.array(places, dtype=np.int32).tofile(work / PLACES)
        manifest = {
            "identity": identity,
            "rows": len(ends),
            "measured": measured(),
            "bytes": {path.name: path.stat().st_size for path in sorted(work.iterdir())},
        }
        (work / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        for path in (*work.iterdir(), work):
            fsync(path)
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return manifest

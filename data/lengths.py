"""Lengths of a run's rows, sampled where the data and the tokenizer are on this machine: a plan counts their tokens."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ag.config.data import SftConfig, StoredConfig, TextConfig
from ag.data.sources import DataError, Source, dataset_name, dataset_of
from ag.data.templates import find_task, is_own
from ag.errors import UserError, first_line
from ag.wheels import BASES, hub_name

if TYPE_CHECKING:
    from ag.config import Config

ROWS = 200


@dataclass(frozen=True)
class RowSample:
    """Lengths of the first training rows of a run, in tokens."""

    name: str  # of the dataset
    count: int  # rows
    mean: float  # tokens of a row
    longest: int  # tokens of the longest row
    mean_batch_length: float  # mean over batches of the longest row in a batch, to which the batch is padded
    with_loss: float  # mean number of a row's tokens that carry loss


def sample_rows(config: Config, context: int, count: int = ROWS) -> RowSample | str:
    """Return the lengths of a run's first ``count`` training rows, cut as the run cuts them.

    The rows come from ``data.root``, a folder or the cache of ``datasets``, and nothing is downloaded. Where they, or
    the model's tokenizer, are not on this machine, the reason is returned, to follow "because".

    Args:
        config: the configuration of the run.
        context: the longest sequence of the model.
        count: rows to read.
    """
    data = config.data
    if not isinstance(data, StoredConfig):
        return f"those of data.kind={data.kind} are generated"
    hub_folder = _hub_folder(data)
    if hub_folder is not None and not hub_folder.is_dir():
        return f"{dataset_name(data)} is not on this machine (data.root=FOLDER names a copy)"
    tokenizer_folder = _tokenizer_folder(config.model.name, config.model.revision)
    if tokenizer_folder is None:
        return f"the tokenizer of {config.model.name} is not on this machine"
    import numpy as np

    from ag.data.kinds import read
    from ag.model.tokenizer import load_tokenizer  # loads transformers, which takes most of a second

    limits: dict[str, Any] = {"train_samples": min(count, data.train_samples or count), "val_samples": 1}
    if isinstance(data, TextConfig):
        limits["cache"] = None  # it would hold these few rows
    try:
        tokenizer = load_tokenizer(str(tokenizer_folder), {"trust_remote_code": config.model.trust_remote_code})
        with nullcontext() if hub_folder is None else _offline():
            splits = read(replace(data, **limits), config.seed, tokenizer, context)
    except (UserError, OSError, ValueError) as error:
        return f"{dataset_name(data)} cannot be read ({first_line(error)})"
    rows = splits.train
    lengths = np.array([len(row.tokens) for row in rows])
    loss = [int(row.loss_mask(splits.loss_on_prompt).sum()) for row in rows]
    shuffled = np.random.default_rng(config.seed).permutation(lengths)
    size = min(data.batch_size, len(lengths))
    batches = shuffled[: len(shuffled) // size * size].reshape(-1, size)
    return RowSample(
        name=dataset_name(data),
        count=len(rows),
        mean=float(lengths.mean()),
        longest=int(lengths.max()),
        mean_batch_length=float(batches.max(axis=1).mean()),
        with_loss=float(np.mean(loss)),
    )


def _hub_folder(data: StoredConfig) -> Path | None:
    """Return where the cache of ``datasets`` has a dataset of the hub. None: the rows are not read from the hub."""
    if data.root is not None:
        return None
    try:
        if isinstance(data, SftConfig) and not is_own(data):
            task = find_task(data)
            source = Source(task.hub, task.subset)
        else:
            source = dataset_of(data)
    except DataError:
        return None  # the reading says what is wrong
    if source.folder is not None:
        return None
    cache = Path(os.environ.get("HF_DATASETS_CACHE") or _hub_home() / "datasets")
    return cache / _cache_name(source.name) / (source.subset or "")


def _cache_name(hub_id: str) -> str:
    """Return the name of a dataset's folder in the cache, as ``datasets`` makes it (importing it takes a second)."""
    *owner, name = hub_id.split("/")
    snake_case = re.sub(r"([a-z\d])([A-Z])", r"\1_\2", re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", name)).lower()
    return "___".join([*owner, snake_case])


@contextmanager
def _offline() -> Iterator[None]:
    """Refuse all requests to the hub: ``datasets`` then reads its cache, or raises."""
    # datasets copies the constant when it is imported, so that it comes first
    import datasets  # noqa: F401
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _tokenizer_folder(name: str, revision: str | None) -> Path | None:
    """Return the folder of a model's tokenizer on this machine; None where it must be fetched."""
    source, path = BASES.get(name), Path(name).expanduser()
    folders = [path] if source is None else [source.folder()]
    if "/" in hub_name(name):
        snapshots = _hub_cache() / f"models--{hub_name(name).replace('/', '--')}"
        reference = snapshots / "refs" / (revision or "main")
        commit = reference.read_text().strip() if reference.is_file() else revision
        folders += [snapshots / "snapshots" / commit] if commit else []
    return next((x for x in folders if (x / "tokenizer_config.json").is_file()), None)


def _hub_home() -> Path:
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return Path(os.environ.get("HF_HOME") or caches / "huggingface").expanduser()


def _hub_cache() -> Path:
    return Path(os.environ.get("HF_HUB_CACHE") or _hub_home() / "hub").expanduser()

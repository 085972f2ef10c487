"""The base class of kinds of data, and the LightningDataModule that all of them share."""

from __future__ import annotations

import functools
import hashlib
import os
import signal
import sys
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ag.data.collate import Collator, Row
from ag.data.sampler import FILLER, Shard, TrainOrder, ValidationOrder
from ag.data.sources import DataError, called

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ag.config import Config, DataConfig


class DataKind(ABC):
    """A kind of data, chosen by ``data.kind=NAME``."""

    def check(self, data: DataConfig) -> None:  # noqa: B027  # most kinds support all settings of the schema
        """Refuse settings that the kind does not support, before anything is loaded.

        Raises:
            DataError: naming the key, what was expected and the fix.
        """

    @abstractmethod
    def build(self, config: Config, tokenizer: PreTrainedTokenizerBase, context: int) -> DataModule:
        """Read or make the rows and tokenise them.

        Args:
            config: the run; ``data`` and ``seed`` are read.
            tokenizer: the model's tokenizer.
            context: the model's longest input in tokens.

        Raises:
            DataError: the data cannot be used; the message names the place and the fix.
        """


@dataclass
class Counts:
    """Numbers of rows that did not fit or were held out."""

    truncated: int = 0  # rows whose prompt lost its left part
    truncated_tokens: int = 0  # tokens that those prompts lost
    skipped: int = 0  # rows left out: too short or too long
    val_skipped: int = 0  # those of them that are validation rows
    remedy: str = ""  # the keys that let more rows in
    held_out: int = 0  # training rows that are used for validation


class DataModule(LightningDataModule):
    """Training and validation batches, in an order that depends on (seed, epoch) only.

    It shards over ranks by itself (give ``use_distributed_sampler=False`` to the trainer), and a checkpoint written in
    the middle of an epoch resumes with the next batch. The batches are described at :class:`ag.data.collate.Collator`.

    Args:
        train: training rows.
        validation: groups of validation rows; a group is never divided over batches.
        collator: makes a batch of rows.
        data: batch sizes and workers are read.
        seed: seed of the order.
        counts: rows that did not fit.

    Raises:
        DataError: a split is empty.
    """

    def __init__(
        self,
        train: Sequence[Row],
        validation: Sequence[Sequence[Row]],
        collator: Collator,
        data: DataConfig,
        seed: int,
        counts: Counts,
    ) -> None:
        super().__init__()
        if not train:
            raise DataError(_empty("training", data, counts.skipped - counts.val_skipped, counts))
        if not validation:
            raise DataError(_empty("validation", data, counts.val_skipped, counts))
        self.train_rows, self.val_rows, self.collator = train, validation, collator
        self.data, self.seed = data, seed
        self.counts = counts
        #: The form of the rows, in a line for the user; empty where the configuration says it.
        self.about = ""
        self._restored: dict[str, Any] = {}

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the training batches, from the restored position on.

        Raises:
            DataError: the rows do not fill one batch, or the checkpoint was written with another seed, other rows or
                another number of rows per step, so that its position means another one here.
        """
        shard = self._shard(self.data.batch_size)
        epoch, batch = self._position()
        order = TrainOrder(len(self.train_rows), shard, self.seed, epoch, resume=(epoch, batch))
        return self._loader(RowGroups(self.train_rows, self.collator.filler(self.train_rows[0])), order)

    def first_rows(self, count: int) -> Iterator[dict[str, Tensor]]:
        """Yield the first ``count`` training rows, of which each rank gets its part, as batches of one."""
        shard = self._shard(1)
        for index in range(shard.rank, min(count, len(self.train_rows)), shard.world_size):
            yield self.collator([self.train_rows[index]])

    def val_dataloader(self) -> DataLoader[Any]:
        """Return the validation batches, the same number on every rank."""
        order = ValidationOrder(len(self.val_rows), self._shard(self.data.val_batch_size))
        return self._loader(RowGroups(self.val_rows, self.collator.filler(self.val_rows[0][0])), order)

    def state_dict(self) -> dict[str, Any]:
        """Return the values on which a position in the data depends: the seed, the rows and the rows per step."""
        return self._identity()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the values of a checkpoint, which :meth:`train_dataloader` compares."""
        self._restored = state_dict
        # Lightning expects resumable loaders; here the data module resumes
        warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch")

    def _position(self) -> tuple[int, int]:
        """Return the epoch and batch where training starts, by Lightning's counters, which a checkpoint restores."""
        if self.trainer is None:
            return 0, 0
        for key, now in self._identity().items():
            if self._restored.get(key, now) != now:
                raise DataError(
                    f"the checkpoint was written with {key} {self._restored[key]}, this run has {now}: "
                    "resume with the same seed, data and rows per step (data.batch_size x processes)"
                )
        epochs = self.trainer.fit_loop.epoch_progress.state_dict()
        batches = self.trainer.fit_loop.epoch_loop.batch_progress.state_dict()
        epoch = int(epochs["current"]["processed"])
        if batches["is_last_batch"]:  # in an epoch that may or may not be counted yet
            return epoch + int(epochs["total"]["started"] > epochs["total"]["processed"]), 0
        # Lightning fetches ahead of the step that it runs
        return epoch, batches["current"]["processed"]

    def _identity(self) -> dict[str, int | str]:
        return {
            "seed": self.seed,
            "training rows": len(self.train_rows),
            "training rows of hash": self._hash,
            "rows per step": self._shard(self.data.batch_size).global_batch,
        }

    @functools.cached_property
    def _hash(self) -> str:
        """A hash of the tokens of the training rows, of what carries loss, and of their order."""
        digest = hashlib.sha256()
        for row in self.train_rows:
            prompt = -1 if row.prompt_length is None else row.prompt_length
            marks = [len(row.tokens), prompt, *(row.copied or (-1, -1)), -1 if row.loss is None else row.loss.sum()]
            digest.update(np.array(marks, dtype=np.int64).tobytes())
            digest.update(np.asarray(row.tokens, dtype=np.int32).tobytes())
            digest.update(b"" if row.loss is None else row.loss.tobytes())
        return digest.hexdigest()[:16]

    def _shard(self, batch_size: int) -> Shard:
        if self.trainer is None:
            return Shard(batch_size)
        return Shard(batch_size, self.trainer.global_rank, self.trainer.world_size)

    def _loader(self, dataset: RowGroups, sampler: TrainOrder | ValidationOrder) -> DataLoader[Any]:
        return DataLoader(
            dataset,
            batch_size=None,  # the sampler gives whole batches
            sampler=sampler,
            collate_fn=self.collator,
            num_workers=self.data.num_workers,
            worker_init_fn=_begin_worker,
            pin_memory=self.trainer is not None and self.trainer.strategy.root_device.type == "cuda",
            generator=torch.Generator(),  # by default each iteration would draw from the one of the gates' noise
        )


@dataclass(eq=False)
class RowGroups(Dataset[list[Row]]):
    """Rows by group (a question with its choices, or a single row), fetched by the whole batch."""

    groups: Sequence[Row] | Sequence[Sequence[Row]]
    filler: Row

    def __getitem__(self, ids: list[int]) -> list[Row]:
        groups = (self.filler if i == FILLER else self.groups[i] for i in ids)
        return [row for group in groups for row in ([group] if isinstance(group, Row) else group)]


def _begin_worker(worker: int) -> None:
    """Seed a data loading process as Lightning does, and let it outlive signals that stop a run.

    A terminal, ``timeout`` and SLURM send these to all processes of a run, and the one that trains needs its batches
    until the end of the step. It alone ends its workers, by SIGTERM too.
    """
    pl_worker_init_function(worker)
    for signum in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(signum, signal.SIG_IGN)
    if sys.platform == "linux":  # elsewhere the sender of a signal is unknown
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Wait for a SIGTERM of the process that trains, and end this one."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


def _empty(split: str, data: DataConfig, skipped: int, counts: Counts) -> str:
    """Return the message that a split has no rows, with the reason."""
    said = f"the {split} split of {called(data)} has no rows"
    if skipped:
        return f"{said}: {skipped} were left out, {counts.remedy}"
    if split == "training" and counts.held_out:
        said += f": the first {counts.held_out} were held out for validation; use a lower "
        return f"{said}data.val_samples={data.val_samples}, or give a validation split"
    return said

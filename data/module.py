"""The LightningDataModule of a run: batches of its rows, divided among ranks and resumable."""

from __future__ import annotations

import functools
import hashlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ag.data.collate import Collator
from ag.data.kinds import read
from ag.data.rows import Row
from ag.data.sampler import FILLER, Shard, TrainOrder, ValidationOrder
from ag.data.sources import DataError
from ag.data.splits import Splits
from ag.data.tokens import padding_token

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ag.config import DataConfig


def build(data: DataConfig, seed: int, tokenizer: PreTrainedTokenizerBase, context: int) -> DataModule:
    """Read, tokenise and batch the data of a run; see :meth:`ag.data.splits.DataKind.read`."""
    return DataModule(read(data, seed, tokenizer, context), padding_token(tokenizer), data, seed)


class DataModule(LightningDataModule):
    """Training and validation batches, in an order that depends on (seed, epoch) only.

    It shards over ranks by itself (give ``use_distributed_sampler=False`` to the trainer). A checkpoint written in the
    middle of an epoch resumes with the next batch. :class:`ag.data.collate.Collator` describes the batches.

    Args:
        splits: the rows.
        pad_id: padding token, see :class:`ag.data.collate.Collator`.
        data: batch sizes and workers are read.
        seed: seed of the order.
    """

    def __init__(self, splits: Splits, pad_id: int, data: DataConfig, seed: int) -> None:
        super().__init__()
        self.splits, self.train_rows, self.val_rows = splits, splits.train, splits.validation
        self.collator = Collator(pad_id, splits.end, splits.loss_on_prompt)
        self.data, self.seed = data, seed
        self._restored: dict[str, Any] = {}

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the training batches, from the restored position on.

        Raises:
            DataError: the rows do not fill one batch, or the checkpoint was written with another seed, other rows or
                another number of rows per step; its position would then mean other rows.
        """
        shard = self._shard(self.data.batch_size)
        epoch, batch = self._position()
        order = TrainOrder(len(self.train_rows), shard, self.seed, epoch, resume=(epoch, batch))
        return self._loader(RowGroups(self.train_rows, self.collator.filler(self.train_rows[0])), order)

    def first_rows(self, count: int) -> Iterator[dict[str, Tensor]]:
        """Yield this rank's share of the first ``count`` training rows, as batches of one row."""
        shard = self._shard(1)
        for index in range(shard.rank, min(count, len(self.train_rows)), shard.world_size):
            yield self.collator([self.train_rows[index]])

    def val_dataloader(self) -> DataLoader[Any]:
        """Return the validation batches, equally many on every rank."""
        order = ValidationOrder(len(self.val_rows), self._shard(self.data.val_batch_size))
        return self._loader(RowGroups(self.val_rows, self.collator.filler(self.val_rows[0][0])), order)

    def state_dict(self) -> dict[str, Any]:
        """Return the values that give a position in the data its meaning: seed, rows and rows per step."""
        return self._identity()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Store the values of a checkpoint; :meth:`train_dataloader` compares them."""
        self._restored = state_dict

    def _position(self) -> tuple[int, int]:
        """Return the epoch and batch at which training starts, from Lightning's counters, which checkpoints restore."""
        if self.trainer is None:
            return 0, 0
        for key, value in self._identity().items():
            if self._restored.get(key, value) != value:
                raise DataError(
                    f"the checkpoint was written with {key} {self._restored[key]}, this run has {value}: "
                    "resume with the same seed, data and rows per step (data.batch_size x processes)"
                )
        epochs = self.trainer.fit_loop.epoch_progress.state_dict()
        batches = self.trainer.fit_loop.epoch_loop.batch_progress.state_dict()
        epoch = int(epochs["current"]["processed"])
        if batches["is_last_batch"]:  # Lightning counts an epoch after the checkpoints of its last batch and validation
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
        """Hash of the training rows in order: their tokens, prompt lengths and loss masks."""
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
            worker_init_fn=seed_worker,
            pin_memory=self.trainer is not None and self.trainer.strategy.root_device.type == "cuda",
            generator=torch.Generator(),  # the default generator, which gives the gates' noise, stays untouched
        )


@dataclass(eq=False)
class RowGroups(Dataset[list[Row]]):
    """Rows by group (a question with its choices, or a single row), fetched by the whole batch."""

    groups: Sequence[Row] | Sequence[Sequence[Row]]
    filler: Row

    def __getitem__(self, ids: list[int]) -> list[Row]:
        groups = (self.filler if i == FILLER else self.groups[i] for i in ids)
        return [row for group in groups for row in ([group] if isinstance(group, Row) else group)]


def seed_worker(worker: int) -> None:
    """Seed a data loading process as Lightning does, and let it outlive signals that stop a run.

    A terminal, ``timeout`` and SLURM send these signals to all processes of a run, but the process that trains needs
    batches until the end of its step. Only that process ends its workers, also by SIGTERM.
    """
    pl_worker_init_function(worker)
    for signum in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(signum, signal.SIG_IGN)
    if sys.platform == "linux":  # other systems do not tell the sender of a signal
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=exit_with_parent, daemon=True).start()


def exit_with_parent() -> None:
    """Wait for a SIGTERM from the process that trains, then end this process."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)

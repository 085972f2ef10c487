"""The order of rows: a function of (seed, epoch), sharded over ranks, resumable in the middle of an epoch.

Global batch k is the concatenation of the ranks' k-th batches: two ranks with batch size b read the rows that one rank
reads with 2 b.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from torch.utils.data import Sampler

from ag.data.sources import DataError

FILLER = -1


@dataclass(frozen=True)
class Shard:
    """This process's part of every global batch."""

    batch_size: int  # rows per process
    rank: int = 0
    world_size: int = 1

    @property
    def global_batch(self) -> int:
        """Rows of all processes together."""
        return self.batch_size * self.world_size

    def of(self, batch: int) -> slice:
        """Return the slice of the global order with this process's rows of global batch ``batch``."""
        start = batch * self.global_batch + self.rank * self.batch_size
        return slice(start, start + self.batch_size)


@dataclass(eq=False)
class TrainOrder(Sampler[list[int]]):
    """Batches of row ids, reshuffled each epoch; the incomplete last global batch is left out."""

    size: int  # number of rows
    shard: Shard
    seed: int
    epoch: int = 0  # Lightning sets it through set_epoch
    resume: tuple[int, int] = (0, 0)  # (epoch, batch): that epoch starts with that batch

    def __post_init__(self) -> None:
        if len(self) == 0:
            raise DataError(
                f"{self.size} training rows do not fill one batch of {self.shard.global_batch} "
                f"(data.batch_size {self.shard.batch_size} x {self.shard.world_size} processes): lower it"
            )

    def __len__(self) -> int:
        return self.size // self.shard.global_batch

    def __iter__(self) -> Iterator[list[int]]:
        order = np.random.default_rng([self.seed, self.epoch]).permutation(self.size)
        epoch, batch = self.resume
        for k in range(batch if epoch == self.epoch else 0, len(self)):
            yield order[self.shard.of(k)].tolist()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration."""
        self.epoch = epoch


@dataclass(eq=False)
class ValidationOrder(Sampler[list[int]]):
    """Batches of all row ids in ascending order; -1 is a filler row."""

    size: int  # number of rows (multiple choice: questions)
    shard: Shard

    def __len__(self) -> int:
        return -(-self.size // self.shard.global_batch)

    def __iter__(self) -> Iterator[list[int]]:
        for k in range(len(self)):
            rows = list(range(self.size)[self.shard.of(k)])
            yield rows or [FILLER]

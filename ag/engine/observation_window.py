"""The last queries of each sequence, for scorers that look back at them (SnapKV), and sums over a prompt's queries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from ag.engine.records import pad_front
from ag.stateful import Attributes

#: Queries ``[B, H, w, D]``, their token indices ``[B, w]``, and ``[B, w]`` bool, False on padding.
Queries = tuple[Tensor, Tensor, Tensor]
DIMS = 2, 1, 1  # the dimension w in each of the three


@dataclass
class ObservationWindow(Attributes):
    """The memory of earlier queries of a layer.

    Attributes:
        queries: the last queries, before any rotation by slot. None: no queries.
        sums: a scorer's sums over the queries of a prompt while it is read, ``[B, ...]`` by name.
    """

    STATE: ClassVar[Mapping[str, Any]] = {"queries": tuple | None}

    queries: Queries | None = None
    sums: dict[str, Tensor] = field(default_factory=dict)

    def reset(self) -> None:
        """Forget everything."""
        self.queries, self.sums = None, {}

    def followed_by(self, new: Queries) -> Queries:
        """Return new queries with the remembered ones before them."""
        if self.queries is None:
            return new
        q, token_indices, valid = (torch.cat(pair, dim) for *pair, dim in zip(self.queries, new, DIMS, strict=True))
        return q, token_indices, valid

    def remember(self, queries: Queries, last: int) -> None:
        """Keep the ``last`` newest queries of each sequence."""
        q, token_indices, valid = queries
        newest = torch.where(valid, token_indices, -1).argsort(dim=1, stable=True)[:, -last:]
        index = newest[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[-1])
        self.queries = q.gather(2, index), token_indices.gather(1, newest), valid.gather(1, newest)

    def select(self, indices: Tensor) -> None:
        """Make the sequences those at ``indices``."""
        self.sums = {name: x[indices.to(x.device)] for name, x in self.sums.items()}
        if self.queries is not None:
            q, token_indices, valid = (x[indices.to(x.device)] for x in self.queries)
            self.queries = q, token_indices, valid

    def join(self, other: ObservationWindow) -> None:
        """Append the queries of other sequences; padding before the fewer queries makes both equally wide."""
        self.sums = {}  # the prompts are over
        if self.queries is None or other.queries is None:
            return
        width = max(self.queries[1].shape[1], other.queries[1].shape[1])
        pairs = zip(self.queries, other.queries, DIMS, strict=True)
        q, token_indices, valid = (torch.cat([pad_front(x, width, dim) for x in pair]) for *pair, dim in pairs)
        self.queries = q, token_indices, valid

"""What a cache holds, for those who ask."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ag.engine.decide import Decision
from ag.engine.layer import EvictionLayer
from ag.engine.policy import Policy
from ag.engine.report import Report
from ag.engine.text import Text
from ag.stateful import Stateful


class Holdings:
    """The side of :class:`ag.engine.cache.EvictionCache` that is read."""

    #: The model's stack of layers.
    decoder: Any
    policy: Policy
    #: What follows the text and its sequences, by name.
    parts: dict[str, Stateful]
    #: What went by.
    text: Text
    #: Says what stays under a budget; None: there is none.
    decision: Decision | None
    #: The layers, with their own type.
    evicting_layers: list[EvictionLayer]

    @abstractmethod
    def crop(self, tokens_to_remove: int | Sequence[int]) -> None:
        """Forget the newest tokens."""

    @property
    def valid(self) -> Tensor:
        """``[B, seen]`` bool, False on padding."""
        return self.text.valid

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values, and for what gates look back at."""
        return sum(layer.nbytes for layer in self.evicting_layers)

    @property
    def seen_tokens(self) -> int:
        """Columns of the input that went by, padding and evicted tokens included."""
        return self.text.seen

    @property
    def over_budget(self) -> Tensor:
        """``[B]`` bool on the CPU: sequences that hold more than the budget, because more is protected than it allows.

        False where nothing had to go so far.
        """
        if self.decision is not None:
            self.decision.look()
        known = None if self.decision is None else self.decision.budgets.over_budget
        return torch.zeros(len(self.valid), dtype=torch.bool) if known is None else known

    def held_tokens(self) -> Tensor:
        """Return the tokens per KV head that each layer holds of each sequence, ``[B, L]`` float32 on the CPU.

        Nothing changes by it, whatever step comes next: tokens that leave when that begins are counted.
        """
        stores = [layer.store for layer in self.evicting_layers if layer.store is not None]
        if not stores:
            return torch.zeros(len(self.valid), len(self.evicting_layers))
        counts = torch.stack([store.present.to(stores[0].present.device) for store in stores])
        return counts.view(len(stores), -1, stores[0].kv_heads).float().mean(2).T.cpu()

    def kept_positions(self, layer: int) -> list[list[Tensor]]:
        """Return, for each sequence and KV head, the sorted columns that a layer still holds.

        Columns are those of the input row, padding counted, and go on with the tokens that follow the prompt: of a
        prompt of 10 columns the first generated token has column 10.
        """
        store = self.evicting_layers[layer].store
        if store is None:
            return []
        kept = store.kept()
        columns = [row.nonzero().flatten().to(kept[0].device) for row in self.valid for _ in range(store.kv_heads)]
        heads = [own[ranks.long()] for own, ranks in zip(columns, kept, strict=True)]
        return [heads[first : first + store.kv_heads] for first in range(0, len(heads), store.kv_heads)]

    def kept_share(self, *, prompt: bool = False) -> float:
        """Return the share of the (token, KV head) pairs seen so far that is still held, over all layers.

        Tokens of all sequences count, without padding: those of the prompt, and those that followed it (generated ones
        and later turns).

        Args:
            prompt: count those of the prompt alone.
        """
        stores = [layer.store for layer in self.evicting_layers if layer.store is not None]
        if prompt:
            seen_of_prompt = self.valid[:, : self.text.prompt_columns].sum(1)
            own = seen_of_prompt.minimum(self.text.prompt_lengths).tolist()  # lower ranks are the prompt's
            rows = [(ranks, own[row // store.kv_heads]) for store in stores for row, ranks in enumerate(store.kept())]
            seen, held = sum(limit for _, limit in rows), sum(int((ranks < limit).sum()) for ranks, limit in rows)
        else:
            seen = sum(int(self.valid.sum()) * store.kv_heads for store in stores)
            held = sum(int(store.lengths.sum()) for store in stores)
        return held / seen if seen else 1.0

    def report(self) -> Report:
        """Return what each layer and head holds, what it costs, and the time that scoring took."""
        stores = [layer.store for layer in self.evicting_layers]
        return Report(
            policy=repr(self.policy),
            tokens=int(self.valid.sum()),
            over_budget=int(self.over_budget.sum()),
            kept=[[] if s is None else s.lengths.view(-1, s.kv_heads).sum(0).tolist() for s in stores],
            nbytes=[layer.nbytes for layer in self.evicting_layers],
            seconds=[layer.scoring_seconds for layer in self.evicting_layers],
            plain_nbytes=sum(layer.plain_nbytes for layer in self.evicting_layers),
        )

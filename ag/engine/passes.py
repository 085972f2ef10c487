"""What a forward pass brings to every layer, worked out once by the cache."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from ag.errors import UserError


def marked(spans: Sequence[Any]) -> Tensor:
    """Return ``[L]`` bool, which own tokens lie in spans ``(first, behind the last)``.

    Raises:
        UserError: for a span that is none.
    """
    for span in spans:
        whole = len(span) == 2 and all(isinstance(x, int) for x in span) if isinstance(span, tuple) else False
        if not whole or not 0 <= span[0] < span[1]:
            raise UserError(
                f"protect: {span!r}: expected pairs (first token, the one behind the last), such as (0, 40), or for "
                "each sequence a list of such pairs."
            )
    marks = torch.zeros(max((behind for _, behind in spans), default=0), dtype=torch.bool)
    for first, behind in spans:
        marks[first:behind] = True
    return marks


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Some tokens of a forward pass, w of each sequence.

    Attributes:
        ranks: ``[B, w]`` long, the place of each among its sequence's own tokens.
        real: ``[B, w]`` bool, whether it exists.
        columns: ``[B, w]`` long, where they are among the new tokens; None: they are all of them.
    """

    ranks: Tensor
    real: Tensor
    columns: Tensor | None = None

    @property
    def counts(self) -> Tensor:
        """Own tokens of each sequence up to the last of these, ``[B]``; 0 where none exists."""
        return torch.where(self.real, self.ranks + 1, 0).amax(1)

    def split(self, at: int) -> tuple[Tokens, Tokens]:
        """Cut all new tokens before one of their columns."""
        columns = torch.arange(self.ranks.shape[1], device=self.ranks.device).expand_as(self.ranks)
        first, second = (
            Tokens(ranks=self.ranks[:, x], real=self.real[:, x], columns=columns[:, x])
            for x in (slice(at), slice(at, None))
        )
        return first, second

    def blocks(self, size: int | None) -> list[Tokens]:
        """Cut into blocks of so many tokens, counted in each sequence's own ones; None: do not cut."""
        if size is None:
            return [self]
        number = torch.where(self.real, self.ranks // size, -1)
        present = number[self.real].unique().tolist()
        if len(present) < 2:
            return [self]
        parts = []
        for index in present:
            inside = number == index
            columns = (~inside).long().argsort(dim=1, stable=True)[:, : int(inside.sum(1).max())]
            parts.append(Tokens(ranks=self.ranks.gather(1, columns), real=inside.gather(1, columns), columns=columns))
        return parts


@dataclass(frozen=True, kw_only=True)
class Pass(Tokens):
    """New tokens on their way through the layers: a whole forward pass, or a part of one.

    Attributes:
        number: counts passes, from 1.
        step: whether it is one token of each sequence behind the prompt, with tensors that are the same at each step.
        reading: whether the tokens are of the prompt; else they follow it.
        ends_prompt: whether the prompt is over after them.
        padded: whether some of them do not exist.
        left_padded: whether some of those come first.
        gaps: whether some of those lie between tokens of a sequence, whose distance is not that of their columns then.
        seen: columns of the input that went by with the forward pass.
        prompt_columns: columns of the prompt.
        prompt_lengths: ``[B]`` long, own tokens of each prompt, as far as they are known.
        protected: ``[B, L]`` bool, which of the first L own tokens never go; None: none is protected so.
        lengths: the ``counts``, worked out once.
        due: ``[B]`` bool, sequences of which something may go after these tokens; None: of none.
        every_due: whether those are all sequences.
        positions: ``[B, w]`` long, positions that the model rotates the tokens by, where slots decide; else None.
        lowest_rank: no new token ranks lower; a bound on the host.
        judged: whether gates are asked about these tokens.
        remember: whether they will be asked about later ones.
        logits: of gates, ``[B, Hkv, w]`` by layer, from the hook before a layer until its attention.
        memo: what layers worked out that is the same for all of them.
    """

    number: int
    step: bool = False
    reading: bool
    ends_prompt: bool
    padded: bool
    left_padded: bool
    gaps: bool = False
    seen: int
    prompt_columns: int
    prompt_lengths: Tensor
    lengths: Tensor
    protected: Tensor | None = None
    due: Tensor | None = None
    every_due: bool = False
    positions: Tensor | None = None
    lowest_rank: int = 0
    judged: bool = False
    remember: bool = False
    logits: dict[int, Tensor] = field(default_factory=dict)
    memo: dict[Hashable, Any] = field(default_factory=dict)

    @property
    def valid(self) -> Tensor | None:
        """The same as ``real``; None where all of the tokens exist."""
        return self.real if self.padded else None

    def stays(self, ranks: Tensor, lowest: int = 0) -> Tensor | None:
        """Return which tokens of these ranks ``[B, ..., N]`` never go, bool of the same shape; None: none.

        ``lowest`` is a bound of the ranks that the host knows.
        """
        if self.protected is None or lowest >= self.protected.shape[1]:
            return None
        inside = (ranks >= 0) & (ranks < self.protected.shape[1])
        places = ranks.where(inside, 0).long().flatten(1)
        return inside & self.protected.gather(1, places).view(ranks.shape)

    def to(self, device: torch.device) -> Self:
        """Return the same on another device."""
        return self._each(lambda x: x.to(device))

    def select(self, indices: Tensor) -> Self:
        """Return the same for the sequences at ``indices``."""
        return self._each(lambda x: x[indices.to(x.device)])

    def _each(self, change: Callable[[Tensor], Tensor]) -> Self:
        changed: dict[str, Any] = {name: change(x) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **changed)

"""Beginnings that several prompts have in common, read once: a system prompt, earlier turns of a conversation.

What is held of a beginning is a cache that has read so far and no further, before anything was decided about the prompt
as a whole: all its tokens (or what flags leave of them as they are read), and what the scorer recorded of its queries.
A copy of it reads the rest of another prompt as if it had read the beginning too. Copies share pages.

Texts are compared with what their requests protect: a *text* is ``[T]`` long, twice the id of each token, and one more
where it is protected (:func:`marked`).
"""

from __future__ import annotations

from collections import deque
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor

from ag.engine.cache import EvictionCache
from ag.engine.pool import PAGE

LEAST = 4 * PAGE  # tokens that are worth it
TEXTS = 256  # that are remembered, to find what they have in common


@dataclass(eq=False)
class Beginning:
    """A beginning that is held.

    Attributes:
        text: ``[T]`` on the CPU.
        cache: which has read it.
    """

    text: Tensor
    cache: EvictionCache

    def numbers(self) -> Tensor:
        """Return the numbers of its pages, ``[n]``."""
        return torch.cat([x.store.table.numbers() for x in self.cache.evicting_layers if x.store is not None])


class Beginnings:
    """Those of the prompts under one policy and its gates; who was not used for longest goes first."""

    def __init__(self) -> None:
        self._held: list[Beginning] = []  # the one used last comes last
        self._texts: deque[Tensor] = deque(maxlen=TEXTS)
        #: Pages that they have together.
        self.pages = 0

    def __len__(self) -> int:
        return len(self._held)

    def remember(self, text: Tensor) -> None:
        """Take note of a text ``[T]`` that others may begin with: a prompt that waits, or one with its answer."""
        self._texts.append(text)

    def common(self, text: Tensor) -> int:
        """Return how many tokens, in whole pages and less than all, a text ``[T]`` has in common with another one.

        Itself is one of those remembered.
        """
        _, most = sorted([0, 0, *(_same(text, other) for other in self._texts)], reverse=True)[:2]
        whole = min(most, len(text) - 1) // PAGE * PAGE
        return whole if whole >= LEAST else 0

    def find(self, text: Tensor) -> Beginning | None:
        """Return the longest one that a text ``[T]`` goes on from; it counts as used."""
        fitting = [x for x in self._held if len(x.text) < len(text) and _same(x.text, text) == len(x.text)]
        if not fitting:
            return None
        found = max(fitting, key=lambda x: len(x.text))
        self._held.remove(found)
        self._held.append(found)
        return found

    def add(self, text: Tensor, cache: EvictionCache) -> None:
        """Hold a copy of a cache that has read this much of a longer prompt."""
        self._held.append(Beginning(text, deepcopy(cache)))
        self._count()

    def drop(self) -> bool:
        """Give the pages of the one that was not used for longest back; returns whether there was one."""
        if not self._held:
            return False
        self._held.pop(0).cache.reset()
        self._count()
        return True

    def _count(self) -> None:
        self.pages = len(torch.cat([x.numbers() for x in self._held]).unique()) if self._held else 0


def marked(tokens: Tensor, protected: Tensor) -> Tensor:
    """Return ids ``[T]``, the first of which may be protected ``[t]`` bool, as texts are compared."""
    text = 2 * tokens
    text[: len(protected)] += protected
    return text


def _same(a: Tensor, b: Tensor) -> int:
    """Return how many tokens two texts begin with alike."""
    least = min(len(a), len(b))
    differs = a[:least] != b[:least]
    return int(differs.byte().argmax()) if bool(differs.any()) else least

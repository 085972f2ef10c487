"""Prefixes that several prompts share, read once: a system prompt, earlier turns of a conversation.

A cached prefix is an evicting cache that has read so far and no further, before anything was decided about the prompt
as a whole: it holds all tokens of the prefix (or what flags leave of them as they are read), and what the scorer noted
of its queries. A fork of it reads the rest of another prompt as if it had read the prefix too; forks share blocks.

Texts are compared together with what their requests protect: a *key* is ``[T]`` long, twice the id of each token, and
one more where the token is protected (:func:`key_of`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from ag.engine.block_pool import BLOCK, BlockPool
from ag.engine.cache import EvictionCache

LEAST = 4 * BLOCK  # tokens of the shortest prefix that is cached
TEXTS = 256  # texts that are remembered, to find what they share


@dataclass(eq=False)
class Prefix:
    """A cached prefix.

    Attributes:
        key: ``[T]`` on the CPU, its tokens and which of them are protected.
        cache: has read it.
    """

    key: Tensor
    cache: EvictionCache


class PrefixCache:
    """The prefixes of the prompts under one policy and its gates, the least recently used one first.

    They lie in blocks that nobody needs: where a pool runs out it drops them.

    Args:
        pool: of their blocks.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._prefixes: list[Prefix] = []
        self._texts: deque[Tensor] = deque(maxlen=TEXTS)
        #: Different blocks of all prefixes.
        self.num_blocks = 0
        pool.spares.add(self)

    def __len__(self) -> int:
        """Return the number of prefixes."""
        return len(self._prefixes)

    def remember(self, key: Tensor) -> None:
        """Take note of a text that others may begin with: a prompt that waits, or one with its answer."""
        self._texts.append(key)

    def common(self, key: Tensor) -> int:
        """Return how many tokens, in whole blocks and less than all, a text has in common with another one.

        The text itself is one of those remembered.
        """
        _, most = sorted([0, 0, *(_common(key, other) for other in self._texts)], reverse=True)[:2]
        whole = min(most, len(key) - 1) // BLOCK * BLOCK
        return whole if whole >= LEAST else 0

    def find(self, key: Tensor) -> Prefix | None:
        """Return the longest prefix of a text, shorter than the text; it counts as used."""
        fitting = [x for x in self._prefixes if len(x.key) < len(key) and _common(x.key, key) == len(x.key)]
        if not fitting:
            return None
        found = max(fitting, key=lambda x: len(x.key))
        self._prefixes.remove(found)
        self._prefixes.append(found)
        return found

    def add(self, key: Tensor, cache: EvictionCache) -> None:
        """Keep a prefix, which ``cache`` has read and nobody else continues."""
        self._prefixes.append(Prefix(key, cache))
        self._count()

    def drop(self) -> bool:
        """Free the blocks of the least recently used prefix; returns whether there was one."""
        if not self._prefixes:
            return False
        self._prefixes.pop(0).cache.reset()
        self._count()
        return True

    def _count(self) -> None:
        blocks = [torch.zeros(0).long(), *(x.cache.store.blocks() for x in self._prefixes)]
        self.num_blocks = len(torch.cat(blocks).unique())


def key_of(tokens: Tensor, protected: Tensor) -> Tensor:
    """Return the key of ids ``[T]``, the first of which may be protected ``[t]`` bool."""
    key = 2 * tokens
    key[: len(protected)] += protected
    return key


def _common(a: Tensor, b: Tensor) -> int:
    """Return how many tokens two texts begin with alike."""
    least = min(len(a), len(b))
    differs = a[:least] != b[:least]
    return int(differs.byte().argmax()) if bool(differs.any()) else least

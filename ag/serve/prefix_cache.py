"""Prefix sharing: prompts with a common prefix (a system prompt, earlier turns of a chat) read it once.

A cached prefix is an eviction cache that has read the prefix only, before any eviction decision about the whole prompt:
it holds all tokens of the prefix (or those that flags keep while it is read) and the scorer's state. A copy of it reads
the rest of another prompt; copies share blocks.

A text is compared together with its protected tokens, as a *key* ``[T]``: twice the id of each token, plus one where
the token is protected (:func:`key_of`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from ag.engine.block_pool import BLOCK, BlockPool
from ag.engine.cache import EvictionCache

MIN_PREFIX_TOKENS = 4 * BLOCK  # tokens of the shortest cached prefix
MAX_RECENT_KEYS = 256  # most texts that a new one is compared with


@dataclass(eq=False)
class Prefix:
    """A cached prefix."""

    key: Tensor  # ``[T]`` on the CPU, see :func:`key_of`
    cache: EvictionCache  # has read it


class PrefixCache:
    """Cached prefixes under one policy, the least recently used one first.

    Args:
        pool: of their blocks; it calls :meth:`drop` when it runs out.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._prefixes: list[Prefix] = []
        self._recent_keys: deque[Tensor] = deque(maxlen=MAX_RECENT_KEYS)
        self._pool = pool
        self._count()

    def __len__(self) -> int:
        """Return the number of prefixes."""
        return len(self._prefixes)

    @property
    def num_blocks(self) -> int:
        """Distinct blocks of all prefixes."""
        return len(self._blocks)

    @property
    def num_freeable_blocks(self) -> int:
        """Blocks that are free once all prefixes are dropped."""
        return int((self._pool.references(self._blocks) == self._uses).sum())

    def remember(self, key: Tensor) -> None:
        """Remember a text for :meth:`common`: a queued prompt, or a prompt with its answer."""
        self._recent_keys.append(key)

    def shared_prefix_length(self, key: Tensor) -> int:
        """Return the length of the longest prefix that a text shares with another remembered one.

        It is a multiple of a block, less than the text, and 0 below ``LEAST``. The text itself is remembered too.
        """
        _, longest = sorted([0, 0, *(_common_length(key, other) for other in self._recent_keys)], reverse=True)[:2]
        length = min(longest, len(key) - 1) // BLOCK * BLOCK
        return length if length >= MIN_PREFIX_TOKENS else 0

    def find(self, key: Tensor) -> Prefix | None:
        """Return the longest cached prefix of a text, shorter than the text, and mark it as used; None means none."""
        fitting = [x for x in self._prefixes if len(x.key) < len(key) and _common_length(x.key, key) == len(x.key)]
        if not fitting:
            return None
        prefix = max(fitting, key=lambda x: len(x.key))
        self._prefixes.remove(prefix)
        self._prefixes.append(prefix)
        return prefix

    def add(self, key: Tensor, cache: EvictionCache) -> None:
        """Add a prefix; ``cache`` has read it and reads nothing else."""
        self._prefixes.append(Prefix(key, cache))
        self._pool.spares.add(self)  # not before: other threads make instances, while the pool reads its spares
        self._count()

    def drop(self) -> bool:
        """Free the blocks of the least recently used prefix; returns whether there was one."""
        if not self._prefixes:
            return False
        self._prefixes.pop(0).cache.reset()
        self._count()
        return True

    def _count(self) -> None:
        blocks = [torch.zeros(0).long(), *(store.blocks() for x in self._prefixes for store in x.cache.stores)]
        self._blocks, self._uses = torch.cat(blocks).unique(return_counts=True)


def key_of(tokens: Tensor, protected: Tensor) -> Tensor:
    """Return the key of ids ``[T]``; ``protected`` ``[t]`` bool marks protected ones among the first t."""
    key = 2 * tokens
    key[: len(protected)] += protected
    return key


def _common_length(a: Tensor, b: Tensor) -> int:
    """Return the length of the common prefix of two texts."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.byte().argmax()) if bool(differs.any()) else length

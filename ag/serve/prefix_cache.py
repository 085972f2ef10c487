"""Prefix sharing: the model reads a common prefix of prompts (a system prompt, earlier turns of a chat) once.

A cached prefix is an eviction cache that has read only the prefix. No eviction of a whole prompt has happened yet: the
cache holds the scorer's state and all tokens of the prefix, or under flags the tokens that are kept while it is read.
A copy of the cache reads the remaining tokens of another prompt. Copies share blocks.

Two prefixes are equal if their tokens and their protected tokens are. A *key* ``[T]`` has both: twice the id of each
token, plus one if the token is protected (:func:`key_of`). Texts with different RoPE frequencies have different keys.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from ag.engine.block_pool import BLOCK, BlockPool
from ag.engine.cache import EvictionCache

MIN_PREFIX_TOKENS = 4 * BLOCK  # length of the shortest cached prefix
MAX_RECENT_KEYS = 256  # a new prompt is compared with at most this number of earlier texts


@dataclass(eq=False)
class Prefix:
    """A cached prefix."""

    key: Tensor  # ``[T]`` on the CPU, see :func:`key_of`
    cache: EvictionCache  # has read the prefix


class PrefixCache:
    """Cached prefixes under one policy, the least recently used one first. Their pool calls :meth:`drop` when full."""

    def __init__(self, pool: BlockPool) -> None:
        self.prefixes: list[Prefix] = []
        #: Keys of queued prompts, and of prompts with their completions.
        self.recent_keys: deque[Tensor] = deque(maxlen=MAX_RECENT_KEYS)
        self._pool = pool
        self._count()

    @property
    def num_freeable_blocks(self) -> int:
        """Number of blocks that dropping all prefixes would free."""
        return int((self._pool.references(self._blocks) == self._uses).sum())

    def shared_prefix_length(self, key: Tensor) -> int:
        """Return the length of the longest prefix that a text shares with another recent text.

        The length is a multiple of the block size, less than the text's, and 0 below ``MIN_PREFIX_TOKENS``. The text
        itself is among the recent ones.
        """
        # the largest is the text's own length; the zeros stand for texts where there are fewer than two
        _, longest = heapq.nlargest(2, [0, 0, *(_common_length(key, other) for other in self.recent_keys)])
        length = min(longest, len(key) - 1) // BLOCK * BLOCK
        return length if length >= MIN_PREFIX_TOKENS else 0

    def find(self, key: Tensor) -> Prefix | None:
        """Return the longest cached prefix that is shorter than the text, and mark it as used. None: there is none."""
        fitting = [x for x in self.prefixes if len(x.key) < len(key) and _common_length(x.key, key) == len(x.key)]
        longest = max(fitting, key=lambda x: len(x.key), default=None)
        if longest is not None:
            self.prefixes.remove(longest)
            self.prefixes.append(longest)
        return longest

    def add(self, key: Tensor, cache: EvictionCache) -> None:
        """Add a prefix. ``cache`` has read the prefix and reads nothing else."""
        self.prefixes.append(Prefix(key, cache))
        self._pool.spares.add(self)  # not in __init__: other threads make instances while the pool reads its spares
        self._count()

    def drop(self) -> bool:
        """Free the blocks of the least recently used prefix. Returns False if there is no prefix."""
        if not self.prefixes:
            return False
        self.prefixes.pop(0).cache.reset()
        self._count()
        return True

    def _count(self) -> None:
        blocks = [torch.zeros(0).long(), *(store.blocks() for x in self.prefixes for store in x.cache.state.stores)]
        self._blocks, self._uses = torch.cat(blocks).unique(return_counts=True)
        self.num_blocks = len(self._blocks)  # distinct blocks of all prefixes


def key_of(tokens: Tensor, protected: Tensor, frequencies: int = 0) -> Tensor:
    """Return the key of ids ``[T]``.

    Args:
        tokens: the ids.
        protected: ``[t]`` bool, the protected tokens among the first t.
        frequencies: number of the RoPE frequencies of the text.
    """
    key = 2 * tokens + (frequencies << 32)
    key[: len(protected)] += protected
    return key


def _common_length(a: Tensor, b: Tensor) -> int:
    """Return the length of the common prefix of two keys."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.byte().argmax()) if bool(differs.any()) else length

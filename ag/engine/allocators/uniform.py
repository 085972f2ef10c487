"""The same budget in every layer and head."""

from __future__ import annotations

from dataclasses import dataclass

from ag.engine.allocators.base import Allocator


@dataclass(frozen=True, kw_only=True)
class Uniform(Allocator):
    """Every head of every layer keeps the budget."""

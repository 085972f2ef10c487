"""Packages that a machine with CUDA torch and transformers may lack: after ``import absent`` they are not installed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

ABSENT = {"omegaconf", "datasets", "gguf", "bitsandbytes", "wandb", "rouge", "thefuzz"}


class Without(PathFinder):
    """Finds what lies on the path, but these."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if fullname.partition(".")[0] in ABSENT else super().find_spec(fullname, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = Without

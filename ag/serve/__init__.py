"""Serving with continuous batching.

Names are imported on first use, as in :mod:`ag`: ``python -m ag.serve --help`` needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ag.serve.request import Request as Request
    from ag.serve.request import Token as Token
    from ag.serve.scheduler import Scheduler as Scheduler
    from ag.serve.stream import Stream as Stream

MODULES = {"Request": "request", "Scheduler": "scheduler", "Stream": "stream", "Token": "request"}
__all__ = ["Request", "Scheduler", "Stream", "Token"]


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module 'ag.serve' has no attribute {name!r}")
    return getattr(import_module(f"ag.serve.{MODULES[name]}"), name)

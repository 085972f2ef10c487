"""Serving with continuous batching.

Names are imported on first use, as in :mod:`ag`: ``python -m ag.serve --help`` needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ag.serve.request import Request as Request
    from ag.serve.request import Stream as Stream
    from ag.serve.request import Token as Token
    from ag.serve.scheduler import Scheduler as Scheduler
    from ag.serve.snapshot import Snapshot as Snapshot

_PUBLIC = {
    "Scheduler": "ag.serve.scheduler",
    "Request": "ag.serve.request",
    "Snapshot": "ag.serve.snapshot",
    "Stream": "ag.serve.request",
    "Token": "ag.serve.request",
}
__all__ = ["Scheduler", "Request", "Snapshot", "Stream", "Token"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'ag.serve' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)

"""Training and validation data: supervised tasks, plain documents, generated facts and worked problems.

Names are imported on first use, as in :mod:`ag`: the checks of :mod:`ag.data.early` need no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ag.data.kinds import KINDS as KINDS
    from ag.data.kinds import build as build
    from ag.data.kinds import check as check
    from ag.data.module import DataKind as DataKind
    from ag.data.module import DataModule as DataModule
    from ag.data.sources import DataError as DataError

_PUBLIC = {
    "KINDS": "ag.data.kinds",
    "DataError": "ag.data.sources",
    "DataKind": "ag.data.module",
    "DataModule": "ag.data.module",
    "build": "ag.data.kinds",
    "check": "ag.data.kinds",
}
__all__ = ["KINDS", "DataError", "DataKind", "DataModule", "build", "check"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'ag.data' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)

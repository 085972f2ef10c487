"""Training and validation data: supervised tasks, plain documents, generated facts and worked problems.

Names are imported on first use, as in :mod:`ag`: only the data module and its batches need torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ag.data.kinds import KINDS as KINDS
    from ag.data.kinds import check as check
    from ag.data.kinds import read as read
    from ag.data.module import DataModule as DataModule
    from ag.data.module import build as build
    from ag.data.sources import DataError as DataError
    from ag.data.splits import DataKind as DataKind
    from ag.data.splits import Splits as Splits

_PUBLIC = {
    "KINDS": "ag.data.kinds",
    "DataError": "ag.data.sources",
    "DataKind": "ag.data.splits",
    "DataModule": "ag.data.module",
    "Splits": "ag.data.splits",
    "build": "ag.data.module",
    "check": "ag.data.kinds",
    "read": "ag.data.kinds",
}
__all__ = ["KINDS", "DataError", "DataKind", "DataModule", "Splits", "build", "check", "read"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'ag.data' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)

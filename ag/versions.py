"""Versions of installed packages, for files of results."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def versions(*names: str) -> dict[str, str]:
    """Return the version of each package, or "not installed"."""
    by_name = {}
    for name in names:
        try:
            by_name[name] = version(name)
        except PackageNotFoundError:
            by_name[name] = "not installed"
    return by_name

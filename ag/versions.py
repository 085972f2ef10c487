"""Versions of installed packages, for files of results."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def versions(*names: str) -> dict[str, str]:
    """Return the version of each package, or "not installed" (also for this one without an installation)."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found

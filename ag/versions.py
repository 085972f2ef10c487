"""Versions of installed packages, for files that say where they come from."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def versions(*names: str) -> dict[str, str]:
    """Return the version of each package; "not installed" also for this one where it runs from a checkout."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found

"""Which packages are installed, and their versions for files of results."""

from __future__ import annotations

import importlib.util
from importlib.metadata import PackageNotFoundError, version

from ag.errors import UserError


def versions(*names: str) -> dict[str, str]:
    """Return the version of each package, or "not installed"."""
    by_name = {}
    for name in names:
        try:
            by_name[name] = version(name)
        except PackageNotFoundError:
            by_name[name] = "not installed"
    return by_name


def need(module: str, extra: str, feature: str) -> None:
    """Raise a :class:`UserError` that names the extra to install, unless a module of another package is installed.

    Args:
        module: name by which it is imported.
        extra: the extra of this package that installs it.
        feature: what needs it, the beginning of the message.
    """
    if importlib.util.find_spec(module) is None:
        raise UserError(f"{feature} needs {module}, which is not installed: pip install 'ag[{extra}]'.")

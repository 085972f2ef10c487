"""Scorers, wrappers, allocators and tasks of other packages: modules that are named, and entry points."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import entry_points

from ag.errors import UserError

#: Groups of entry points, each with the module and the name of the table that they enter.
GROUPS = {
    "ag.scorers": ("ag.engine.scorers", "SCORERS"),
    "ag.wrappers": ("ag.engine.wrappers", "WRAPPERS"),
    "ag.allocators": ("ag.engine.allocators", "ALLOCATORS"),
    "ag.tasks": ("ag.evaluate.tasks.registry", "TASKS"),
}


def load(modules: Sequence[str]) -> None:
    """Import modules that enter something into a table, as ``SCORERS["mine"] = Mine``; the working folder is searched.

    Raises:
        UserError: naming the module that is not there, or that fails.
    """
    if modules and os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())  # python -m searches it, the command ag does not
    for name in modules:
        try:
            import_module(name)
        except Exception as error:  # a module may do anything
            missing = isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}.")
            why = "there is no such module" if missing else f"importing it fails ({type(error).__name__}: {error})"
            raise UserError(
                f"plugins=[{name}]: {why}; expected a module that Python finds, as package.module: install its "
                "package, or start from the folder that holds it."
            ) from error


@functools.cache
def discover(group: str) -> None:
    """Enter what installed packages offer as entry points of a group into its table, once.

    Raises:
        UserError: naming the entry point and its package when it cannot be loaded, or when its name is taken.
    """
    module, table = GROUPS[group]
    known = getattr(import_module(module), table)
    for point in entry_points(group=group):
        what = f"{group}: entry point {point.name} of package {'unknown' if point.dist is None else point.dist.name}"
        try:
            found = point.load()
        except Exception as error:  # a module may do anything
            raise UserError(
                f"{what}: {point.value} cannot be loaded ({type(error).__name__}: {error}); mend or uninstall it."
            ) from error
        entry = (found, {}) if group == "ag.tasks" and isinstance(found, type) else found
        if known.setdefault(point.name, entry) != entry:
            raise UserError(f"{what}: there is another {point.name} already; rename it or uninstall one of the two.")

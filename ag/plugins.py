"""Extensions (scorers, tasks, kinds of gates, losses, ...) by ``plugins=[MODULE]`` and by entry points."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from ag.errors import PLUGINS_ADD, UserError, nearest

#: Groups of entry points, each with the module and the name of its table.
GROUPS = {
    "ag.scorers": ("ag.engine.scorers", "SCORERS"),
    "ag.wrappers": ("ag.engine.wrappers", "WRAPPERS"),
    "ag.allocators": ("ag.engine.allocators", "ALLOCATORS"),
    "ag.tasks": ("ag.evaluate.tasks.registry", "TASKS"),
    "ag.gate_kinds": ("ag.gates.gate", "KINDS"),
    "ag.losses": ("ag.training.objectives", "OBJECTIVES"),
    "ag.data_kinds": ("ag.data", "KINDS"),
}


def load(modules: Sequence[str]) -> None:
    """Import modules that add to a table, as ``SCORERS["mine"] = Mine``. The working folder is searched too."""
    if modules and os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())  # as python -m does, unlike the command ag
    for name in modules:
        try:
            import_module(name)
        except Exception as error:  # a module may do anything
            missing = isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}.")
            reason = "there is no such module" if missing else f"importing it fails ({type(error).__name__}: {error})"
            raise UserError(
                f"plugins=[{name}]: {reason}; expected a module that Python finds, as package.module: install its "
                "package, or start from the folder that holds it."
            ) from error


@functools.cache
def discover(group: str) -> dict[str, Any]:
    """Return the table of a group, after adding the entry points of installed packages."""
    module, table = GROUPS[group]
    entries: dict[str, Any] = getattr(import_module(module), table)
    for point in entry_points(group=group):
        origin = f"{group}: entry point {point.name} of package {'unknown' if point.dist is None else point.dist.name}"
        try:
            loaded = point.load()
        except Exception as error:  # a module may do anything
            raise UserError(
                f"{origin}: {point.value} cannot be loaded ({type(error).__name__}: {error}); mend or uninstall it."
            ) from error
        entry = (loaded, {}) if group == "ag.tasks" and isinstance(loaded, type) else loaded
        if entries.setdefault(point.name, entry) != entry:
            raise UserError(f"{origin}: there is another {point.name} already; rename it or uninstall one of the two.")
    return entries


def part(group: str, key: str, name: str, base: Any) -> Any:
    """Return the class of this name.

    Args:
        group: one of :data:`GROUPS`.
        key: the configuration key, for messages.
        name: value of the key.
        base: required base class.
    """
    entries = discover(group)
    if name not in entries:
        hint = nearest(name, entries) or PLUGINS_ADD
        raise UserError(f"{key}={name}: expected one of {', '.join(entries)}{hint}")
    check_part(name, entries[name], base)
    return entries[name]


def check_part(name: str, kind: Any, base: Any) -> None:
    """Refuse an entry of a table that is not a subclass of ``base``, or has abstract methods left."""
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise UserError(f"{name!r} is {kind!r:.80}: expected a class derived from {base.__module__}.{base.__name__}.")
    if lacking := sorted(getattr(kind, "__abstractmethods__", ())):
        raise UserError(
            f"{kind.__name__} ({name!r}) lacks {', '.join(lacking)}, which a {base.__name__} has to define."
        )

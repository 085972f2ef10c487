"""Tasks by name."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from dataclasses import fields
from typing import Any

from ag.data import templates
from ag.errors import UserError
from ag.evaluate.tasks.base import Task
from ag.evaluate.tasks.longbench import LongBench
from ag.evaluate.tasks.longbench_subsets import SUBSETS
from ag.evaluate.tasks.multiple_choice import MultipleChoice
from ag.evaluate.tasks.needle_kinds import ManyValues, NeedleInText, OneNeedle, Variables
from ag.evaluate.tasks.perplexity import Continuation, Stream
from ag.evaluate.tasks.responses import Responses
from ag.evaluate.tasks.worked import Worked

TASKS: dict[str, tuple[type[Task], dict[str, Any]]] = {
    **{name: (MultipleChoice, {}) for name in templates.TASKS},
    "ppl": (Continuation, {}),
    "ppl_stream": (Stream, {}),
    "responses": (Responses, {}),
    "worked": (Worked, {}),
    "needle_single": (OneNeedle, {}),
    "needle_text": (NeedleInText, {}),
    "needle_multikey": (OneNeedle, {"keys": 4}),
    "needle_multivalue": (ManyValues, {}),
    "needle_variables": (Variables, {}),
    **{name: (LongBench, {}) for name in SUBSETS},
}
ALIASES = {"arc_c": "arc_challenge", "arc_e": "arc_easy", "obqa": "openbookqa"}
GROUPS = {
    "multiple_choice": tuple(templates.TASKS),
    "needle": tuple(name for name in TASKS if name.startswith("needle_")),
    "longbench": tuple(SUBSETS),
}


def expand(names: Sequence[str]) -> list[str]:
    """Return the tasks that names stand for, each once: of groups all, of aliases the full name.

    Raises:
        UserError: a name is neither a task nor a group; the nearest is suggested.
    """
    for name in names:
        _known(name, [*TASKS, *GROUPS, *ALIASES], "task")
    return list(dict.fromkeys(task for name in names for task in GROUPS.get(name, (ALIASES.get(name, name),))))


def unit(name: str) -> str:
    """Return what the samples of a task are called, in the plural."""
    return TASKS[name][0].unit if name in TASKS else Task.unit


def make(name: str, root: str | None = None, **options: Any) -> Task:
    """Make a task.

    Args:
        name: one of :data:`TASKS`, or an alias.
        root: local folder that is read instead of the hub.
        options: the fields of the task's class.

    Raises:
        UserError: unknown name or option (the nearest is suggested), or a value out of range.
    """
    full = ALIASES.get(name, name)
    if name in GROUPS:
        raise UserError(f"Task {name!r} is a group of {', '.join(GROUPS[name])}; name one of them.")
    _known(full, [*TASKS, *ALIASES], "task")
    kind, defaults = TASKS[full]
    for option in options:
        _known(option, [f.name for f in fields(kind) if f.name not in ("name", "root")], f"option of task {name}")
    return kind(full, root, **defaults | options)


def _known(name: str, names: Collection[str], what: str) -> None:
    if name not in names:
        near = difflib.get_close_matches(name, names, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        expected = f"expected one of {', '.join(names)}" if names else "it takes none"
        raise UserError(f"Unknown {what} {name!r}: {expected}{hint}")

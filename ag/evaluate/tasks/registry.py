"""Tasks by name: the class of each task, and its options that differ from the defaults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from ag.data import templates
from ag.errors import PLUGINS_ADD, UserError, check_known
from ag.evaluate.tasks import ruler
from ag.evaluate.tasks.base import Task
from ag.evaluate.tasks.instructions import Instructions
from ag.evaluate.tasks.longbench import SUBSETS, LongBench
from ag.evaluate.tasks.multiple_choice import MultipleChoice
from ag.evaluate.tasks.own import Own
from ag.evaluate.tasks.perplexity import Continuation, Stream
from ag.evaluate.tasks.reasoning import DATASETS, OwnSolutions, Reasoning
from ag.evaluate.tasks.responses import Responses
from ag.evaluate.tasks.turns import Turns
from ag.evaluate.tasks.worked import Worked
from ag.plugins import check_part, discover

GRID = {"depths": (0.0, 0.25, 0.5, 0.75, 1.0)}
BOOKS = {"haystack": "text", "digits": 5, "hint": False, "lengths": (512, 1024, 2048, 4096), "repeats": 20}
LONG = {"lengths": (4096,), "repeats": 500}
NIAH = LONG | {"generate": 128, "key": "word"}
SHORT = {"lengths": (768,), "repeats": 60}
#: The thirteen tasks of RULER.
RULER: dict[str, tuple[type[Task], dict[str, Any]]] = {
    "niah_single_1": (ruler.Needles, NIAH),
    "niah_single_2": (ruler.Needles, NIAH | {"haystack": "text"}),
    "niah_single_3": (ruler.Needles, NIAH | {"haystack": "text", "value": "uuid"}),
    "niah_multikey_1": (ruler.Needles, NIAH | {"haystack": "text", "keys": 4}),
    "niah_multikey_2": (ruler.Needles, NIAH | {"haystack": "needles"}),
    "niah_multikey_3": (ruler.Needles, NIAH | {"haystack": "needles", "key": "uuid", "value": "uuid"}),
    "niah_multivalue": (ruler.Needles, NIAH | {"haystack": "text", "values": 4}),
    "niah_multiquery": (ruler.Needles, NIAH | {"haystack": "text", "keys": 4, "queries": 4}),
    "vt": (ruler.Variables, LONG | {"generate": 30, "chains": 1, "hops": 4, "example": True}),
    "cwe": (ruler.CommonWords, LONG | {"generate": 120}),
    "fwe": (ruler.FrequentWords, LONG | {"generate": 50}),
    "qa_1": (ruler.DocumentQA, LONG | {"generate": 32}),
    "qa_2": (ruler.DocumentQA, LONG | {"generate": 32}),
}
TASKS: dict[str, tuple[type[Task], dict[str, Any]]] = {
    # answers of one token need a question after the eviction
    **{name: (MultipleChoice, {"question": "after"} if task.context else {}) for name, task in templates.TASKS.items()},
    "ppl": (Continuation, {}),
    "ppl_stream": (Stream, {}),
    "responses": (Responses, {}),
    "own": (Own, {}),
    "worked": (Worked, {}),
    **{name: (Reasoning, {"dataset": name}) for name in DATASETS},
    **{f"{name}_nats": (OwnSolutions, {"dataset": name}) for name in DATASETS},
    "needle_single": (ruler.OneNeedle, GRID),
    "needle_text": (ruler.OneNeedle, GRID | {"haystack": "text"}),
    "needle_multikey": (ruler.OneNeedle, GRID | {"keys": 4}),
    "needle_multivalue": (ruler.Needles, {"values": 4}),
    "needle_variables": (ruler.Variables, {}),
    **{f"needle_books_{keys}": (ruler.ExactNeedle, BOOKS | {"keys": keys}) for keys in (1, 4, 8)},
    **{f"instructions_{rules}": (Instructions, SHORT | {"rules": rules}) for rules in (2, 4, 8)},
    "instructions_4_protected": (Instructions, SHORT | {"protect": True}),
    "turns": (Turns, SHORT),
    "turns_apart": (Turns, SHORT | {"apart": True}),
    **RULER,
    **{name: (LongBench, {}) for name in SUBSETS},
}
ALIASES = {"arc_c": "arc_challenge", "arc_e": "arc_easy", "obqa": "openbookqa"}
GROUPS = {
    "multiple_choice": tuple(templates.TASKS),
    "needle": tuple(name for name in TASKS if name.startswith("needle_") and "books" not in name),
    "needle_books": tuple(name for name in TASKS if name.startswith("needle_books_")),
    "instructions": tuple(name for name in TASKS if name.startswith("instructions_")),
    "ruler": tuple(RULER),
    "longbench": tuple(SUBSETS),
}


def expand(names: Sequence[str]) -> list[str]:
    """Return the tasks of names, groups and aliases, without repetition.

    Raises:
        UserError: a name is unknown; the nearest one is suggested.
    """
    discover("ag.tasks")
    for name in names:
        check_known(name, [*TASKS, *GROUPS, *ALIASES], "task", otherwise=PLUGINS_ADD)
    return list(dict.fromkeys(task for name in names for task in GROUPS.get(name, (ALIASES.get(name, name),))))


def unit(name: str) -> str:
    """Return the name of a task's samples, in the plural."""
    return TASKS[name][0].unit if name in TASKS else Task.unit


def make(name: str, root: str | None = None, **options: Any) -> Task:
    """Make a task.

    Args:
        name: one of :data:`TASKS`, or an alias.
        root: local folder that is read instead of the hub.
        options: the fields of the task's class.

    Raises:
        UserError: the name or an option is unknown (the nearest one is suggested), or a value is out of range.
    """
    discover("ag.tasks")
    full = ALIASES.get(name, name)
    if name in GROUPS:
        raise UserError(f"Task {name!r} is a group of {', '.join(GROUPS[name])}; name one of them.")
    check_known(full, [*TASKS, *ALIASES], "task", otherwise=PLUGINS_ADD)
    task_class, defaults = TASKS[full]
    check_part(full, task_class, Task)
    types = get_type_hints(task_class, include_extras=True)
    option_names = [field.name for field in fields(task_class) if field.name not in ("name", "root")]
    without_context = task_class is MultipleChoice and full not in templates.WITH_CONTEXT
    for option, value in options.items():
        if option == "question" and (option not in option_names or (without_context and value == "after")):
            raise UserError(
                f"Task {name}: question={value} needs a context with a question about it, and this task has none; "
                f"needles, RULER, LongBench, {', '.join(templates.WITH_CONTEXT)} have."
            )
        check_known(option, option_names, f"option of task {name}")
        try:
            TypeAdapter(types[option]).validate_python(value, strict=True)
        except ValidationError as error:
            expected = error.errors()[0]["msg"].replace("Input should be", "expected")
            raise UserError(f"Task {name}: {option}={value!r}: {expected}.") from None
    return task_class(full, root, **defaults | options)

"""Tables of combinations of keys that make no sense, with conditions and reason in each row."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from typing import Any

CONDITION = re.compile(r"([\w.+]+)(!=|>=|<=|=|>|<)([^;\s]+)")
COMPARE = {">": operator.gt, "<": operator.lt, ">=": operator.ge, "<=": operator.le}


def rows(table: str) -> list[tuple[str, str]]:
    """Read a table of rows ``WHEN -> WHY``; a line that begins with spaces continues a row.

    WHEN is a conjunction of conditions, joined by ``;``; the message leaves out those after ``if``. A condition is
    ``KEY=VALUE|VALUE``, ``KEY!=VALUE``, or a comparison of a key or a sum of keys with a number or a key, such as
    ``KEY+KEY>KEY``. WHY is the reason and the fix.
    """
    lines = re.sub(r"\n +", " ", table).strip().splitlines()
    return [(when, why) for when, _, why in (line.partition(" -> ") for line in lines)]


def clash(config: Any, table: Sequence[tuple[str, str]], prefix: str = "") -> str | None:
    """Return the message of the first row that holds, ``KEY=VALUE with KEY=VALUE: WHY``; None means that none does.

    Args:
        config: has the keys as attributes.
        table: of :func:`rows`.
        prefix: text before each key in the message.
    """
    for when, why in table:
        named = when.partition(" if ")[0]
        if all(_holds(config, *condition) for condition in CONDITION.findall(when)):
            sides = (
                side for name, sign, wanted in CONDITION.findall(named) for side in (name, wanted * (sign in COMPARE))
            )
            names = dict.fromkeys(name for side in sides for name in side.split("+") if name[:1].isalpha())
            first, *others = (f"{prefix}{name}={_shown(operator.attrgetter(name)(config))}" for name in names)
            return f"{first}{' with ' * bool(others)}{', '.join(others)}: {why}"
    return None


def _holds(config: Any, name: str, sign: str, wanted: str) -> bool:
    if sign in COMPARE:
        return bool(COMPARE[sign](_number(config, name), _number(config, wanted)))
    return (_shown(operator.attrgetter(name)(config)) in wanted.split("|")) == (sign == "=")


def _number(config: Any, text: str) -> float:
    """Return the value of a number, a key, or a sum of keys."""
    return sum(operator.attrgetter(x)(config) if x[0].isalpha() else float(x) for x in text.split("+"))


def _shown(value: Any) -> str:
    """Return a value as on a command line."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)

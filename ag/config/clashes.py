"""Tables of invalid combinations of keys. Each row has conditions and a reason."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from typing import Any

CONDITION = re.compile(r"([\w.+]+)(!=|>=|<=|=|>|<)([^;\s]+)")
COMPARE = {">": operator.gt, "<": operator.lt, ">=": operator.ge, "<=": operator.le}


def parse_table(table: str) -> list[tuple[str, str]]:
    """Read a table of rows ``CONDITIONS -> REASON``; a line that begins with spaces continues a row.

    The conditions are joined by ``;``, and all must hold. The message leaves out conditions after ``if``. A condition
    is ``KEY=VALUE|VALUE``, ``KEY!=VALUE``, or a comparison of a key or a sum of keys with a number or a key, as
    ``KEY+KEY>KEY``. The reason includes the fix.
    """
    lines = re.sub(r"\n +", " ", table).strip().splitlines()
    return [(conditions, reason) for conditions, _, reason in (line.partition(" -> ") for line in lines)]


def first_clash(config: Any, table: Sequence[tuple[str, str]], prefix: str = "") -> str | None:
    """Return the message of the first row whose conditions hold, ``KEY=VALUE with KEY=VALUE: REASON``, or None.

    Args:
        config: has the keys as attributes.
        table: result of :func:`parse_table`.
        prefix: text before each key in the message.
    """
    for conditions, reason in table:
        shown_conditions = conditions.partition(" if ")[0]
        if all(_condition_holds(config, *condition) for condition in CONDITION.findall(conditions)):
            operands = (
                operand
                for name, sign, wanted in CONDITION.findall(shown_conditions)
                for operand in (name, wanted * (sign in COMPARE))
            )
            names = dict.fromkeys(name for operand in operands for name in operand.split("+") if name[:1].isalpha())
            first, *further = (f"{prefix}{name}={_as_argument(operator.attrgetter(name)(config))}" for name in names)
            return f"{first}{' with ' * bool(further)}{', '.join(further)}: {reason}"
    return None


def _condition_holds(config: Any, name: str, sign: str, wanted: str) -> bool:
    if sign in COMPARE:
        return bool(COMPARE[sign](_number(config, name), _number(config, wanted)))
    return (_as_argument(operator.attrgetter(name)(config)) in wanted.split("|")) == (sign == "=")


def _number(config: Any, text: str) -> float:
    """Return the value of a number, of a key, or of a sum of keys."""
    return sum(operator.attrgetter(x)(config) if x[0].isalpha() else float(x) for x in text.split("+"))


def _as_argument(value: Any) -> str:
    """Return a value in the form of the command line."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)

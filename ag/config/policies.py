"""The names in the text of a policy, known without loading the parts that they stand for."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from ag.errors import check_known

FULL = "full"  # evicts nothing, and has no scorer
GATES = "gates"  # rank tokens under a budget
FLAGS = "flags"  # the same gates, whose flags decide: there is no budget
ALIASES = {"pyramidkv": ("snapkv", "pyramid")}


@cache
def shipped_parts(kind: str) -> list[str]:
    """Return the names in the table of ``scorers``, ``wrappers`` or ``allocators``, from its source: no torch loads."""
    source = Path(__file__).parents[1] / "engine" / kind / "__init__.py"
    tables = [node.value for node in ast.parse(source.read_text(encoding="utf-8")).body if hasattr(node, "value")]
    [names] = [[ast.literal_eval(key) for key in table.keys if key] for table in tables if isinstance(table, ast.Dict)]
    return names


def split_label(text: str) -> tuple[str | None, str]:
    """Split ``LABEL=POLICY`` into its two parts; the label is None where there is none, as in ``gates:a=b``."""
    label, equals, rest = text.partition("=")
    return (label, rest) if equals and not re.search("[:+@]", label) else (None, text)


def check_names(text: str) -> None:
    """Refuse a policy with a name that nobody knows; :class:`ag.engine.spec.PolicySpec` reads all of the grammar."""
    bare = split_label(text)[1]
    scorer = re.split("[:+@]", bare, maxsplit=1)[0]
    if scorer:
        check_known(scorer, (FULL, *shipped_parts("scorers"), FLAGS, *ALIASES), "policy", text)
    if ":" not in bare:  # in a path any sign may stand
        for sign, name in re.findall("([+@])([^+@]+)", bare):
            what = "wrapper" if sign == "+" else "allocator"
            check_known(name, shipped_parts(f"{what}s"), what, text)

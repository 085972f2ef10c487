"""Names in the text of a policy, and the options of its parts, without the engine."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.metadata import entry_points
from typing import Any

from ag.errors import check_known
from ag.plugins import GROUPS, check_part, discover

FULL = "full"  # evicts nothing, and has no scorer
GATES = "gates"  # scores of gates under a budget
FLAGS = "flags"  # decisions of the same gates, without a budget
ALIASES = {"pyramidkv": ("snapkv", "pyramid")}


def split_label(text: str) -> tuple[str | None, str]:
    """Split ``LABEL=POLICY``; the label is None if there is none, as in ``gates:a=b``."""
    label, equals, rest = text.partition("=")
    return (label, rest) if equals and not re.search("[:+@]", label) else (None, text)


BASES = {"ag.scorers": "Scorer", "ag.wrappers": "Wrapper", "ag.allocators": "Allocator"}  # in the module of the group


@dataclass(frozen=True)
class Shipped:
    """What is known of a part of the library before its class is loaded; the attributes are those of the class."""

    options: str  # names, with blanks between
    default_allocator: str = "uniform"
    reads_gates: bool = False
    shorthands: tuple[str, ...] = ()


#: The parts of the library by group and name, which have to agree with the classes.
SHIPPED = {
    "ag.scorers": {
        "streaming_llm": Shipped("sinks recent"),
        "h2o": Shipped("sinks recent window"),
        "scissorhands": Shipped("sinks recent window"),
        "tova": Shipped("sinks recent scope"),
        "snapkv": Shipped("sinks recent window kernel pooling"),
        "cake": Shipped("sinks recent window kernel pooling gamma", "preference"),
        "expected_attention": Shipped("sinks recent future values eps window"),
        "keydiff": Shipped("sinks recent"),
        "rkv": Shipped("sinks recent window kernel mix threshold"),
        "kvzip": Shipped("sinks recent chunk overlap normalize ask ask_part answer", "global"),
        "gates": Shipped("sinks recent recent_share", "global", reads_gates=True),
        "random": Shipped("sinks recent seed"),
        "knorm": Shipped("sinks recent"),
    },
    "ag.wrappers": {
        "vatp": Shipped("sinks recent inner"),
        "caote": Shipped("sinks recent inner"),
        "fastcaote": Shipped("sinks recent inner"),
        "criticalkv": Shipped("sinks recent inner first"),
        "obcache_value": Shipped("sinks recent inner"),
        "obcache_key": Shipped("sinks recent inner"),
        "obcache_joint": Shipped("sinks recent inner"),
    },
    "ag.allocators": {
        "uniform": Shipped(""),
        "pyramid": Shipped("beta"),
        "preference": Shipped("tau1 tau2 observers", shorthands=("tau",)),
        "heads": Shipped("floor"),
        "global": Shipped("floor"),
    },
}


def parts(group: str) -> Mapping[str, Any]:
    """Return the parts of a group by name: classes where the engine is loaded or a package adds some, else shipped."""
    if GROUPS[group][0] in sys.modules or entry_points(group=group):
        return discover(group)
    return SHIPPED[group]


def check_name(what: str, name: str, text: str) -> None:
    """Refuse a wrapper or an allocator, in the text of a policy, that is unknown or of a wrong class."""
    group = f"ag.{what}s"
    check_known(name, parts(group), what, text)
    check_class(group, name)


def check_class(group: str, name: str) -> None:
    """Refuse a part of a plugin that does not derive from the class of its group."""
    kind = parts(group)[name]
    if not isinstance(kind, Shipped):
        check_part(name, kind, getattr(sys.modules[GROUPS[group][0]], BASES[group]))


def option_names(part: Any) -> list[str]:
    """Return the names of the options of a part of a policy: the fields of a class but for derived ones."""
    if isinstance(part, Shipped):
        return part.options.split()
    return [field.name for field in fields(part) if field.metadata.get("option", True)]

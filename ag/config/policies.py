"""The names in the text of a policy, and the options of its parts; readable without the engine."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.metadata import entry_points
from typing import Any

from ag.plugins import GROUPS, check_part, discover

FULL = "full"  # evicts nothing, and has no scorer
GATES = "gates"  # scores of gates, under a budget
FLAGS = "flags"  # decisions of gates, without a budget
ALIASES = {"pyramidkv": ("snapkv", "pyramid")}


def split_label(text: str) -> tuple[str | None, str]:
    """Split ``LABEL=POLICY``. A label of None means that the text has no label, as in ``gates:a=b``."""
    label, equals, policy = text.partition("=")
    return (label, policy) if equals and not re.search("[:+@]", label) else (None, text)


BASES = {"ag.scorers": "Scorer", "ag.wrappers": "Wrapper", "ag.allocators": "Allocator"}  # in the modules of GROUPS


@dataclass(frozen=True)
class Shipped:
    """Facts of a scorer, wrapper or allocator of this library, for use before its class is loaded."""

    options: str  # names, separated by blanks
    default_allocator: str = "uniform"
    reads_gates: bool = False
    shorthands: tuple[str, ...] = ()


#: The parts of the library by group and name, a row for each class in the tables of ``ag.engine``; both must agree.
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
    """Return the parts of a group by name: classes if the engine is loaded or a package adds some, else SHIPPED."""
    if GROUPS[group][0] in sys.modules or entry_points(group=group):
        return discover(group)
    return SHIPPED[group]


def check_class(group: str, name: str) -> None:
    """Refuse a plugin's part that does not derive from the base class of its group."""
    kind = parts(group)[name]
    if not isinstance(kind, Shipped):
        check_part(name, kind, getattr(sys.modules[GROUPS[group][0]], BASES[group]))


def option_names(part: Any) -> list[str]:
    """Return the names of the options of a part: the fields of its class, except derived fields."""
    if isinstance(part, Shipped):
        return part.options.split()
    return [field.name for field in fields(part) if field.metadata.get("option", True)]

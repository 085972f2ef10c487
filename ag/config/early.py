"""What is wrong with the values of a command's keys, said before torch and transformers are loaded.

What reads a value refuses it as well: here are the mistakes that are common and cheap to see.
"""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from ag.config.exports import absence, here, on_hub
from ag.config.keys import keys
from ag.config.policies import FLAGS, GATES, check_names, split_label
from ag.errors import UserError

PARTS = ("ag.scorers", "ag.wrappers", "ag.allocators")


def check(config: Any) -> None:
    """Refuse policies whose names nobody knows, and files, folders and exports that are not there.

    Raises:
        UserError: names the value, what was expected, and the nearest name.
    """
    for key in keys(type(config)).values():
        value = operator.attrgetter(key.name)(config)
        if not key.holds or not value or (key.holds != "policy" and _elsewhere(config)):
            continue
        for text in value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]:
            CHECKS[key.holds](config, key.name, text)


def _elsewhere(config: Any) -> bool:
    """Whether the machines that read the files may be others than this one."""
    return getattr(config, "cluster", None) not in (None, "local")


def _policy(config: Any, name: str, text: str) -> None:
    loaded = "ag.engine.policy" in sys.modules  # by a program that may have added names, as plugins do
    if not (loaded or config.plugins or any(entry_points(group=group) for group in PARTS)):
        check_names(text)
    found = re.fullmatch(f"(?:{GATES}|{FLAGS}):([^+@]+)", split_label(text)[1])
    if found and not _elsewhere(config):
        _export(config, name, found[1])


def _export(config: Any, name: str, text: str) -> None:
    said = None if on_hub(text) else absence(here(text))
    if said is not None:
        raise UserError(said)


def _file(config: Any, name: str, text: str) -> None:
    if not Path(text).exists():  # a pipe is no file, and can be read
        raise UserError(f"{name}={text}: no such file; expected a text file in UTF-8.")


def _folder(config: Any, name: str, text: str) -> None:
    if not Path(text).expanduser().exists():
        raise UserError(f"{name}={text}: no such folder; expected one that is there, or leave {name} out.")


#: By what a key says that it holds; see :func:`ag.config.sections.key`.
CHECKS: dict[str, Callable[[Any, str, str], None]] = {
    "policy": _policy,
    "export": _export,
    "file": _file,
    "folder": _folder,
}

"""The checks that need neither torch nor a model: policies, budgets, files, folders, exports and devices."""

from __future__ import annotations

import ctypes
import operator
import re
import sys
from pathlib import Path
from typing import Any

from ag.config.exports import absence, here, on_hub
from ag.config.keys import Key, keys
from ag.config.spec import PolicySpec, parse_budget
from ag.errors import UserError

EXPECTED = {
    "file": "no such file; expected a text file in UTF-8.",
    "folder": "no such folder; expected an existing one.",
}
NO_GPU = "no driver of a CUDA device is on this machine"


def check(config: Any, elsewhere: bool = False) -> None:
    """Refuse unknown policies and bad budgets; unless other machines do the work, also what this one does not have.

    Args:
        config: of a command; what its values are is said by :attr:`ag.config.keys.Key.holds`.
        elsewhere: whether the device may be one of another machine.

    Raises:
        UserError: names the key, the value and what was expected.
    """
    away = getattr(config, "cluster", None) not in (None, "local")
    for key in keys(type(config)).values():
        value = operator.attrgetter(key.name)(config)
        if value is None or value == "" or not key.holds:
            continue
        for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]:
            if key.holds == "policy":
                path = PolicySpec.parse(one).path
                if path and not away:
                    _check_export(path)
            elif key.holds == "budget":
                parse_budget(one)
            elif key.holds == "device":
                check_device(key.name, one, away or elsewhere)
            elif not away:
                _check_place(key, one)


def _check_place(key: Key, text: str) -> None:
    """Refuse a file, a folder or an export that is not there."""
    if key.holds == "export":
        _check_export(text)
    elif key.holds in EXPECTED and not Path(text).exists():  # a pipe is no file
        raise UserError(f"{key.name}={text}: {EXPECTED[key.holds]}")


def _check_export(text: str) -> None:
    """Refuse an export that is neither here nor named as one of the hub."""
    said = None if on_hub(text) else absence(here(text))
    if said is not None:
        raise UserError(said)


def check_device(name: str, value: str, elsewhere: bool = False) -> None:
    """Refuse what is no device, and a GPU where no driver is; :mod:`ag.model.base` asks torch about the others."""
    if name == "device" and not re.fullmatch(r"[a-z]+(:\d+)?", value):
        raise UserError(f"device={value}: expected cpu, cuda, or a GPU by its number, as cuda:1.")
    if not elsewhere and value.startswith(("cuda", "gpu")) and not has_driver():
        raise UserError(f"{name}={value}: {NO_GPU}: give {name}=cpu, or start the command where a GPU is.")


def has_driver() -> bool:
    """Return whether a driver of GPUs can be loaded, of NVIDIA, or is there, of AMD."""
    try:
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return Path("/dev/kfd").exists()
    return True

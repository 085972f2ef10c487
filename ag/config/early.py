"""Checks without torch and without a model: policies, budgets, files, folders, exports and devices."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from pathlib import Path
from typing import Any

from ag.config.exports import export_folder, missing_export_error, on_hub
from ag.config.keys import Key, keys, values_of
from ag.config.spec import PolicySpec, parse_budget
from ag.errors import UserError

EXPECTED = {
    "file": "no such file; expected a text file in UTF-8.",
    "folder": "no such folder; expected an existing one.",
    "rows": "no such file or folder; expected an existing one.",
}
NO_GPU = "no driver of a CUDA device is on this machine"


def check(config: Any, elsewhere: bool = False) -> None:
    """Refuse unknown policies, bad budgets, and files, exports and devices that this machine does not have.

    Args:
        config: configuration of a command; :attr:`ag.config.keys.Key.holds` says how to check each value. If it names a
            cluster of other machines, files, exports and devices are not checked.
        elsewhere: whether the device may belong to another machine.

    Raises:
        UserError: names the key, the value and the expected values.
    """
    on_cluster = getattr(config, "cluster", None) not in (None, "local")
    schema_keys = keys(type(config))
    for name, value in values_of(config).items():
        key = schema_keys[name]
        if value is None or value == "" or not key.holds:
            continue
        if name == "init" and config.resume is not None:
            continue  # the checkpoint has the weights
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]:
            if key.holds == "policy":
                path = PolicySpec.parse(item).path
                if path and not on_cluster:
                    _check_export(path)
            elif key.holds == "budget":
                parse_budget(item)
            elif key.holds == "device":
                check_device(key.name, item, on_cluster or elsewhere)
            elif not on_cluster:
                _check_path(key, item)


def _check_path(key: Key, text: str) -> None:
    """Refuse a file, a folder or an export that does not exist."""
    if key.holds == "export":
        _check_export(text)
    elif key.holds in EXPECTED and not os.path.exists(text):  # a pipe is no file; pathlib raises for a long name
        raise UserError(f"{key.name}={text}: {EXPECTED[key.holds]}")


def _check_export(text: str) -> None:
    """Refuse an export that does not exist here and is not named like an export of the hub."""
    message = None if on_hub(text) else missing_export_error(export_folder(text))
    if message is not None:
        raise UserError(message)


def check_device(name: str, value: str, elsewhere: bool = False) -> None:
    """Refuse an invalid device, and a GPU without a driver. :mod:`ag.model.base` checks the device further."""
    if name == "device" and not re.fullmatch(r"[a-z]+(:\d+)?", value):
        raise UserError(f"device={value}: expected cpu, cuda, or a GPU by its number, as cuda:1.")
    if not elsewhere and value.startswith(("cuda", "gpu")) and not has_driver():
        raise UserError(f"{name}={value}: {NO_GPU}: give {name}=cpu, or start the command where a GPU is.")


def has_driver() -> bool:
    """Return whether NVIDIA's driver can be loaded, or AMD's driver exists."""
    try:
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return Path("/dev/kfd").exists()
    return True

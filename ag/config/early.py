"""The check that files, folders and exports exist, before torch and transformers are loaded."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

from ag.config.exports import absence, here, on_hub
from ag.config.keys import keys
from ag.errors import UserError

EXPECTED = {
    "file": "no such file; expected a text file in UTF-8.",
    "folder": "no such folder; expected an existing one.",
}


def check(config: Any) -> None:
    """Refuse missing files, folders and exports, unless other machines read them.

    Raises:
        UserError: names the key, the value and what was expected.
    """
    if getattr(config, "cluster", None) not in (None, "local"):
        return
    for key in keys(type(config)).values():
        value = operator.attrgetter(key.name)(config)
        if not value or key.holds not in ("export", *EXPECTED):
            continue
        for text in value.values() if isinstance(value, dict) else [value]:
            if key.holds == "export":
                said = None if on_hub(text) else absence(here(text))
            else:  # exists(), as a pipe is no file
                said = None if Path(text).exists() else f"{key.name}={text}: {EXPECTED[key.holds]}"
            if said is not None:
                raise UserError(said)

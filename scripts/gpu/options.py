"""The options of a line's module, ``name=value ...``, read without the packages that recipes need."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, TypeVar

from ag.errors import UserError

T = TypeVar("T")


def read_options(words: Iterable[str], schema: type[T]) -> T:
    """Make a dataclass from words ``name=value``: texts as they are, other values in JSON.

    Raises:
        UserError: for a name that the dataclass lacks, or a value that is not JSON.
    """
    known = {field.name: field.type for field in fields(schema)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for name, _, text in (word.partition("=") for word in words):
        if name not in known:
            raise UserError(f"{name}: expected one of {', '.join(known)}.")
        try:
            values[name] = text if known[name] == "str" else json.loads(text)
        except ValueError:
            raise UserError(f"{name}={text}: expected a {known[name]}.") from None
    return schema(**values)

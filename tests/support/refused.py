"""Errors are checked by type and by what they must name, so that their sentences may be reworded."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


def names(text: str, *parts: str) -> None:
    """Assert that a message has these parts, each as whole words: keys, values, and names of fixes."""
    lacking = [part for part in parts if not re.search(rf"{edge(part[0])}{re.escape(part)}{edge(part[-1])}", text)]
    assert lacking == [], text


def edge(letter: str) -> str:
    return r"\b" if re.match(r"\w", letter) else ""


@contextmanager
def refuses(kind: type[BaseException], *parts: str) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """Expect an error whose message names these keys, values and fixes, each as whole words."""
    with pytest.raises(kind) as caught:
        yield caught
    names(str(caught.value), *parts)

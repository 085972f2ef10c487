"""Errors are checked by type and by what they must name, so that their sentences may be reworded."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


def named(text: str, *parts: str) -> bool:
    """Whether a message has every part, as whole words: keys, values, and names of fixes."""
    return not unnamed(text, *parts)


def unnamed(text: str, *parts: str) -> list[str]:
    """The parts that a message lacks."""
    return [part for part in parts if not re.search(rf"{edge(part[0])}{re.escape(part)}{edge(part[-1])}", text)]


def edge(letter: str) -> str:
    return r"\b" if re.match(r"\w", letter) else ""


@contextmanager
def refuses(kind: type[BaseException], *parts: str) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """Expect an error whose message names these keys, values and fixes, each as whole words."""
    with pytest.raises(kind) as caught:
        yield caught
    assert unnamed(str(caught.value), *parts) == [], str(caught.value)

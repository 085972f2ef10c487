"""Errors and warnings for users."""

import importlib.util
from collections.abc import Collection, Iterable
from difflib import get_close_matches


class UserError(ValueError):
    """An error that the user can fix, in one sentence. Commands print it and exit with code 2."""


SHORT, LONG = 0.6, 0.75  # smallest similarity of a suggestion to a short and to a longer word
SHORT_LETTERS = 4
PLUGINS_ADD = "; plugins=[MODULE] adds others"  # said of unknown names of parts


class BudgetWarning(UserWarning):
    """A cache exceeds its budget: the policy protects more tokens, or layers without a gate keep all of theirs."""


def require(part: object, name: str, holds: bool, expected: str) -> None:
    """Raise a :class:`UserError` that names an attribute's value, unless ``holds``."""
    if not holds:
        raise UserError(f"{type(part).__name__}: {name}={getattr(part, name)!r}: expected {expected}.")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type if the text is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def check_known(name: str, names: Collection[str], noun: str, text: str = "", otherwise: str = "") -> None:
    """Raise a :class:`UserError` with the nearest name, unless ``name``, which occurs in ``text``, is known.

    The message ends with ``otherwise`` if no name is near.
    """
    if name not in names:
        location = f" in {text!r}" if text else ""
        expected = f"expected one of {', '.join(names)}" if names else "it takes none"
        raise UserError(f"Unknown {noun} {name!r}{location}: {expected}{nearest(name, names) or otherwise}")


def nearest(word: str, names: Iterable[str], cutoff: float | None = None) -> str:
    """Return ``"; did you mean X?"`` for the closest name, or ``""`` if no name is close.

    Args:
        word: the unknown name.
        names: known names.
        cutoff: smallest similarity of a suggestion, from 0 to 1. None: 0.6 for words of up to 4 letters, else 0.75.
    """
    min_similarity = cutoff if cutoff is not None else SHORT if len(word) <= SHORT_LETTERS else LONG
    close = get_close_matches(word, list(names), n=1, cutoff=min_similarity)
    return f"; did you mean {close[0]}?" if close else ""


def need(module: str, extra: str, feature: str) -> None:
    """Raise a :class:`UserError` that names the extra to install, unless a module of another package is installed.

    Args:
        module: name by which it is imported.
        extra: the extra of this package that installs it.
        feature: what needs it, the beginning of the message.
    """
    if importlib.util.find_spec(module) is None:
        raise UserError(f"{feature} needs {module}, which is not installed: pip install 'ag[{extra}]'.")

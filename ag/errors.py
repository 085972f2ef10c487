"""The error that a user can mend."""

from collections.abc import Collection, Iterable
from difflib import get_close_matches


class UserError(ValueError):
    """Something the user can fix, told in one sentence; the commands print it and leave with exit code 2."""


class BudgetWarning(UserWarning):
    """A policy protects more tokens than its budget allows, so that more is held than was asked for."""


def require(part: object, name: str, holds: bool, expected: str) -> None:
    """Raise a :class:`UserError` that names an attribute's value, unless something holds."""
    if not holds:
        raise UserError(f"{type(part).__name__}: {name}={getattr(part, name)!r}: expected {expected}.")


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says; where it says nothing, its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def check_known(name: str, names: Collection[str], what: str, text: str = "") -> None:
    """Raise a :class:`UserError` that suggests the nearest name, unless there is one of this name; it is in a text."""
    if name not in names:
        where = f" in {text!r}" if text else ""
        expected = f"expected one of {', '.join(names)}" if names else "it takes none"
        raise UserError(f"Unknown {what} {name!r}{where}: {expected}{nearest(name, names)}")


def nearest(word: str, names: Iterable[str], cutoff: float = 0.5) -> str:
    """Return ``"; did you mean X?"`` for the closest name, or ``""`` when none is close."""
    close = get_close_matches(word, list(names), n=1, cutoff=cutoff)
    return f"; did you mean {close[0]}?" if close else ""

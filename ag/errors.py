"""The error that a user can mend."""


class UserError(ValueError):
    """Something the user can fix, told in one sentence; the commands print it and leave with exit code 2."""


class BudgetWarning(UserWarning):
    """A policy protects more tokens than its budget allows, so that more is held than was asked for."""


def require(part: object, name: str, holds: bool, expected: str) -> None:
    """Raise a :class:`UserError` that names an attribute's value, unless something holds."""
    if not holds:
        raise UserError(f"{type(part).__name__}: {name}={getattr(part, name)!r}: expected {expected}.")

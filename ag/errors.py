"""The error that a user can mend."""


class UserError(ValueError):
    """Something the user can fix, told in one sentence; the commands print it and leave with exit code 2."""

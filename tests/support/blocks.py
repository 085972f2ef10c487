"""Memory that a row of tokens takes: whole blocks, counted without the engine."""

BLOCK = 16  # tokens


def slots(read: int, held: int | None = None) -> int:
    """Slots of a row that read so many tokens, and of which so many are left; None means that nothing went.

    Behind the tokens that are left a block more stays for those to come, where the row had one.
    """
    had = -(-read // BLOCK)
    return BLOCK * (had if held is None or held == read else min(had, -(-(held + BLOCK) // BLOCK)))

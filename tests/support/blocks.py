"""Memory of a row of tokens in whole blocks, counted without the engine."""

BLOCK = 16  # tokens


def slots(read: int, held: int | None = None) -> int:
    """Slots of a row that has read ``read`` tokens and holds ``held`` of them; None means that it holds all.

    A row has as many blocks as its tokens need.
    """
    had = -(-read // BLOCK)
    return BLOCK * (had if held is None or held == read else min(had, -(-held // BLOCK)))

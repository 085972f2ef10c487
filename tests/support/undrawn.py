"""Runs without pictures, which take half the time of a tiny run; as a script, `python -m ag.fit` without them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

UNDRAWN = Path(__file__).resolve()
#: The end of a module or script that lies elsewhere: its process draws nothing.
WITHOUT_PICTURES = f"""
import sys

sys.path.append({str(UNDRAWN.parents[2])!r})
from tests.support import undrawn

undrawn.undraw()
"""


def undraw(remove: Callable[[type, str], object] = delattr) -> None:
    """Take out what draws while a run goes on; ``remove`` may remember it, to put it back."""
    from ag.callbacks.pictures import Figures

    for hook in ("on_validation_end", "on_train_end"):
        remove(Figures, hook)


if __name__ == "__main__":
    from ag import fit

    undraw()
    raise SystemExit(fit.main())

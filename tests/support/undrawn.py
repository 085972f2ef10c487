"""Runs without pictures, which take half the time of a tiny run; as a script, `python -m ag.fit` without them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

UNDRAWN = Path(__file__).resolve()


def undraw(remove: Callable[[type, str], object] = delattr) -> None:
    """Remove the hooks that draw during a run, with ``remove``, which may restore them later."""
    from ag.callbacks.pictures import Figures

    for hook in ("on_validation_end", "on_train_end"):
        remove(Figures, hook)


if __name__ == "__main__":
    from ag import fit

    undraw()
    raise SystemExit(fit.main())

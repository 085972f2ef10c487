"""What to evict: a policy is named by a short text, such as ``full`` or ``gates:PATH``."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from pathlib import Path

from ag.errors import UserError
from ag.gate import AttentionGates

SCORERS = ("full", "gates")


@dataclass(frozen=True)
class Policy:
    """A policy; its repr is the call that makes it again.

    Attributes:
        spec: the text it was made from.
        gates: gates read from a folder, None for ``gates`` alone (those attached to the model) and other scorers.
    """

    spec: str
    gates: AttentionGates | None = field(default=None, compare=False, repr=False)

    @property
    def scorer(self) -> str:
        """Name of the scorer, without its path."""
        return self.spec.partition(":")[0]

    def __repr__(self) -> str:
        return f"ag.policy({self.spec!r})"


def policy(spec: str) -> Policy:
    """Make a policy.

    Args:
        spec: ``full`` keeps everything; ``gates:PATH`` keeps what exported gates flag; ``gates`` those attached.

    Raises:
        UserError: for an unknown name (the nearest is suggested) or a path that a scorer does not take.
        ag.export.ExportError: when the gates cannot be read.
    """
    name, colon, path = spec.partition(":")
    if name not in SCORERS:
        near = difflib.get_close_matches(name, SCORERS, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"Unknown policy {spec!r}: expected one of {', '.join(SCORERS)}{hint}")
    if colon and (name != "gates" or not path):
        raise UserError(f"Policy {spec!r}: expected {'gates:PATH' if name == 'gates' else name}.")
    return Policy(spec, AttentionGates.from_pretrained(Path(path)) if colon else None)

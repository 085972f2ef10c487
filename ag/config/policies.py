"""Names in the text of a policy, without the engine."""

from __future__ import annotations

import re

FULL = "full"  # evicts nothing, and has no scorer
GATES = "gates"  # scores of gates under a budget
FLAGS = "flags"  # decisions of the same gates, without a budget
ALIASES = {"pyramidkv": ("snapkv", "pyramid")}


def split_label(text: str) -> tuple[str | None, str]:
    """Split ``LABEL=POLICY``; the label is None if there is none, as in ``gates:a=b``."""
    label, equals, rest = text.partition("=")
    return (label, rest) if equals and not re.search("[:+@]", label) else (None, text)

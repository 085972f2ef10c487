"""Names in the text of a policy that more than the engine knows."""

from __future__ import annotations

import re

FULL = "full"  # evicts nothing, and has no scorer
GATES = "gates"  # rank tokens under a budget
FLAGS = "flags"  # the same gates, whose flags decide: there is no budget
ALIASES = {"pyramidkv": ("snapkv", "pyramid")}


def split_label(text: str) -> tuple[str | None, str]:
    """Split ``LABEL=POLICY`` into its two parts; the label is None where there is none, as in ``gates:a=b``."""
    label, equals, rest = text.partition("=")
    return (label, rest) if equals and not re.search("[:+@]", label) else (None, text)

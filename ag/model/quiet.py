"""Warnings and lines of libraries that are not shown, each with the reason."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging as transformers_logging

WARNINGS = (
    # Lightning 2.6 calls what PyTorch 2.11 replaced
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    # PEFT 0.21 reads an attribute by the name that transformers 5 replaced
    r"`is_gradient_checkpointing` is deprecated",
    # PEFT 0.21 expects stacked experts, whose rank it doubles, to be modules; they are parameters
    r"The following (rank|alpha)_pattern keys did not match any targeted module",
)
#: Loggers whose lines below warnings are not shown: devices, tips, the reason of a stop, by names of Lightning's API.
CHATTY = ("lightning.pytorch", "lightning.fabric")


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the listed warnings, Lightning's lines, and progress bars of loading where stderr is no terminal."""
    levels = {logger: logger.level for logger in map(logging.getLogger, CHATTY)}
    bars = not sys.stderr.isatty() and transformers_logging.is_progress_bar_enabled()
    if bars:
        transformers_logging.disable_progress_bar()
    for logger in levels:
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            for pattern in WARNINGS:
                warnings.filterwarnings("ignore", message=pattern)
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()

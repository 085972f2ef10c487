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
    # metrics of the validation are reduced over all ranks before they are logged
    r"It is recommended to use `self\.log\(.*sync_dist=True",
)
LINES = (
    # advertisements of Lightning
    "Tip: For seamless cloud",
    # the command prints that it was stopped
    "Detected KeyboardInterrupt",
)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the listed texts, and progress bars of loading where standard error is no terminal."""
    loggers = [logging.getLogger(f"lightning.{part}.utilities.rank_zero") for part in ("fabric", "pytorch")]
    bars = not sys.stderr.isatty() and transformers_logging.is_progress_bar_enabled()
    if bars:
        transformers_logging.disable_progress_bar()
    listed = _Listed()  # a new one, as contexts may be nested
    for logger in loggers:
        logger.addFilter(listed)
    try:
        with warnings.catch_warnings():
            for pattern in WARNINGS:
                warnings.filterwarnings("ignore", message=pattern)
            yield
    finally:
        for logger in loggers:
            logger.removeFilter(listed)
        if bars:
            transformers_logging.enable_progress_bar()


class _Listed(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return not any(line in text for line in LINES)

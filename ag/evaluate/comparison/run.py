"""A comparison from its configuration to its page."""

from __future__ import annotations

import warnings
from pathlib import Path

from rich.console import Console

from ag.config.recipes import dump
from ag.errors import BudgetWarning
from ag.evaluate.comparison.cells import list_cells
from ag.evaluate.comparison.config import CompareConfig
from ag.evaluate.comparison.findings import Comparison
from ag.evaluate.comparison.report import write
from ag.evaluate.comparison.results import CorruptRowWarning, Results
from ag.evaluate.comparison.work import fill


def compare(config: CompareConfig, console: Console, command: str = "") -> Comparison:
    """Fill the cells that are missing in the output folder, and write its table, plots and page.

    Args:
        config: what to compare.
        console: where progress is shown.
        command: the command line, which the rows hold; empty: the call of this function.

    Raises:
        UserError: naming what is wrong with a policy, a task, the model or the data, and the fix.
        KeyboardInterrupt: on Ctrl-C, saying what is left.
    """
    cells = list_cells(config)
    results = Results(Path(config.output or f"runs/{config.recipe}"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CorruptRowWarning)
        warnings.simplefilter("ignore", BudgetWarning)  # rows say it
        try:
            rows = fill(config, cells, results, console, command)
        except KeyboardInterrupt:
            there = len(results.rows().keys() & {cell.key for cell in cells})
            kept = f"{there} of {len(cells)} cells are in {results.folder}"
            raise KeyboardInterrupt(f"{kept}; the same command goes on from there") from None
    for warning in caught:
        console.print(f"warning: {warning.message}", soft_wrap=True)
    comparison = Comparison.of(config, cells, rows, results)
    (results.folder / "config.yaml").write_text(dump(config))
    write(comparison)
    if comparison.hidden:
        console.print(f"{len(comparison.hidden)} rows of earlier commands are in the folder and not shown.")
    return comparison

"""Join finished comparisons into one report: ``python -m ag.report FOLDER... output=FOLDER``."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from ag.config.command_line import main_from_schema
from ag.config.sections import key
from ag.errors import UserError
from ag.plugins import load

ROWS = "results.jsonl"
EXPECTED = "give folders that ag.compare or ag.evaluate has written"


@dataclass
class ReportConfig:
    """The keys of ``python -m ag.report``."""

    folders: list[str] = key([], "folders that ag.compare or ag.evaluate has written; may also be plain words")
    output: str = key("runs/report", "folder of the tables, figures and page", holds="output")
    baseline: str = key("full", "label of the policy that other policies are tested against")
    mine: str | None = key(None, "label of the policy that every verdict names; null means the last one")
    plugins: list[str] = key([], "modules to import first, which add the policies and tasks of the comparisons")

    def __post_init__(self) -> None:
        load(self.plugins)


def check(config: ReportConfig) -> None:
    """Refuse a command without folders, and folders without results."""
    if not config.folders:
        raise UserError(f"folders=[]: nothing to report; {EXPECTED}.")
    for folder in config.folders:
        if not (Path(folder) / ROWS).is_file():
            raise UserError(f"folders={folder}: it has no {ROWS}; {EXPECTED}.")


_main = main_from_schema("ag.report", ReportConfig, "ag.evaluate.comparison.compare:report", check=check)


def main(argv: list[str] | None = None) -> int:
    """Run the command; its words without ``=`` are the folders. Returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    folders = [word for word in words if "=" not in word and not word.startswith("-")]
    keys = [word for word in words if word not in folders]
    return _main([*([f"folders={json.dumps(folders)}"] if folders else []), *keys])

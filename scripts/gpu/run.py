"""Running the lines of a part: each in a process of its own, with a limit, recorded whatever happens."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from ast import literal_eval
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from ag.errors import UserError
from scripts.gpu import ROOT
from scripts.gpu.line import Line
from scripts.gpu.machine import Machine

Row = dict[str, Any]
ROWS = "rows.jsonl"
NO_TIME = "no time"
TAIL = 4000  # characters of a failed line's output that are kept
NO_TESTS = 5  # pytest's exit code where whole files skip
RESERVE = 20.0  # seconds of a part for its start and its summary


@dataclass(frozen=True)
class Workspace:
    """Where a part works.

    Attributes:
        out: folder of its rows.
        work: scratch folder, which lines share.
        values: what stands for ``{data}``, ``{model}``, ``{device}``, ... in commands.
    """

    out: Path
    work: Path
    values: dict[str, str]


def read(folder: Path) -> dict[str, Row]:
    """Return the newest row of each line; a last row that was cut short is left out."""
    file = folder / ROWS
    rows: dict[str, Row] = {}
    for text in file.read_text().splitlines() if file.is_file() else []:
        try:
            row = json.loads(text)
        except ValueError:
            continue
        rows[row["line"]] = row
    return rows


def missing(lines: Sequence[Line], folder: Path, here: Machine) -> list[Line]:
    """Return the lines that have not ended well: first those that were not tried, then those that failed.

    Raises:
        UserError: when the folder holds rows of another card.
    """
    rows = read(folder)
    others = {row["card"] for row in rows.values()} - {here.card}
    if others:
        raise UserError(f"{folder} holds rows of {others.pop()}, this is {here.card}: give another folder.")
    status = {line.name: rows.get(line.name, {}).get("status", NO_TIME) for line in lines}
    todo = [line for line in lines if status[line.name] != "ok"]
    return sorted(todo, key=lambda line: status[line.name] != NO_TIME)


def run(
    lines: Sequence[Line],
    workspace: Workspace,
    here: Machine,
    seconds: float,
    after: Callable[[], None],
    say: Any = print,
) -> dict[str, Row]:
    """Run lines in their order until the time is over.

    Args:
        lines: most valuable first; those that ended well before are not run again.
        workspace: where to.
        here: the machine, for the rows.
        seconds: for all of them.
        after: called after every row, to write what is known so far.
        say: prints a line of progress.

    Returns:
        The newest row of every line.
    """
    end = time.monotonic() + seconds - RESERVE
    todo = missing(lines, workspace.out, here)
    workspace.out.mkdir(parents=True, exist_ok=True)
    if len(todo) < len(lines):
        say(f"{workspace.out} has {len(lines) - len(todo)} of {len(lines)} lines: continuing with what is missing")
    for number, line in enumerate(todo, 1):
        left = end - time.monotonic()
        head = f"[{workspace.out.name} {number}/{len(todo)}; {_clock(left)} left] {line.name}"
        row = _row(line, workspace, here)
        reason = row.pop("reason", None)
        if reason is None and left < line.seconds:
            row["status"], reason = NO_TIME, f"takes about {line.seconds} s, {max(0.0, left):.0f} s were left"
        if reason is None:
            say(f"{head}: about {line.seconds} s")
            row |= _execute(line, row, workspace, min(line.limit, left))
            say(f"    {row['status']} after {row['seconds']:.0f} s{_headline(row)}")
        else:
            row["why"] = reason
            say(f"{head}: {row['status']}: {reason}")
        _append(workspace.out / ROWS, row)
        try:
            after()
        except Exception as error:  # a page that cannot be drawn must not cost the lines that follow
            say(f"    no summary: {type(error).__name__}: {error}")
    return read(workspace.out)


def _append(file: Path, row: Row) -> None:
    """Write a row at the end of a file, on a line of its own even after one that was cut short."""
    old = file.read_text() if file.is_file() else ""
    with open(file, "a") as out:
        out.write("\n" * (old[-1:] not in ("", "\n")) + json.dumps(row, default=str) + "\n")


def _row(line: Line, workspace: Workspace, here: Machine) -> Row:
    """Return what is known of a line before it runs; ``reason``: why it is skipped."""
    row: Row = {"line": line.name, "part": workspace.out.name, **asdict(here), "date": time.strftime("%Y-%m-%d %H:%M")}
    shape, reasons = line.shape(here.gib)
    missing = line.missing({"work": str(workspace.work)} | workspace.values)
    if shape is None or missing:
        row |= {"status": "skipped", "reason": missing or "; ".join(reasons)}
    else:
        row |= {"shape": dict(shape.values)} | ({"smaller": reasons} if reasons else {})
    return row


def _execute(line: Line, row: Row, workspace: Workspace, limit: float) -> Row:
    """Run a line's process and return its status, seconds, result and goals."""
    workspace.work.mkdir(parents=True, exist_ok=True)
    out = Path(tempfile.mkdtemp(prefix=f"{line.name}-", dir=workspace.work))
    values = workspace.values | row["shape"]
    words = line.words(values | {"out": str(out), "work": str(workspace.work)})
    shown = [f"{name}={value}" for name, value in line.environment.items()]
    shown += [*line.prefix, "python", "-m", *line.words(values | {"out": "OUT", "work": "WORK"})]
    begin = time.monotonic()
    code, text = _process([*line.prefix, sys.executable, "-m", *words], limit, line.environment)
    found: Row = {"command": shlex.join(shown), "seconds": time.monotonic() - begin, "result": results(out)}
    tests = found["result"].get("tests")
    idle = tests is not None and tests["skipped"] == tests["tests"] > 0
    if idle and (code == NO_TESTS or (code == 0 and row["gib"] is not None)):  # in a rehearsal tests may skip
        found |= {"status": "skipped", "why": "; ".join(tests["reasons"])}
    elif code == 0:
        found["status"] = "ok"
    else:
        what = f"stopped after {limit:.0f} s" if code is None else f"exit code {code}"
        stopped = "timed out" if limit >= 2 * line.seconds else NO_TIME  # the part was over
        found |= {"status": stopped if code is None else "failed", "why": what, "tail": text[-TAIL:]}
    goals = [goal.check(found["result"]) for goal in line.goals] if code == 0 else []
    judged = {} if row["gib"] is not None else {"met": None}  # a rehearsal shows nothing
    found["goals"] = [goal | judged for goal in goals]
    shutil.rmtree(out, ignore_errors=True)
    return found


def _process(words: list[str], limit: float, variables: Mapping[str, str]) -> tuple[int | None, str]:
    """Run a process and its children; returns the exit code (None: stopped) and all output."""
    with tempfile.TemporaryFile() as output:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **variables}
        into: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        try:
            process = subprocess.Popen(words, **into, cwd=ROOT, env=environment, start_new_session=True)
        except OSError as error:
            return 127, str(error)
        code: int | None
        try:
            code = process.wait(timeout=max(1.0, limit))
        except subprocess.TimeoutExpired:
            code = None
        finally:  # also when this process is told to stop
            if process.poll() is None or code is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        return code, output.read().decode(errors="replace")


def results(folder: Path) -> Row:
    """Read the JSON files of a folder, by name, and the counts of a junit.xml."""
    found: Row = {}
    for file in sorted(folder.glob("*.json")):
        try:
            found[file.stem] = json.loads(file.read_text())
        except ValueError as error:
            found[file.stem] = {"unreadable": str(error)}
    if (folder / "junit.xml").is_file():
        suite = next(ElementTree.parse(folder / "junit.xml").iter("testsuite"))  # nosec B314: pytest wrote it
        counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
        bad = [case.get("name") for case in suite.iter("testcase") if {"failure", "error"} & {x.tag for x in case}]
        passed = counts["tests"] - counts["failures"] - counts["errors"] - counts["skipped"]
        reasons = dict.fromkeys(_reason(skip) for skip in suite.iter("skipped"))
        found["tests"] = counts | {"passed": passed, "names of failures": bad[:50], "reasons": list(reasons)[:50]}
    return found


def _reason(skip: ElementTree.Element) -> str:
    """Return why a test was skipped; of a whole file pytest writes path, line and reason, as Python would."""
    message = skip.get("message", "")
    return message if message != "collection skipped" else literal_eval(skip.text or "")[2].removeprefix("Skipped: ")


def _headline(row: Row) -> str:
    """Return what a finished line says in a few words."""
    tests = row["result"].get("tests")
    said = [outcome(tests)] if tests else []
    said += [f"{goal['goal']} {number(goal['measured'])} ({verdict(goal)})" for goal in row["goals"]]
    said += [row["why"]] if "why" in row else []
    return f": {'; '.join(said)}" if said else ""


def number(value: float | None) -> str:
    """Write a measured number."""
    return "-" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def verdict(goal: Row) -> str:
    """Write whether a goal was met."""
    words = {True: "met", False: "missed", None: "not judged"}[goal["met"]]
    return f"{words}: {goal['why']}" if "why" in goal else words


def outcome(tests: Row) -> str:
    """Write how many tests passed, failed and skipped."""
    return f"{tests['passed']} passed, {tests['failures'] + tests['errors']} failed, {tests['skipped']} skipped"


def _clock(seconds: float) -> str:
    return f"{max(0, int(seconds)) // 60} min {max(0, int(seconds)) % 60:02d} s"

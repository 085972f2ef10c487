"""What a line is: a command, what it needs, and what its result must reach."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

Result = Mapping[str, Any]


@dataclass(frozen=True)
class Shape:
    """One size of a line.

    Attributes:
        gib: memory of the card that it needs, 2^30 bytes.
        values: what stands for ``{NAME}`` in the command.
        modules: Python packages that must be installed.
    """

    gib: float
    values: Mapping[str, str]
    modules: tuple[str, ...] = ()

    def refuses(self, memory: float) -> str | None:
        """Return why this size cannot run on a card of so many GiB, or None."""
        return lacking(self.modules) or (
            f"needs {self.gib:g} GiB, the card has {memory:.0f}" if self.gib > memory else None
        )

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.values.items())


@dataclass(frozen=True)
class Goal:
    """What a line's result is measured against.

    Attributes:
        name: what is measured.
        kind: whether the bar is the least or the most that it may be.
        bar: the number.
        value: takes it from the results, which are the contents of the line's JSON files by name.
    """

    name: str
    kind: Literal["at least", "at most"]
    bar: float
    value: Callable[[Result], float]

    def check(self, result: Result) -> dict[str, Any]:
        """Return the goal with what was measured; a result without the number has missed it, with the reason."""
        row = {"goal": self.name, "kind": self.kind, "bar": self.bar}
        try:
            found = float(self.value(result))
        except (KeyError, IndexError, TypeError, ValueError, ZeroDivisionError) as error:
            return row | {"measured": None, "met": False, "why": f"no such number: {type(error).__name__} {error}"}
        met = found >= self.bar if self.kind == "at least" else found <= self.bar
        return row | {"measured": found, "met": met}


@dataclass(frozen=True)
class Line:
    """One step of a part.

    Attributes:
        name: unique in its part.
        command: the words of the command; the first is a module, run as ``python -m``. ``{out}`` is an empty folder
            whose JSON files (and junit.xml) are the result, ``{work}`` one that all lines share, ``{data}`` and
            ``{model}`` the corpus and the small model.
        seconds: estimated on an H100; the line is begun when so much time is left.
        shapes: the sizes, largest first: the first that the card can hold is run.
        rehearsal: what stands for the names in a rehearsal on the CPU.
        goals: what the result is measured against.
        prefix: words before Python: a program that runs it.
        environment: variables that are set for it.
        modules: Python packages that must be installed.
        files: ``{work}/...`` that earlier lines made, or ``{data}``: without them the line is skipped.
    """

    name: str
    command: tuple[str, ...]
    seconds: int
    shapes: tuple[Shape, ...] = (Shape(1, {}),)
    rehearsal: Mapping[str, str] | None = None
    goals: tuple[Goal, ...] = ()
    prefix: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    files: tuple[str, ...] = ()

    @property
    def limit(self) -> int:
        """Seconds after which the line is stopped: it may take three times as long as it should."""
        return 3 * self.seconds + 30

    def shape(self, memory: float | None) -> tuple[Shape | None, list[str]]:
        """Return the largest size that a card of so many GiB can run (None: a rehearsal), and why none before it."""
        if memory is None:
            return Shape(0, self.rehearsal if self.rehearsal is not None else self.shapes[-1].values), []
        reasons: list[str] = []
        for shape in self.shapes:
            reason = shape.refuses(memory)
            if reason is None:
                return shape, reasons
            reasons.append(f"{shape}: {reason}" if shape.values else reason)
        return None, reasons

    def words(self, values: Mapping[str, str]) -> list[str]:
        """Return the words of the command, with values put in; ``{more}`` may stand for several words, or none."""
        found: list[str] = []
        for word in self.command:
            found += shlex.split(values["more"]) if word == "{more}" else [word.format_map(values)]
        return found

    def missing(self, values: Mapping[str, str]) -> str | None:
        """Return which program, package or file is missing, or None."""
        if self.prefix and shutil.which(self.prefix[0]) is None:
            return f"{self.prefix[0]} is not installed"
        paths = [file.format_map(values) for file in self.files]
        gone = [path or "a corpus or model" for path in paths if not path or not Path(path).exists()]
        return lacking(self.modules) or (f"{gone[0]} is not there" if gone else None)


def lacking(modules: tuple[str, ...]) -> str | None:
    """Return which of some Python packages is not installed, or None."""
    return next((f"{name} is not installed" for name in modules if find_spec(name) is None), None)

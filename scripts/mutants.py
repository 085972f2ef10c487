"""Break the code on purpose and see that the tests notice: python scripts/mutants.py [NAME ...] [--tree PATH].

Each mutant of mutants.toml is made in a copy of the tree, never in the tree itself, and tested in a process of its own.
"""

import argparse
import importlib
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

TABLE = Path(__file__).with_suffix(".toml")
SECONDS = 300  # for the tests of one mutant
OPTIONS = ("-x", "-q", "-n", "0", "-p", "no:cacheprovider")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",  # a file may change twice in a second
}
#: Imported once, so that the process of each mutant has them from the start.
PRELOADED = ("torch", "transformers", "transformers.models.llama.modeling_llama", "peft", "lightning", "hypothesis")


@dataclass(frozen=True)
class Mutant:
    """A fault: ``old`` becomes ``new`` in a file. ``tests`` should fail of it, or else some of the ``wider`` ones."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    wider: tuple[str, ...]

    def applied(self, text: str) -> str:
        """Return the file's text with the fault.

        Raises:
            ValueError: the old text does not occur exactly once, as the code has moved on.
        """
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"{self.name}: {self.file} has the old text {count} times instead of once: {self.old!r}")
        return text.replace(self.old, self.new)


def mutants(table: Path) -> list[Mutant]:
    """Read the table."""
    content: dict[str, Any] = tomllib.loads(table.read_text())
    paths, wider = content["paths"], content["wider"]

    def wide(file: str) -> tuple[str, ...]:
        folder = max((x for x in wider if file.startswith(x)), key=len)
        return tuple(paths[word] for word in wider[folder])

    return [
        Mutant(name, x["file"], x["old"], x["new"], tuple(paths[word] for word in x["tests"]), wide(x["file"]))
        for name, x in content["mutants"].items()
    ]


def copied(tree: Path, target: Path) -> None:
    """Copy the files that git tracks or would track, as they are now."""
    command = ["git", "-C", str(tree), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in filter(None, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")):
        source, copy = tree / name, target / name
        if source.is_symlink() or source.is_file():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy, follow_symlinks=False)


def tested(tree: Path, words: Sequence[str], seconds: int = SECONDS) -> tuple[str, str]:
    """Run tests of a tree; returns ``passed``, ``failed``, ``timed out`` or ``broken``, and the test or last lines."""
    with tempfile.TemporaryFile("w+") as output:
        process = multiprocessing.get_context("fork").Process(target=_test, args=(tree, words, output.fileno()))
        process.start()
        try:
            process.join(seconds)
        finally:
            code = process.exitcode
            if code is None and process.pid is not None:
                os.killpg(process.pid, signal.SIGKILL)  # the tests' own processes too
                process.join()
        output.seek(0)
        said = output.read()
    if code is None:
        return "timed out", f"after {seconds} s"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+(?:\[[^\n]*?\])?)(?= - |$)", said, re.MULTILINE)
    if code == 1 and failed:
        return "failed", failed[1]
    return ("passed", "") if code == 0 else ("broken", "\n".join(said.splitlines()[-8:]))


def _test(tree: Path, words: Sequence[str], output: int) -> None:
    """Run pytest in this process, which ends."""
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(tree)
    os.environ["PYTHONPATH"] = sys.path[0] = str(tree)  # before an editable installation
    if interpreted(words):
        os.environ["TRITON_INTERPRET"] = "1"
    sys.exit(pytest.main([*OPTIONS, *words]))


def interpreted(words: Sequence[str]) -> bool:
    """Tell whether these are tests of Triton kernels, which must be told so before Triton is imported."""
    return any("_triton.py" in word for word in words)


def tried(mutant: Mutant, tree: Path) -> tuple[str, str]:
    """Make a mutant in a tree, run its tests, then the wider ones if it survives, and take it back."""
    file = tree / mutant.file
    text = file.read_text()
    file.write_text(mutant.applied(text))
    try:
        outcome, what = tested(tree, mutant.tests)
        if outcome == "passed":
            outcome, what = tested(tree, [*mutant.wider, "-m", "not slow"])
            what += " (wider)" * (outcome == "failed")
    finally:
        file.write_text(text)
    return {"failed": "killed", "passed": "SURVIVED"}.get(outcome, outcome), what


def main() -> int:
    """Try the mutants named, or all; returns 1 unless tests killed each of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="mutants of scripts/mutants.toml; all without")
    parser.add_argument("--tree", type=Path, default=TABLE.parents[1], help="checkout to test; this one without")
    given = parser.parse_args()
    known = {mutant.name: mutant for mutant in mutants(TABLE)}
    if unknown := sorted(set(given.names) - set(known)):
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(known)}")
    chosen = [known[name] for name in given.names or known]
    outcomes: dict[str, str] = {}
    innocent = True
    start = time.monotonic()
    os.environ |= ENVIRONMENT
    sys.dont_write_bytecode = True
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder).resolve()
        copied(given.tree.resolve(), tree)
        for mutant in chosen:
            mutant.applied((tree / mutant.file).read_text())  # before the first run
        for first in True, False:
            killers: set[str] = set()
            if not first:
                for name in PRELOADED:
                    importlib.import_module(name)
            for mutant in (x for x in chosen if interpreted(x.tests) == first):
                began = time.monotonic()
                outcome, what = tried(mutant, tree)
                print(f"{mutant.name:42} {outcome:9} {time.monotonic() - began:4.0f} s  {what}", flush=True)
                outcomes[mutant.name] = outcome
                killers |= {what.removesuffix(" (wider)")} if outcome == "killed" else set()
            outcome, what = tested(tree, sorted(killers), 4 * SECONDS) if killers else ("passed", "")
            if outcome != "passed":
                innocent = False
                print(f"Without a fault {outcome}: {what}")
    alive = [name for name, outcome in outcomes.items() if outcome != "killed"]
    print(f"{len(chosen) - len(alive)} of {len(chosen)} killed in {time.monotonic() - start:.0f} s", *alive, sep="\n  ")
    return int(bool(alive) or not innocent)


if __name__ == "__main__":
    sys.exit(main())

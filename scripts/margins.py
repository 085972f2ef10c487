"""Measure how much of their bounds the numerical tests leave: python scripts/margins.py [OPTIONS] [PATH ...].

The tests run with other random numbers and in another order, under each instruction set that the processor has (in
PyTorch, MKL, oneDNN and the C++ kernels) and with one and two threads. The margin of a test is the smallest bound over
the error found under it. Runs are kept in a folder: what is there is not run again, so that an interrupted sweep goes
on.
"""

import argparse
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
PATHS = [f"tests/{name}" for name in ("kernels", "engine", "gates", "training", "model", "evaluate")]
PATHS += ["tests/project/test_extending.py"]
#: What keeps libraries to an instruction set: PyTorch, MKL, oneDNN; and the compiler's word for it.
SETS = {
    "default": ("default", "SSE4_2", "SSE41", "x86-64"),
    "avx2": ("avx2", "AVX2", "AVX2", "haswell"),
    "avx512": ("avx512", "AVX512", "AVX512_CORE", "skylake-avx512"),
}
VARIABLES = ("ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")
OPTIONS = ("-q", "-p", "no:cacheprovider", "--timeout", "7200", "-o", "enable_assertion_pass_hook=true")
#: Tests that count what is held when an object is gone, which an assertion that was watched keeps.
OPTIONS += ("--ignore=tests/engine/test_pool.py", "--ignore=tests/engine/test_store.py")
FAILED = 1e9


@dataclass(frozen=True)
class Run:
    """One round of the tests."""

    instructions: str
    threads: int
    seed: int

    @property
    def name(self) -> str:
        """What its file is called."""
        return f"{self.instructions}-{self.threads}-{self.seed}"


def available() -> list[str]:
    """Return the instruction sets of this processor; of one that is no x86, its own alone."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ["own"]
    highest = torch.backends.cpu.get_cpu_capability().lower()
    names = list(SETS)
    return names[: names.index(highest) + 1] if highest in names else names[:1]


def compiler(instructions: str, folder: Path) -> Path:
    """Write a compiler that takes an instruction set in place of the machine's; kernels are kept by its path."""
    file = folder / f"c++-{instructions}"
    found = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++") or "c++"
    own = f'[ "$word" = -march=native ] && word=-march={SETS[instructions][3]}'
    file.write_text(f'#!/bin/sh\nfor word; do shift; {own}; set -- "$@" "$word"; done\nexec {found} "$@"\n')
    file.chmod(0o755)
    return file


def environment(run: Run, scratch: Path, folder: Path, only: Path | None) -> dict[str, str]:
    """Return the variables of a round."""
    given = {
        "AG_MARGINS": str(scratch),
        "AG_SEED": str(run.seed),
        "AG_TEST_THREADS": str(run.threads),
        "OMP_WAIT_POLICY": "passive",  # threads that wait give the processor to the tests beside them
        "PYTHONPYCACHEPREFIX": str(folder / "bytecode"),  # what was rewritten without the hook of passed assertions
    }
    if only is not None:
        given["AG_MARGINS_ONLY"] = str(only)
    if run.instructions in SETS:
        given |= dict(zip(VARIABLES, SETS[run.instructions], strict=False))
        given["CXX"] = str(compiler(run.instructions, folder))
    return os.environ | given


def measured(run: Run, words: Iterable[str], folder: Path, only: Path | None) -> dict[str, list[float]]:
    """Run the tests once; return by test the largest share of a bound, and seconds."""
    with tempfile.TemporaryDirectory() as scratch:
        variables = environment(run, Path(scratch), folder, only)
        order = [f"--shuffle={run.seed}"] if run.seed else []
        if only is not None:  # the files that these tests are in
            words = sorted({line.partition("::")[0] for line in only.read_text().splitlines()})
        command = [sys.executable, "-m", "pytest", *OPTIONS, "-n", str(jobs(run.threads)), *order, *words]
        done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
        if done.returncode not in (0, 1, 5):
            sys.exit(f"{run.name}: pytest ended with {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        (folder / f"{run.name}.log").write_text(done.stdout)
        found: dict[str, list[float]] = {}
        for file in Path(scratch).glob("*.json"):
            for test, (share, seconds) in json.loads(file.read_text()).items():
                before = found.get(test, [0.0, 0.0])
                found[test] = [max(before[0], share), before[1] + seconds]
        return found


def jobs(threads: int) -> int:
    """Return how many processes share the processor."""
    return max(1, (os.cpu_count() or 1) // threads)


def kept(run: Run, words: Iterable[str], folder: Path, only: Path | None) -> dict[str, list[float]]:
    """Return what a round found, which is run where its file is missing."""
    file = folder / f"{run.name}.json"
    if not file.is_file():
        print(f"{run.name} ...", file=sys.stderr, flush=True)
        file.write_text(json.dumps(measured(run, words, folder, only), indent=1, sort_keys=True))
    found: dict[str, list[float]] = json.loads(file.read_text())
    return found


def chosen(rounds: dict[Run, dict[str, list[float]]], folder: Path, seconds: float, far: float) -> Path | None:
    """Name in a file the tests with a bound that took less time, and with no larger margin in any round so far."""
    first, *_ = [*rounds.values(), None]
    if first is None:
        return None
    largest = {test: max(shares.get(test, [0.0])[0] for shares in rounds.values()) for test in first}
    file = folder / f"chosen-{len(rounds)}"
    file.write_text("\n".join(test for test, (_, took) in first.items() if took < seconds and largest[test] >= 1 / far))
    return file


def report(rounds: dict[Run, dict[str, list[float]]], least: float) -> bool:
    """Print the smallest margin of each test function and where it was; say whether every one is large enough."""
    smallest: dict[str, tuple[float, str, str]] = {}
    failed: dict[str, list[str]] = {}
    for run, shares in rounds.items():
        for test, (share, _) in shares.items():
            if share >= FAILED:
                failed.setdefault(test, []).append(run.name)
                continue
            name, margin = test.partition("[")[0], 1 / share if share else float("inf")
            smallest[name] = min(smallest.get(name, (float("inf"), "", "")), (margin, test, run.name))
    print(f"{'margin':>8}  test, and the instruction set, threads and seed of the smallest")
    for margin, test, run_name in sorted(smallest.values(), reverse=True):
        print(f"{margin:8.2f}{' < ' if margin < least else '   '}{test}  {run_name}")
    for test, names in sorted(failed.items()):
        print(f"  failed  {test}  {' '.join(names)}")
    below = sum(margin < least for margin, *_ in smallest.values())
    print(f"{len(smallest)} tests in {len(rounds)} rounds: {below} with a margin below {least:g}, {len(failed)} failed")
    return not below and not failed


def main(words: list[str] | None = None) -> int:
    """Run the sweep and print its report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", default=PATHS, metavar="PATH", help="tests (default: the numerical ones)")
    parser.add_argument("--seeds", type=int, default=20, help="rounds of each kind; the first has the tests' own seeds")
    parser.add_argument(
        "--few",
        type=int,
        default=3,
        help="rounds of each kind of slow tests and those not near their bound, and of the first kind of those far off",
    )
    parser.add_argument("--slow", type=float, default=0.5, help="seconds from which on a test is slow")
    parser.add_argument("--far", type=float, default=30.0, help="the margin above which a test is far off its bound")
    parser.add_argument("--near", type=float, default=10.0, help="the margin below which a test runs in all rounds")
    parser.add_argument("--sets", nargs="+", default=available(), choices=available(), help="instruction sets")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], help="numbers of threads")
    parser.add_argument("--least", type=float, default=3.0, help="the margin that every test should have")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "margins", help="folder of the rounds")
    given = parser.parse_args(words)
    folder: Path = given.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    rounds: dict[Run, dict[str, list[float]]] = {}
    for seed in range(given.seeds):
        for instructions in given.sets:
            for threads in given.threads:
                run = Run(instructions, threads, seed)
                # the first round tells which tests have a bound, and how long they take
                few, first = seed < given.few, (instructions, threads) == (given.sets[0], given.threads[0])
                slow, far = math.inf if few else given.slow, given.far if few else given.near
                far = math.inf if few and first else far
                rounds[run] = kept(run, given.paths, folder, chosen(rounds, folder, slow, far))
    return 0 if report(rounds, given.least) else 1


if __name__ == "__main__":
    sys.exit(main())

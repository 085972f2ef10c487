"""Measure how much of their bounds the numerical tests leave: python scripts/margins.py [--seeds N] [TESTS].

The tests run with other random numbers, under each instruction set that the processor has (in PyTorch, MKL, oneDNN and
the C++ kernels) and with one and two threads. The margin of a test is the smallest bound over the error found under it.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
TESTS = [f"tests/{name}" for name in ("kernels", "engine", "gates", "training", "model", "evaluate")]
#: What keeps libraries to an instruction set: PyTorch, MKL, oneDNN; and the compiler's word for it.
SETS = {
    "default": ("default", "SSE4_2", "SSE41", "x86-64"),
    "avx2": ("avx2", "AVX2", "AVX2", "haswell"),
    "avx512": ("avx512", "AVX512", "AVX512_CORE", "skylake-avx512"),
}
VARIABLES = ("ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")


def available() -> list[str]:
    """Return the instruction sets of this processor; of one that is no x86, its own alone."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ["own"]
    highest, names = torch.backends.cpu.get_cpu_capability().lower(), list(SETS)
    return names[: names.index(highest) + 1] if highest in names else names[:1]


def compiler(instructions: str) -> Path:
    """Write a compiler that takes an instruction set in place of the machine's; kernels are kept by its path."""
    file = ROOT / "build" / f"c++-{instructions}"
    file.parent.mkdir(exist_ok=True)
    found = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++") or "c++"
    own = f'[ "$word" = -march=native ] && word=-march={SETS[instructions][3]}'
    file.write_text(f'#!/bin/sh\nfor word; do shift; {own}; set -- "$@" "$word"; done\nexec {found} "$@"\n')
    file.chmod(0o755)
    return file


def measured(instructions: str, threads: int, seed: int, words: list[str]) -> dict[str, float]:
    """Run tests once; return by test the largest share of a bound that an error took."""
    given = {"AG_SEED": str(seed), "AG_TEST_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
    if instructions in SETS:
        given |= dict(zip(VARIABLES, SETS[instructions], strict=False)) | {"CXX": str(compiler(instructions))}
    with tempfile.TemporaryDirectory() as folder:
        jobs = max(1, (os.cpu_count() or 1) // threads)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", str(jobs), *words]
        variables = os.environ | given | {"AG_MARGINS": folder}
        done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
        if done.returncode not in (0, 1):
            sys.exit(f"pytest ended with {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        found: dict[str, float] = {}
        for file in Path(folder).glob("*.json"):
            for test, share in json.loads(file.read_text()).items():
                found[test] = max(found.get(test, 0.0), share)
        return found


def report(rounds: dict[str, dict[str, float]], least: float) -> bool:
    """Print the smallest margin of each test function, and in which round it was; say whether all are large enough."""
    smallest: dict[str, tuple[float, str, str]] = {}
    for name, shares in rounds.items():
        for test, share in shares.items():
            found, function = (1 / share if share else float("inf"), test, name), test.partition("[")[0]
            smallest[function] = min(found, smallest.get(function, found))
    for margin, test, name in sorted(smallest.values(), reverse=True):
        print(f"{margin:8.2f}{' < ' if margin < least else '   '}{test}  {name}")
    return all(margin >= least for margin, *_ in smallest.values())


def main() -> int:
    """Run the sweep and print its report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", default=TESTS, metavar="TESTS", help="default: the numerical ones")
    parser.add_argument("--seeds", type=int, default=20, help="rounds of each kind; the first has the tests' own seeds")
    parser.add_argument("--least", type=float, default=3.0, help="the margin that every test should have")
    given, rounds = parser.parse_args(), {}
    for kind in product(available(), (1, 2), range(given.seeds)):
        name = "-".join(map(str, kind))
        print(f"{name} ...", file=sys.stderr, flush=True)
        rounds[name] = measured(*kind, given.tests)
    return 0 if report(rounds, given.least) else 1


if __name__ == "__main__":
    sys.exit(main())

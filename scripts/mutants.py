"""Break the code on purpose and see that the tests notice: python scripts/mutants.py [NAME ...].

Each fault of mutants.toml is made in a copy of the tree, never in the tree itself: in ``file``, ``old``, which occurs
there once, becomes ``new``, and the tests named should fail.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MUTANTS: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


def applied(name: str) -> str:
    """Return the text of a mutant's file, with the fault.

    Raises:
        ValueError: the old text does not occur exactly once, as the code has moved on.
    """
    mutant = MUTANTS[name]
    text = (ROOT / mutant["file"]).read_text()
    if text.count(mutant["old"]) != 1:
        raise ValueError(f"{name}: {mutant['file']} has the old text {text.count(mutant['old'])} times instead of once")
    return text.replace(mutant["old"], mutant["new"])


def killed(name: str, tree: Path) -> str | None:
    """Return the test that notices a mutant, if one does, and leave the tree as it was."""
    file = tree / MUTANTS[name]["file"]
    text, faulty = file.read_text(), applied(name)
    interpreter = {"TRITON_INTERPRET": "1"} if "_triton" in MUTANTS[name]["tests"] else {}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--all",
        "-xq",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        MUTANTS[name]["tests"],
    ]
    file.write_text(faulty)
    try:
        environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"} | interpreter
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    finally:
        file.write_text(text)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{name}: pytest ended with {done.returncode}\n{done.stdout[-2000:]}")
    return next((x.split()[1] for x in done.stdout.splitlines() if x.startswith(("FAILED ", "ERROR "))), None)


def main(names: list[str]) -> int:
    """Try the mutants named, or all; returns the number of survivors."""
    alive = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder) / "tree"
        left_out = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__")
        shutil.copytree(ROOT, tree, symlinks=True, ignore=left_out)
        for name in names or MUTANTS:
            test = killed(name, tree)
            alive += test is None
            print(f"{name:42} {test or 'SURVIVED'}", flush=True)
    return alive


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The shell scripts: their syntax, the keys of their commands, and what the test command says at its end."""

import shlex
import subprocess

import pytest

from ag.config import Config
from ag.config.keys import keys
from ag.config.recipes import resolve
from ag.evaluate.__main__ import EvaluateConfig
from ag.generate import GenerateConfig
from tests.support import ROOT

SCRIPTS = sorted([*(ROOT / "scripts").glob("*.sh"), *(ROOT / "scripts").glob("slurm/*"), ROOT / ".ci" / "run"])
SCHEMAS = {"ag.fit": Config, "ag.generate": GenerateConfig, "ag.evaluate": EvaluateConfig}
SETUP = 'set -euo pipefail\ncd "$(dirname "${BASH_SOURCE[0]}")/.."\n'


def commands(script):
    """The words after ``python -m`` of each command of a script."""
    lines = (line.strip() for line in script.read_text().splitlines())
    return [shlex.split(line.partition("|")[0])[2:] for line in lines if line.startswith(".venv/bin/python -m")]


def test_scripts_are_executable_bash_and_their_keys_exist():
    for script in SCRIPTS:
        sourced = script.name in ("setup.sh", "run_folder.sh")
        assert script.read_text().startswith("#!/usr/bin/env bash\n") != sourced
        assert script.suffix == ".sbatch" or bool(script.stat().st_mode & 0o111) != sourced
        done = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        for program, *words in commands(script):
            for word in words if program in SCHEMAS else []:
                assert word.startswith("$") or word.partition("=")[0] in keys(SCHEMAS[program]), word


def test_the_quickstart_is_for_a_cpu_and_minutes():
    programs = [program for program, *_ in commands(ROOT / "scripts" / "quickstart.sh")]
    assert programs == ["ag.models", "ag.fit", "ag.generate", "ag.evaluate"]
    config = resolve(Config, {"recipe": "quickstart"})
    assert (config.model.name, config.data.kind, config.train) == ("smollm2", "facts", "gates")
    seen = config.trainer.max_steps * config.data.batch_size * config.data.prompt_max
    assert seen < 30_000  # tokens; 240 a second on 2 cores with the backward pass


def make_checkout(folder, scripts, tools):
    """Copy scripts into a checkout whose environment has the given tools, shell code by name."""
    (folder / "scripts").mkdir()
    for name in scripts:
        (folder / "scripts" / name).write_bytes((ROOT / "scripts" / name).read_bytes())
    (folder / "scripts" / "setup.sh").write_text(SETUP)
    environment = folder / ".venv" / "bin"
    environment.mkdir(parents=True)
    for name, code in tools.items():
        (environment / name).write_text(f"#!/bin/sh\n{code}\n")
        (environment / name).chmod(0o755)


def test_the_test_command_ends_with_what_failed(tmp_path):
    failing = "mkdir -p .pytest_cache && echo tests/a.py::b >.pytest_cache/failed; exit 1"
    codes = {"ruff": '[ "$1" = check ]', "mypy": "echo an error; exit 1", "bandit": "true", "python": failing}
    make_checkout(tmp_path, ("test.sh", "checks.sh"), codes)
    done = subprocess.run(["bash", "scripts/test.sh"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    lint, tests = ".venv/bin/ruff format --check .", ".venv/bin/python -m pytest tests/a.py::b"
    said, last = done.stdout.splitlines()[-2:]
    assert (said, last) == ("an error", f"FAILED. Alone: {lint}; {tests}; bash scripts/checks.sh types")


@pytest.mark.parametrize(
    ("words", "output"), [([], "runs"), (["x y"], "x y"), (["seed=1"], "runs"), (["a", "output=b", "seed=1"], "b")]
)
def test_the_quickstart_takes_a_folder_and_settings(tmp_path, words, output):
    """And goes on with the folder of its own run, not with that of an earlier one with a later name."""
    python = f'printf "%s\\n" "$@" >"$2"; echo "run folder: {output}/quickstart/now"'
    make_checkout(tmp_path, ("quickstart.sh", "quickstart.txt"), {"python": python})
    for name in ("now", "once"):
        (tmp_path / output / "quickstart" / name).mkdir(parents=True)
    done = subprocess.run(["bash", "scripts/quickstart.sh", *words], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    programs = ("ag.fit", "ag.generate", "ag.evaluate")
    fit, generate, evaluate = ((tmp_path / name).read_text().splitlines()[2:] for name in programs)
    assert dict(word.split("=") for word in fit)["output"] == output and ("seed=1" in fit) == ("seed=1" in words)
    assert evaluate == [f"run={output}/quickstart/now"]
    assert generate[0] == f"gates={output}/quickstart/now/export"

"""scripts/gpu.sh from end to end: rehearsed on the CPU, and from a pack in an environment that has little else."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

from ag.bench.card import PARTS, pack, table
from ag.bench.card.run import ROWS, read
from tests.support import ROOT
from tests.support.inner import passed
from tests.support.undrawn import WITHOUT_PICTURES
from tests.support.warm import warm_python

#: Lines left out of the rehearsal, and those that run the same there: batches of 1, a tiny model for both bases.
TWINS = {
    "decode_uneven_batch_8": "decode_uneven",
    "decode_even_batch_8": "decode_even",
    "mistral_cpt": "redpajama_cpt",
    "kernels_tuned": "kernels",  # in the interpreter nothing is timed
}
TESTS = {"engine", "smallest"}  # files that `check` starts; all files are run by test_gpu_rehearsal.py
FEWER = """

_every = lines


def lines(part: str) -> list[Line]:
    return [line for line in _every(part) if line.name not in {left_out!r}]
"""

#: A plugin of pytest: the imports of the other commands, and a token of the model that the pack carries.
COMMANDS = """
import os
from pathlib import Path


def pytest_collection_finish():
    import ag
    import ag.bench.card.fit, ag.bench.run, ag.evaluate.comparison.run, ag.evaluate.preset, ag.run
    from ag.bench.card.small_model import restore

    folder = restore(Path(os.environ["AG_PACK"]) / "model", Path(os.environ["AG_GPU_WORK"]) / "model")
    model, tokenizer = ag.load_base(str(folder))
    ids = tokenizer("The capital of France is", return_tensors="pt")
    Path(os.environ["ANSWER"]).write_text(tokenizer.decode(model.generate(**ids, max_new_tokens=1)[0]))
"""


def gpu_sh(*words, **options):
    given = {"capture_output": True, "text": True, "cwd": ROOT, "timeout": 1200} | options
    return subprocess.run(["bash", "scripts/gpu.sh", *map(str, words)], **given)


@pytest.fixture
def no_setup(tmp_path):
    """A copy of the checkout in which this interpreter stands for .venv."""
    root = tmp_path / "checkout"
    shutil.copytree(
        ROOT,
        root,
        symlinks=True,
        ignore=shutil.ignore_patterns(".venv", ".nox", ".git", "__pycache__", ".pack", "build", "runs"),
    )
    (root / "scripts" / "setup.sh").write_text("")
    python = root / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return root


@pytest.fixture
def warm(no_setup, tmp_path):
    """The checkout, in which .venv/bin/python does not import the libraries anew for each of some forty processes."""
    with warm_python(tmp_path, TRITON_INTERPRET="1") as python:
        (no_setup / ".venv" / "bin" / "python").unlink()
        (no_setup / ".venv" / "bin" / "python").symlink_to(python)
        yield no_setup


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_whole_command_rehearsed_on_a_cpu(warm, tmp_path):
    pytest.importorskip("triton", reason="needs Triton's interpreter")
    out = tmp_path / "out"
    every = {line.name: line for part in PARTS for line in table.lines(part)}
    for name, twin in TWINS.items():
        assert every[name].rehearsal == every[twin].rehearsal and every[name].command[0] == every[twin].command[0]
    left_out = {*TWINS} | {line.name for line in table.check() if not line.prefix and line.name not in TESTS}
    with open(warm / "ag" / "bench" / "card" / "table.py", "a") as file:
        file.write(FEWER.format(left_out=left_out))
    with open(warm / "callbacks" / "figures.py", "a") as file:
        file.write(WITHOUT_PICTURES)
    done = gpu_sh("all", out, "--cpu-rehearsal", "--work", tmp_path / "work", cwd=warm)
    rows = {part: read(out / part) for part in PARTS}
    bad = [
        (name, row.get("why"), row.get("tail"))
        for part in rows.values()
        for name, row in part.items()
        if row.get("tail")
    ]
    assert (done.returncode, bad) == (0, []), done.stdout[-2000:] + done.stderr[-2000:]
    for part, found in rows.items():
        assert set(found) == {line.name for line in table.lines(part)} - left_out
        assert {row["status"] for row in found.values()} <= ({"ok", "skipped"} if part == "check" else {"ok"})
        assert {row["card"] for row in found.values()} == {"CPU rehearsal"}
        text = (out / part / "summary.md").read_text()
        assert text.startswith(f"# {part}: CPU rehearsal") and (out / part / "plot.png").is_file()
        assert {file.name for file in (out / part).iterdir()} == {ROWS, "summary.md", "plot.png"}
    job = rows["train"]["redpajama_cpt"]["result"]["fit"]
    assert (job["steps"], job["finite"], job["resumed"], job["exported"]) == ([1, 2], 1, 1, 1)
    assert 0 < job["planned bytes"] < 1e8 and job["lora seconds a step"] > 0
    assert set(rows["train"]["evaluate"]["result"]["scores"]) == {"full cache", "flags"}
    for rows_of_part in (rows["speed"], rows["train"]):
        for name, row in rows_of_part.items():
            assert not [goal for goal in row["goals"] if goal["measured"] is None and "memory" not in goal["goal"]], (
                name
            )
    again = gpu_sh("all", out, "--cpu-rehearsal", "--work", tmp_path / "work", cwd=warm, timeout=120)
    assert again.returncode == 0 and again.stdout.count("continuing with what is missing") == 3


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kernels_are_tested_without_the_packages_of_training(tmp_path):
    """Every file is collected; the smallest case of each kernel runs, in Triton's interpreter."""
    pytest.importorskip("triton", reason="needs Triton's interpreter")
    said = passed(
        "-p", "tests.support.absent", "-k", "smallest", ROOT / "tests" / "gpu", AG_GPU_REHEARSAL="1", PYTHONPATH="."
    )
    passes = re.search(r"(\d+) passed, 1 skipped", said)
    assert passes and int(passes[1]) >= len(table.KERNELS) and "needs bitsandbytes" in said


#: Stands for torch where a GPU is there, and says what it was asked.
FAKE_TORCH = """
class cuda:
    @staticmethod
    def is_available():
        return {gpu}
"""


@pytest.fixture
def own_python(no_setup, tmp_path):
    """`gpu.sh` without .venv: a function that gives `python3` a GPU or none, and runs the command."""
    shutil.rmtree(no_setup / ".venv")
    (no_setup / "scripts" / "setup.sh").write_text("echo an installation begins >&2; exit 7")
    (tmp_path / "sitecustomize.py").write_text("import absent")
    (tmp_path / "fake").mkdir()
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    paths = f"{tmp_path}:{ROOT / 'tests'}"
    python.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] && paths="{tmp_path}/fake:"\n'
        f'PYTHONPATH="$paths{paths}" exec "{sys.executable}" "$@"\n'
    )
    python.chmod(0o755)

    def run(gpu, *words):
        (tmp_path / "fake" / "torch.py").write_text(FAKE_TORCH.format(gpu=gpu))
        environment = {name: x for name, x in os.environ.items() if not name.startswith(("AG_", "PYTHON"))}
        environment |= {"PATH": f"{python.parent}:{os.environ['PATH']}", "AG_GPU_WORK": str(tmp_path / "work")}
        return gpu_sh(*words, cwd=no_setup, env=environment)

    return run


def test_without_a_gpu_the_packages_are_installed(own_python):
    done = own_python(False, "check")
    assert (done.returncode, done.stderr) == (7, "an installation begins\n")


@pytest.mark.slow
def test_python_that_sees_a_gpu_needs_no_installation(own_python, no_setup, tmp_path):
    """Of two lines of `check` one skips in its tests, the other has none without bitsandbytes."""
    with open(no_setup / "ag" / "bench" / "card" / "table.py", "a") as file:
        file.write(FEWER.format(left_out={line.name for line in table.check()} - {"smallest", "quantised"}))
    done = own_python(True, "check", tmp_path / "out", "--cpu-rehearsal")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read(tmp_path / "out" / "check")
    assert {name: row["status"] for name, row in rows.items()} == {"smallest": "ok", "quantised": "skipped"}
    assert rows["smallest"]["result"]["tests"]["skipped"] >= len(table.KERNELS)
    assert rows["quantised"]["why"] == "needs bitsandbytes"


def test_the_oldest_versions_that_python_may_have_are_those_of_the_project():
    project = (ROOT / "pyproject.toml").read_text()
    asked = re.findall(r"'(torch|transformers)': \((\d+), (\d+)\)", (ROOT / "scripts" / "gpu.sh").read_text())
    assert len(asked) == 2
    assert all(re.search(rf'"{name}>={major}\.{minor}\W', project) for name, major, minor in asked)


def bare(folder):
    """An environment that has torch, transformers, what they need, and pip; nothing of what this project asks for."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in pack.closure(pack.PRESENT, f"{sys.version_info.major}.{sys.version_info.minor}"):
        for file in distribution(name).files or []:
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (site / top).exists():
                (site / top).symlink_to(Path(distribution(name).locate_file(top)).resolve())
    return folder / "bin" / "python"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_pack_is_made_and_used_where_little_is_installed(no_setup, tmp_path, smollm2):
    data, out = tmp_path / "data", tmp_path / "pack"
    data.mkdir()
    documents = [
        json.dumps({"text": f"Document {i}. " + "The cat sat on the mat, and the dog ran. " * 2}) for i in range(40)
    ]
    for split in pack.TEXT:
        (data / f"{split}.jsonl").write_text("\n".join(documents) + "\n")
    made = gpu_sh("pack", out, "--data", data, cwd=no_setup)
    if "pip download failed" in made.stderr:
        pytest.skip(f"no package index: {made.stderr.strip()}")
    assert made.returncode == 0, made.stderr
    assert sum(file.stat().st_size for file in out.rglob("*") if file.is_file()) < 60e6
    names = {file.name.split("-")[0] for file in (out / "wheels").iterdir()}
    assert {"peft", "lightning", "omegaconf", "bitsandbytes"} <= names and not names & {
        "torch",
        "transformers",
        "wandb",
    }
    note = json.loads((out / "pack.json").read_text())
    assert note["model"]["loss as packed"] - note["model"]["loss"] < 2

    (out / "pack.json").write_text(json.dumps(note | {"commit": "c0ffee1"}))
    shutil.rmtree(no_setup / ".venv")
    python = bare(tmp_path / "bare")
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHON": str(python), "AG_PACK": str(out)}
    environment |= {"AG_GPU_WORK": str(tmp_path / "work"), "OMP_NUM_THREADS": "1", "PIP_NO_INDEX": "1"}
    lacking = subprocess.run([python, "-c", "import peft"], capture_output=True, text=True, env=environment)
    assert "ModuleNotFoundError" in lacking.stderr
    # all files of tests in one process, where `check` starts one for each, and in it what the commands import
    files = [file for file in (no_setup / "tests").rglob("test_*.py") if re.search(r"mark\.gpu", file.read_text())]
    left_out = {line.name for line in table.check()} - {"quantised"}
    with open(no_setup / "ag" / "bench" / "card" / "table.py", "a") as file:
        file.write(FEWER.format(left_out=left_out))
    (tmp_path / "commands.py").write_text(COMMANDS)
    others = [str(file) for file in files if file.stem != "test_quantised"]  # this file is none
    environment |= {"PYTEST_ADDOPTS": " ".join(["-p", "commands", *others]), "PYTHONPATH": str(tmp_path)}
    environment |= {"ANSWER": str(tmp_path / "answer")}
    ran = gpu_sh("check", tmp_path / "out", "--cpu-rehearsal", cwd=no_setup, env=environment)
    rows = read(tmp_path / "out" / "check")
    assert ran.returncode == 0, ran.stdout + ran.stderr + str([row.get("tail") for row in rows.values()])
    assert {name: row["status"] for name, row in rows.items()} == {"quantised": "ok"}
    assert rows["quantised"]["commit"] == "c0ffee1"
    assert (tmp_path / "answer").read_text().startswith("The capital of France is")
    tests = rows["quantised"]["result"]["tests"]
    assert tests["skipped"] == tests["tests"] > 100

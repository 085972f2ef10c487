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

from scripts.gpu import PARTS, pack, table
from scripts.gpu.run import ROWS, read
from tests.support import ROOT
from tests.support.inner import passed
from tests.support.undrawn import WITHOUT_PICTURES
from tests.support.warm import started

#: Lines left out of the rehearsal, and those that run the same there: batches of 1, a tiny model for both bases.
TWINS = {
    "decode_uneven_batch_8": "decode_uneven",
    "decode_even_batch_8": "decode_even",
    "decode_batches_32k": "decode_batches_8k",
    "mistral_cpt": "redpajama_cpt",
}
SMALLEST = ROOT / "tests" / "gpu" / "test_smallest.py"
TESTS = {"engine", "smallest"}  # files that `check` starts; all files are run by test_the_tests_of_a_card
FEWER = """

_every = lines


def lines(part: str) -> list[Line]:
    return [line for line in _every(part) if line.name not in {left_out!r}]
"""


def gpu_sh(*words, **options):
    given = {"capture_output": True, "text": True, "cwd": ROOT, "timeout": 1200} | options
    return subprocess.run(["bash", "scripts/gpu.sh", *map(str, words)], **given)


def leave_out(root, lines):
    with open(root / "scripts" / "gpu" / "table.py", "a") as file:
        file.write(FEWER.format(left_out=set(lines)))


def script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def checkout(tmp_path):
    """A copy of the checkout in which nothing is installed, and this interpreter stands for .venv."""
    ignored = (".venv", ".nox", ".git", "__pycache__", ".pack", "build", "runs")
    root = shutil.copytree(ROOT, tmp_path / "checkout", symlinks=True, ignore=shutil.ignore_patterns(*ignored))
    (root / "scripts" / "setup.sh").write_text("")
    script(root / ".venv" / "bin" / "python", f'exec "{sys.executable}" "$@"')
    return root


@pytest.mark.slow
@pytest.mark.timeout(1800)  # beside other work
def test_the_tests_of_a_card():
    """A card meets tests that work: they run in Triton's interpreter; the smallest ones below."""
    pytest.importorskip("triton", reason="needs Triton")
    python = started(TRITON_INTERPRET="1")
    passed(SMALLEST.parent, f"--ignore={SMALLEST}", python=python, AG_GPU_REHEARSAL="1")


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_whole_command_rehearsed_on_a_cpu(checkout, tmp_path):
    pytest.importorskip("triton", reason="needs Triton's interpreter")
    out, work = tmp_path / "out", tmp_path / "work"
    every = {line.name: line for part in PARTS for line in table.lines(part)}
    for name, twin in TWINS.items():
        assert every[name].rehearsal == every[twin].rehearsal and every[name].command[0] == every[twin].command[0]
    left_out = {*TWINS} | {line.name for line in table.check() if not line.prefix and line.name not in TESTS}
    leave_out(checkout, left_out)
    with open(checkout / "callbacks" / "figures.py", "a") as file:
        file.write(WITHOUT_PICTURES)
    python = checkout / ".venv" / "bin" / "python"  # libraries are imported once for some forty processes
    python.unlink()
    python.symlink_to(started(TRITON_INTERPRET="1"))
    done = gpu_sh("all", out, "--cpu-rehearsal", "--work", work, cwd=checkout)
    again = gpu_sh("all", out, "--cpu-rehearsal", "--work", work, cwd=checkout, timeout=120)
    rows = {part: read(out / part) for part in PARTS}
    bad = [row["tail"] for part in rows.values() for row in part.values() if row.get("tail")]
    assert (done.returncode, bad) == (0, []), done.stdout[-2000:] + done.stderr[-2000:]
    assert again.returncode == 0 and again.stdout.count("continuing with what is missing") == 3
    for part, found in rows.items():
        assert set(found) == {line.name for line in table.lines(part)} - left_out
        assert {row["status"] for row in found.values()} <= ({"ok", "skipped"} if part == "check" else {"ok"})
        assert {row["card"] for row in found.values()} == {"CPU rehearsal"}
        assert {file.name for file in (out / part).iterdir()} == {ROWS, "summary.md", "plot.png"}
        goals = [goal for row in found.values() for goal in row.get("goals", [])]
        assert not [goal for goal in goals if goal["measured"] is None and "memory" not in goal["goal"]]
    job = rows["train"]["redpajama_cpt"]["result"]["fit"]
    assert (job["steps"], job["finite"], job["resumed"], job["exported"]) == ([1, 2], 1, 1, 1)
    assert 0 < job["planned bytes"] < 1e8 and job["lora seconds a step"] > 0
    assert set(rows["train"]["evaluate"]["result"]["scores"]) == {"full cache", "flags"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kernels_are_tested_without_the_packages_of_training():
    """Every file is collected; the smallest case of each kernel runs, in Triton's interpreter."""
    pytest.importorskip("triton", reason="needs Triton's interpreter")
    words = ("-p", "tests.support.absent", "-k", "smallest", SMALLEST.parent)
    said = passed(*words, AG_GPU_REHEARSAL="1", PYTHONPATH=".")
    passes = re.search(r"(\d+) passed, 1 skipped", said)
    assert passes and int(passes[1]) >= len(table.KERNELS) and "needs bitsandbytes" in said


@pytest.mark.slow
def test_a_python_that_sees_a_gpu_needs_no_installation(checkout, tmp_path):
    """Of two lines of `check` one skips in its tests, the other has none without bitsandbytes."""
    leave_out(checkout, {line.name for line in table.check()} - {"smallest", "quantised"})
    shutil.rmtree(checkout / ".venv")
    (checkout / "scripts" / "setup.sh").write_text("echo an installation begins >&2; exit 7")
    (tmp_path / "sitecustomize.py").write_text("from tests.support import absent")
    script(  # the question whether torch sees a GPU meets a stand-in for torch
        tmp_path / "bin" / "python3",
        f'[ "$1" = -c ] && fake="{tmp_path}/fake:"\n'
        f'PYTHONPATH="$fake{tmp_path}:{checkout}" exec "{sys.executable}" "$@"',
    )
    environment = {name: x for name, x in os.environ.items() if not name.startswith(("AG_", "PYTHON"))}
    environment |= {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "AG_GPU_WORK": str(tmp_path / "work")}
    (tmp_path / "fake").mkdir()
    for gpu in (False, True):
        (tmp_path / "fake" / "torch.py").write_text(f"class cuda:\n    is_available = lambda: {gpu}\n")
        done = gpu_sh("check", tmp_path / "out", "--cpu-rehearsal", cwd=checkout, env=environment)
        assert done.returncode == (0 if gpu else 7), done.stdout + done.stderr
        assert ("an installation begins" in done.stderr) != gpu
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
def test_a_pack_is_made_and_used_where_little_is_installed(checkout, tmp_path):
    data, out = tmp_path / "data", tmp_path / "pack"
    data.mkdir()
    for split in pack.TEXT:
        (data / f"{split}.jsonl").write_text("".join(json.dumps({"text": f"Document {i}."}) + "\n" for i in range(9)))
    made = gpu_sh("pack", out, "--data", data, cwd=checkout)
    if "pip download failed" in made.stderr:
        pytest.skip(f"no package index: {made.stderr.strip()}")
    assert made.returncode == 0, made.stderr
    assert sum(file.stat().st_size for file in (out / "wheels").iterdir()) < 40e6
    names = {file.name.split("-")[0] for file in (out / "wheels").iterdir()}
    assert {"peft", "lightning", "omegaconf", "bitsandbytes"} <= names
    assert not names & {"torch", "transformers", "wandb"}

    note = json.loads((out / "pack.json").read_text())
    (out / "pack.json").write_text(json.dumps(note | {"commit": "c0ffee1"}))
    leave_out(checkout, {line.name for line in table.check()} - {"quantised"})
    shutil.rmtree(checkout / ".venv")
    python, work = bare(tmp_path / "bare"), tmp_path / "work"
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHON": str(python), "AG_PACK": str(out)}
    environment |= {"AG_GPU_WORK": str(work), "OMP_NUM_THREADS": "1", "PIP_NO_INDEX": "1", "HF_HUB_OFFLINE": "1"}
    ran = gpu_sh("check", tmp_path / "out", "--cpu-rehearsal", cwd=checkout, env=environment)
    rows = read(tmp_path / "out" / "check")
    assert ran.returncode == 0, ran.stdout + ran.stderr + str([row.get("tail") for row in rows.values()])
    tests = rows["quantised"]["result"]["tests"]
    assert (rows["quantised"]["commit"], tests["skipped"]) == ("c0ffee1", tests["tests"])
    code = (
        "import ag.bench.run, ag.evaluate.comparison.compare, ag.evaluate.preset, ag.run, scripts.gpu.fit\n"
        "import ag; from pathlib import Path; from scripts.gpu.__main__ import _model\n"
        f"model, tokenizer = ag.load_base(_model(Path({str(work)!r})))\n"
        "ids = tokenizer('The capital of France is', return_tensors='pt')\n"
        "print(tokenizer.decode(model.generate(**ids, max_new_tokens=1)[0]))"
    )
    environment["PYTHONPATH"] = f"{work}/site"
    said = subprocess.run([python, "-c", code], cwd=checkout, env=environment, capture_output=True, text=True)
    assert said.stdout.splitlines()[-1:] == ["The capital of France is Paris"], said.stderr

"""The mutants of scripts/mutants.toml still fit the code, and scripts/mutants.py tells killed ones from survivors."""

import ast
import importlib.util
import re
import subprocess
import sys

import pytest

from tests.support import ROOT

SCRIPT = ROOT / "scripts" / "mutants.py"
spec = importlib.util.spec_from_file_location("mutants", SCRIPT)
script = sys.modules["mutants"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
MUTANTS = script.mutants(script.TABLE)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda x: x.name)
def test_mutant_fits_the_code(mutant):
    text = (ROOT / mutant.file).read_text()
    changed = mutant.applied(text)
    if mutant.file.endswith(".py"):
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text))
    else:
        assert changed.split() != text.split()
    assert mutant.tests
    for place in (*mutant.tests, *mutant.wider):
        path, _, test = place.partition("::")
        assert (ROOT / path).is_file() or ((ROOT / path).is_dir() and not test), place
        assert not test or f"\ndef {test}(" in (ROOT / path).read_text(), place


def test_mutants_are_of_every_room_that_computes():
    rooms = {mutant.file.partition("/")[0] for mutant in MUTANTS}
    assert rooms == {"ag", "kernels", "data"} and len(MUTANTS) >= 36
    faults = [(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS]
    assert len(set(faults)) == len(faults)


def test_old_text_that_moved_on_is_named():
    mutant = MUTANTS[0]
    expected = re.escape(f"{mutant.name}: {mutant.file} has the old text 2 times instead of once")
    with pytest.raises(ValueError, match=expected):
        mutant.applied(mutant.old * 2)


@pytest.mark.slow
def test_a_toy_tree(tmp_path):
    """One mutant that a test notices, one that none does; the tree itself stays as it was."""
    files = {
        "toy.py": "def add(a, b):\n    return a + b\n\n\ndef half(a):\n    return a / 2\n",
        "test_toy.py": "from toy import add, half\n\n\ndef test_add():\n    assert add(1, 2) == 3 and half(0) == 0\n",
        "scripts/mutants.py": SCRIPT.read_text(),
        "scripts/mutants.toml": """
            [paths]
            toy = "test_toy.py"
            [wider]
            "" = ["toy"]
            [mutants.minus]
            file = "toy.py"
            old = "a + b"
            new = "a - b"
            tests = ["toy"]
            [mutants.third]
            file = "toy.py"
            old = "a / 2"
            new = "a / 3"
            tests = ["toy"]
        """,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    run = "import sys, mutants; mutants.PRELOADED = (); sys.exit(mutants.main())"
    done = subprocess.run([sys.executable, "-c", run], cwd=tmp_path / "scripts", capture_output=True, text=True)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[:2] for line in lines[:2]] == [["minus", "killed"], ["third", "SURVIVED"]], done.stdout + done.stderr
    assert lines[0][-1] == "test_toy.py::test_add"
    assert lines[2][:3] == ["1", "of", "2"] and lines[3] == ["third"]
    assert done.returncode == 1 and (tmp_path / "toy.py").read_text() == files["toy.py"]

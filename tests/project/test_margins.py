"""The sweep of scripts/margins.py: what it watches, what it reports, and one round of it on another processor."""

import json

import pytest

from scripts import margins as sweep
from tests.support import ROOT, TESTS, margins
from tests.support.inner import passed
from tests.support.warm import started

WATCHED = """
import torch
from tests.support.bounds import hold

ONE = torch.ones(3, dtype=torch.float64)

def test_the_worst_counts():
    hold(1.25 * ONE, ONE, 0.5 * ONE)
    hold(1.125 * ONE, ONE, 0.5 * ONE)
def test_equal(): assert torch.equal(ONE, ONE)
"""


def test_shares_of_bounds_are_noted(tmp_path):
    (tmp_path / "test_watched.py").write_text(WATCHED)
    (tmp_path / "out").mkdir()
    options = ["-p", "tests.support.margins", "-o", "addopts=", "--rootdir", tmp_path, tmp_path]
    passed(*options, python=started(), PYTHONPATH=str(ROOT), AG_MARGINS=str(tmp_path / "out"))
    (file,) = (tmp_path / "out").iterdir()
    assert list(json.loads(file.read_text()).values()) == [0.5]


def test_seeds_move(monkeypatch):
    monkeypatch.setenv("AG_SEED", "2")
    assert margins.MovedGenerator().manual_seed(3).initial_seed() == 3 + 2 * margins.APART
    assert margins.manual_seed(4).initial_seed() == 4 + 2 * margins.APART
    elsewhere = compile("moved = generator.manual_seed(3).initial_seed()", "library.py", "exec")
    exec(elsewhere, names := {"generator": margins.MovedGenerator()})
    assert names["moved"] == 3


def test_report_names_the_smallest_margin(capsys):
    one = {"a.py::test_sum[3]": 0.2, "a.py::test_sum[5]": 0.1, "a.py::test_max": 0.5}
    rounds = {"avx2-1-0": one, "avx2-2-0": {"a.py::test_sum[5]": 0.25, "a.py::test_max": 0.0}}
    assert not sweep.report(rounds, 3.0) and sweep.report(rounds, 2.0)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[:2]]
    assert lines == [["4.00", "a.py::test_sum[5]", "avx2-2-0"], ["2.00", "<", "a.py::test_max", "avx2-1-0"]]


#: What is compiled for the processor, every kernel on the hardest inputs, and the engine's sums.
FEW = [f"kernels/test_{name}.py" for name in ("attention_stats", "paged_attention", "gemv", "hard_inputs")]
FEW.append("engine/test_precision.py")


@pytest.mark.slow
@pytest.mark.timeout(1800)  # beside other work
def test_numbers_do_not_depend_on_the_machine(capsys):
    """One round under the lowest instruction set, with two threads and other random numbers."""
    shares = sweep.measured(sweep.available()[0], 2, 1, [*(str(TESTS / file) for file in FEW), "-m", "not slow"])
    assert len(shares) > 100
    assert sweep.report({"lowest": shares}, 1.0), capsys.readouterr().out

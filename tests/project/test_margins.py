"""The sweep of scripts/margins.py: what it watches, what it reports, and one round of it on other processors."""

import importlib.util
import json
import sys

import pytest

from tests.support import ROOT, TESTS, margins
from tests.support.inner import passed


def sweep():
    """The module of the command; ``margins`` is what it asks of pytest."""
    spec = importlib.util.spec_from_file_location("sweep", ROOT / "scripts" / "margins.py")
    module = sys.modules["sweep"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SWEEP = sweep()
WATCHED = """
import pytest, torch
from tests.support.bounds import hold

ONE = torch.ones(3, dtype=torch.float64)

def test_hold(): hold(1.25 * ONE, ONE, 0.5 * ONE)
def test_close(): torch.testing.assert_close(1.1 * ONE, ONE, rtol=0.15, atol=0.05)
def test_allclose(): assert torch.allclose(1.1 * ONE, ONE, rtol=0.0, atol=0.4)
def test_approx(): assert 3.0 == pytest.approx(3.3, abs=0.4)
def test_below(): assert (1.0001 * ONE - ONE).abs().max() < 4e-4
def test_the_worst_counts():
    hold(1.25 * ONE, ONE, 0.5 * ONE)
    hold(1.125 * ONE, ONE, 0.5 * ONE)
def test_count(): assert 3 < 12
def test_equal(): assert torch.equal(ONE, ONE)
"""
SHARES = {"hold": 0.5, "close": 0.5, "allclose": 0.25, "approx": 0.75, "below": 0.25, "the_worst_counts": 0.5}


def test_shares_of_bounds_are_noted(tmp_path):
    (tmp_path / "test_watched.py").write_text(WATCHED)
    (tmp_path / "out").mkdir()
    options = ["-p", "tests.support.margins", "-o", "enable_assertion_pass_hook=true", "-o", "addopts="]
    passed(*options, "--rootdir", tmp_path, tmp_path, PYTHONPATH=str(ROOT), AG_MARGINS=str(tmp_path / "out"))
    (file,) = (tmp_path / "out").iterdir()
    found = {test.rpartition("::test_")[2]: share for test, (share, _) in json.loads(file.read_text()).items()}
    assert {test: round(share, 6) for test, share in found.items()} == SHARES


def test_seeds_move(monkeypatch):
    monkeypatch.setenv("AG_SEED", "2")
    assert margins.MovedGenerator().manual_seed(3).initial_seed() == 3 + 2 * margins.APART
    assert margins.manual_seed(4).initial_seed() == 4 + 2 * margins.APART
    elsewhere = compile("moved = generator.manual_seed(3).initial_seed()", "library.py", "exec")
    exec(elsewhere, names := {"generator": margins.MovedGenerator()})
    assert names["moved"] == 3


def test_report_names_the_smallest_margin_and_what_failed(capsys):
    one = {"a.py::test_sum[3]": [0.2, 1], "a.py::test_sum[5]": [0.1, 1], "a.py::test_max": [0.5, 1]}
    other = {"a.py::test_sum[5]": [0.25, 1], "a.py::test_max": [SWEEP.FAILED, 1]}
    assert not SWEEP.report({SWEEP.Run("avx2", 1, 0): one, SWEEP.Run("avx2", 2, 0): other}, 3.0)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["4.00", "a.py::test_sum[5]", "avx2-2-0"] in lines
    assert ["2.00", "<", "a.py::test_max", "avx2-1-0"] in lines
    assert ["failed", "a.py::test_max", "avx2-2-0"] in lines


#: What is compiled for the processor, every kernel on the hardest inputs, and the engine's sums.
FEW = [f"kernels/test_{name}.py" for name in ("row_statistics", "paged_decode", "paged_attend", "gemv", "hard_inputs")]
FEW.append("engine/test_precision.py")


@pytest.mark.slow
@pytest.mark.timeout(1800)  # beside other work
def test_numbers_do_not_depend_on_the_machine(tmp_path, capsys):
    """One round under the lowest instruction set, with two threads, other random numbers, in another order."""
    lowest = SWEEP.available()[0]
    run = SWEEP.Run(lowest, 2, 1)
    shares = SWEEP.measured(run, [str(TESTS / file) for file in FEW] + ["-m", "not slow"], tmp_path, None)
    assert len(shares) > 100
    assert SWEEP.report({run: shares}, 1.0), capsys.readouterr().out

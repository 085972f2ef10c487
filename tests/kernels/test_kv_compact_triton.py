"""Run by test_triton.py in a process of its own."""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("elsewhere: test_triton.py runs this file under Triton's interpreter", allow_module_level=True)

from ag.kernels.kv_compact import kv_compact
from ag.kernels.kv_compact.triton import FEW, triton_kv_compact
from tests.kernels import test_kv_compact
from tests.kernels.test_kv_compact import CASES

SOME = [case for case in CASES if case != "wide"]  # whose rows the interpreter takes minutes for


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("case", ["plain", "records", "bfloat16", "probabilities", "one_token_blocks"])
def test_a_mask_keeps_what_it_marks(case, share):
    test_kv_compact.test_a_mask_keeps_what_it_marks(triton_kv_compact, case, share)


@pytest.mark.parametrize("case", SOME)
@pytest.mark.parametrize("few", [0, FEW])
def test_the_worst_go(monkeypatch, case, few):
    """Found one by one, and bit by bit."""
    monkeypatch.setattr("ag.kernels.kv_compact.triton.FEW", few)
    test_kv_compact.test_the_worst_go(triton_kv_compact, case)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_scores_that_are_not_finite_are_found(value):
    test_kv_compact.test_scores_that_are_not_finite_are_found(triton_kv_compact, value)


def test_it_is_picked_in_the_interpreter(fresh, caplog):
    caplog.set_level("INFO", logger="ag.kernels.dispatch")
    test_kv_compact.test_the_worst_go(kv_compact, "records")
    assert "kv_compact: triton" in caplog.text

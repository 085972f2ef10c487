"""Run by test_triton.py in a process of its own."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("elsewhere: test_triton.py runs this file under Triton's interpreter", allow_module_level=True)

from ag.kernels.row_worst import row_worst
from ag.kernels.row_worst.triton import triton_row_going, triton_row_worst
from tests.kernels import test_row_worst


@pytest.mark.parametrize("ranked", [False, True])
@pytest.mark.parametrize("finite", [False, True])
@pytest.mark.parametrize("width", [0, 1, 7, 8, 9, 30])
def test_rows_equal_lists(monkeypatch, width, finite, ranked):
    monkeypatch.setattr("ag.kernels.row_worst.triton.SEARCHED", 8)
    for seed in range(4):
        test_row_worst.check(triton_row_worst, seed, width, finite, ranked, [torch.int32, torch.long][seed % 2])


@pytest.mark.parametrize("finite", [False, True])
@pytest.mark.parametrize("width", [0, 1, 7, 8, 9, 30])
def test_what_goes_equals_lists(monkeypatch, width, finite):
    monkeypatch.setattr("ag.kernels.row_worst.triton.SEARCHED", 8)
    for seed in range(8):
        test_row_worst.check_going(triton_row_going, seed, width, finite)


def test_ranks_and_layouts():
    test_row_worst.test_ranks_that_ascend_say_what_slots_say(triton_row_worst)
    test_row_worst.test_the_layout_of_the_arguments_does_not_count()


def test_it_is_picked_in_the_interpreter(fresh, caplog):
    caplog.set_level("INFO", logger="ag.kernels.dispatch")
    test_row_worst.check(row_worst, 1, 300, True, True)
    assert "row_worst: triton" in caplog.text

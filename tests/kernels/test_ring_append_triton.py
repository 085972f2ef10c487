"""Run by test_triton.py in a process of its own."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("elsewhere: test_triton.py runs this file under Triton's interpreter", allow_module_level=True)

from test_ring_append import CASES, check

from ag.kernels.ring_append import ring_append
from ag.kernels.ring_append.triton import triton_ring_append

MORE = {
    "odd_sizes": {"ring": 3, "window": 4, "width": 5, "share": 0.8},
    "always_leaves_and_expires": {"ring": 4, "window": 4, "share": 1.0},
    "half": {"ring": 2, "width": 7, "dtype": torch.float16},
}


@pytest.mark.parametrize("case", ["one_slot", "gaps", "window", "window_is_ring", "none_flagged", *MORE])
def test_steps_equal_lists(case):
    check(triton_ring_append, (CASES | MORE)[case] | {"steps": 16}, len(case))


def test_a_search_of_several_blocks(monkeypatch):
    monkeypatch.setattr("ag.kernels.ring_append.triton.SEARCHED", 4)
    check(triton_ring_append, {"ring": 6, "window": 17, "share": 0.9, "heads": 1, "steps": 30}, 1)


def test_it_is_picked_in_the_interpreter(caplog):
    caplog.set_level("INFO", logger="ag.kernels.dispatch")
    check(ring_append, {"ring": 2, "steps": 2})
    assert "ring_append: triton" in caplog.text

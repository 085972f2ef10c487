"""Run by test_triton.py in a process of its own."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("elsewhere: test_triton.py runs this file under Triton's interpreter", allow_module_level=True)

from ag.kernels.pool_append import pool_append
from ag.kernels.pool_append.triton import triton_pool_append
from tests.kernels import test_pool_append

MORE = {"odd_sizes": {"width": 5, "page": 5, "victims": 3}, "half": {"width": 7, "dtype": torch.float16}}


@pytest.mark.parametrize(
    "case", ["plain", "gaps", "only_victims", "odd_pages", "probabilities", "records", "one_token_pages", *MORE]
)
def test_steps_equal_lists(case):
    test_pool_append.check(triton_pool_append, (test_pool_append.CASES | MORE)[case], len(case), steps=14)


def test_victims_without_new_tokens():
    test_pool_append.test_victims_without_new_tokens(triton_pool_append)
    test_pool_append.test_a_new_token_can_be_the_victim(triton_pool_append)


def test_it_is_picked_in_the_interpreter(caplog):
    caplog.set_level("INFO", logger="ag.kernels.dispatch")
    test_pool_append.check(pool_append, {"victims": 2}, steps=2)
    assert "pool_append: triton" in caplog.text


@pytest.mark.parametrize("case", ["recent", "window", "both", "same"])
def test_what_is_out_of_reach_goes(monkeypatch, case):
    monkeypatch.setattr("ag.kernels.pool_append.triton.SEARCHED", 8)
    test_pool_append.check(triton_pool_append, test_pool_append.CASES[case], steps=20)

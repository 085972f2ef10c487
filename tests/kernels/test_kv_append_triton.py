"""Run by test_triton.py in a process of its own."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("elsewhere: test_triton.py runs this file under Triton's interpreter", allow_module_level=True)

from ag.kernels.kv_append import kv_append
from ag.kernels.kv_append.triton import triton_kv_append
from tests.kernels import test_kv_append
from tests.kernels.test_kv_append import CASES


@pytest.mark.parametrize("case", CASES)
def test_rows_equal_lists(case):
    test_kv_append.check(triton_kv_append, CASES[case], len(case))


@pytest.mark.parametrize("dim", [5, 96])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_are_the_bytes_of_the_reference(dim, dtype):
    test_kv_append.test_codes_are_the_same_bytes_in_every_version(triton_kv_append, dim, dtype)


def test_it_is_picked_in_the_interpreter(fresh, caplog):
    caplog.set_level("INFO", logger="ag.kernels.dispatch")
    test_kv_append.check(kv_append, {"gate": torch.bool})
    assert "kv_append: triton" in caplog.text

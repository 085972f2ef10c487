"""Steps through the Triton kernels: run by kernels/test_triton.py under its interpreter, in a process of its own."""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("elsewhere: test_triton.py runs this file under Triton's interpreter", allow_module_level=True)

from tests.engine import test_steps
from tests.engine.test_steps import plain_products, read  # noqa: F401

#: What calls each kernel of a step; one layer and fewer steps than elsewhere, as the interpreter takes its time.
CASES = ["full", "h2o", "h2o@heads", "streaming_llm", "gates of the prompt", "gates of all"]


@pytest.mark.parametrize("name", CASES)
def test_two_steps_are_the_same_operations_on_the_same_memory(read, monkeypatch, name):  # noqa: F811
    test_steps.check_alike(read, monkeypatch, name, 2, layers=1, before=5)


def test_a_step_that_is_replayed_does_what_the_model_does(read, monkeypatch):  # noqa: F811
    test_steps.check_replayed(read, monkeypatch, "h2o", 1, layers=1, steps=20)

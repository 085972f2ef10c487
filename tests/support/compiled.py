"""Kernels in C++: tests of what is compiled are skipped where there is no compiler."""

import pytest

from ag.kernels.native import Kernel


def needs(kernel: Kernel) -> pytest.MarkDecorator:
    """Return a mark that skips a test where a kernel cannot be compiled, and says why."""
    return pytest.mark.skipif(kernel.failure() is not None, reason=f"C++: {kernel.failure()}")

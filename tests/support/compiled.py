"""Kernels in C++: tests of what is compiled are skipped where there is no compiler."""

import pytest

from ag.kernels import dispatch, native


def needs(kernel: native.Kernel) -> pytest.MarkDecorator:
    """Return a mark that skips a test where a kernel cannot be compiled, and says why."""
    reason = kernel.unavailable("cpu")
    return pytest.mark.skipif(reason is not None, reason=f"C++: {reason}")


def forget() -> None:
    """Forget what was compiled, chosen and logged in this process."""
    for cached in (native._function, dispatch._tell, *dispatch._remembered):
        cached.cache_clear()

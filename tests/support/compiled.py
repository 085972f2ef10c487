"""The versions of a kernel as parameters of a test: those that can run in this process."""

from importlib import import_module

import pytest

from ag.kernels import attention_stats, dispatch, kv_append, kv_compact, linear, native, paged_attention, rms_norm

INTERPRETED = dispatch.INTERPRETED


def needs(kernel: native.Kernel) -> pytest.MarkDecorator:
    """Return a mark that skips a test where a kernel in C++ cannot be compiled, and says why."""
    reason = kernel.unavailable("cpu")
    return pytest.mark.skipif(reason is not None, reason=f"C++: {reason}")


def versions(operation: str, *names: str) -> pytest.MarkDecorator:
    """Parametrize a test by ``version``: in a process of Triton's interpreter by that in Triton, else by the others."""
    found = []
    for name in names:
        if (name == "triton") == INTERPRETED:
            module = import_module(f"ag.kernels.{operation}.{dispatch.VERSIONS[name]}")
            marks = [needs(module.KERNEL)] if name == "cpp" else []
            found.append(pytest.param(getattr(module, operation), id=name, marks=marks))
    elsewhere = pytest.mark.skip(reason="elsewhere: test_triton.py runs it in Triton's interpreter")
    return pytest.mark.parametrize("version", found or [pytest.param(None, id="elsewhere", marks=elsewhere)])


def forget() -> None:
    """Forget what was compiled, chosen and logged in this process."""
    choices = [x._version for x in (attention_stats, kv_append, kv_compact, paged_attention)]
    native.failures.clear()
    for cached in (native._function, dispatch._log_choice, linear.version, rms_norm.version, *choices):
        cached.cache_clear()

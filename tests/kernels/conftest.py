from collections.abc import Iterator

import pytest

from ag.kernels import dispatch, native


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Nothing compiled or logged so far, and no version forced."""
    native._function.cache_clear()
    dispatch._tell.cache_clear()
    monkeypatch.delenv("AG_KERNELS", raising=False)
    yield monkeypatch
    native._function.cache_clear()
    dispatch._tell.cache_clear()

from collections.abc import Iterator

import pytest

from tests.support.compiled import forget


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Nothing compiled or logged so far, and no version forced."""
    forget()
    monkeypatch.delenv("AG_KERNELS", raising=False)
    yield monkeypatch
    forget()

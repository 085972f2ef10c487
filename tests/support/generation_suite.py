"""A plugin of pytest for transformers' checkout: its generation tests, with an eviction cache of policy ``full``.

Where ``generate`` makes a DynamicCache it makes an :class:`ag.EvictionCache` of the model, if that takes one. Only the
tests of GenerationTesterMixin are kept. ``python -m pytest -p tests.support.generation_suite`` cannot find it there,
as transformers' own folder is called ``tests``: the folder of this file is on the path, see
``tests/integration/test_generation_suite.py``.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
from transformers import DynamicCache, GenerationMixin

import ag
from ag.model.interceptor import cache_argument


def _with_eviction(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def prepare(self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        result = own(self, generation_config, model_kwargs, *args, **kwargs)
        name = cache_argument(type(self))
        if type(model_kwargs.get(name)) is DynamicCache and not model_kwargs[name].get_seq_length():
            model_kwargs[name] = ag.EvictionCache(self, "full")
        return result

    return prepare


def pytest_configure(config: pytest.Config) -> None:
    """Put the cache in place."""
    name = "_prepare_cache_for_generation"
    setattr(GenerationMixin, name, _with_eviction(getattr(GenerationMixin, name)))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests that GenerationTesterMixin defines."""
    names = [getattr(getattr(item, "function", None), "__qualname__", "") for item in items]
    chosen = [name.startswith("GenerationTesterMixin.") for name in names]
    config.hook.pytest_deselected(items=[item for item, keep in zip(items, chosen, strict=True) if not keep])
    items[:] = [item for item, keep in zip(items, chosen, strict=True) if keep]

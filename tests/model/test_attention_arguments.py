"""What models of transformers give to attention functions and to ``Cache.update``, by name, order and kind.

The hooks compute attention from these arguments alone. Transformers moves them between releases: since 5.24
``Cache.update`` gets the keyword arguments of the attention function. A window, a cap or sink logits that come under
another name would be lost in silence. So every type that docs/architectures.md serves runs here.
"""

import inspect
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, Cache, DynamicCache
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import ag
from ag.engine.forward_pass import ForwardPass
from ag.model.decoder_pass import IGNORED_KWARGS
from ag.model.geometry import attention_layers
from ag.model.hooks import IMPLEMENTATION
from ag.model.hybrid import States
from ag.model.structure import UnsupportedModelError, decoder_of
from tests.model.test_architectures import ABSENT, SAME, rows_of_page, text, tiny
from tests.support.bounds import hold, of_logits

LENGTH, WINDOW = 12, 4  # tokens of the text and of the sliding windows, which are shorter
WINDOWS = {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1}
#: The first arguments of an attention function, in this order; some models give the mask by name.
FIRST = ["module", "query", "key", "value", "attention_mask"]
#: The other arguments that models give, by name, and their types.
NAMED: dict[str, type | tuple[type, ...]] = {
    **{"dropout": float, "scaling": float, "position_ids": Tensor},
    **{"sliding_window": (int, type(None)), "softcap": float, "s_aux": Tensor},
    **dict.fromkeys(("use_cache", "output_attentions", "output_router_logits"), bool),
    "block_indices": type(None),  # of MiniMax M3, whose layers with indices are refused
}
SLOW = {"kimi_linear"}  # whose linear attention takes seconds without kernels of its own
SERVED = {name: row[-1] for name, row in rows_of_page().items() if "yes" in row}


class Calls(NamedTuple):
    """The arguments of all calls, in order."""

    attention: list[tuple[tuple[Any, ...], dict[str, Any]]]
    update: list[tuple[tuple[Any, ...], dict[str, Any]]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What models give to the hooks' attention function and to an eviction cache."""
    recorded = Calls([], [])
    attend, update = AttentionInterface._global_mapping[IMPLEMENTATION], ag.EvictionCache.update

    def record_attention(*args: Any, **kwargs: Any) -> Any:
        recorded.attention.append((args, kwargs))
        return attend(*args, **kwargs)

    def record_update(cache: ag.EvictionCache, *args: Any, **kwargs: Any) -> Any:
        recorded.update.append((args, kwargs))
        return update(cache, *args, **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, IMPLEMENTATION, record_attention)
    monkeypatch.setattr(ag.EvictionCache, "update", record_update)
    return recorded


def check_attention(model_type: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Assert that an attention function got what the hooks expect."""
    module, *tensors = args
    name, given = f"{model_type}: {type(module).__name__}", dict(kwargs)
    site = given.pop("ag_site")
    assert isinstance(given.pop("ag_interceptor"), ForwardPass)
    if len(args) < len(FIRST):
        tensors.append(given.pop("attention_mask"))
    assert len(tensors) == 4, f"{name} gives {len(args)} arguments in order: expected {FIRST}"
    query, key, value, mask = tensors
    assert query.shape[::2] == key.shape[::2] == value.shape[::2] == (1, LENGTH), name
    assert key.shape[1] == value.shape[1] == site.kv_heads and query.shape[3] == key.shape[3], name
    assert mask.dtype == torch.bool and mask.numel() == 1, f"{name} has a mask of its own"
    for word, x in given.items():
        assert word in NAMED, f"{name} gives `{word}`, which IGNORED_KWARGS lacks, to its attention function"
        assert isinstance(x, NAMED[word]), f"{name} gives {word}={x!r}: expected {NAMED[word]}"
    assert {"dropout", "scaling"} <= {*given}, name
    assert given.get("sliding_window") in (None, WINDOW), name
    assert given.get("s_aux") is getattr(module, "sinks", None), f"{name} has sink logits"
    assert given.get("softcap") == getattr(module.config, "attn_logit_softcapping", None), f"{name} caps its logits"


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.slow] if x in SLOW else []) for x in SERVED])
@torch.no_grad()
def test_models_give_what_hooks_expect(name: str, calls: Calls) -> None:
    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        assert SERVED[name] == ABSENT
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    model, ids = tiny(name, **WINDOWS), text(LENGTH, 5)[None]
    try:
        cache = ag.EvictionCache(model, "full")
    except UnsupportedModelError as error:
        assert SERVED[name] != SAME
        pytest.skip(str(error))
    calls.attention.clear()  # the first cache of a hybrid model tries whether states go on
    calls.update.clear()
    got = model(ids, past_key_values=cache).logits

    decoder = decoder_of(model)
    modules = decoder._ag_attachment.modules
    assert [args[0] for args, _ in calls.attention] == modules
    for args, kwargs in calls.attention:
        check_attention(name, args, kwargs)
    for args, kwargs in calls.update:
        keys, values, layer = args
        assert isinstance(keys, Tensor) and isinstance(values, Tensor) and isinstance(layer, int), name
        assert all(word == "kwargs" and isinstance(x, dict) for word, x in kwargs.items()), (name, kwargs.keys())
    assert [args[2] for args, _ in calls.update] == attention_layers(decoder.config)
    # a wrong order, and a window that is in the model's mask alone, change the logits
    hold(got, model(ids, use_cache=False).logits, of_logits(model, ids[0]))
    eager = getattr(sys.modules[type(modules[0]).__module__], "eager_attention_forward", None)
    assert eager is None or named(eager)[:5] == FIRST


def named(function: Callable[..., Any]) -> list[str]:
    """The parameters of a function that have a name; each must take an argument in order and by name."""
    parameters = inspect.signature(function).parameters.values()
    names = [x for x in parameters if x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD)]
    assert {x.kind for x in names} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    return [x.name for x in names]


@pytest.mark.parametrize("function", [sdpa_attention_forward, flash_attention_forward, flex_attention_forward])
def test_attention_functions_of_transformers_take_what_hooks_give(function: Callable[..., Any]) -> None:
    first, rest = named(function)[:5], {*named(function)[5:]}
    assert first == FIRST
    assert rest <= IGNORED_KWARGS | {"position_bias"}  # which the hooks refuse


@pytest.mark.parametrize("override", [ag.EvictionCache.update, States.update])
def test_a_cache_is_updated_with_what_transformers_gives(override: Callable[..., Any]) -> None:
    """An eviction cache hands keys and values on, and takes anything else for a matter of transformers."""
    names = ["self", "key_states", "value_states", "layer_idx"]
    assert named(Cache.update) == names
    assert named(override) == names[:3]
    kinds = [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]
    for function in (Cache.update, override):
        assert [x.kind for x in inspect.signature(function).parameters.values()][-2:] == kinds


def test_caches_of_transformers_change_no_argument_of_attention() -> None:
    """Its paged cache does; if others did, an eviction cache would have to do the same."""
    keys, values, given = torch.ones(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), {"dropout": 0.0}
    returned = DynamicCache().update(keys, values, 0, kwargs=given)
    assert (
        isinstance(returned, tuple)
        and [torch.equal(*x) for x in zip(returned, (keys, values), strict=True)] == [True] * 2
    )
    assert given == {"dropout": 0.0}

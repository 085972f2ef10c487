"""The geometry of a base model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin

from ag.errors import UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

#: Types of layers that attend by a cache of keys and values: to all keys, to the newest keys, or to keys in their own
#: chunk of a text.
ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")


class KVHeads(NamedTuple):
    """The KV heads of a layer."""

    number: int
    key: int  # numbers of a key
    value: int  # numbers of a value, which has fewer in DeepSeek's attention


def fingerprint(model_config: PretrainedConfig) -> dict[str, Any]:
    """Return the geometry of a base model that gates depend on.

    ``num_kv_heads`` is the number in the layers that may have gates, or a list of numbers where these differ.

    Raises:
        UserError: when the configuration describes no decoder with attention heads.
    """
    text = model_config.get_text_config()
    try:
        heads, each, windowed = int(text.num_attention_heads), kv_heads(text), _alternating_windows(text)
        gated = {layer.number for index, layer in enumerate(each) if index not in windowed}
        return {
            "model_type": text.model_type,
            "num_layers": len(each),
            "num_heads": heads,
            "num_kv_heads": sorted(gated) if len(gated) > 1 else max(gated, default=heads),
            "head_dim": max(map(_head_dim, _each(text)), default=text.hidden_size // heads),
            "hidden_size": int(text.hidden_size),
            "windowed_layers": windowed,
        }
    except AttributeError as error:
        raise UserError(f"{type(text).__name__} is not the configuration of a decoder: {error}.") from error


def kv_heads(model_config: PretrainedConfig) -> list[KVHeads]:
    """Return the KV heads of each layer with keys and values; in Gemma 4 windowed layers have more and smaller ones."""
    heads_by_layer = []
    for layer in _each(model_config.get_text_config()):
        size, parts = _head_dim(layer), [int(getattr(layer, f"qk_{x}_head_dim", None) or 0) for x in ("nope", "rope")]
        number = int(getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads)
        value = int(getattr(layer, "v_head_dim", None) or size)
        heads_by_layer.append(KVHeads(number, sum(parts) if all(parts) else size, value))
    return heads_by_layer


def _head_dim(layer: PretrainedConfig) -> int:
    return int(getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads)


def _each(text: PretrainedConfig) -> list[PretrainedConfig]:
    """Return the configuration of each layer with keys and values, which may differ in transformers."""
    layers = attention_layers(text)
    each = getattr(text, "per_layer_config", None) or [text] * (max(layers, default=0) + 1)
    return [each[index] for index in layers]


def attention_layers(model_config: PretrainedConfig) -> list[int]:
    """Return which layers of a decoder hold keys and values, by the cache that transformers would make for it.

    The others keep a state of fixed size (linear attention, state spaces, convolutions), read the keys and values of an
    earlier layer, or keep nothing. Gates and caches count the layers with keys and values of their own alone.
    """
    text = model_config.get_text_config()
    if not (has_other_layers(text) or getattr(text, "kv_sharing_modes", None)):
        return [*range(text.num_hidden_layers)]
    try:
        layers = DynamicCache(config=text).layers
    except KeyError as error:
        raise UserError(f"{type(text).__name__}: no cache of transformers has layers of the type {error}.") from error
    return [index for index, layer in enumerate(layers) if isinstance(layer, CacheLayerMixin)]


def has_other_layers(config: PretrainedConfig) -> bool:
    """Tell whether some layers of a decoder are of another type than attention."""
    return bool({*(getattr(config, "layer_types", None) or ())} - {*ATTENTION})


def chunk_size(config: PretrainedConfig) -> int | None:
    """Return the tokens of the chunks within which some layers of a decoder attend; None means that no layer does."""
    chunked = "chunked_attention" in (getattr(config, "layer_types", None) or ())
    return int(config.attention_chunk_size) if chunked else None


def sliding_windows(model_config: PretrainedConfig) -> list[int | None]:
    """Return the sliding window of each layer with keys and values, in tokens; None where a layer has none."""
    text = model_config.get_text_config()
    window: int | None = getattr(text, "sliding_window", None)
    layers, layer_types = attention_layers(text), getattr(text, "layer_types", None)
    return [window if layer_types is None or layer_types[index] == "sliding_attention" else None for index in layers]


def shared_layers(config: PretrainedConfig) -> dict[int, int]:
    """Return the layers of a decoder that read the keys and values of an earlier one, and which that is."""
    modes, types = getattr(config, "kv_sharing_modes", None) or (), getattr(config, "layer_types", ())
    stored = {types[index]: index for index, mode in enumerate(modes) if mode == "store"}
    return {index: stored[types[index]] for index, mode in enumerate(modes) if mode == "reuse"}


def _alternating_windows(text: PretrainedConfig) -> list[int]:
    """Return the windowed layers, which have no gate, of a model that also has full ones (Gemma's pattern)."""
    types = getattr(text, "layer_types", None) or []
    attention_types = [types[index] for index in attention_layers(text)] if types else []
    windowed = [index for index, kind in enumerate(attention_types) if kind in ATTENTION[1:]]
    return windowed if len(windowed) < len(attention_types) else []

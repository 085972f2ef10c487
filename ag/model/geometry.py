"""The geometry of a base model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin

from ag.errors import UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

#: Types of layers that attend by a cache of keys and values: to all, the newest, or those of the same chunk of a text.
ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")


def fingerprint(model_config: PretrainedConfig) -> dict[str, Any]:
    """Return the geometry of a base model that gates depend on.

    Raises:
        UserError: when the configuration is not that of a decoder with attention heads.
    """
    text = model_config.get_text_config()
    try:
        heads, layers = int(text.num_attention_heads), attention_layers(text)
        sizes = _sizes(text, layers)
        return {
            "model_type": text.model_type,
            "num_layers": len(layers),
            "num_heads": heads,
            "num_kv_heads": sizes["num_key_value_heads"] or heads,
            "head_dim": sizes["head_dim"] or text.hidden_size // heads,
            "hidden_size": int(text.hidden_size),
            "windowed_layers": _alternating_windows(text),
        }
    except AttributeError as error:
        raise UserError(f"{type(text).__name__} is not the configuration of a decoder: {error}.") from error


def entry_sizes(model_config: PretrainedConfig) -> tuple[int, int]:
    """Return the sizes of a key and of a value, which differ in DeepSeek's attention."""
    text, size = model_config.get_text_config(), fingerprint(model_config)["head_dim"]
    parts = [int(getattr(text, f"qk_{part}_head_dim", None) or 0) for part in ("nope", "rope")]
    return (sum(parts) if all(parts) else size), int(getattr(text, "v_head_dim", None) or size)


def _sizes(text: PretrainedConfig, layers: list[int]) -> dict[str, int]:
    """Return the number of KV heads and the largest size of a head, 0 where the configuration does not say.

    Layers may have heads of several sizes (Gemma 4), the smaller of which are held with zeros behind them.

    Raises:
        UserError: when layers have unequal numbers of KV heads.
    """
    each = getattr(text, "per_layer_config", None) or [text] * (max(layers, default=0) + 1)
    found = {
        name: {int(getattr(each[index], name, None) or 0) for index in layers}
        for name in ("num_key_value_heads", "head_dim")
    }
    heads = sorted(found["num_key_value_heads"])
    if len(heads) > 1:
        raise UserError(
            f"{type(text).__name__}: layers have {' and '.join(map(str, heads))} KV heads: expected the same number in "
            "all; use another model."
        )
    return {name: max(values, default=0) for name, values in found.items()}


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


def shared_layers(config: PretrainedConfig) -> dict[int, int]:
    """Return the layers of a decoder that read the keys and values of an earlier one, and which that is."""
    modes, types = getattr(config, "kv_sharing_modes", None) or (), getattr(config, "layer_types", ())
    stored = {types[index]: index for index, mode in enumerate(modes) if mode == "store"}
    return {index: stored[types[index]] for index, mode in enumerate(modes) if mode == "reuse"}


def _alternating_windows(text: PretrainedConfig) -> list[int]:
    """Return the windowed layers, which have no gate, of a model that also has full ones (Gemma's pattern)."""
    types = getattr(text, "layer_types", None) or []
    held = [types[index] for index in attention_layers(text)] if types else []
    windowed = [index for index, kind in enumerate(held) if kind in ATTENTION[1:]]
    return windowed if len(windowed) < len(held) else []

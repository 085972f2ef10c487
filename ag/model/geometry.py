"""The geometry of a base model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ag.errors import UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def fingerprint(model_config: PretrainedConfig) -> dict[str, Any]:
    """Return the geometry of a base model that gates depend on.

    Raises:
        UserError: when the configuration is not that of a decoder with attention heads.
    """
    text = model_config.get_text_config()
    try:
        heads = int(text.num_attention_heads)
        return {
            "model_type": text.model_type,
            "num_layers": int(text.num_hidden_layers),
            "num_heads": heads,
            "num_kv_heads": int(getattr(text, "num_key_value_heads", None) or heads),
            "head_dim": int(getattr(text, "head_dim", None) or text.hidden_size // heads),
            "hidden_size": int(text.hidden_size),
            "windowed_layers": _alternating_windows(text),
        }
    except RuntimeError as error:  # of a configuration that has several values of something, as Gemma 4's
        raise UserError(f"{type(text).__name__}: layers differ in size, expected the same in all: {error}") from error
    except AttributeError as error:
        raise UserError(f"{type(text).__name__} is not the configuration of a decoder: {error}.") from error


def entry_sizes(model_config: PretrainedConfig) -> tuple[int, int]:
    """Return the sizes of a key and of a value, which differ in DeepSeek's attention."""
    text, size = model_config.get_text_config(), fingerprint(model_config)["head_dim"]
    parts = [int(getattr(text, f"qk_{part}_head_dim", None) or 0) for part in ("nope", "rope")]
    return (sum(parts) if all(parts) else size), int(getattr(text, "v_head_dim", None) or size)


def _alternating_windows(text: PretrainedConfig) -> list[int]:
    """Return the windowed layers, which have no gate, of a model that also has full ones (Gemma's pattern)."""
    types = getattr(text, "layer_types", None) or []
    windowed = [index for index, kind in enumerate(types) if kind == "sliding_attention"]
    return windowed if len(windowed) < len(types) else []

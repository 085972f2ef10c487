"""Checks of a model before its first pass under an interceptor."""

from __future__ import annotations

import functools
import inspect
from typing import Any, cast

import torch
from torch import Tensor, nn

from ag.model.hooks import AttentionCall, Interceptor, causal_attention, check_adapter
from ag.model.rope import rope_of, rotate
from ag.model.structure import USE_ANOTHER, UnsupportedModelError, decoder_of, device_of, unwrapped

SERVED = ("full_attention", "sliding_attention")  # layer types whose cache holds a key and a value of each token
INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # of transformers, by which a model finds its attention function
FAR, TOLERANCE = 100, 0.05  # positions between two queries, and the share of a query's length that rounding may change


def check_attention(model: nn.Module) -> None:
    """Raise an :class:`UnsupportedModelError` unless an interceptor can compute the attention of every layer."""
    decoder, base = decoder_of(model), unwrapped(model)
    check_adapter(model)
    for part in base.modules():
        if (
            part is not decoder
            and getattr(part, "get_decoder", lambda: None)() is decoder
            and _makes_masks(cast("Any", type(part)))
        ):
            raise UnsupportedModelError(
                f"{type(part).__name__} makes the attention masks of its {type(decoder).__name__} itself, for images "
                "beside text: expected a model that hands the attention_mask on; load the language model alone."
            )
    kinds = getattr(decoder.config, "layer_types", None) or SERVED[:1] * len(decoder.layers)
    first = decoder.layers[0].self_attn
    for index, layer in enumerate(decoder.layers):
        module: Any = layer.self_attn
        kind: Any = type(getattr(module, "_orig_mod", module))  # that of a compiled module too
        if not hasattr(module, "config") or not _calls_interface(kind):
            does = "computes its attention without the attention interface of transformers"
        elif kinds[index] not in SERVED:
            does = f"is of the type {kinds[index]}: expected {' or '.join(SERVED)}"
        elif getattr(module, "is_causal", True) is False:
            does = "lets tokens see later ones: expected causal attention"
        elif getattr(module, "is_kv_shared_layer", False):
            does = "takes its keys and values from another layer: expected its own"
        elif getattr(module, "head_dim", None) != (size := getattr(first, "head_dim", None)):
            does = f"has heads of {module.head_dim} numbers: expected {size}, as in layer 0"
        elif getattr(module, "num_key_value_groups", None) != getattr(first, "num_key_value_groups", None):
            does = f"has {module.num_key_value_groups} query heads for a KV head: expected as many as in layer 0"
        else:
            causal_attention(module)
            continue
        raise UnsupportedModelError(
            f"{type(decoder).__name__}: layer {index}, a {type(module).__name__}, {does}; {USE_ANOTHER}"
        )
    several = "mrope_section" in (getattr(decoder.config, "rope_parameters", None) or {})
    if several or hasattr(decoder, "embed_positions"):
        does = "gives a token several positions" if several else "learns its positions and counts them by the mask"
        raise UnsupportedModelError(f"{type(decoder).__name__} {does}: expected one rotary position; {USE_ANOTHER}")


@functools.cache
def _makes_masks(kind: Any) -> bool:
    """Whether the forward pass of a class calls a function that creates attention masks."""
    names = inspect.unwrap(kind.forward).__code__.co_names
    return any(name.startswith("create_") and "mask" in name for name in names)


@functools.cache
def _calls_interface(kind: Any) -> bool:
    """Whether some method of an attention class names the table of attention functions."""
    own = [base for base in kind.__mro__ if base not in nn.Module.__mro__]
    methods = [inspect.unwrap(part) for base in own for part in vars(base).values() if inspect.isfunction(part)]
    return any(INTERFACE in method.__code__.co_names for method in methods)


def check_rotations(decoder: Any, what: str, instead: str) -> None:
    """Raise an :class:`UnsupportedModelError` unless queries and keys of every layer can be rotated to other positions.

    ``what`` needs it, and ``instead`` is the fix in the message; the decoder is instrumented.
    """
    attachment = decoder._ag_attachment
    if attachment.unturned is None:
        attachment.unturned = _unturned(decoder)
    if attachment.unturned:
        raise UnsupportedModelError(f"{what}: {type(decoder).__name__} {attachment.unturned}. {instead}")


def check_turns(decoder: Any, positions: str) -> None:
    """Raise an error unless :func:`check_rotations` holds with one RoPE for all layers, and without windows."""
    check_rotations(decoder, f"positions={positions}", "Use positions=original.")
    kinds, window = decoder.rotary_emb.rope_type, getattr(decoder.config, "sliding_window", None)
    layers = getattr(decoder.config, "layer_types", None) or ["sliding_attention"]
    if isinstance(kinds, dict):
        does = f"rotates keys by several RoPEs ({', '.join(kinds)})"
    elif window and "sliding_attention" in layers:
        does = f"attends within a sliding window of {window} tokens, which would move"
    else:
        return
    raise UnsupportedModelError(f"positions={positions}: {type(decoder).__name__} {does}; use positions=original.")


def _unturned(decoder: Any) -> str:
    """Return why :func:`ag.model.hooks.rotate` differs from the model's RoPE, empty if it does not.

    Layers are tried, as some models rotate in some of their layers only, or a part of each key.
    """
    rotary: Any = getattr(decoder, "rotary_emb", None)
    kinds = getattr(rotary, "rope_type", None)
    for index, layer in enumerate(decoder.layers):
        name = decoder.config.layer_types[index] if isinstance(kinds, dict) else ""
        kind = kinds.get(name) if isinstance(kinds, dict) else kinds
        if not isinstance(kind, str) or kind in ("dynamic", "longrope"):
            found = f"{kind or 'no'} RoPE"
            return f"rotates keys by {found}; expected fixed frequencies (default, linear, llama3, yarn)"
        q = _probed(decoder, index, layer)
        turned = 2 * len(getattr(rotary, f"{name}_inv_freq" if name else "inv_freq"))
        if q.shape[-1] != turned:
            return f"rotates {turned} of a key's {q.shape[-1]} dimensions; expected all"
        near, far = q[:, :, :1].float(), q[:, :, 1:].float()
        moved = rotate(decoder, near, torch.full((1, 1, 1), FAR, device=q.device), layer=index)
        if torch.linalg.vector_norm(moved - far) > TOLERANCE * torch.linalg.vector_norm(far):
            return (
                f"does not rotate the keys of layer {index} as those of others; expected the same RoPE in every layer"
            )
    return ""


@torch.no_grad()
def _probed(decoder: Any, index: int, layer: Any) -> Tensor:
    """Return the queries ``[1, H, 2, D]`` of a layer for one hidden state at the positions 0 and ``FAR``."""
    weight, device = decoder.get_input_embeddings().weight, device_of(layer)
    drawn = torch.randn(1, 1, weight.shape[1], generator=torch.Generator().manual_seed(0))
    hidden = drawn.to(device, weight.dtype).expand(-1, 2, -1)
    places = torch.tensor([[0, FAR]], device=device)
    probe = _Probe()
    layer.self_attn(
        hidden_states=hidden,
        position_embeddings=rope_of(decoder, index)[0](hidden, places),
        position_ids=places,
        attention_mask=None,
        gating=probe,
    )
    return probe.q


class _Probe(Interceptor):
    """Records the queries of one layer."""

    q: Tensor

    def attend(self, call: AttentionCall) -> Tensor:
        """Keep the queries."""
        self.q = call.q
        return call.v.repeat_interleave(call.q.shape[1] // call.v.shape[1], 1)

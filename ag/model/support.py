"""Which models an interceptor can serve: checks made before the first forward pass."""

from __future__ import annotations

import copy
import inspect
import itertools
import sys
from typing import Any, NoReturn

import torch
import transformers
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionCacheLayerMixin

from ag.errors import UserError
from ag.model.geometry import ATTENTION, attention_layers, has_other_layers, shared_layers
from ag.model.interceptor import AttentionCall, Interceptor, cache_argument, causal_attention
from ag.model.rope import rope_of, rotate
from ag.model.structure import (
    USE_ANOTHER,
    UnsupportedModelError,
    attention_of,
    attentions_of,
    decoder_of,
    device_of,
)

PARTS = 4, 2  # tokens of the two parts of a text that tries whether states go on
STATE_SCALE = 100.0  # size of the states that replace those of the first part
PROBE_DISTANCE = 100  # positions between two queries
TOLERANCE = 0.05  # share of a query's length that rounding may change


def check_attention(model: nn.Module) -> None:
    """Raise unless an interceptor can compute the attention of every layer as the model does.

    Raises:
        UnsupportedModelError: naming the layer's class, what it does, and what was expected.
    """
    decoder = decoder_of(model)
    check_adapter(model)
    own = [name for name, kind in vars(sys.modules[type(decoder).__module__]).items() if _is_cache_of_its_own(kind)]
    if own:
        raise UnsupportedModelError(
            f"{type(decoder).__name__} keeps the states of its layers in a cache of its own ({own[0]}): expected one "
            f"that reads and writes them through transformers' Cache; {USE_ANOTHER}"
        )
    if has_other_layers(decoder.config) and not hasattr(Cache, "get_conv_state"):
        raise UnsupportedModelError(
            f"{type(decoder).__name__}: layers that do not attend reach into the cache of transformers "
            f"{transformers.__version__}: expected 5.23 or newer; pip install -U transformers."
        )
    types = getattr(decoder.config, "layer_types", None) or ATTENTION[:1] * len(decoder.layers)
    shared = shared_layers(decoder.config)
    for index in sorted([*attention_layers(decoder.config), *shared]):
        module: Any = attention_of(decoder.layers[index])
        if module is None:
            module = getattr(decoder.layers[index], "self_attn", decoder.layers[index])
            does = "computes its attention without the attention interface of transformers"
        elif types[index] not in (*ATTENTION, "hybrid"):
            does = f"is of the type {types[index]}: expected {' or '.join(ATTENTION)}"
        elif getattr(module, "is_causal", True) is False:
            does = "lets tokens see later ones: expected causal attention"
        elif getattr(module, "is_kv_shared_layer", False) and index not in shared:
            does = "takes its keys and values from another layer: expected its own"
        else:
            causal_attention(module)
            continue
        raise UnsupportedModelError(
            f"{type(decoder).__name__}: layer {index}, a {type(module).__name__}, {does}; {USE_ANOTHER}"
        )
    if hasattr(decoder, "embed_positions"):
        raise UnsupportedModelError(
            f"{type(decoder).__name__} learns its positions and counts them by the mask: expected rotary ones; "
            f"{USE_ANOTHER}"
        )


def _is_cache_of_its_own(kind: Any) -> bool:
    """Whether something in the module of a model is a class of caches that transformers has nowhere else."""
    return isinstance(kind, type) and issubclass(kind, Cache) and kind.__module__ != Cache.__module__


def check_rotations(decoder: Any, operation: str, instead: str) -> None:
    """Raise unless queries and keys of every layer can be rotated to other positions by fixed frequencies.

    Args:
        decoder: the model's stack of layers, which is instrumented.
        operation: what needs the rotation, for the message.
        instead: what the user can do, a sentence.

    Raises:
        UnsupportedModelError: the class does not rotate its keys so; the message says what it does.
    """
    attachment = decoder._ag_attachment
    if attachment.rope_mismatch is None:
        attachment.rope_mismatch = _rope_mismatch(decoder)
    if attachment.rope_mismatch:
        raise UnsupportedModelError(f"{operation}: {type(decoder).__name__} {attachment.rope_mismatch}. {instead}")


def has_multiple_positions(decoder: Any) -> bool:
    """Return whether a token has several positions (time, height, width), as in Qwen2-VL."""
    return "mrope_section" in (getattr(decoder.config, "rope_parameters", None) or {})


def check_one_position_per_token(decoder: Any, operation: str) -> None:
    """Raise a ``UserError`` for an operation that takes the length of a text for its next position, if it is not."""
    if has_multiple_positions(decoder):
        raise UserError(
            f"{operation}: tokens of {type(decoder).__name__} have several positions (time, height, width): the "
            "next one of a text does not follow from its length; leave this out, or use a model with one position a "
            "token."
        )


def check_rerotation(decoder: Any, positions: str) -> None:
    """Raise a ``UserError`` unless cached keys can be rotated again: one RoPE for all layers, no sliding windows."""
    check_rotations(decoder, f"positions={positions}", "Use positions=original.")
    types = decoder.rotary_emb.rope_type
    if isinstance(types, dict):
        raise UnsupportedModelError(
            f"positions={positions}: {type(decoder).__name__} rotates keys by several RoPEs ({', '.join(types)}); "
            "expected one for all layers. Use positions=original."
        )
    window = getattr(decoder.config, "sliding_window", None)
    if window and "sliding_attention" in (getattr(decoder.config, "layer_types", None) or ["sliding_attention"]):
        raise UserError(
            f"positions={positions}: {type(decoder).__name__} attends within a sliding window of {window} tokens, "
            "which would move; use positions=original."
        )


@torch.no_grad()
def states_go_on(decoder: Any) -> bool:
    """Tell whether layers that keep states go on from them in a pass of several tokens; Jamba's do not.

    That is tried once for each kind of layers: if we change the states that the first part of a text left, the output
    of the second part must change. The decoder is instrumented.
    """
    attachment = decoder._ag_attachment
    if attachment.goes_on is None:
        attachment.goes_on = not has_other_layers(decoder.config) or _read_in_two_parts(decoder)
    return bool(attachment.goes_on)


def _read_in_two_parts(decoder: Any) -> bool:
    """Tell whether the second part of a text depends on the states of each kind of layers."""
    config, device, draw = decoder.config, device_of(decoder), torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (1, sum(PARTS)), generator=draw).to(device)
    token_positions, called = torch.arange(sum(PARTS), device=device)[None], cache_argument(type(decoder))

    def read(part: slice, states: Cache) -> Tensor:
        inputs = {
            "input_ids": ids[:, part],
            "position_ids": token_positions[:, part],
            called: states,
            "use_cache": True,
        }
        hidden: Tensor = decoder(**inputs).last_hidden_state
        return hidden

    states, second_part = DynamicCache(config=config), slice(PARTS[0], None)
    read(slice(PARTS[0]), states)
    want, types = read(second_part, copy.deepcopy(states)), dict[Any, list[int]]()
    for index, layer in enumerate(states.layers):
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            types.setdefault((type(decoder.layers[index]), config.layer_types[index]), []).append(index)
    for layers, name in itertools.product(types.values(), ("conv_states", "recurrent_states")):
        other = copy.deepcopy(states)
        changed = [x for index in layers for x in getattr(other.layers[index], name).values() if x is not None]
        for x in changed:  # large, so that what follows moves by more than rounding
            x.copy_(STATE_SCALE * torch.randn(x.shape, generator=draw))
        if changed and torch.equal(read(second_part, other), want):
            return False
    return True


def _rope_mismatch(decoder: Any) -> str:
    """Return how :func:`ag.model.rope.rotate` differs from the model's RoPE, in words; empty if they agree.

    Layers are tried: some models rotate in some of their layers only, or a part of each key, which no name tells.
    """
    if has_multiple_positions(decoder):
        return "rotates each key by several positions; expected one for each token"
    rotary: Any = getattr(decoder, "rotary_emb", None)
    types = getattr(rotary, "rope_type", None)
    apply = getattr(sys.modules[type(decoder).__module__], "apply_rotary_pos_emb", None)
    if apply is None or not {"q", "k", "cos", "sin"} <= {*inspect.signature(apply).parameters}:
        return "rotates keys by a function of its own; expected apply_rotary_pos_emb(q, k, cos, sin)"
    layers = attention_layers(decoder.config)
    for index, attention in enumerate(attentions_of(decoder)):
        name = decoder.config.layer_types[layers[index]] if isinstance(types, dict) else ""
        kind = types.get(name) if isinstance(types, dict) else types
        if not isinstance(kind, str) or kind in ("dynamic", "longrope"):
            label = f"{kind or 'no'} RoPE"
            return f"rotates keys by {label}; expected fixed frequencies (default, linear, llama3, yarn)"
        q = _probed(decoder, index, attention)
        rotated_size = 2 * len(getattr(rotary, f"{name}_inv_freq" if name else "inv_freq"))
        if q.shape[-1] != rotated_size:
            return f"rotates {rotated_size} of a key's {q.shape[-1]} dimensions; expected all"
        first_query, second_query = q[:, :, :1].float(), q[:, :, 1:].float()
        moved = rotate(decoder, first_query, torch.full((1, 1, 1), PROBE_DISTANCE, device=q.device), layer=index)
        if torch.linalg.vector_norm(moved - second_query) > TOLERANCE * torch.linalg.vector_norm(second_query):
            return (
                f"does not rotate the keys of layer {index} as those of others; expected the same RoPE in every layer"
            )
    return ""


@torch.no_grad()
def _probed(decoder: Any, index: int, attention: Any) -> Tensor:
    """Return queries ``[1, H, 2, D]`` of one hidden state at positions 0 and ``PROBE_DISTANCE``."""
    weight, device = decoder.get_input_embeddings().weight, device_of(attention)
    drawn = torch.randn(1, 1, weight.shape[1], generator=torch.Generator().manual_seed(0))
    hidden = drawn.to(device, weight.dtype).expand(-1, 2, -1)
    token_positions = torch.tensor([[0, PROBE_DISTANCE]], device=device)
    probe, names = _Probe(), inspect.signature(type(attention).forward).parameters
    attention(
        hidden_states=hidden,
        position_embeddings=rope_of(decoder, index)[0](hidden, token_positions),
        position_ids=token_positions,
        attention_mask=None,
        gating=probe,
        **({"shared_kv_states": {}} if "shared_kv_states" in names else {}),
    )
    return probe.q


class _Probe(Interceptor):
    """Takes the queries of one layer; attends to nothing."""

    q: Tensor

    def attend(self, call: AttentionCall) -> Tensor:
        """Keep the queries."""
        self.q = call.q
        return call.v.repeat_interleave(call.q.shape[1] // call.v.shape[1], 1)


# ---- of one forward pass


def check_adapter(model: Any) -> None:
    """Refuse an active adapter of PEFT that puts keys, values or embeddings of its own before the text."""
    config = getattr(model, "active_peft_config", None)
    if config is not None and config.is_prompt_learning:
        raise UnsupportedModelError(
            f"The model has an adapter of the type {config.peft_type.value}, whose tokens, or a cache of PEFT's, come "
            "before the text: expected LoRA, or another type that adapts weights."
        )


def check_end(mask: Tensor) -> None:
    """Refuse a mask under which the text of some sequence ends before the last column."""
    if mask.ndim != 2 or not bool(mask[:, -1:].all()):
        raise UserError(
            f"attention_mask {tuple(mask.shape)}: expected [B, T] without padding in its last column, from which a "
            'text is continued; give tokenizer(..., padding_side="left").'
        )


def refuse_noncausal(decoder: Any) -> NoReturn:
    """Refuse tokens that see later ones where these come in another pass, or under flags."""
    raise UserError(
        f"{type(decoder).__name__}: tokens of an image see later ones: expected the whole prompt in one pass, dense, "
        "with all its images; leave prefill_chunk_size and the schedule blocks out, and give images before the answer."
    )


def refuse_unreached(decoder: Any, attended: list[int]) -> NoReturn:
    """Refuse a pass where some layer did not attend exactly once under the interceptor."""
    index = next(index for index, times in enumerate(attended) if times != 1)
    does = f"{type(decoder._ag_attachment.modules[index]).__name__} attends "
    does += f"twice in layer {index}" if attended[index] else f"without the gates or the cache in layer {index}"
    if max(attended) == 0:
        does = f"{type(decoder).__name__} does not hand keyword arguments on to its layers"
    raise UnsupportedModelError(f"{does}: expected one attention a layer under gates or a cache; {USE_ANOTHER}")

"""How an interceptor takes part in the forward pass of a Hugging Face model.

An *interceptor* (:class:`Interceptor`: the gates of a training step, or the forward pass of an eviction cache) arrives
as the keyword argument ``gating``, or as the attribute ``interceptor`` of the model's cache, which is an ordinary
``Cache`` of transformers. The decoder's forward gives it the padding, and runs the tokens in the passes that it yields
(``decoder_pass.py``); a hook on each attention module gives it the hidden states; the attention function gives it q, k
and v. After a pass every layer must have attended once. ``model.generate`` tells it the text (``generation.py``).

Without an interceptor the model's own attention runs. Nothing global changes: each attention module gets a shallow copy
of the configuration, whose attention implementation is ``ag``, so that recomputation under gradient checkpointing goes
the interceptor's way too. Nothing changes during a pass either, so that several threads may use one model.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from ag.kernels.softmax import Softmax
from ag.model.decoder_pass import run_decoder
from ag.model.generation import generate, prepare_inputs
from ag.model.geometry import attention_layers, chunk_size, has_other_layers, kv_heads, shared_layers
from ag.model.hybrid import taken
from ag.model.interceptor import AttentionCall, Interceptor, OwnConfig, interceptor_in, with_cache_argument
from ag.model.products import ThreadedLayers
from ag.model.rope import RopeByText, changing_length
from ag.model.structure import (
    USE_ANOTHER,
    UnsupportedModelError,
    attention_of,
    decoder_of,
    own_config,
    unwrapped,
)

IMPLEMENTATION = "ag"
WINDOW_MASK = "create_sliding_window_causal_mask"  # of transformers
#: Arguments of attention functions that do not change what an :class:`AttentionCall` computes: its own fields,
#: positions (queries and keys are rotated already), and settings of outputs and losses.
HARMLESS = frozenset(
    ["dropout", "scaling", "sliding_window", "softcap", "s_aux", "is_causal", "position_ids", "cache_position"]
    + ["use_cache", "output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep"]
    + ["num_items_in_batch", "token_type_ids", "mm_token_type_ids"]
)


class Site(NamedTuple):
    """A module that attends, and its place in the model."""

    number: int  # of the module, among all that attend
    layer: int  # whose keys and values it reads, among the layers that have some
    shared: bool  # whether an earlier module made them
    chunk: int | None
    kind: str  # the type of the layer; models make one mask for each type
    kv_heads: int
    window: int | None  # tokens of the sliding window in the model's own mask for the layer; None means no window


@dataclass
class Attachment:
    """The changes of :func:`instrument`, kept on the decoder so that :func:`restore` can undo them."""

    base: nn.Module
    handles: list[Any]  # each has a method remove
    modules: list[Any]  # the modules that attend, in order
    forward: Callable[..., Any] | None  # the decoder's, where another library had replaced it (accelerate)
    hybrid: bool  # whether some layers do not attend
    rope: RopeByText | None  # None means that its frequencies do not depend on the length of a text
    gates: nn.Module | None = None  # see ag.gates.attach
    unturned: str | None = None  # see ag.model.support.check_rotations; None before its first call
    goes_on: bool | None = None  # see ag.model.support.states_go_on; None before its first call


def instrument(model: nn.Module) -> Attachment:
    """Install the hooks and the attention function once; a second call returns the first one's record.

    Raises:
        UnsupportedModelError: when the model class does not use the attention interface of transformers.
    """
    decoder = decoder_of(model)
    existing: Attachment | None = getattr(decoder, "_ag_attachment", None)
    if existing is not None:
        return existing
    handles: list[Any] = []
    modules, changes = [], changing_length(decoder)
    for site, module in _sites(decoder):
        handles.append(module.register_forward_pre_hook(partial(_before_attention, site), with_kwargs=True))
        modules.append(module)
        module._ag_own_config = module.config
        module.config = copy.copy(module.config)
        module.config._attn_implementation = IMPLEMENTATION
    base = unwrapped(model)
    threaded = ThreadedLayers(base)
    handles += [base.register_forward_pre_hook(partial(_before_model, threaded), with_kwargs=True), threaded]
    hybrid = has_other_layers(decoder.config)
    rope = None if changes is None else RopeByText(decoder, changes)
    handles += [] if rope is None else [rope]
    attachment = decoder._ag_attachment = Attachment(base, handles, modules, vars(decoder).get("forward"), hybrid, rope)
    decoder.forward = partial(run_decoder, decoder, decoder.forward)
    base.generate = partial(generate, base)
    if hasattr(base, "prepare_inputs_for_generation"):
        prepare = partial(prepare_inputs, base)
        base.prepare_inputs_for_generation = functools.update_wrapper(prepare, base.prepare_inputs_for_generation)
    return attachment


def _sites(decoder: Any) -> Iterator[tuple[Site, Any]]:
    """Yield each module that attends, and where that is."""
    config = decoder.config
    places = {index: place for place, index in enumerate(attention_layers(config))}
    shared, types = shared_layers(config), getattr(config, "layer_types", None) or ()
    modules = {index: attention_of(decoder.layers[index]) for index in sorted([*places, *shared])}
    heads, masked = kv_heads(config), _masks_windows(type(decoder))
    for number, (index, module) in enumerate(modules.items()):
        kind, place = types[index] if types else "full_attention", places[shared.get(index, index)]
        chunk = chunk_size(config) if kind == "chunked_attention" else None
        windowed = kind == "sliding_attention" if types else masked
        window = getattr(config, "sliding_window", None) if windowed else None
        yield Site(number, place, index in shared, chunk, kind, heads[place].number, window), module


def _masks_windows(decoder: Any) -> bool:
    """Tell whether a class of decoders makes a mask with a sliding window for layers that have no types."""
    return WINDOW_MASK in inspect.unwrap(decoder.forward).__code__.co_names


def restore(model: nn.Module) -> None:
    """Undo everything that this library did to a model; does nothing to an untouched one."""
    decoder = decoder_of(model)
    attachment: Attachment | None = getattr(decoder, "_ag_attachment", None)
    if attachment is None:
        return
    for handle in attachment.handles:
        handle.remove()
    for module in attachment.modules:
        module.config = module._ag_own_config
        del module._ag_own_config
    for name in ("generate", "prepare_inputs_for_generation"):
        vars(attachment.base).pop(name, None)
    if getattr(vars(decoder)["forward"], "func", None) is not run_decoder:  # accelerate hooked the decoder since
        decoder._old_forward = attachment.forward or type(decoder).forward.__get__(decoder)
    elif attachment.forward is not None:
        decoder.forward = attachment.forward
    else:
        del decoder.forward
    del decoder._ag_attachment


def _before_model(threaded: ThreadedLayers, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    renamed, interceptor = with_cache_argument(type(model), kwargs), interceptor_in(kwargs)
    if interceptor is not None and not torch.compiler.is_compiling():
        interceptor.padding = kwargs.get("attention_mask")
        given = (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args[:1])
        threaded.begin([model, *interceptor.modules], next(x for x in given if isinstance(x, Tensor)))
    return None if renamed is kwargs else (args, renamed)


def _before_attention(site: Site, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    interceptor = interceptor_in(kwargs)
    kwargs.pop("gating", None)
    if interceptor is None:
        return None
    hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    if not site.shared:
        how = interceptor.arranged
        interceptor.enter_layer(site.layer, hidden if how is None else how.aligned(hidden, 1))
    return args, kwargs | {"ag_interceptor": interceptor, "ag_site": site}


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    ag_interceptor: Interceptor | None = None,
    ag_site: Site | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute the attention of a layer by the interceptor, or by the model's own function without one."""
    if ag_interceptor is None or ag_site is None:
        eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        own: Any = ALL_ATTENTION_FUNCTIONS.get_interface(own_config(module)._attn_implementation, eager)
        result: tuple[Tensor, Tensor | None] = own(OwnConfig(module), query, key, value, attention_mask, **kwargs)
        return result
    said = {name for name, value in kwargs.items() if value is not None and value is not False}
    unknown = sorted(said - HARMLESS)
    own_mask = attention_mask is not None and not (isinstance(attention_mask, Tensor) and attention_mask.numel() == 1)
    if unknown or own_mask or kwargs.get("is_causal") is False:  # a mask of one number is what _decode gave
        does = f"says {', '.join(unknown)} to its attention function" if unknown else "is not causal (is_causal=False)"
        does = "makes a mask or a bias of its own" if own_mask else does
        raise UnsupportedModelError(
            f"{type(module).__name__} {does}, which gates and eviction caches leave out; {USE_ANOTHER}"
        )
    if key.shape[1] != ag_site.kv_heads:
        raise UnsupportedModelError(
            f"{type(module).__name__} attends with {key.shape[1]} KV heads: expected {ag_site.kv_heads}, as its "
            f"configuration says; {USE_ANOTHER}"
        )
    how, columns = ag_interceptor.arranged, ag_interceptor.columns
    scaling = query.shape[-1] ** -0.5 if kwargs.get("scaling") is None else kwargs["scaling"]
    own = ag_interceptor.masks.get(ag_site.kind)
    if own is not None and columns is not None:
        for dim in (2, 3):
            own = taken(own.expand(len(columns), -1, -1, -1), columns.clamp_min(0), dim)
    if how is not None:
        query, key, value = (how.aligned(x, 2) for x in (query, key, value))
    call = AttentionCall(
        module,
        ag_site.layer,
        query,
        key,
        value,
        scaling,
        kwargs.get("sliding_window", ag_site.window),  # some models (Phi-3.5-MoE, Qwen2-MoE) leave it to the mask
        Softmax(kwargs.get("softcap"), kwargs.get("s_aux")),
        ag_site.chunk,
        ag_site.shared,
        own,
    )
    if ag_interceptor.attended is not None:
        ag_interceptor.attended[ag_site.number] += 1
    out = ag_interceptor.attend(call)
    if how is not None:
        out = how.put_back(out, 2)
    rate = kwargs.get("dropout", 0.0)
    return F.dropout(out, rate, module.training).transpose(1, 2).contiguous(), None


AttentionInterface.register(IMPLEMENTATION, _attention)

"""Installs hooks in a Hugging Face model, so that an interceptor takes part in its forward pass; undoes it too.

An *interceptor* (:class:`ag.model.interceptor.Interceptor`: the gates of a training step, or the forward pass of an
eviction cache) arrives as the keyword argument ``gating``, or as the attribute ``interceptor`` of the model's cache,
which is an ordinary ``Cache`` of transformers. The decoder's forward gives it the padding, and runs the tokens in the
passes that it yields; a hook on each attention module gives it the hidden states; the attention function gives it q, k
and v (``decoder_pass.py``). After a pass every layer must have attended once. ``model.generate`` tells it the text
(``generation.py``).

Without an interceptor the model's own attention runs. Nothing global changes: each attention module gets a shallow copy
of the configuration, whose attention implementation is ``ag``, so that recomputation under gradient checkpointing goes
the interceptor's way too. Nothing changes during a pass either, so that several threads may use one model.
"""

from __future__ import annotations

import copy
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from transformers.modeling_utils import AttentionInterface

from ag.model.decoder_pass import AttentionModuleInfo, attention, before_attention, before_model, run_decoder
from ag.model.generation import generate, prepare_inputs
from ag.model.geometry import attention_layers, chunk_size, has_other_layers, kv_heads, shared_layers
from ag.model.products import ThreadedLayers
from ag.model.rope import RopeByText, changing_length
from ag.model.structure import (
    attention_of,
    decoder_of,
    unwrapped,
)

IMPLEMENTATION = "ag"
WINDOW_MASK = "create_sliding_window_causal_mask"  # of transformers
LOCK = threading.RLock()  # held while hooks are installed or removed: two threads may make the first caches of a model


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
    rope_mismatch: str | None = None  # see ag.model.support.check_rotations; None before its first call
    goes_on: bool | None = None  # see ag.model.support.states_go_on; None before its first call


def instrument(model: nn.Module) -> Attachment:
    """Install the hooks and the attention function once; a second call returns the first one's record.

    Raises:
        UnsupportedModelError: when the model class does not use the attention interface of transformers.
    """
    decoder = decoder_of(model)
    with LOCK:
        existing: Attachment | None = getattr(decoder, "_ag_attachment", None)
        return existing if existing is not None else _install(unwrapped(model), decoder)


def _install(base: Any, decoder: Any) -> Attachment:
    """Install the hooks and the attention function in a model, and keep the record on its decoder."""
    handles: list[Any] = []
    modules, changes = [], changing_length(decoder)
    for site, module in _attention_modules(decoder):
        handles.append(module.register_forward_pre_hook(partial(before_attention, site), with_kwargs=True))
        modules.append(module)
        module._ag_own_config = module.config
        module.config = copy.copy(module.config)
        module.config._attn_implementation = IMPLEMENTATION
    threaded = ThreadedLayers(base)
    handles += [base.register_forward_pre_hook(partial(before_model, threaded), with_kwargs=True), threaded]
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


def _attention_modules(decoder: Any) -> Iterator[tuple[AttentionModuleInfo, Any]]:
    """Yield each module that attends, and where that is."""
    config = decoder.config
    kv_layers = {index: number for number, index in enumerate(attention_layers(config))}
    shared, types = shared_layers(config), getattr(config, "layer_types", None) or ()
    modules = {index: attention_of(decoder.layers[index]) for index in sorted([*kv_layers, *shared])}
    heads, masked = kv_heads(config), _masks_windows(type(decoder))
    for number, (index, module) in enumerate(modules.items()):
        kind, kv_layer = types[index] if types else "full_attention", kv_layers[shared.get(index, index)]
        chunk = chunk_size(config) if kind == "chunked_attention" else None
        windowed = kind == "sliding_attention" if types else masked
        window = getattr(config, "sliding_window", None) if windowed else None
        yield (
            AttentionModuleInfo(number, kv_layer, index in shared, chunk, kind, heads[kv_layer].number, window),
            module,
        )


def _masks_windows(decoder: Any) -> bool:
    """Tell whether a class of decoders makes a mask with a sliding window for layers that have no types."""
    return WINDOW_MASK in inspect.unwrap(decoder.forward).__code__.co_names


def restore(model: nn.Module) -> None:
    """Undo everything that this library did to a model; does nothing to an untouched one."""
    decoder = decoder_of(model)
    with LOCK:
        attachment: Attachment | None = getattr(decoder, "_ag_attachment", None)
        if attachment is not None:
            _uninstall(decoder, attachment)


def _uninstall(decoder: Any, attachment: Attachment) -> None:
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


AttentionInterface.register(IMPLEMENTATION, attention)

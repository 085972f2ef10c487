"""How an interceptor takes part in a Hugging Face model's forward pass: hooks, attention interface, decoder and head.

An *interceptor* (:class:`Interceptor`: the gates of a training step, or an eviction cache) arrives as a keyword argument:
``gating``, or the model's own for a cache (:func:`cache_argument`). The decoder's forward passes it the padding, and runs the tokens in blocks if it asks
for them; a hook on each attention module passes it the hidden states; the attention function passes it q, k and v.
Without one the model's own attention runs. Nothing global changes: each attention module gets its own shallow copy of
the configuration, whose attention implementation is ``ag``, so that recomputation under gradient checkpointing takes
the same path.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from ag.errors import UserError
from ag.kernels.gated_attention import gated_attention
from ag.kernels.softmax import PLAIN, Softmax
from ag.model.products import ThreadedLayers

IMPLEMENTATION = "ag"


class UnsupportedModelError(UserError, TypeError):
    """A model class that cannot take a custom attention function."""


@dataclass
class AttentionCall:
    """One call of a layer's attention: q ``[B, H, T, D]``, k and v ``[B, Hkv, T, D]`` of the new tokens, post-RoPE.

    Measurements are kept in ``memo``, so that the parts of a policy, and caches that share a forward pass, make each of
    them once.
    """

    module: nn.Module
    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    scaling: float
    window: int | None
    softmax: Softmax = PLAIN
    memo: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def dense(self, valid: Tensor | None, left_padded: bool) -> Tensor:
        """Attend causally to every new token, ``[B, H, T, D]``; by the model's own implementation where it can.

        Args:
            valid: ``[B, T]`` bool, or None without padding.
            left_padded: whether some row starts with padding (padding on the right is never seen).
        """
        windowed = self.window is not None and self.q.shape[2] > self.window
        if left_padded or windowed or not self.softmax.plain:
            options: dict[str, Any] = {"scaling": self.scaling, "window": self.window, "softmax": self.softmax}
            return gated_attention(self.q, self.k, self.v, None, valid, **options)
        with _own_config(self.module) as name:
            own = ALL_ATTENTION_FUNCTIONS["sdpa" if name == "eager" else name]  # eager needs an n^2 mask to be causal
            out: Tensor = own(self.module, self.q, self.k, self.v, None, dropout=0.0, scaling=self.scaling)[0]
        return out.transpose(1, 2)


class Interceptor(ABC):
    """What to do in each layer of a forward pass."""

    reached = False  # whether some layer was entered, ever

    def begin(self, decoder: nn.Module, attention_mask: Tensor | None, batch: int, length: int) -> None:
        """Start a forward pass over ``[B, T]`` new tokens; the mask is ``[B, seen + T]``, nonzero on real tokens."""
        return None

    def modules(self) -> list[nn.Module]:
        """Return the modules that run in a forward pass beside the model's."""
        return []

    def note(self, tokens: Tensor) -> None:
        """Look at the ids ``[B, T]`` or embeddings ``[B, T, d]`` of the new tokens, after :meth:`begin`."""
        return None

    def blocks(self) -> Iterator[Tensor] | None:
        """Yield the columns ``[B, w]`` of the new tokens to read next, -1 for none; None: all are read at once."""
        return None

    def positions(self, given: Tensor | None, columns: Tensor | None) -> Tensor | None:
        """Return the positions ``[B, w]`` for the rotary embedding of the tokens in ``columns``, or of all new ones.

        Args:
            given: ``position_ids`` ``[B or 1, T]`` of all new tokens as the caller gave them, or None.
            columns: ``[B, w]``, or None for all.
        """
        return given

    def finish(self, states: Tensor) -> Tensor:
        """Return the final hidden states ``[B, T, d]`` of the new tokens as the model's head is to see them."""
        return states

    def expect(self, valid: Tensor, tokens: Tensor | None = None) -> None:
        """Announce the whole text: what was seen of it, and the rest, which comes in one or several passes.

        Args:
            valid: ``[B, T]`` bool, False on padding.
            tokens: ``[B, T]`` ids, where they are known.
        """
        return None

    def saw(self, tokens: Tensor) -> None:
        """Record the text ``[B, T]`` after generation; its last token may not have been read yet."""
        return None

    def enter_layer(self, layer: int, hidden: Tensor) -> None:
        """Look at the hidden states ``[B, T, d]`` that enter the attention of a layer."""
        return None

    @abstractmethod
    def attend(self, call: AttentionCall) -> Tensor:
        """Compute the attention output ``[B, H, T, D]``."""


class Change(Protocol):
    """A change of a model, as torch's handles of hooks are."""

    def remove(self) -> None:
        """Undo it."""


@dataclass
class Attachment:
    """What :func:`instrument` changed, kept on the decoder so that :func:`restore` can undo it."""

    base: nn.Module
    handles: list[Change]
    configs: list[tuple[nn.Module, PretrainedConfig]]
    forward: Callable[..., Any] | None  # the decoder's, where it had one of its own (accelerate's hooks)
    gates: nn.Module | None = None  # see ag.gates.attach
    unturned: str | None = None  # see ag.model.support.check_rotations; None: not asked yet


def device_of(module: nn.Module) -> torch.device:
    """Return the device a module runs on: that of its weights, or, while these are offloaded, of accelerate's hooks."""
    device = next(module.parameters()).device
    if device.type != "meta":
        return device
    hooks = (getattr(part, "_hf_hook", None) for part in module.modules())
    found = (getattr(hook, "execution_device", None) for hook in hooks)
    return torch.device(next((device for device in found if device is not None), "cpu"))


def instrument(model: nn.Module) -> Attachment:
    """Install the hooks and the attention function once; a second call returns the first one's record.

    Raises:
        TypeError: when the model class does not use the attention interface of transformers.
    """
    decoder = decoder_of(model)
    existing: Attachment | None = getattr(decoder, "_ag_attachment", None)
    if existing is not None:
        return existing
    handles: list[Change] = []
    configs = []
    for index, layer in enumerate(decoder.layers):
        module = layer.self_attn
        handles.append(module.register_forward_pre_hook(partial(_before_attention, index), with_kwargs=True))
        configs.append((module, module.config))
        module.config = copy.copy(module.config)
        module.config._attn_implementation = IMPLEMENTATION
        module._ag_own_config = configs[-1][1]
    base = _unwrapped(model)
    handles += ThreadedLayers(base, partial(_running, base)).handles
    attachment = decoder._ag_attachment = Attachment(base, handles, configs, vars(decoder).get("forward"))
    decoder.forward = partial(_decode, decoder, decoder.forward)
    base.generate = partial(_generate, base)
    return attachment


def _running(base: nn.Module, kwargs: dict[str, Any]) -> list[nn.Module]:
    """Return the modules that run in a forward pass with such keyword arguments; none without an interceptor."""
    interceptor = interceptor_in(kwargs)
    return [] if interceptor is None else [base, *interceptor.modules()]


def interceptor_in(kwargs: Mapping[str, Any]) -> Interceptor | None:
    """Return the interceptor among the keyword arguments of a forward pass, whatever its name; None without one.

    Gates (``gating``) come before a cache.
    """
    given = kwargs.get("gating")
    return next((x for x in (given, *kwargs.values()) if isinstance(x, Interceptor)), None)


@functools.cache
def cache_argument(model: type[nn.Module]) -> str:
    """Return what a class of models calls the cache in its forward pass: ``cache`` since transformers 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def restore(model: nn.Module) -> None:
    """Undo everything that this library did to a model; does nothing to an untouched one."""
    decoder = decoder_of(model)
    attachment: Attachment | None = getattr(decoder, "_ag_attachment", None)
    if attachment is None:
        return
    for handle in attachment.handles:
        handle.remove()
    for module, config in attachment.configs:
        module.config = config  # type: ignore[assignment]
        del module._ag_own_config
    vars(attachment.base).pop("generate", None)
    if getattr(vars(decoder)["forward"], "func", None) is not _decode:  # accelerate hooked the decoder since
        decoder._old_forward = attachment.forward or type(decoder).forward.__get__(decoder)
    elif attachment.forward is not None:
        decoder.forward = attachment.forward
    else:
        del decoder.forward
    del decoder._ag_attachment


def decoder_of(model: nn.Module) -> Any:
    """Return the stack of layers inside a causal language model, through PEFT's wrapper.

    Raises:
        TypeError: when there is none, or it does not use the attention interface.
    """
    base = _unwrapped(model)
    decoder = base.get_decoder() if hasattr(base, "get_decoder") else base
    layers = getattr(decoder, "layers", ())
    supported = isinstance(base, PreTrainedModel) and base._supports_attention_backend
    if not (supported and layers and all(getattr(layer, "self_attn", None) is not None for layer in layers)):
        raise UnsupportedModelError(
            f"{type(base).__name__} does not use the attention interface of transformers (layers with self_attn and "
            "_supports_attention_backend); use a model that does, such as Llama, Mistral, Qwen2 or Qwen3."
        )
    return decoder


def lm_head(model: nn.Module) -> nn.Module:
    """Return the language model head."""
    head: nn.Module = _unwrapped(model).get_output_embeddings()
    return head


def lm_logits(model: nn.Module, hidden: Tensor) -> Tensor:
    """Compute the logits of final hidden states ``[..., d]`` as the model does: by its head, its scales, its soft cap.

    The model's own forward pass runs, on a shallow copy that has the states in place of the stack of layers.
    """
    base, decoder = _unwrapped(model), decoder_of(model)
    states = hidden.reshape(1, -1, hidden.shape[-1])
    reader = next(name for name, part in base.named_children() if any(module is decoder for module in part.modules()))
    behind = copy.copy(base)
    behind._modules = base._modules | {reader: _Read(states)}
    out = type(base).forward(behind, inputs_embeds=states, use_cache=False, return_dict=True)
    logits: Tensor = out.logits
    return logits.view(*hidden.shape[:-1], logits.shape[-1])


class _Read:
    """A stack of layers that has read its tokens: it returns itself as its output, which has nothing but the states."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __call__(self, *args: Any, **kwargs: Any) -> _Read:
        return self

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None

    @property
    def decoder(self) -> _Read:
        """Stand for the part of it that some models call (OPT)."""
        return self


def _unwrapped(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _generate(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Generate, and tell the cache the text and where the prompt ends, which chunks and drafts do not show."""
    cache = interceptor_in(kwargs)
    given = (*args[:1], *(kwargs.get(name) for name in ("inputs", "input_ids", "inputs_embeds")))
    tokens = next((x for x in given if x is not None), None)
    if cache is None or tokens is None:
        return type(model).generate(model, *args, **kwargs)
    mask, ids = kwargs.get("attention_mask"), tokens if tokens.ndim == 2 else None
    cache.expect(torch.ones(tokens.shape[:2], dtype=torch.bool) if mask is None else mask.bool(), ids)
    output = type(model).generate(model, *args, **kwargs)
    text = getattr(output, "sequences", output)
    if ids is not None and isinstance(text, Tensor):
        cache.saw(text)
    return output


def _decode(decoder: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run the decoder under an interceptor, or as it is when there is none."""
    named = kwargs
    if args:
        names = list(inspect.signature(type(decoder).forward).parameters)[1:]
        named = dict(zip(names, args, strict=False)) | kwargs
    interceptor = interceptor_in(named)
    if interceptor is None:
        return forward(*args, **kwargs)
    name = "input_ids" if named.get("inputs_embeds") is None else "inputs_embeds"
    tokens: Tensor = named[name]
    interceptor.begin(decoder, named.get("attention_mask"), tokens.shape[0], tokens.shape[1])
    interceptor.note(tokens)
    # transformers passes a 4-dimensional mask through, so it builds no n^2 mask; the interceptor knows the padding
    named["attention_mask"] = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=tokens.device)
    given, blocks = named.pop("position_ids", None), interceptor.blocks()
    if blocks is None:
        out = forward(**named, position_ids=interceptor.positions(given, None))
    else:
        parts = []
        for columns in blocks:
            index = columns.clamp_min(0).to(tokens.device)
            part = tokens.gather(1, index) if tokens.ndim == 2 else tokens.gather(1, _wide(index, tokens))
            parts.append((columns, forward(**named | {name: part}, position_ids=interceptor.positions(given, columns))))
        out = _joined(parts, tokens.shape[1])
    if not interceptor.reached:
        raise UnsupportedModelError(
            f"{type(decoder).__name__} does not hand keyword arguments on to its layers: no gate would see anything; "
            "use a model such as Llama, Mistral, Qwen2 or Qwen3."
        )
    if hasattr(out, "last_hidden_state"):  # not a tuple
        out.last_hidden_state = interceptor.finish(out.last_hidden_state)
    return out


def _joined(parts: list[tuple[Tensor, Any]], length: int) -> Any:
    """Put the outputs of blocks back into their columns."""

    def join(outputs: list[Tensor]) -> Tensor:
        first = outputs[0]
        # the last column takes outputs of no token
        whole = first.new_zeros(first.shape[0], length + 1, *first.shape[2:])
        for (columns, _), output in zip(parts, outputs, strict=True):
            whole.scatter_(1, _wide(columns.where(columns >= 0, length).to(output.device), output), output)
        return whole[:, :length]

    out = parts[-1][1]
    out.last_hidden_state = join([part.last_hidden_state for _, part in parts])
    if out.hidden_states is not None:
        out.hidden_states = tuple(map(join, map(list, zip(*(part.hidden_states for _, part in parts), strict=True))))
    return out


def _wide(index: Tensor, like: Tensor) -> Tensor:
    return index[:, :, None].expand(-1, -1, like.shape[-1])


def rope_of(decoder: Any, layer: int) -> tuple[Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], float]:
    """Return what makes cosines and sines ``[B, T, D]`` like x for positions ``[B, T]`` in a layer, and their scaling.

    Some models have a RoPE for each type of layers (Gemma 3).
    """
    rotary = decoder.rotary_emb
    if not isinstance(rotary.rope_type, dict):
        return rotary, rotary.attention_scaling
    kind = decoder.config.layer_types[layer]
    return partial(rotary, layer_type=kind), getattr(rotary, f"{kind}_attention_scaling")


def rotate(decoder: Any, x: Tensor, positions: Tensor, span: int = 1, layer: int = 0) -> Tensor:
    """Rotate queries or keys further by positions, as the model's RoPE does; negative ones turn back.

    Args:
        decoder: the model's stack of layers.
        x: ``[B, H, n, D]``, already scaled as the model's RoPE scales (yarn).
        positions: ``[B or 1, H or 1, n or 1]``, whole or not.
        span: rotate by the mean of so many positions, from each of these on.
        layer: index of the layer, where layers have several RoPEs.
    """
    apply = sys.modules[type(decoder).__module__].apply_rotary_pos_emb
    positions = positions.expand(len(x), -1, -1)
    steps = (positions[..., None] + torch.arange(span, device=positions.device)).flatten(1)
    rope, scaling = rope_of(decoder, layer)
    cos, sin = (part / scaling for part in rope(x.float(), steps))
    cos, sin = (  # a rotation is linear in both
        part.unflatten(1, (*positions.shape[1:], span)).mean(3).expand(-1, x.shape[1], -1, -1).flatten(0, 1)
        for part in (cos, sin)
    )
    flat = x.float().flatten(0, 1)
    turned: Tensor = apply(flat[:, None], flat[:, None][:, :0], cos, sin)[0]
    return turned.view_as(x).to(x.dtype)


def _before_attention(index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    interceptor = interceptor_in(kwargs)
    kwargs.pop("gating", None)
    if interceptor is None:
        return None
    interceptor.reached = True
    interceptor.enter_layer(index, kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])
    return args, kwargs | {"ag_interceptor": interceptor, "ag_layer": index}


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    ag_interceptor: Interceptor | None = None,
    ag_layer: int = 0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Serve the attention interface: the interceptor's attention, or the model's own when there is no interceptor."""
    if ag_interceptor is None:
        eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        with _own_config(module) as name:
            own: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
            result: tuple[Tensor, Tensor | None] = own(module, query, key, value, attention_mask, **kwargs)
        return result
    scaling = kwargs.get("scaling")
    call = AttentionCall(
        module,
        ag_layer,
        query,
        key,
        value,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        kwargs.get("sliding_window"),
        Softmax(kwargs.get("softcap"), kwargs.get("s_aux")),
    )
    out = ag_interceptor.attend(call)
    rate = kwargs.get("dropout", 0.0)
    return F.dropout(out, rate, module.training).transpose(1, 2).contiguous(), None


@contextmanager
def _own_config(module: Any) -> Iterator[str]:
    """Give an attention module the model's configuration back for a call of its own attention, whose name this yields.

    Attention functions of transformers read the configuration: flash-attention by the name that stands there.
    """
    ours, module.config = module.config, module._ag_own_config
    try:
        yield module.config._attn_implementation
    finally:
        module.config = ours


AttentionInterface.register(IMPLEMENTATION, _attention)

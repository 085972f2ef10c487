"""How an interceptor takes part in a Hugging Face model's forward pass: hooks, attention interface, decoder and head.

An *interceptor* (:class:`Interceptor`: the gates of a training step, or an eviction cache) arrives as a keyword
argument: ``gating``, or the model's own for a cache (:func:`cache_argument`). The decoder's forward passes it the
padding, and runs the tokens in blocks if it asks for them; a hook on each attention module passes it the hidden states;
the attention function passes it q, k and v. After a pass every layer must have attended once, else it is an error.

Without an interceptor the model's own attention runs. Nothing global changes: each attention module gets its own
shallow copy of the configuration, whose attention implementation is ``ag``, so that recomputation under gradient
checkpointing takes the same path. Nothing changes during a pass either: several threads may use one model.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PretrainedConfig
from transformers.cache_utils import Cache
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from ag.errors import UserError
from ag.kernels.gated_attention import gated_attention
from ag.kernels.softmax import PLAIN, Softmax
from ag.model.geometry import attention_layers, chunk_size, fingerprint, has_other_layers, shared_layers
from ag.model.hybrid import aligned, as_they_came, looking_ahead, masks_by_type, put_back
from ag.model.products import ThreadedLayers
from ag.model.rope import rotate as rotate
from ag.model.structure import USE_ANOTHER, attention_of, own_config, unwrapped
from ag.model.structure import UnsupportedModelError as UnsupportedModelError
from ag.model.structure import attentions_of as attentions_of
from ag.model.structure import decoder_of as decoder_of
from ag.model.structure import device_of as device_of
from ag.model.structure import lm_head as lm_head
from ag.model.structure import lm_logits as lm_logits

IMPLEMENTATION = "ag"
#: Implementations that need a mask to be causal, in whose place sdpa computes the same.
BY_MASK = (None, "eager", "flex_attention")
#: What models may say to the attention function beside what an :class:`AttentionCall` holds, without changing what that
#: computes: positions are in the queries and keys already, and the rest concerns outputs and losses.
HARMLESS = frozenset(
    ["dropout", "scaling", "sliding_window", "softcap", "s_aux", "is_causal", "position_ids", "cache_position"]
    + ["use_cache", "output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep"]
    + ["num_items_in_batch", "token_type_ids", "mm_token_type_ids"]
)


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
    chunk: int | None = None  # tokens of the chunks of a text within which the layer attends; None means no chunks
    shared: bool = False  # whether the queries are of another layer than keys and values, which ``layer`` counts
    mask: Tensor | None = None  # [B or 1, 1, T, T], of a prompt whose images see later tokens; None means causal
    memo: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def dense(self, valid: Tensor | None, left_padded: bool) -> Tensor:
        """Attend causally to every new token, ``[B, H, T, D]``; by the model's own implementation where it can.

        Args:
            valid: ``[B, T]`` bool, or None without padding.
            left_padded: whether some row starts with padding (padding on the right is never seen).
        """
        if self.mask is not None:
            if not self.softmax.plain:
                raise UnsupportedModelError(
                    f"{type(self.module).__name__} caps its logits or has sink logits, and tokens of this prompt see "
                    f"later ones: expected plain logits under such a mask; {USE_ANOTHER}"
                )
            by_mask: Callable[..., Any] = sdpa_attention_forward
            module = _Own(self.module)
            seen: Tensor = by_mask(module, self.q, self.k, self.v, self.mask, dropout=0.0, scaling=self.scaling)[0]
            return seen.transpose(1, 2)
        windowed = self.window is not None and self.q.shape[2] > self.window
        if left_padded or windowed or not self.softmax.plain:
            options: dict[str, Any] = {"scaling": self.scaling, "window": self.window, "softmax": self.softmax}
            return gated_attention(self.q, self.k, self.v, None, valid, **options)
        own = causal_attention(self.module)
        out: Tensor = own(_Own(self.module), self.q, self.k, self.v, None, dropout=0.0, scaling=self.scaling)[0]
        return out.transpose(1, 2)


class Site(NamedTuple):
    """Where a module attends."""

    number: int  # of the module, among all that attend
    layer: int  # whose keys and values it reads, among the layers that have some
    shared: bool  # whether an earlier module made them
    chunk: int | None
    kind: str  # the type of the layer, by which models have masks
    missing: int  # zeros behind the numbers of a head, where other layers have larger heads
    kv_heads: int


class Interceptor(ABC):
    """What to do in each layer of a forward pass."""

    #: How often each layer attended in the pass at hand, or since; None: there was no pass yet.
    attended: list[int] | None = None
    #: Modules that run in a forward pass beside the model's.
    modules: Sequence[nn.Module] = ()
    #: What layers of a hybrid model that do not attend keep; None means that they keep nothing.
    states: Cache | None = None
    #: Where the tokens of each sequence stand in the pass at hand, ``[B, n]``; None means in every column.
    order: Tensor | None = None
    #: The attention mask that came to the model, ``[B, seen + T]``; None means that all columns are tokens.
    padding: Any = None
    #: What the tokens of the pass at hand see by the model's own masks, by type of layer, where some see later ones, as
    #: those of an image do; empty where all attend causally.
    masks: Mapping[str, Tensor] = MappingProxyType({})

    @property
    def seen_tokens(self) -> int:
        """Columns that went by in earlier passes."""
        return 0

    def begin(self, decoder: nn.Module, attention_mask: Tensor | None, tokens: Tensor) -> None:
        """Start a forward pass.

        Args:
            decoder: the model's stack of layers.
            attention_mask: ``[B, seen + T]``, nonzero on real tokens; None means that all are.
            tokens: ids ``[B, T]`` or embeddings ``[B, T, d]`` of the new tokens.
        """
        return None

    def passes(self, given: Tensor | None) -> Iterator[tuple[Tensor | None, Tensor | None]]:
        """Yield what the layers read in each of the passes that the new tokens make; a pass ends as the next begins.

        Args:
            given: ``position_ids`` ``[B or 1, T]`` of all new tokens as the caller gave them, or None.

        Yields:
            The columns ``[B, w]`` of the tokens, -1 where there is none; None means all new tokens as they came, in one
            pass. And their positions ``[B, w]``; None means that the model counts them itself.
        """
        yield None, given

    def expect(self, valid: Tensor, tokens: Tensor | None = None) -> None:
        """Announce the whole text: what was seen of it, and the rest, which comes in one or several passes.

        Args:
            valid: ``[B, T]`` bool, False on padding.
            tokens: ids ``[B, T]``, or of the rest alone; None: they are not known.
        """
        return None

    def saw(self, tokens: Tensor | None) -> None:
        """Forget what was announced, and record the text ``[B, T]`` after generation; None: it is not known.

        Its last token may not have been read yet.
        """
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
    hybrid: bool  # whether some layers do not attend
    gates: nn.Module | None = None  # see ag.gates.attach
    unturned: str | None = None  # see ag.model.support.check_rotations; None: not asked yet


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
    for site, module in _sites(decoder):
        handles.append(module.register_forward_pre_hook(partial(_before_attention, site), with_kwargs=True))
        configs.append((module, module.config))
        module.config = copy.copy(module.config)
        module.config._attn_implementation = IMPLEMENTATION
        module._ag_own_config = configs[-1][1]
    base = unwrapped(model)
    threaded = ThreadedLayers(base)
    handles += [base.register_forward_pre_hook(partial(_before_model, threaded), with_kwargs=True), threaded]
    hybrid = has_other_layers(decoder.config)
    attachment = decoder._ag_attachment = Attachment(base, handles, configs, vars(decoder).get("forward"), hybrid)
    decoder.forward = partial(_decode, decoder, decoder.forward)
    base.generate = partial(_generate, base)
    if hasattr(base, "prepare_inputs_for_generation"):
        prepare = partial(_prepare_inputs, base)
        base.prepare_inputs_for_generation = functools.update_wrapper(prepare, base.prepare_inputs_for_generation)
    return attachment


def _sites(decoder: Any) -> Iterator[tuple[Site, Any]]:
    """Yield each module that attends, and where that is."""
    config = decoder.config
    places = {index: place for place, index in enumerate(attention_layers(config))}
    shared, types = shared_layers(config), getattr(config, "layer_types", None) or ()
    modules = {index: attention_of(decoder.layers[index]) for index in sorted([*places, *shared])}
    kv_heads = fingerprint(config)["num_kv_heads"]
    largest = max(getattr(module, "head_dim", 0) for module in modules.values())
    for number, (index, module) in enumerate(modules.items()):
        kind = types[index] if types else "full_attention"
        chunk = chunk_size(config) if kind == "chunked_attention" else None
        missing = largest - getattr(module, "head_dim", largest)
        yield Site(number, places[shared.get(index, index)], index in shared, chunk, kind, missing, kv_heads), module


def interceptor_in(kwargs: Mapping[str, Any]) -> Interceptor | None:
    """Return the interceptor among the keyword arguments of a forward pass, whatever its name; None without one.

    Gates (``gating``) come before a cache.
    """
    given = kwargs.get("gating")
    return next((x for x in (given, *kwargs.values()) if isinstance(x, Interceptor)), None)


def _cache_argument(model: Any) -> str:
    """Return what a class of models calls the cache in its forward pass: ``cache`` since transformers 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


cache_argument: Callable[[Any], str] = functools.cache(_cache_argument)


def _renamed(model: type[nn.Module], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return keyword arguments in which an interceptor that came as a cache has the name that the model gives it."""
    given = next((x for x in ("cache", "past_key_values") if isinstance(kwargs.get(x), Interceptor)), None)
    if given is None or given == (name := cache_argument(model)):
        return kwargs
    rest = {key: value for key, value in kwargs.items() if key not in (given, name)}
    return rest | {name: kwargs[given]}


def _before_model(threaded: ThreadedLayers, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    renamed, interceptor = _renamed(type(model), kwargs), interceptor_in(kwargs)
    if interceptor is not None and not torch.compiler.is_compiling():
        interceptor.padding = kwargs.get("attention_mask")
        given = (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args[:1])
        threaded.begin([model, *interceptor.modules], next(x for x in given if isinstance(x, Tensor)))
    return None if renamed is kwargs else (args, renamed)


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
    for name in ("generate", "prepare_inputs_for_generation"):
        vars(attachment.base).pop(name, None)
    if getattr(vars(decoder)["forward"], "func", None) is not _decode:  # accelerate hooked the decoder since
        decoder._old_forward = attachment.forward or type(decoder).forward.__get__(decoder)
    elif attachment.forward is not None:
        decoder.forward = attachment.forward
    else:
        del decoder.forward
    del decoder._ag_attachment


def _generate(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Generate, and tell the cache the text and where the prompt ends, which chunks and drafts do not show."""
    cache, kwargs = interceptor_in(kwargs), _renamed(type(model), kwargs)
    given = (kwargs.get("inputs_embeds"), *args[:1], kwargs.get("inputs"), kwargs.get("input_ids"))
    tokens: Tensor | None = next((x for x in given if x is not None), None)
    if cache is None or tokens is None:
        return type(model).generate(model, *args, **kwargs)
    check_adapter(getattr(model.prepare_inputs_for_generation, "__self__", model))  # PEFT puts its own method there
    mask, ids = kwargs.get("attention_mask"), tokens if tokens.ndim == 2 else None
    valid = _inferred(model, tokens, kwargs) if mask is None else mask.bool()
    check_end(valid)
    cache.expect(valid, ids)
    text = None
    try:
        output = type(model).generate(model, *args, **kwargs)
        found = getattr(output, "sequences", output)
        text = found if ids is not None and ids.shape[1] == valid.shape[1] and isinstance(found, Tensor) else None
        return output
    finally:
        cache.saw(text)


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


def _inferred(model: Any, tokens: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
    """Return the mask ``[B, T]`` bool that transformers infers where none is given: ``pad_token_id`` is padding."""
    pad, ends = (_setting(model, name, kwargs) for name in ("pad_token_id", "eos_token_id"))
    known = pad is not None and pad not in (ends if isinstance(ends, list | tuple) else [ends])
    text = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
    return tokens.ne(pad) if known and tokens.ndim == 2 else text


def _setting(model: Any, name: str, kwargs: Mapping[str, Any]) -> Any:
    """Return a setting of ``model.generate``: its argument, or what the given configuration says, or the model's."""
    if name in kwargs:
        return kwargs[name]
    found = (getattr(config, name, None) for config in (kwargs.get("generation_config"), model.generation_config))
    return next((x for x in found if x is not None), None)


def _prepare_inputs(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Prepare a pass of ``model.generate``, which must not go without the cache that it was given.

    Phi-3 leaves its cache out where the text passes the length from which its RoPE is another one, so that everything
    is read anew. An empty cache can take part in that.
    """
    kwargs = _renamed(type(model), kwargs)
    cache: Any = interceptor_in(kwargs)
    inputs = type(model).prepare_inputs_for_generation(model, *args, **kwargs)
    if cache is None or interceptor_in(inputs) is not None:
        return inputs
    if cache.get_seq_length():
        limit = getattr(model.config.get_text_config(), "original_max_position_embeddings", None)
        why = f", whose RoPE is another one behind {limit} tokens," if limit else ""
        raise UserError(
            f"{type(model).__name__}{why} leaves its cache of {cache.get_seq_length()} tokens out to read the whole "
            "text again, and nothing would be evicted: give the whole text to a cache that is empty (cache.reset()), "
            "or generate less."
        )
    return inputs | {cache_argument(type(model)): cache}


def _decode(decoder: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run the decoder under an interceptor, or as it is when there is none."""
    named = kwargs
    if args:
        names = list(inspect.signature(type(decoder).forward).parameters)[1:]
        named = dict(zip(names, args, strict=False)) | kwargs
    interceptor = interceptor_in(named)
    if interceptor is None:
        return forward(*args, **kwargs)
    named = dict(_renamed(type(decoder), named))
    own = named.get("attention_mask")
    if isinstance(own, dict):  # the masks of a model for images beside text
        named["attention_mask"] = interceptor.padding
    _check_pass(decoder, named)
    interceptor.masks = looking_ahead(own) if isinstance(own, dict) else {}
    if interceptor.masks and (interceptor.seen_tokens or "gating" in named):
        _refuse_masks(decoder)
    name = "input_ids" if named.get("inputs_embeds") is None else "inputs_embeds"
    tokens: Tensor = named[name]
    interceptor.begin(decoder, named.get("attention_mask"), tokens)
    if "logits_to_keep" in named:  # by which Gemma 4 leaves out what its last layers would read
        named["logits_to_keep"] = 0
    attachment: Any = decoder._ag_attachment
    padding, cache = named.get("attention_mask"), cache_argument(type(decoder))
    # transformers passes a 4-dimensional mask through, so it builds no n^2 mask; the interceptor knows the padding
    mask = named["attention_mask"] = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=tokens.device)
    if interceptor.states is not None and named.get(cache) is not interceptor:
        named |= {cache: interceptor.states, "use_cache": True}
    in_words = named.get("return_dict", getattr(decoder.config, "return_dict", True)) is not False
    if not in_words:
        named["return_dict"] = True  # a tuple is made of it behind the interceptor's end of the pass

    parts: list[tuple[Tensor | None, Any]] = []
    seen = 0
    for columns, positions in interceptor.passes(named.pop("position_ids", None)):
        interceptor.order = None
        if attachment.hybrid or interceptor.masks:
            if interceptor.masks and seen:
                _refuse_masks(decoder)
            columns, positions, interceptor.order, there = as_they_came(columns, positions, padding, seen)
            seen = tokens.shape[1] if columns is None else int(columns[0, -1]) + 1
            length = tokens.shape[1] if columns is None else columns.shape[1]
            named["attention_mask"] = masks_by_type(mask, there, length) if attachment.hybrid else mask
        if columns is not None:
            index = columns.clamp_min(0).to(tokens.device)
            named[name] = tokens.gather(1, index if tokens.ndim == 2 else _wide(index, tokens))
        interceptor.attended = [0] * len(attachment.configs)
        parts.append((columns, forward(**named, position_ids=positions)))
        if any(times != 1 for times in interceptor.attended):
            _refuse_unreached(decoder, interceptor.attended)
    out = parts[0][1] if parts[0][0] is None else _joined(parts, tokens.shape[1])
    return out if in_words else out.to_tuple()


def _refuse_masks(decoder: Any) -> NoReturn:
    """Refuse tokens that see later ones where these come in another pass, or under flags."""
    raise UserError(
        f"{type(decoder).__name__}: tokens of an image see later ones: expected the whole prompt in one pass, dense, "
        "with all its images; leave prefill_chunk_size and the schedule blocks out, and give images before the answer."
    )


def _check_pass(decoder: Any, named: Mapping[str, Any]) -> None:
    """Refuse a pass that asks for what an interceptor cannot give, before anything has changed."""
    kind, mask = type(decoder).__name__, named.get("attention_mask")
    if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2):
        shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise UserError(
            f"{kind}: an attention_mask {shape}: expected [B, T], nonzero on real tokens; masks of 4 dimensions, and "
            "those that a model makes itself (images in Gemma 3 and PaliGemma), are not supported."
        )
    if named.get("output_attentions") or getattr(decoder.config, "output_attentions", False):
        raise UserError(
            f"{kind}: output_attentions=True: the matrix of attention weights is not computed under gates or an "
            "eviction cache; leave it out, or use a cache of transformers."
        )
    if "gating" in named:
        return
    if named.get("use_cache") is False:
        raise UserError(f"{kind}: use_cache=False came with an eviction cache; leave one of the two out.")
    if torch.is_grad_enabled() and _checkpoints(decoder):
        raise UserError(_WITHOUT_CACHE.format(kind))


#: Why a model that trains under gradient checkpointing takes no cache.
_WITHOUT_CACHE = (
    "{}: layers that train under gradient checkpointing throw their cache away; call model.eval() before a pass with "
    "an eviction cache, or leave gradient checkpointing out."
)


def _checkpoints(decoder: Any) -> bool:
    return any(layer.training and getattr(layer, "gradient_checkpointing", False) for layer in decoder.layers)


def _refuse_unreached(decoder: Any, attended: list[int]) -> NoReturn:
    """Refuse a pass in which some layer did not attend exactly once under the interceptor: it saw later tokens.

    Raises:
        UnsupportedModelError: naming the layers, and the reason where it is known.
    """
    wrong = [index for index, times in enumerate(attended) if times != 1]
    kind, layer = type(decoder).__name__, decoder._ag_attachment.configs[wrong[0]][0]
    if max(attended) == 0 and _checkpoints(decoder):
        raise UserError(_WITHOUT_CACHE.format(kind))
    if max(attended) == 0:
        raise UnsupportedModelError(
            f"{kind} does not hand keyword arguments on to its layers: no gate would see anything; {USE_ANOTHER}"
        )
    if attended[wrong[0]] > 1:
        raise UnsupportedModelError(
            f"{type(layer).__name__} attends twice in layer {wrong[0]}: expected one softmax over keys; {USE_ANOTHER}"
        )
    raise UnsupportedModelError(
        f"{kind}: layers {', '.join(map(str, wrong))} of {len(attended)} (a {type(layer).__name__}) did not attend "
        f"under the gates or the cache that came with the pass: expected each to do so once; {USE_ANOTHER}"
    )


def _joined(parts: list[tuple[Any, Any]], length: int) -> Any:
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


def _before_attention(site: Site, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    interceptor = interceptor_in(kwargs)
    kwargs.pop("gating", None)
    if interceptor is None:
        return None
    hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    if not site.shared:
        order = interceptor.order
        interceptor.enter_layer(site.layer, hidden if order is None else aligned(hidden, order, 1))
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
    """Serve the attention interface: the interceptor's attention, or the model's own when there is no interceptor."""
    if ag_interceptor is None or ag_site is None:
        eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        own: Any = ALL_ATTENTION_FUNCTIONS.get_interface(own_config(module)._attn_implementation, eager)
        result: tuple[Tensor, Tensor | None] = own(_Own(module), query, key, value, attention_mask, **kwargs)
        return result
    said = {name for name, value in kwargs.items() if value is not None and value is not False}
    unknown = sorted(said - HARMLESS)
    own_mask = attention_mask is not None and not (isinstance(attention_mask, Tensor) and attention_mask.numel() == 1)
    if unknown or own_mask or kwargs.get("is_causal") is False:  # a mask of one number is what _decode gave
        _refuse_arguments(module, attention_mask if own_mask else None, unknown)
    if key.shape[1] != ag_site.kv_heads:
        raise UnsupportedModelError(
            f"{type(module).__name__} attends with {key.shape[1]} KV heads: expected {ag_site.kv_heads}, as its "
            f"configuration says; {USE_ANOTHER}"
        )
    scaling, order, length, size = kwargs.get("scaling"), ag_interceptor.order, query.shape[2], value.shape[-1]
    if ag_site.missing:
        query, key, value = (F.pad(x, (0, ag_site.missing)) for x in (query, key, value))
    own = ag_interceptor.masks.get(ag_site.kind)
    if order is not None:
        query, key, value = (aligned(x, order, 2) for x in (query, key, value))
        own = None if own is None else aligned(aligned(own.expand(len(order), -1, -1, -1), order, 2), order, 3)
    call = AttentionCall(
        module,
        ag_site.layer,
        query,
        key,
        value,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        kwargs.get("sliding_window"),
        Softmax(kwargs.get("softcap"), kwargs.get("s_aux")),
        ag_site.chunk,
        ag_site.shared,
        own,
    )
    if ag_interceptor.attended is not None:
        ag_interceptor.attended[ag_site.number] += 1
    out = ag_interceptor.attend(call)[..., :size]
    if order is not None:
        out = put_back(out, order, length, 2)
    rate = kwargs.get("dropout", 0.0)
    return F.dropout(out, rate, module.training).transpose(1, 2).contiguous(), None


def _refuse_arguments(module: nn.Module, mask: Any, unknown: list[str]) -> NoReturn:
    """Refuse what an attention module tells its attention function and an interceptor would leave out."""
    if mask is not None:
        shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        does = f"makes a mask or a bias of its own ({shape})"
    elif unknown:
        does = f"says {', '.join(unknown)} to its attention function"
    else:
        does = "is not causal (is_causal=False)"
    raise UnsupportedModelError(
        f"{type(module).__name__} {does}, which gates and eviction caches leave out; {USE_ANOTHER}"
    )


def causal_attention(module: nn.Module) -> Callable[..., Any]:
    """Return the model's own attention function, or sdpa's, that is causal without a mask.

    Raises:
        UnsupportedModelError: naming an implementation of which that is not known.
    """
    name = own_config(module)._attn_implementation
    own = sdpa_attention_forward if name in BY_MASK else ALL_ATTENTION_FUNCTIONS.get(name)
    if own not in (sdpa_attention_forward, flash_attention_forward):
        raise UnsupportedModelError(
            f"attn_implementation={name}: nothing says whether this function is causal without a mask and attends as "
            "sdpa does; use sdpa, eager, flex_attention or flash_attention_2."
        )
    return own


class _Own:
    """An attention module as its own attention function is to see it: with the model's configuration.

    Attention functions of transformers read the configuration: flash-attention by the name that stands there.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self.config = module, own_config(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


AttentionInterface.register(IMPLEMENTATION, _attention)

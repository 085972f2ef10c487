"""How an interceptor takes part in the forward pass of a Hugging Face model.

An *interceptor* (:class:`Interceptor`: the gates of a training step, or the forward pass of an eviction cache) arrives
as the keyword argument ``gating``, or as the attribute ``interceptor`` of the model's cache, which is an ordinary
``Cache`` of transformers. The decoder's forward gives it
the padding, and runs the tokens in the blocks that it yields; a hook on each attention module gives it the hidden
states; the attention function gives it q, k and v. After a pass every layer must have attended once.

Without an interceptor the model's own attention runs. Nothing global changes: each attention module gets a shallow copy
of the configuration, whose attention implementation is ``ag``, so that recomputation under gradient checkpointing takes
the same path. Nothing changes during a pass either, so that several threads may use one model.
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
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache
from transformers.generation.utils import GenerationMixin
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from ag.errors import UserError
from ag.kernels.gated_attention import gated_attention
from ag.kernels.softmax import PLAIN, Softmax
from ag.model.geometry import attention_layers, chunk_size, has_other_layers, kv_heads, shared_layers
from ag.model.hybrid import Arranged, States, as_they_came, looking_ahead, masks_by_type, right_aligned, taken
from ag.model.products import ThreadedLayers
from ag.model.rope import RopeByText, changing_length
from ag.model.rope import rotate as rotate
from ag.model.structure import USE_ANOTHER, attention_of, own_config, unwrapped
from ag.model.structure import UnsupportedModelError as UnsupportedModelError
from ag.model.structure import attentions_of as attentions_of
from ag.model.structure import decoder_of as decoder_of
from ag.model.structure import device_of as device_of
from ag.model.structure import lm_head as lm_head
from ag.model.structure import lm_logits as lm_logits

IMPLEMENTATION = "ag"
WINDOW_MASK = "create_sliding_window_causal_mask"  # of transformers
#: Implementations that need a mask to be causal; sdpa computes the same without one.
BY_MASK = (None, "eager", "flex_attention")
#: Arguments of attention functions that do not change what an :class:`AttentionCall` computes: those that it holds,
#: positions, which are in the queries and keys already, and what concerns outputs and losses.
HARMLESS = frozenset(
    ["dropout", "scaling", "sliding_window", "softcap", "s_aux", "is_causal", "position_ids", "cache_position"]
    + ["use_cache", "output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep"]
    + ["num_items_in_batch", "token_type_ids", "mm_token_type_ids"]
)


@dataclass
class AttentionCall:
    """One call of a layer's attention: q ``[B, H, T, D]``, k and v ``[B, Hkv, T, D]`` of the new tokens, post-RoPE.

    ``memo`` keeps measurements, so that each is made once for the parts of a policy and for caches that share a pass.
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
        """Attend causally to every new token, ``[B, H, T, D]``, by the model's own implementation where that can.

        Args:
            valid: ``[B, T]`` bool, False on padding; None means no padding.
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
    kv_heads: int
    window: int | None  # tokens of the sliding window in the model's own mask for the layer; None means no window


class Interceptor(ABC):
    """Gates or a cache that compute the attention of each layer of a forward pass."""

    #: How often each layer attended in the current or last pass; None before the first.
    attended: list[int] | None = None
    #: Modules that run in a forward pass beside the model's.
    modules: Sequence[nn.Module] = ()
    #: What layers of a hybrid model that do not attend keep; None means that they keep nothing.
    states: States | None = None
    #: The columns of the call that the pass at hand reads, ``[B, w]``, left-aligned, -1 behind them; None means all.
    columns: Tensor | None = None
    #: How the model reads them, where layers read columns in turn; None means left-aligned.
    arranged: Arranged | None = None
    #: Which columns of the call are tokens, ``[B, T]`` bool, if no attention mask says it; None means all.
    tokens: Tensor | None = None
    #: Tokens of the text of each sequence, ``[B]`` on the host, or of each token ``[B, T]``, for a RoPE whose
    #: frequencies depend on it; None means that each row of the call is a text, whole.
    text_lengths: Tensor | None = None
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
        """Yield the columns and positions of each pass that the new tokens are read in; a pass ends as the next begins.

        Args:
            given: ``position_ids`` ``[B or 1, T]`` of all new tokens as the caller gave them, or None.

        Yields:
            The columns ``[B, w]`` of the tokens, -1 where there is none; None means one pass of all new tokens as they
            came. Their positions ``[B, w]``; None means that the model counts them.
        """
        yield None, given

    def expect(self, valid: Tensor, tokens: Tensor | None = None) -> None:
        """Announce the whole text before generation: what was read of it, and the rest, which comes in passes.

        Args:
            valid: ``[B, T]`` bool, False on padding.
            tokens: ids ``[B, T]``, or those of the rest; None means that they are not known.
        """
        return None

    def saw(self, tokens: Tensor | None) -> None:
        """Record the text ``[B, T]`` after generation, whose last token may not have been read; None if unknown."""
        return None

    def enter_layer(self, layer: int, hidden: Tensor) -> None:
        """Take the hidden states ``[B, T, d]`` that enter the attention of a layer."""
        return None

    @abstractmethod
    def attend(self, call: AttentionCall) -> Tensor:
        """Compute the attention output ``[B, H, T, D]``."""


@dataclass
class Attachment:
    """The changes of :func:`instrument`, kept on the decoder so that :func:`restore` can undo them."""

    base: nn.Module
    handles: list[Any]  # each has a method remove
    modules: list[Any]  # those that attend, in order
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


def interceptor_in(kwargs: Mapping[str, Any]) -> Interceptor | None:
    """Return the interceptor among the keyword arguments of a forward pass, gates before a cache; None without one."""
    gating: Interceptor | None = kwargs.get("gating")
    if gating is not None:
        return gating
    caches = (value for value in kwargs.values() if isinstance(value, Cache))
    return next((cache.interceptor for cache in caches if hasattr(cache, "interceptor")), None)


def _cache_argument(model: Any) -> str:
    """Return the name of the cache in the forward pass of a class of models: ``cache`` since transformers 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


cache_argument: Callable[[Any], str] = functools.cache(_cache_argument)


def _renamed(model: type[nn.Module], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return keyword arguments in which an interceptor that came as a cache has the name that the model gives it."""
    given = next((x for x in ("cache", "past_key_values") if hasattr(kwargs.get(x), "interceptor")), None)
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
    for module in attachment.modules:
        module.config = module._ag_own_config
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
    """Generate, and announce the text and the end of the prompt to the cache, which chunks and drafts do not show."""
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
    """Prepare a pass of ``model.generate``, which must take the given cache.

    Phi-3 leaves its cache out where the text passes the length at which its RoPE changes, so that all of it is read
    again. An interceptor chooses the frequencies by the text, and refuses one that outgrows them.
    """
    kwargs = _renamed(type(model), kwargs)
    inputs = type(model).prepare_inputs_for_generation(model, *args, **kwargs)
    if interceptor_in(kwargs) is None or interceptor_in(inputs) is not None:
        return inputs
    return GenerationMixin.prepare_inputs_for_generation(model, *args, **kwargs)


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
    # transformers passes a 4-dimensional mask through, so it builds no n^2 mask; the interceptor has the padding
    mask = named["attention_mask"] = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=tokens.device)
    in_words = named.get("return_dict", getattr(decoder.config, "return_dict", True)) is not False
    if not in_words:
        named["return_dict"] = True  # the tuple is made at the end

    padding, parts = interceptor.tokens if padding is None else padding, list[_Part]()
    for columns, positions in interceptor.passes(named.pop("position_ids", None)):
        if interceptor.masks and parts:
            _refuse_masks(decoder)
        how = Arranged(columns, positions, None)
        if attachment.hybrid:
            if columns is None:
                how = as_they_came(positions, padding, tokens.shape[1])
            else:
                how = right_aligned(columns, positions)
            named["attention_mask"] = masks_by_type(mask, how.valid)
        interceptor.columns, interceptor.arranged = columns, how if attachment.hybrid else None
        interceptor.attended = [0] * len(attachment.modules)
        named["position_ids"] = how.positions
        if how.columns is not None:
            named[name] = _gathered(tokens, how.rows, how.columns)
        run = forward
        if attachment.rope is not None:
            lengths = interceptor.text_lengths
            lengths = torch.full(tokens.shape[:1], tokens.shape[1]) if lengths is None else lengths
            run = partial(_with_rope, forward, attachment.rope, lengths, how)
        keeps = attachment.hybrid and interceptor.states is not None
        output = _with_states(run, named, cache, interceptor, how) if keeps else run(**named)
        parts.append(_Part(how.rows, how.columns, output))
        if any(times != 1 for times in interceptor.attended):
            _refuse_unreached(decoder, interceptor.attended)
    out = parts[0].output if parts[0].columns is None else _joined(parts, tokens)
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
        raise UserError(f"{kind}: an attention_mask {shape}: expected [B, T], nonzero on real tokens.")
    if named.get("output_attentions") or getattr(decoder.config, "output_attentions", False):
        raise UserError(
            f"{kind}: output_attentions=True: the matrix of attention weights is not computed under gates or an "
            "eviction cache; leave it out, or use a cache of transformers."
        )
    if "gating" in named:
        return
    if named.get("use_cache") is False:
        raise UserError(f"{kind}: use_cache=False came with an eviction cache; leave one of the two out.")
    checkpoints = any(layer.training and getattr(layer, "gradient_checkpointing", False) for layer in decoder.layers)
    if torch.is_grad_enabled() and checkpoints:
        raise UserError(
            f"{kind}: layers that train under gradient checkpointing drop their cache; call model.eval() before a pass "
            "with an eviction cache, or leave gradient checkpointing out."
        )


def _refuse_unreached(decoder: Any, attended: list[int]) -> NoReturn:
    """Refuse a pass in which some layer did not attend exactly once under the interceptor."""
    index = next(index for index, times in enumerate(attended) if times != 1)
    does = f"{type(decoder._ag_attachment.modules[index]).__name__} attends "
    does += f"twice in layer {index}" if attended[index] else f"without the gates or the cache in layer {index}"
    if max(attended) == 0:
        does = f"{type(decoder).__name__} does not hand keyword arguments on to its layers"
    raise UnsupportedModelError(f"{does}: expected one attention a layer under gates or a cache; {USE_ANOTHER}")


class _Part(NamedTuple):
    """A pass that was made of a call."""

    rows: Tensor | None  # [b], the sequences in it; None means all
    columns: Tensor | None  # [b, w], which columns of the call it read, -1 for none; None means all
    output: Any  # of the decoder


def _gathered(tokens: Tensor, rows: Tensor | None, columns: Tensor) -> Tensor:
    """Return the ids ``[b, w]`` or embeddings of a pass, from those of the call."""
    given = tokens if rows is None else tokens[rows.to(tokens.device)]
    index = columns.clamp_min(0).to(given.device)
    return given.gather(1, index if given.ndim == 2 else _wide(index, given))


def _with_rope(forward: Callable[..., Any], rope: RopeByText, lengths: Tensor, how: Arranged, **named: Any) -> Any:
    """Run a pass of the decoder, in which each sequence is rotated by the frequencies of its own text."""
    with rope.reading(lengths if how.rows is None else lengths[how.rows.to(lengths.device)]):
        return forward(**named)


def _with_states(
    forward: Callable[..., Any], named: dict[str, Any], cache: str, interceptor: Interceptor, how: Arranged
) -> Any:
    """Run a pass of the decoder, in which layers that keep states read and write those of the sequences in it."""
    states = interceptor.states
    assert states is not None
    here = interceptor.states = states if how.rows is None else states.at(how.rows)
    if not hasattr(named.get(cache), "interceptor"):
        named |= {cache: here, "use_cache": True}
    output = forward(**named)
    if how.rows is not None and how.columns is not None and bool((how.columns >= 0).any()):
        states.put(how.rows, here, how.batch)
    interceptor.states = states
    return output


def _joined(parts: list[_Part], tokens: Tensor) -> Any:
    """Join the outputs of the passes of a call by the columns of its tokens ``[B, T]`` or ``[B, T, d]``."""
    batch, length = tokens.shape[:2]

    def join(outputs: list[Tensor]) -> Tensor:
        first = outputs[0]
        # the last column takes the outputs of places without a token
        whole = first.new_zeros(batch, length + 1, *first.shape[2:])
        for (rows, columns, _), output in zip(parts, outputs, strict=True):
            assert columns is not None
            at = columns.where(columns >= 0, length).to(output.device)
            rows = torch.arange(batch) if rows is None else rows
            here = rows.to(output.device)
            whole[here] = whole[here].scatter(1, _wide(at, output), output)
        return whole[:, :length]

    out = parts[-1].output
    out.last_hidden_state = join([part.output.last_hidden_state for part in parts])
    if out.hidden_states is not None:
        out.hidden_states = tuple(
            map(join, map(list, zip(*(part.output.hidden_states for part in parts), strict=True)))
        )
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
        result: tuple[Tensor, Tensor | None] = own(_Own(module), query, key, value, attention_mask, **kwargs)
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


def causal_attention(module: nn.Module) -> Callable[..., Any]:
    """Return the model's own attention function, or sdpa's, that is causal without a mask.

    Raises:
        UnsupportedModelError: for an implementation that is not known to be causal without a mask.
    """
    name = own_config(module)._attn_implementation
    own = sdpa_attention_forward if name in BY_MASK else ALL_ATTENTION_FUNCTIONS.get(name)
    if own not in (sdpa_attention_forward, flash_attention_forward):
        raise UnsupportedModelError(
            f"attn_implementation={name}: expected a function that is known to be causal without a mask; use sdpa, "
            "eager, flex_attention or flash_attention_2."
        )
    return own


class _Own:
    """An attention module with the model's configuration, in which flash attention reads its own name."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self.config = module, own_config(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


AttentionInterface.register(IMPLEMENTATION, _attention)

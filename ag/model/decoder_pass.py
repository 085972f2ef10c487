"""The functions that run in a forward pass under an interceptor, in their order.

They run before the model, as its decoder, before the attention of a layer, and as its attention. One call of the model
becomes one or several passes of its decoder.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ag.errors import UserError
from ag.kernels.softmax import Softmax
from ag.model.hybrid import ColumnPass, columns_in_order, find_noncausal_masks, masks_by_type, right_aligned, taken
from ag.model.interceptor import AttentionCall, Interceptor, OwnConfig, cache_argument
from ag.model.products import ThreadedLayers
from ag.model.rope import RopeByText
from ag.model.structure import USE_ANOTHER, UnsupportedModelError, own_config
from ag.model.support import refuse_noncausal, refuse_unreached

#: Arguments of attention functions that do not change what an :class:`AttentionCall` computes: its own fields,
#: positions (queries and keys are rotated already), and settings of outputs and losses.
IGNORED_KWARGS = frozenset(
    ["dropout", "scaling", "sliding_window", "softcap", "s_aux", "is_causal", "position_ids", "cache_position"]
    + ["use_cache", "output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep"]
    + ["num_items_in_batch", "token_type_ids", "mm_token_type_ids"]
)


class AttentionModuleInfo(NamedTuple):
    """A module that attends, and its place in the model."""

    number: int  # of the module, among all that attend
    layer: int  # whose keys and values it reads, among the layers that have some
    shared: bool  # whether an earlier module made them
    chunk: int | None
    kind: str  # the type of the layer; models make one mask for each type
    kv_heads: int
    window: int | None  # tokens of the sliding window in the model's own mask for the layer; None means no window


def interceptor_in(kwargs: Mapping[str, Any]) -> Interceptor | None:
    """Return the interceptor among the keyword arguments of a forward pass, gates before a cache; None without one."""
    gating: Interceptor | None = kwargs.get("gating")
    if gating is not None:
        return gating
    caches = (value for value in kwargs.values() if isinstance(value, Cache))
    return next((cache.interceptor for cache in caches if hasattr(cache, "interceptor")), None)


def with_cache_argument(model: type[nn.Module], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return keyword arguments where an interceptor's cache has the name that the model gives it."""
    given_name = next((x for x in ("cache", "past_key_values") if hasattr(kwargs.get(x), "interceptor")), None)
    if given_name is None or given_name == (name := cache_argument(model)):
        return kwargs
    other_arguments = {key: value for key, value in kwargs.items() if key not in (given_name, name)}
    return other_arguments | {name: kwargs[given_name]}


def before_model(threaded: ThreadedLayers, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Give the cache the name that the model knows, and let a step's products run in the threads of the kernels."""
    renamed, interceptor = with_cache_argument(type(model), kwargs), interceptor_in(kwargs)
    if interceptor is not None and not torch.compiler.is_compiling():
        interceptor.token_mask = kwargs.get("attention_mask")
        token_inputs = (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args[:1])
        tokens = next((x for x in token_inputs if isinstance(x, Tensor)), None)
        if tokens is not None:  # without tokens the model raises its own error
            threaded.begin([model, *interceptor.modules], tokens)
    return None if renamed is kwargs else (args, renamed)


def run_decoder(decoder: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run the decoder under an interceptor, or as it is when there is none."""
    named = kwargs
    if args:
        names = list(inspect.signature(type(decoder).forward).parameters)[1:]
        named = dict(zip(names, args, strict=False)) | kwargs
    interceptor = interceptor_in(named)
    if interceptor is None:
        return forward(*args, **kwargs)
    named = dict(with_cache_argument(type(decoder), named))
    given_mask = named.get("attention_mask")
    if isinstance(given_mask, dict):  # the masks of a model for images beside text
        named["attention_mask"] = interceptor.token_mask
    _check_pass(decoder, named)
    interceptor.masks = find_noncausal_masks(given_mask) if isinstance(given_mask, dict) else {}
    if interceptor.masks and (interceptor.seen_tokens or "gating" in named):
        refuse_noncausal(decoder)
    name = "input_ids" if named.get("inputs_embeds") is None else "inputs_embeds"
    tokens: Tensor = named[name]
    interceptor.begin(decoder, named.get("attention_mask"), tokens)
    if "logits_to_keep" in named:  # with it Gemma 4 leaves out tokens that its last layers would read
        named["logits_to_keep"] = 0
    attachment: Any = decoder._ag_attachment
    cache = cache_argument(type(decoder))
    token_mask = interceptor.tokens if named.get("attention_mask") is None else named["attention_mask"]
    # transformers passes a 4-dimensional mask through, so it builds no n^2 mask; the interceptor knows the padding
    open_mask = named["attention_mask"] = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=tokens.device)
    returns_dict = named.get("return_dict", getattr(decoder.config, "return_dict", True)) is not False
    if not returns_dict:
        named["return_dict"] = True  # the tuple is made at the end

    parts: list[_Part] = []
    for columns, positions in interceptor.passes(named.pop("position_ids", None)):
        if interceptor.masks and parts:
            refuse_noncausal(decoder)
        arranged = ColumnPass(columns, positions, None)
        if attachment.hybrid:
            if columns is None:
                arranged = columns_in_order(positions, token_mask, tokens.shape[1])
            else:
                arranged = right_aligned(columns, positions)
            named["attention_mask"] = masks_by_type(open_mask, arranged.valid)
        interceptor.columns, interceptor.arranged = columns, arranged if attachment.hybrid else None
        interceptor.attended = [0] * len(attachment.modules)
        named["position_ids"] = arranged.positions
        if arranged.columns is not None:
            named[name] = _gathered(tokens, arranged.rows, arranged.columns)
        run = forward
        if attachment.rope is not None:
            lengths = interceptor.text_lengths
            lengths = torch.full(tokens.shape[:1], tokens.shape[1]) if lengths is None else lengths
            run = partial(_with_rope, forward, attachment.rope, lengths, arranged)
        keeps = attachment.hybrid and interceptor.states is not None
        output = _with_states(run, named, cache, interceptor, arranged) if keeps else run(**named)
        if arranged.columns is not None:
            _check_joinable(decoder, output)
        parts.append(_Part(arranged.rows, arranged.columns, output))
        if any(times != 1 for times in interceptor.attended):
            refuse_unreached(decoder, interceptor.attended)
    out = parts[0].output if parts[0].columns is None else _join_passes(parts, tokens)
    return out if returns_dict else out.to_tuple()


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


def _check_joinable(decoder: Any, output: Any) -> None:
    """Refuse a pass over a part of a call if its output has fields that :func:`_join_passes` cannot put together."""
    if getattr(output, "router_logits", None) is not None:
        raise UserError(
            f"{type(decoder).__name__}: output_router_logits=True, and this call is read in parts, each with router "
            "logits of its own: expected one pass without padding; set output_router_logits=False, or leave "
            "prefill_chunk_size, the schedule blocks and padding out."
        )


def before_attention(
    site: AttentionModuleInfo, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Show the interceptor the hidden states, and hand it on to the attention function."""
    interceptor = interceptor_in(kwargs)
    kwargs.pop("gating", None)
    if interceptor is None:
        return None
    hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    if not site.shared:
        arranged = interceptor.arranged
        interceptor.enter_layer(site.layer, hidden if arranged is None else arranged.aligned(hidden, 1))
    return args, kwargs | {"ag_interceptor": interceptor, "ag_site": site}


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    ag_interceptor: Interceptor | None = None,
    ag_site: AttentionModuleInfo | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute the attention of a layer by the interceptor, or by the model's own function without one."""
    if ag_interceptor is None or ag_site is None:
        eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        own: Any = ALL_ATTENTION_FUNCTIONS.get_interface(own_config(module)._attn_implementation, eager)
        result: tuple[Tensor, Tensor | None] = own(OwnConfig(module), query, key, value, attention_mask, **kwargs)
        return result
    said = {name for name, value in kwargs.items() if value is not None and value is not False}
    unknown, does = sorted(said - IGNORED_KWARGS), ""
    if attention_mask is not None and not (isinstance(attention_mask, Tensor) and attention_mask.numel() == 1):
        does = "makes a mask or a bias of its own"  # a mask of one number is that of run_decoder
    elif unknown:
        does = f"says {', '.join(unknown)} to its attention function"
    elif kwargs.get("is_causal") is False:
        does = "is not causal (is_causal=False)"
    if does:
        raise UnsupportedModelError(
            f"{type(module).__name__} {does}, which gates and eviction caches leave out; {USE_ANOTHER}"
        )
    if key.shape[1] != ag_site.kv_heads:
        raise UnsupportedModelError(
            f"{type(module).__name__} attends with {key.shape[1]} KV heads: expected {ag_site.kv_heads}, as its "
            f"configuration says; {USE_ANOTHER}"
        )
    arranged, columns = ag_interceptor.arranged, ag_interceptor.columns
    scaling = query.shape[-1] ** -0.5 if kwargs.get("scaling") is None else kwargs["scaling"]
    image_mask = ag_interceptor.masks.get(ag_site.kind)
    if image_mask is not None and columns is not None:
        for dim in (2, 3):
            image_mask = taken(image_mask.expand(len(columns), -1, -1, -1), columns.clamp_min(0), dim)
    if arranged is not None:
        query, key, value = (arranged.aligned(x, 2) for x in (query, key, value))
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
        image_mask,
    )
    if ag_interceptor.attended is not None:
        ag_interceptor.attended[ag_site.number] += 1
    out = ag_interceptor.attend(call)
    if arranged is not None:
        out = arranged.restore_columns(out, 2)
    rate = kwargs.get("dropout", 0.0)
    return F.dropout(out, rate, module.training).transpose(1, 2).contiguous(), None


# ---- several passes of a call


class _Part(NamedTuple):
    """A pass that was made of a call."""

    rows: Tensor | None  # [b], the sequences in it; None means all
    columns: Tensor | None  # [b, w], which columns of the call it read, -1 for none; None means all
    output: Any  # of the decoder


def _gathered(tokens: Tensor, rows: Tensor | None, columns: Tensor) -> Tensor:
    """Return the ids ``[b, w]`` or the embeddings of one pass, taken from the call's."""
    pass_tokens = tokens if rows is None else tokens[rows.to(tokens.device)]
    index = columns.clamp_min(0).to(pass_tokens.device)
    return pass_tokens.gather(1, index if pass_tokens.ndim == 2 else _expand_index(index, pass_tokens))


def _with_rope(
    forward: Callable[..., Any], rope: RopeByText, lengths: Tensor, arranged: ColumnPass, **named: Any
) -> Any:
    """Run a pass of the decoder. Each sequence is rotated by the frequencies of its own text."""
    with rope.reading(lengths if arranged.rows is None else lengths[arranged.rows.to(lengths.device)]):
        return forward(**named)


def _with_states(
    forward: Callable[..., Any], named: dict[str, Any], cache: str, interceptor: Interceptor, arranged: ColumnPass
) -> Any:
    """Run a pass of the decoder. Layers that keep states read and write the states of the sequences in it."""
    states = interceptor.states
    assert states is not None
    pass_states = interceptor.states = states if arranged.rows is None else states.at(arranged.rows)
    if not hasattr(named.get(cache), "interceptor"):
        named |= {cache: pass_states, "use_cache": True}
    output = forward(**named)
    if arranged.rows is not None and arranged.columns is not None and bool((arranged.columns >= 0).any()):
        states.put(arranged.rows, pass_states, arranged.batch)
    interceptor.states = states
    return output


def _join_passes(parts: list[_Part], tokens: Tensor) -> Any:
    """Join the outputs of the passes of a call by the columns of its tokens ``[B, T]`` or ``[B, T, d]``."""
    batch, length = tokens.shape[:2]

    def join(outputs: list[Tensor]) -> Tensor:
        first = outputs[0]
        # the last column takes the outputs of places without a token
        joined = first.new_zeros(batch, length + 1, *first.shape[2:])
        for (rows, columns, _), output in zip(parts, outputs, strict=True):
            assert columns is not None
            at = columns.where(columns >= 0, length).to(output.device)
            rows = torch.arange(batch) if rows is None else rows
            on_device = rows.to(output.device)
            joined[on_device] = joined[on_device].scatter(1, _expand_index(at, output), output)
        return joined[:, :length]

    out = parts[-1].output
    out.last_hidden_state = join([part.output.last_hidden_state for part in parts])
    if out.hidden_states is not None:
        out.hidden_states = tuple(
            map(join, map(list, zip(*(part.output.hidden_states for part in parts), strict=True)))
        )
    return out


def _expand_index(index: Tensor, like: Tensor) -> Tensor:
    return index[:, :, None].expand(-1, -1, like.shape[-1])

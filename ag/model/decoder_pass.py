"""The forward pass of a decoder under an interceptor: one call of the model becomes one or several passes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ag.model.hybrid import Arranged, as_they_came, looking_ahead, masks_by_type, right_aligned
from ag.model.interceptor import Interceptor, cache_argument, interceptor_in, with_cache_argument
from ag.model.rope import RopeByText
from ag.model.support import check_pass, refuse_masks, refuse_unreached


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
    own = named.get("attention_mask")
    if isinstance(own, dict):  # the masks of a model for images beside text
        named["attention_mask"] = interceptor.padding
    check_pass(decoder, named)
    interceptor.masks = looking_ahead(own) if isinstance(own, dict) else {}
    if interceptor.masks and (interceptor.seen_tokens or "gating" in named):
        refuse_masks(decoder)
    name = "input_ids" if named.get("inputs_embeds") is None else "inputs_embeds"
    tokens: Tensor = named[name]
    interceptor.begin(decoder, named.get("attention_mask"), tokens)
    if "logits_to_keep" in named:  # with it Gemma 4 leaves out tokens that its last layers would read
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
            refuse_masks(decoder)
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
            refuse_unreached(decoder, interceptor.attended)
    out = parts[0].output if parts[0].columns is None else _joined(parts, tokens)
    return out if in_words else out.to_tuple()


class _Part(NamedTuple):
    """A pass that was made of a call."""

    rows: Tensor | None  # [b], the sequences in it; None means all
    columns: Tensor | None  # [b, w], which columns of the call it read, -1 for none; None means all
    output: Any  # of the decoder


def _gathered(tokens: Tensor, rows: Tensor | None, columns: Tensor) -> Tensor:
    """Return the ids ``[b, w]`` or the embeddings of one pass, taken from the call's."""
    given = tokens if rows is None else tokens[rows.to(tokens.device)]
    index = columns.clamp_min(0).to(given.device)
    return given.gather(1, index if given.ndim == 2 else _wide(index, given))


def _with_rope(forward: Callable[..., Any], rope: RopeByText, lengths: Tensor, how: Arranged, **named: Any) -> Any:
    """Run a pass of the decoder. Each sequence is rotated by the frequencies of its own text."""
    with rope.reading(lengths if how.rows is None else lengths[how.rows.to(lengths.device)]):
        return forward(**named)


def _with_states(
    forward: Callable[..., Any], named: dict[str, Any], cache: str, interceptor: Interceptor, how: Arranged
) -> Any:
    """Run a pass of the decoder. Layers that keep states read and write the states of the sequences in it."""
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

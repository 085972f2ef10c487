"""``model.generate`` of an instrumented model: it announces the text to the cache, and hands the cache on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.utils import GenerationMixin

from ag.model.decoder_pass import interceptor_in, with_cache_argument
from ag.model.structure import end_tokens
from ag.model.support import check_adapter, check_end

FIRST = ("inputs", "generation_config")  # arguments of ``model.generate`` that may come without a name


def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Generate, and announce the text and the end of the prompt to the cache, which chunks and drafts do not show."""
    interceptor, kwargs = interceptor_in(kwargs), with_cache_argument(type(model), kwargs)
    named = dict(zip(FIRST, args, strict=False)) | kwargs
    inputs = (named.get(name) for name in ("inputs_embeds", "inputs", "input_ids"))
    tokens: Tensor | None = next((x for x in inputs if x is not None), None)
    if interceptor is None or tokens is None:
        return type(model).generate(model, *args, **kwargs)
    check_adapter(getattr(model.prepare_inputs_for_generation, "__self__", model))  # PEFT puts its own method there
    mask, ids = named.get("attention_mask"), tokens if tokens.ndim == 2 else None
    valid = _inferred(model, tokens, named) if mask is None else mask.bool()
    check_end(valid)
    interceptor.expect(valid, ids)
    text, broken_off = None, True
    try:
        output = type(model).generate(model, *args, **kwargs)
        answers = getattr(output, "sequences", output)
        text = answers if ids is not None and ids.shape[1] == valid.shape[1] and isinstance(answers, Tensor) else None
        broken_off = False
        return output
    finally:
        interceptor.end_generation(text, broken_off)


@contextmanager
def own_settings(model: Any, tokenizer: Any) -> Iterator[None]:
    """Let ``model.generate`` follow its arguments alone, and stop where the server does.

    transformers fills every argument that was not given from the model's ``generation_config.json``, such as a
    repetition penalty, under which greedy decoding does not choose the likeliest token.
    """
    ends = sorted(end_tokens(model, tokenizer.eos_token_id))
    settings = GenerationConfig(eos_token_id=ends or None, pad_token_id=tokenizer.pad_token_id)
    models = [model, model.get_base_model()] if hasattr(model, "get_base_model") else [model]  # PEFT copies its own
    before = [x.generation_config for x in models]
    try:
        for x in models:
            x.generation_config = settings
        yield
    finally:
        for x, old_settings in zip(models, before, strict=True):
            x.generation_config = old_settings


def prepare_inputs(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Prepare a pass of ``model.generate``, which must take the given cache.

    Phi-3 drops its cache when the text grows beyond the length where its RoPE changes; all of it would be read again.
    An interceptor chooses the frequencies by the text, and refuses one that outgrows them.
    """
    kwargs = with_cache_argument(type(model), kwargs)
    inputs = type(model).prepare_inputs_for_generation(model, *args, **kwargs)
    if interceptor_in(kwargs) is None or interceptor_in(inputs) is not None:
        return inputs
    return GenerationMixin.prepare_inputs_for_generation(model, *args, **kwargs)


def _inferred(model: Any, tokens: Tensor, named: Mapping[str, Any]) -> Tensor:
    """Return the mask ``[B, T]`` bool that transformers infers where none is given: ``pad_token_id`` is padding."""
    pad, ends = (_setting(model, name, named) for name in ("pad_token_id", "eos_token_id"))
    marks_padding = pad is not None and pad not in (ends if isinstance(ends, list | tuple) else [ends])
    text = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
    return tokens.ne(pad) if marks_padding and tokens.ndim == 2 else text


def _setting(model: Any, name: str, named: Mapping[str, Any]) -> Any:
    """Return a setting of ``model.generate``: its argument, else the given configuration's value, else the model's."""
    if name in named:
        return named[name]
    values = (getattr(config, name, None) for config in (named.get("generation_config"), model.generation_config))
    return next((x for x in values if x is not None), None)

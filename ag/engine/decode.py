"""The decoding loop of ``model.generate`` by recorded steps."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from ag.engine.cache import EvictionCache
from ag.engine.step_runner import StepRunner
from ag.errors import UserError

COLDEST = 1e-25  # a lower temperature is greedy: quotients of logits would become infinite


@torch.no_grad()
def decode(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    streamer: BaseStreamer | None = None,
    **prepared: Any,
) -> Tensor:
    """Generate greedily or by chance, by a :class:`StepRunner`: for ``model.generate(custom_generate=decode, ...)``.

    Args:
        model: that generates.
        input_ids: ``[B, T]``, the text so far; or its tokens that are not in the cache, with the mask of all.
        logits_processor: changes scores, for example by a temperature.
        stopping_criteria: find the sequences that have ended.
        generation_config: as transformers completed it.
        streamer: gets each new token.
        prepared: the model's arguments as transformers prepared them: the cache, whose text is not read again, and an
            ``attention_mask`` ``[B, T]`` where tokens are masked.

    Returns:
        The text ``[B, T + n]``, with padding after the end of a sequence.
    """
    cache = next((value for value in prepared.values() if isinstance(value, EvictionCache)), None)
    if cache is None:
        raise UserError("custom_generate=decode: no ag.EvictionCache came with it; give past_key_values=cache.")
    mode = generation_config.get_generation_mode(prepared.get("assistant_model")).value
    refused = {
        f"{mode} (such as num_beams={generation_config.num_beams})": mode not in ("greedy_search", "sample"),
        "return_dict_in_generate=True": generation_config.return_dict_in_generate,
        "inputs_embeds": prepared.get("inputs_embeds") is not None,
        "prefill_chunk_size": generation_config.prefill_chunk_size is not None,
    }
    for argument, value in refused.items():
        if value:
            raise UserError(f"custom_generate=decode does no {argument}: leave custom_generate out.")
    mask, step, num_read = prepared.get("attention_mask"), StepRunner(model, cache), cache.get_seq_length()
    # input_ids may be the new tokens alone; transformers drops a mask without padding
    num_new = max(x.shape[-1] for x in (input_ids, mask, prepared.get("position_ids")) if x is not None) - num_read
    logits = model(
        input_ids=input_ids[:, input_ids.shape[1] - num_new :],
        attention_mask=mask,
        position_ids=None if mask is None else (mask.cumsum(1) - 1).clamp_min(0)[:, num_read:],
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    ).logits[:, -1]
    padding: Tensor | None = generation_config._pad_token_tensor
    going = torch.ones(len(input_ids), dtype=torch.bool, device=input_ids.device)
    while True:
        scores: Any = logits_processor(cast("Any", input_ids), logits.float())
        by_chance = generation_config.do_sample
        tokens = torch.multinomial(scores.softmax(-1), 1)[:, 0] if by_chance else scores.argmax(-1)
        if padding is not None:
            tokens = tokens.where(going, padding.to(tokens.device))
        input_ids = torch.cat([input_ids, tokens[:, None]], 1)
        if streamer is not None:
            streamer.put(tokens.cpu())
        going = going & ~stopping_criteria(cast("Any", input_ids), scores)
        if not bool(going.any()):
            break
        logits = step(tokens[:, None])
    if streamer is not None:
        streamer.end()
    return input_ids

"""One token of each sequence: recorded as a CUDA graph where that can be, and run as it is where not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from ag.engine.cache import EvictionCache
from ag.errors import UserError
from ag.model.hooks import interceptor_in

#: Runs a function, or records it: returns what it computed, and what computes that again in the same memory.
Record = Callable[[Callable[[], Tensor]], tuple[Tensor, Callable[[], None]]]


def cuda_graph(run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
    """Record a function as a CUDA graph, and run that once."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    graph.replay()
    return out, graph.replay


class NextToken:
    """The forward pass of one token of each sequence behind a prompt.

    On a card the second step that works on the same memory as the one before it is recorded as a CUDA graph, and those
    that follow are replayed, until something else happens to the cache. :meth:`EvictionCache.reserve` gives memory for
    many steps at once. Policies that cannot be recorded, and other devices, run the model as it is.

    Args:
        model: that the cache was made for, in evaluation mode.
        cache: which has read a prompt.
        record: records a step; None: as a CUDA graph where the model is on a card, else nothing is recorded.
    """

    def __init__(self, model: nn.Module, cache: EvictionCache, record: Record | None = None) -> None:
        self.model, self.cache = model, cache
        on_card = all(x.device.type == "cuda" for x in model.parameters())
        self._record = cuda_graph if record is None and on_card else record
        self._key: tuple[Any, ...] | None = None  # of the memory that the last step worked on
        self._tokens, self._logits = torch.empty(0), torch.empty(0)
        self._replay: Callable[[], None] | None = None

    def __call__(self, tokens: Tensor) -> Tensor:
        """Read the next tokens.

        Args:
            tokens: ids ``[B, 1]``, one of each sequence.

        Returns:
            The logits ``[B, V]`` of those that may follow; a later call may write over them.

        Raises:
            UserError: before a prompt was read, or for several tokens of a sequence.
        """
        cache = self.cache
        if tokens.ndim != 2 or tokens.shape[1] != 1 or not cache.text.ends:
            raise UserError(
                f"NextToken: tokens {list(tokens.shape)} after {cache.seen_tokens} columns: expected [B, 1] behind a "
                "prompt; read that by model(ids, past_key_values=cache)."
            )
        cache.text.check_by_rank("NextToken")
        recordable = self._record is not None and not torch.is_grad_enabled()
        before, self._key = self._key, cache.step_key() if recordable else None
        if self._record is None or self._key is None or self._key != before:
            self._replay = None  # what was recorded is of other memory
            return self._run(tokens)
        if self._replay is None:
            self._tokens = tokens.clone()
            cache.recording = True
            try:
                self._logits, self._replay = self._record(lambda: self._run(self._tokens))
            finally:
                cache.recording = False
        else:
            self._tokens.copy_(tokens)
            cache.stepped()
            self._replay()
        cache.look()
        return self._logits

    def _run(self, tokens: Tensor) -> Tensor:
        out = self.model(
            input_ids=tokens,
            position_ids=self.cache.text.next_ranks(),
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = out.logits[:, -1]
        return logits


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
    """Generate greedily or by chance, by :class:`NextToken`: for ``model.generate(custom_generate=decode, ...)``.

    Args:
        model: that generates.
        input_ids: ``[B, T]``, the text so far.
        logits_processor: what transformers changes scores by, such as a temperature.
        stopping_criteria: say which sequences have ended.
        generation_config: as transformers completed it.
        streamer: is shown each new token.
        prepared: what transformers prepared for the model: the cache, of whose text what it has seen is not read again,
            and an ``attention_mask`` ``[B, T]`` where something is masked.

    Returns:
        The text ``[B, T + n]``; behind the end of a sequence padding.
    """
    cache = interceptor_in(prepared)
    if not isinstance(cache, EvictionCache):
        raise UserError("custom_generate=decode: no ag.EvictionCache came with it; give past_key_values=cache.")
    mode = generation_config.get_generation_mode(prepared.get("assistant_model")).value
    refused = {
        f"{mode} (such as num_beams={generation_config.num_beams})": mode not in ("greedy_search", "sample"),
        "return_dict_in_generate=True": generation_config.return_dict_in_generate,
        "inputs_embeds": prepared.get("inputs_embeds") is not None,
    }
    for what, given in refused.items():
        if given:
            raise UserError(f"custom_generate=decode does no {what}: leave custom_generate out.")
    mask, step, new = prepared.get("attention_mask"), NextToken(model, cache), slice(cache.seen_tokens, None)
    logits = model(
        input_ids=input_ids[:, new],
        attention_mask=mask,
        position_ids=None if mask is None else (mask.cumsum(1) - 1).clamp_min(0)[:, new],
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

"""Reading a prompt once for several policies."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ag.engine.cache import EvictionCache
from ag.engine.policy import Policy
from ag.engine.recorded_prompt import ReconstructionScores
from ag.engine.scorers.kvzip import KVzip
from ag.errors import UserError
from ag.gates.memory import has_gaps
from ag.kernels.codes import KVDtype
from ag.model.interceptor import AttentionCall, Interceptor
from ag.model.structure import decoder_of
from ag.model.support import check_end


@torch.no_grad()
def read_prompt(
    model: nn.Module,
    policies: Sequence[Policy | str],
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    protect: Sequence[Any] = (),
) -> list[tuple[EvictionCache, Tensor]]:
    """Read a prompt once into caches with different policies; each cache is as if it had been alone.

    Policies that read it densely share one forward pass, and policies that repeat it alike share the repetition. With
    padding or ``position_ids`` only policies of equal ``positions`` share a pass.

    Args:
        model: causal language model in evaluation mode.
        policies: one for each cache.
        input_ids: ``[B, T]``.
        attention_mask: ``[B, T]``, nonzero on real tokens, zeros on the left alone, else it is refused; None means that
            there is no padding.
        position_ids: ``[B, T]``; None means that they are counted from the first column.
        protect: tokens that stay in each of the caches; see :meth:`ag.EvictionCache.protect`.

    Returns:
        For each policy its cache, and the final hidden states ``[B, d]`` of the last token of each prompt.
    """
    decoder = decoder_of(model)
    if attention_mask is not None:
        check_end(attention_mask)
        if has_gaps(attention_mask.bool()):
            raise UserError("attention_mask: padding between tokens of a prompt: expected it on the left alone.")
    caches = [EvictionCache(model, policy) for policy in policies]
    for cache in caches if protect else ():
        cache.protect(protect)

    def read(taking_part: dict[str, object]) -> Tensor:
        states: Tensor = decoder(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **taking_part
        ).last_hidden_state
        return states[:, -1]

    plain = position_ids is None and (attention_mask is None or bool(attention_mask.all()))
    together: dict[str, list[EvictionCache]] = defaultdict(list)  # by the positions of their tokens
    for cache in caches:
        # attention in chunks makes a pass of each chunk, and an earlier chunk is not in the next call
        in_one_pass = cache.setup.chunk is None or input_ids.shape[1] <= cache.setup.chunk
        if cache.setup.prompt_sees == "dense" and in_one_pass:
            together["" if plain else cache.policy.positions].append(cache)
    shared: dict[EvictionCache, Tensor] = {}
    for group in together.values():
        shared |= dict.fromkeys(group, read({"gating": SharedPromptPass(group), "use_cache": False}))
        for cache in group[1:]:
            cache.state.states = copy.deepcopy(group[0].state.states)
    return [(cache, shared[cache] if cache in shared else read({"past_key_values": cache})) for cache in caches]


@dataclass
class PrecomputedAttention(AttentionCall):
    """A call with its dense attention, computed before."""

    output: Tensor = field(kw_only=True)

    def dense(self, valid: Tensor | None, left_padded: bool) -> Tensor:
        """Return the known attention."""
        return self.output


class SharedPromptPass(Interceptor):
    """Several empty caches that read one forward pass; nothing is evicted before its end."""

    def __init__(self, caches: list[EvictionCache]) -> None:
        self.caches, states = caches, caches[0].state.states
        self.states = states
        for cache in caches:  # while they read
            cache.state.states = states
        self.modules = [module for cache in caches for module in cache.interceptor.modules]
        # a repetition does not depend on the budget, but it attends to codes where keys are held so
        shared_results: dict[KVDtype, dict[KVzip, ReconstructionScores]] = defaultdict(dict)
        for cache in caches:
            if cache.state.recorded_prompt is not None:
                cache.state.recorded_prompt.shared_results = shared_results[cache.policy.kv_dtype]

    def begin(self, decoder: nn.Module, attention_mask: Tensor | None, tokens: Tensor) -> None:
        """Begin a pass of each cache."""
        for cache in self.caches:
            cache.interceptor.begin(decoder, attention_mask, tokens)

    def passes(self, position_ids: Tensor | None) -> Iterator[tuple[Tensor | None, Tensor | None]]:
        """Yield the columns and positions of each pass, which all caches share."""
        for first, *_ in zip(*(cache.interceptor.passes(position_ids) for cache in self.caches), strict=True):
            self.text_lengths = self.caches[0].interceptor.text_lengths
            yield first

    def enter_layer(self, layer: int, hidden: Tensor) -> None:
        """Run the gates of each cache."""
        for cache in self.caches:
            cache.interceptor.enter_layer(layer, hidden)

    def attend(self, call: AttentionCall) -> Tensor:
        """Attend once, and hand the result to each cache."""
        output = call.dense(None, left_padded=False)  # blocks are left-aligned
        known_call = PrecomputedAttention(**vars(call), output=output)
        for cache in self.caches:
            cache.interceptor.attend(known_call)
        return output

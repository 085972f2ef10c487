"""One decoding step of several caches, which may have different policies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ag.engine.cache import EvictionCache
from ag.model.interceptor import AttentionCall, Interceptor
from ag.model.structure import decoder_of


@torch.no_grad()
def step_together(model: nn.Module, caches: Sequence[EvictionCache], tokens: Sequence[int]) -> Tensor:
    """Feed each of N caches with one sequence its next token, and return the final hidden states ``[N, d]``.

    The model's weights are read once for all caches. Each cache attends, scores and evicts as if it had been alone. In
    models with layers that do not attend, each cache has a pass of its own. A cache may be given once.

    Raises:
        PoolFullError: a pool of fixed size has no room for a token; the caches before that one are to be reset.
    """
    decoder = decoder_of(model)
    ids = torch.tensor(tokens, device=next(model.parameters()).device)[:, None]
    if len(caches) == 1 or caches[0].state.states is not None:
        states = [decoder(row, past_key_values=cache) for row, cache in zip(ids[:, None], caches, strict=True)]
        return torch.cat([state.last_hidden_state[:, -1] for state in states])
    output: Tensor = decoder(ids, gating=SharedStep(caches), use_cache=False).last_hidden_state
    return output[:, -1]


class SharedStep(Interceptor):
    """A forward pass of one token for each of N caches; row n of the batch belongs to cache n, of one sequence."""

    def __init__(self, caches: Sequence[EvictionCache]) -> None:
        self.interceptors = [cache.interceptor for cache in caches]
        self.modules = [module for interceptor in self.interceptors for module in interceptor.modules]

    def begin(self, decoder: nn.Module, attention_mask: Tensor | None, tokens: Tensor) -> None:
        """Begin a step of each cache."""
        for row, interceptor in enumerate(self.interceptors):
            interceptor.begin(decoder, None, tokens[row : row + 1])

    def passes(self, position_ids: Tensor | None) -> Iterator[tuple[Tensor | None, Tensor | None]]:
        """Yield one pass, with the position of each cache's token."""
        for each in zip(*(interceptor.passes(None) for interceptor in self.interceptors), strict=True):
            self.text_lengths = torch.cat([interceptor.text_lengths for interceptor in self.interceptors])
            yield None, torch.cat([positions for _, positions in each if positions is not None])

    def enter_layer(self, layer: int, hidden: Tensor) -> None:
        """Run the gates of each cache on its token."""
        for row, interceptor in enumerate(self.interceptors):
            interceptor.enter_layer(layer, hidden[row : row + 1])

    def attend(self, call: AttentionCall) -> Tensor:
        """Let each cache attend from its token."""
        outputs = []
        for row, interceptor in enumerate(self.interceptors):
            q, k, v = (states[row : row + 1] for states in (call.q, call.k, call.v))
            outputs.append(interceptor.attend(replace(call, q=q, k=k, v=v, memo={})))
        return torch.cat(outputs)

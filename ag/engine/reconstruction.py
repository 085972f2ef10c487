"""Scores by reconstruction (KVzip): the model repeats a prompt under the whole cache, which evicts once after that."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ag.engine.cache_state import CacheState
from ag.engine.evictor import Stopwatch
from ag.engine.forward_batch import ForwardBatch, PassNotes
from ag.engine.recorded_prompt import ReconstructionScores
from ag.engine.scorers.kvzip import KVzip
from ag.errors import UserError
from ag.kernels.attention_stats import attention_stats
from ag.kernels.pages import read
from ag.model.interceptor import AttentionCall, Interceptor
from ag.model.projection import output_weight, projected_norms


@torch.no_grad()
def evict_by_reconstruction(state: CacheState, batch: ForwardBatch) -> None:
    """Let the model repeat the prompt that a cache holds, whole and nothing else, and evict.

    Args:
        state: of the cache.
        batch: the last pass of the prompt.

    Raises:
        UserError: where something follows the prompt already, or the model would not see it while it repeats it.
        PoolFullError: when the pool has no room for a repetition.
    """
    prompt = state.recorded_prompt
    assert prompt is not None
    result = prompt.shared_results.get(prompt.scorer)
    if result is None:
        result = prompt.shared_results[prompt.scorer] = measure_reconstruction(state, batch)
    prompt.shared_results = {}
    _evict(state, batch, result)
    prompt.clear()


@torch.no_grad()
def measure_reconstruction(state: CacheState, batch: ForwardBatch) -> ReconstructionScores:
    """Return the largest attention weight that each token gets while the prompt is repeated; the cache is as before."""
    sequences, setup, watch, prompt = state.sequences, state.setup, Stopwatch(), state.recorded_prompt
    assert prompt is not None
    if bool((sequences.num_tokens > sequences.prompt_len).any()):
        raise UserError(
            f"{setup.policy!r} repeats a prompt before anything follows it, and {sequences.num_tokens.tolist()} "
            f"tokens came with prompts of {sequences.prompt_len.tolist()}; generate without an assistant model and "
            "prompt lookup."
        )
    prompts = [ids[valid].tolist() for ids, valid in zip(prompt.ids.cpu(), sequences.mask.cpu(), strict=True)]
    chunks = [prompt.scorer.chunks_to_repeat(ids) for ids in prompts]
    _check_reach(state, [max((len(ids) for _, ids in row), default=0) for row in chunks])
    tokens, device = max(map(len, prompts)), setup.pool.device
    zeros = torch.zeros(len(prompts), 1, tokens, dtype=torch.float32, device=device)
    scores = {layer: zeros.repeat(1, setup.heads[layer].number, 1) for layer in setup.budget_layers}
    with watch.running(device):
        for parts in zip_longest(*chunks, fillvalue=(range(0), [])):
            repetition = ReconstructionChunk(state, batch, prompt.scorer, [chunk for chunk, _ in parts], scores)
            repetition.read([ids for _, ids in parts], prompt.next_position)
    return ReconstructionScores(scores, watch.seconds)


def _check_reach(state: CacheState, repeated: list[int]) -> None:
    """Refuse prompts that a repetition of ``repeated`` tokens would see only in part, or at other positions."""
    windows = [state.layers[layer].window for layer in state.setup.budget_layers]
    reach = min((size for size in windows if size is not None), default=None)
    reason = f"the model attends within a window of {reach} tokens, which hides"
    if state.setup.policy.positions == "interpolated":
        reach = state.setup.decoder.config.max_position_embeddings
        reason = f"positions=interpolated squeezes what is beyond the model's context of {reach} tokens, as would be"
    for prompt, num_repeated in zip(state.sequences.prompt_len.tolist(), repeated, strict=True):
        if reach is not None and num_repeated and prompt + num_repeated > reach:
            raise UserError(
                f"kvzip: {reason} a prompt of {prompt} tokens for its repetition of up to {num_repeated}; use a "
                "shorter chunk, a shorter prompt or another policy."
            )


def _evict(state: CacheState, batch: ForwardBatch, result: ReconstructionScores) -> None:
    """Decide and evict, layer by layer."""
    capacity = batch.prompts.capacity
    assert capacity is not None and state.evictor is not None and state.recorded_prompt is not None
    everyone = torch.ones(len(state.sequences), dtype=torch.bool)
    batch = replace(batch, is_first_pass=False, evicting=everyone)
    for layer, scores in result.scores.items():
        part, call = state.layers[layer], state.recorded_prompt.calls[layer]
        part.watch = Stopwatch(part.watch.seconds + result.seconds / len(result.scores))
        state.layer_stores[layer].put_records(layer, {"repeated": scores})
        part.evict_by_records(call, batch, state.layer_stores, state.evictor)
    for layer in result.scores:
        state.layer_stores[layer].records[layer] = {}
    state.sequences.note_eviction(everyone, capacity)


class ReconstructionChunk(Interceptor):
    """A forward pass that repeats a chunk of each prompt, and measures the attention to it.

    Args:
        state: of the cache that holds the prompts, whole.
        last_batch: the last pass of the prompts.
        scorer: of the policy.
        chunks: by sequence, the token indices that are repeated.
        scores: the largest attention of each token so far, which it updates.
    """

    def __init__(
        self,
        state: CacheState,
        last_batch: ForwardBatch,
        scorer: KVzip,
        chunks: list[range],
        scores: dict[int, Tensor],
    ) -> None:
        self.state, self.batch, self.scorer, self.scores = state, last_batch, scorer, scores
        self.states, self.text_lengths = copy.deepcopy(state.states), state.sequences.text_len
        rows = [torch.tensor([*range(min(scorer.sinks, chunk.start)), *chunk], dtype=torch.long) for chunk in chunks]
        device = state.setup.pool.device
        #: Token indices of the sinks and the chunk, ``[B, P]``.
        self._target_indices = pad_sequence(rows, batch_first=True, padding_value=-1).to(device)
        self._norms: Tensor | None = None  # norms of the current layer's input, [B, T]

    def read(self, rows: list[list[int]], first_position: Tensor) -> None:
        """Let the model read tokens after each prompt, whose positions begin with ``first_position`` ``[B]``."""
        sequences, device = self.state.sequences, self.state.setup.pool.device
        ids = pad_sequence([torch.tensor(row, dtype=torch.long) for row in rows], batch_first=True)
        counts, columns = torch.tensor([len(row) for row in rows]), torch.arange(ids.shape[1])
        valid = columns < counts[:, None]
        self.batch = replace(
            self.batch,
            token_indices=(sequences.num_tokens[:, None] + columns).where(valid, -1).to(device),
            columns=None,
            counts=counts,
            num_tokens=sequences.num_tokens + counts,
            max_length=int((sequences.num_tokens + counts).max()),
            is_prefill=False,
            ends_prompt=False,
            is_first_pass=False,
            notes=PassNotes(),
        )
        position_ids = (first_position.to(device)[:, None] + columns.to(device)).where(valid.to(device), 0)
        self.state.setup.decoder(input_ids=ids.to(device), position_ids=position_ids, gating=self, use_cache=False)

    def passes(self, position_ids: Tensor | None) -> Iterator[tuple[Tensor | None, Tensor | None]]:
        """Yield one pass. Its positions go on after the prompt, as the cache rotates its keys."""
        rotation = self.state.setup.rotation
        rotated = None if rotation is None else rotation.positions(self.batch, self.state.stores)
        yield None, position_ids if rotated is None else rotated

    def enter_layer(self, layer: int, hidden: Tensor) -> None:
        """Record the norms of the hidden states ``[B, T, d]`` that enter a layer's attention, if they are needed."""
        if self.scorer.normalize:
            self._norms = torch.linalg.vector_norm(hidden.float(), dim=-1)

    def attend(self, call: AttentionCall) -> Tensor:
        """Attend to the prompt and the repeated tokens so far, measure, and remove the repeated tokens."""
        state, layer = self.state, call.layer
        out: Tensor
        out, _, call = state.layers[layer].append_and_attend(call, self.batch, state.layer_stores[layer])
        if layer in self.scores:
            self._measure(call)
        state.layer_stores[layer].truncate(self.batch.counts, slice(layer, layer + 1), spare=0)
        return out

    def _measure(self, call: AttentionCall) -> None:
        """Measure the attention of a repetition's queries to the chunk that they repeat."""
        store, heads, targets = self.state.layer_stores[call.layer], call.k.shape[1], self._target_indices
        token_indices = torch.cat([targets, self.batch.token_indices], 1)
        valid = token_indices >= 0
        # nothing was evicted: the slot of a token is its index
        slots = token_indices.clamp_min(0)[:, None].expand(-1, heads, -1)
        k, v = read(store.pages(call.layer), store.pool_indices(call.layer).gather(2, slots))
        factors = None if self._norms is None else 1 / self._norms.clamp_min(1e-12)
        order = torch.arange(token_indices.shape[1], device=token_indices.device).where(valid, -1)
        arguments = call.q.to(k.dtype), k, order[:, targets.shape[1] :], order[:, None], call.scaling
        largest = attention_stats("max", *arguments, factors=factors, softmax=call.softmax)[:, :, : targets.shape[1]]
        if self.scorer.normalize:
            values = v[:, :, : targets.shape[1]].float()
            largest = largest * projected_norms(values, output_weight(call.module, call.q.shape[1]), 2)
        best = largest.unflatten(1, (heads, -1)).amax(2).float()
        best = best.masked_fill((targets < self.scorer.sinks)[:, None], 0.0)
        self.scores[call.layer].scatter_reduce_(2, slots[:, :, : targets.shape[1]], best, "amax")

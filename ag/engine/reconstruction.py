"""Scores by reconstruction (KVzip): the model repeats a prompt under the whole cache, which evicts once after that."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ag.engine.forward_batch import ForwardBatch
from ag.engine.scorers.kvzip import KVzip
from ag.engine.sequences import SequenceState
from ag.engine.stopwatch import Stopwatch
from ag.errors import UserError
from ag.kernels.attention_stats import attention_stats
from ag.kernels.pages import read
from ag.model.hooks import AttentionCall, Interceptor
from ag.model.projection import output_weight, projected_norms

if TYPE_CHECKING:
    from ag.engine.cache_state import CacheState


class Measured(NamedTuple):
    """Scores of a prompt by its repetition."""

    scores: dict[int, Tensor]  # by layer, [B, Hkv, N] float32, a column for each token
    seconds: float  # of the model and of measuring


class ReconstructionPass:
    """Repeats a prompt at its end, for a scorer that measures the repetition.

    While the prompt is read, its token ids are kept. Behind its last token the model repeats it chunk by chunk, each
    token is scored by the largest attention that the repetition pays it, and the layers evict once. The keys and values
    of a repetition are in the cache while their layer attends, and no longer.

    Args:
        scorer: which tokens of a prompt are repeated, behind which instructions.
    """

    def __init__(self, scorer: KVzip) -> None:
        self.scorer = scorer
        #: Measurements by scorer, which caches that read a prompt together share.
        self.shared_results: dict[KVzip, Measured] = {}
        self._ids = torch.zeros(0, 0, dtype=torch.long)  # [B, columns], the prompt so far; empty when it was repeated
        self._next = torch.zeros(0, dtype=torch.long)  # [B], the position behind the newest token; empty likewise
        self._calls: dict[int, AttentionCall] = {}  # of each layer's attention, without its tokens

    # ---- while the prompt is read

    def note(self, tokens: Tensor, num_columns: int) -> None:
        """Note the ids ``[B, T]`` of a forward pass, behind ``before`` columns of the prompt; refuse embeddings."""
        if tokens.ndim != 2:
            raise UserError("kvzip repeats the prompt by its token ids: give input_ids, not inputs_embeds.")
        if not num_columns:
            self._ids = tokens[:, :0]
            self._next = tokens.new_zeros(len(tokens))
        self._ids = torch.cat([self._ids[:, :num_columns], tokens], 1)

    def follow(self, token_indices: Tensor, positions: Tensor | None) -> None:
        """Note the positions ``[B or 1, w]`` of tokens of token indices ``[B, w]``, -1 where there is none."""
        assert positions is not None
        newest = torch.where(token_indices >= 0, positions.to(token_indices.device), -1).amax(1)
        self._next = torch.where(newest >= 0, newest + 1, self._next.to(token_indices.device))

    def look(self, call: AttentionCall) -> None:
        """Note how a layer attends."""
        self._calls[call.layer] = replace(call, **{x: getattr(call, x)[:, :, :0] for x in "qkv"}, memo={})

    def fork(self) -> ReconstructionPass:
        """Return a copy for another continuation of the prompt."""
        new = copy.copy(self)
        new.shared_results, new._calls = {}, {**self._calls}
        return new

    def select(self, indices: Tensor) -> None:
        """Make the sequences those at ``indices``."""
        self._ids, self._next = (x[indices.to(x.device)] if len(x) else x for x in (self._ids, self._next))

    # ---- at its end

    def due(self, state: SequenceState) -> bool:
        """Return whether the forward pass that ends has read the end of the prompt."""
        return len(self._ids) > 0 and state.ready

    @torch.no_grad()
    def run(self, state: CacheState, batch: ForwardBatch) -> None:
        """Let the model repeat the prompt that a cache holds, whole and nothing else, and evict.

        Args:
            state: of the cache.
            batch: the last pass of the prompt.

        Raises:
            UserError: where something follows the prompt already, or the model would not see it while it repeats it.
            PoolFullError: when the pool has no room for a repetition.
        """
        measured = self.shared_results.get(self.scorer)
        if measured is None:
            measured = self.shared_results[self.scorer] = self.measure(state, batch)
        self.shared_results = {}
        self._evict(state, batch, measured)
        self._ids, self._next, self._calls = self._ids[:0], self._next[:0], {}

    @torch.no_grad()
    def measure(self, state: CacheState, batch: ForwardBatch) -> Measured:
        """Return the largest attention that the repetition pays each token; the cache is as before."""
        sequences, setup, watch = state.sequences, state.setup, Stopwatch()
        if bool((sequences.num_tokens > sequences.prompt_len).any()):
            raise UserError(
                f"{setup.policy!r} repeats a prompt before anything follows it, and {sequences.num_tokens.tolist()} "
                f"tokens came with prompts of {sequences.prompt_len.tolist()}; generate without an assistant model and "
                "prompt lookup."
            )
        prompts = [ids[valid].tolist() for ids, valid in zip(self._ids.cpu(), sequences.mask.cpu(), strict=True)]
        chunks = [self.scorer.inputs(ids) for ids in prompts]
        self._check_reach(state, [max((len(ids) for _, ids in row), default=0) for row in chunks])
        tokens, device = max(map(len, prompts)), setup.pool.device
        kind = {"dtype": torch.float32, "device": device}
        scores = {n: torch.zeros(len(prompts), setup.heads[n].number, tokens, **kind) for n in setup.budget_layers}
        with watch.running(device):
            for parts in zip_longest(*chunks, fillvalue=(range(0), [])):
                repetition = Repetition(state, batch, self.scorer, [chunk for chunk, _ in parts], scores)
                repetition.read([ids for _, ids in parts], self._next)
        return Measured(scores, watch.seconds)

    def _check_reach(self, state: CacheState, repeated: list[int]) -> None:
        """Refuse prompts of which repetitions of ``repeated`` tokens would see a part alone, or see it elsewhere."""
        windows = [state.layers[layer].window for layer in state.setup.budget_layers]
        reach = min((size for size in windows if size is not None), default=None)
        reason = f"the model attends within a window of {reach} tokens, which hides"
        if state.setup.policy.positions == "interpolated":
            reach = state.setup.decoder.config.max_position_embeddings
            reason = (
                f"positions=interpolated squeezes what is beyond the model's context of {reach} tokens, as would be"
            )
        for prompt, num_repeated in zip(state.sequences.prompt_len.tolist(), repeated, strict=True):
            if reach is not None and num_repeated and prompt + num_repeated > reach:
                raise UserError(
                    f"kvzip: {reason} a prompt of {prompt} tokens for its repetition of up to {num_repeated}; use a "
                    "shorter "
                    "chunk, a shorter prompt or another policy."
                )

    def _evict(self, state: CacheState, batch: ForwardBatch, measured: Measured) -> None:
        """Decide and evict, layer by layer."""
        assert batch.prompts.capacity is not None and state.evictor is not None
        everyone = torch.ones(len(state.sequences), dtype=torch.bool)
        batch = replace(batch, fresh=False, evict=everyone)
        for layer, scores in measured.scores.items():
            part, call = state.layers[layer], self._calls[layer]
            part.watch = Stopwatch(part.watch.seconds + measured.seconds / len(measured.scores))
            part.evict_later(call, batch, state.store_of, state.evictor, {"repeated": scores})
        for layer in measured.scores:
            state.store_of[layer].records[layer] = {}
        state.sequences.note_eviction(everyone, batch.prompts.capacity)


class Repetition(Interceptor):
    """A forward pass in which the model repeats a chunk of each prompt, and its measurement.

    Args:
        state: of the cache that holds the prompts, whole.
        last_batch: the last pass of the prompts.
        scorer: of the policy.
        places: by sequence, the tokens that are repeated.
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
        self._paid = pad_sequence(rows, batch_first=True, padding_value=-1).to(device)
        self._norms: Tensor | None = None  # of what the layer at hand reads, [B, T]

    def read(self, rows: list[list[int]], following: Tensor) -> None:
        """Let the model read a row of tokens behind each prompt, at positions that go on from ``following`` ``[B]``."""
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
            longest=int((sequences.num_tokens + counts).max()),
            is_prefill=False,
            ends_prompt=False,
            fresh=False,
            memo={},
        )
        position_ids = (following.to(device)[:, None] + columns.to(device)).where(valid.to(device), 0)
        self.state.setup.decoder(input_ids=ids.to(device), position_ids=position_ids, gating=self, use_cache=False)

    def passes(self, position_ids: Tensor | None) -> Iterator[tuple[Tensor | None, Tensor | None]]:
        """Yield one pass, which goes on behind the prompt by what the cache's keys are rotated by."""
        rotation = self.state.setup.rotation
        rotated = None if rotation is None else rotation.positions(self.batch, self.state.stores)
        yield None, position_ids if rotated is None else rotated

    def enter_layer(self, layer: int, hidden: Tensor) -> None:
        """Look at the hidden states ``[B, T, d]`` that enter the attention of a layer."""
        if self.scorer.normalize:
            self._norms = torch.linalg.vector_norm(hidden.float(), dim=-1)

    def attend(self, call: AttentionCall) -> Tensor:
        """Attend to the prompt and the repetition so far, measure, and forget the repetition."""
        state, layer = self.state, call.layer
        out: Tensor
        out, _, call = state.layers[layer].read(call, self.batch, state.store_of[layer])
        if layer in self.scores:
            self._measure(call)
        state.store_of[layer].truncate(self.batch.counts, slice(layer, layer + 1), spare=0)
        return out

    def _measure(self, call: AttentionCall) -> None:
        """Measure the attention of a repetition's queries to the chunk that they repeat."""
        store, heads, paid, own = self.state.store_of[call.layer], call.k.shape[1], self._paid, self.batch.token_indices
        token_indices, valid = torch.cat([paid, own], 1), torch.cat([paid, own], 1) >= 0
        # nothing was evicted: the slot of a token is its index
        slots = token_indices.clamp_min(0)[:, None].expand(-1, heads, -1)
        index = store.ledger(call.layer)[0].gather(2, slots)
        k, v = read(store.pages(call.layer), index)
        factors = None if self._norms is None else 1 / self._norms.clamp_min(1e-12)
        order = torch.arange(token_indices.shape[1], device=token_indices.device).where(valid, -1)
        arguments = call.q.to(k.dtype), k, order[:, paid.shape[1] :], order[:, None], call.scaling
        largest = attention_stats("max", *arguments, factors=factors, softmax=call.softmax)[:, :, : paid.shape[1]]
        if self.scorer.normalize:
            values = v[:, :, : paid.shape[1]].float()
            largest = largest * projected_norms(values, output_weight(call.module, call.q.shape[1]), 2)
        best = largest.unflatten(1, (heads, -1)).amax(2).float()
        best = best.masked_fill((paid < self.scorer.sinks)[:, None], 0.0)
        self.scores[call.layer].scatter_reduce_(2, slots[:, :, : paid.shape[1]], best, "amax")

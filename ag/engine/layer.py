"""One layer of the cache: what it holds, what its scorer remembers, and when something goes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import CacheLayerMixin

from ag.attach import AttentionCall
from ag.engine.decide import Decision, closing_order
from ag.engine.observe import Observation
from ag.engine.storage import RaggedStore, Rows
from ag.errors import UserError

if TYPE_CHECKING:
    from ag.engine.cache import EvictionCache

QUERY_BLOCK = 256  # queries that meet the stored keys at once


class EvictionLayer(CacheLayerMixin):
    """One layer of the cache."""

    is_sliding = False
    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, cache: EvictionCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache = cache
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.store: RaggedStore | None = None
        self.seen = 0
        self.prompt_length = 0
        #: Columns that were seen when the policy last evicted something; 0: it never did.
        self.evicted_at = 0
        #: Seconds spent on scores and decisions.
        self.scoring_seconds = 0.0
        #: What the scorer recorded, ``[..., N]`` by slot of the store.
        self.memory: dict[str, Tensor] = {}
        self._lookback: tuple[Tensor, Tensor, Tensor] | None = None  # last queries, their ranks and validity
        self._probability: Tensor | None = None  # of the gate, by rank
        self._decided = torch.empty(0, dtype=torch.long)  # own tokens of each sequence at the last decision
        self._fleeting = 0  # distance from which on the store's fleeting tokens are invisible; 0: it has none

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the storage is made when it is known what stays."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Count the new tokens and hand them on; they are stored after the attention has seen them."""
        if self.seen + key_states.shape[2] != self._cache.valid.shape[1]:  # the model's hooks did not run
            raise UserError(
                "This cache was made for another model, or ag.detach(model) was called since; make one with "
                "EvictionCache(model, ...)."
            )
        self.seen += key_states.shape[2]
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Return the columns seen, which drive positions."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the sizes of a mask over everything seen."""
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        """Return -1: there is no limit."""
        return -1

    get_max_cache_shape = get_max_length  # the name before transformers 5.20

    def prefill(self, call: AttentionCall) -> Tensor:
        """Attend within the prompt and store what stays."""
        cache = self._cache
        self.prompt_length = self.seen
        valid = cache.valid if cache.padded_step else None
        keep = fleeting = None if valid is None else valid[:, None]
        gating = cache.gating
        if gating is None or call.layer not in gating.logits:
            out, fleeting = call.dense(valid, cache.left_padded), None
        else:
            config = gating.gates.config
            out = gating.attend(call) if config.prefill == "sparse" else call.dense(valid, cache.left_padded)
            flagged = gating.gates.flags(gating.logits[call.layer])
            flagged = F.pad(flagged, (0, call.k.shape[2] - flagged.shape[2])) & cache.valid[:, None]
            flagged = flagged | (cache.valid & (cache.new_ranks < config.sink_tokens))[:, None]
            # the next query stands one further on, so that it sees recent - 1 tokens of the prompt
            recent = cache.valid & (cache.valid.sum(1, keepdim=True) - cache.new_ranks < config.recent_tokens)
            keep = flagged | recent[:, None]
            fleeting = keep & ~flagged
            self._fleeting = config.recent_tokens if config.recent_tokens > 1 else 0
            gating.forget(call.layer)
        self.store = RaggedStore(call.k.shape[0], call.k.shape[1], call.k, call.v)
        self.store.append(call.k, call.v, cache.new_ranks, keep, fleeting)
        return out

    def prefill_within(self, call: AttentionCall, decision: Decision) -> Tensor:
        """Attend within the prompt and evict down to the budget, block by block where the schedule says so."""
        cache, policy = self._cache, self._cache.policy
        self.prompt_length = self.seen
        self.store = RaggedStore(call.k.shape[0], call.k.shape[1], call.k, call.v)
        self._decided = cache.valid.sum(1)
        if policy.block is None or policy.block >= call.q.shape[2]:
            valid = cache.valid if cache.padded_step else None
            out = call.dense(valid, cache.left_padded)
            self.store.append(call.k, call.v, cache.new_ranks, cache.valid[:, None])
            held, due = self.store.padded(), cache.valid.any(1)
            self._decide(call, held, decision, cache.new_ranks, cache.valid, due, out)
        else:
            out = torch.zeros_like(call.q)
            # the columns of each sequence's own tokens, so that its blocks do not depend on padding
            columns = cache.valid.long().argsort(dim=1, descending=True, stable=True)
            for part in columns.split(policy.block, 1):
                valid, ranks, piece = cache.valid.gather(1, part), cache.new_ranks.gather(1, part), call.at(part)
                self.store.append(piece.k, piece.v, ranks, valid[:, None])
                held = self.store.padded()
                mixed = self._attend(piece, held, ranks).masked_fill(~valid[:, None, :, None], 0.0)
                out.scatter_(2, part[:, None, :, None].expand_as(mixed), mixed)
                self._decide(piece, held, decision, ranks, valid, valid.any(1), mixed)
        if policy.steps is None:  # no later decision needs these
            self.memory, self._lookback, self._probability = {}, None, None
        return out

    def _decide(
        self,
        call: AttentionCall,
        held: Rows,
        decision: Decision,
        ranks: Tensor,
        valid: Tensor,
        due: Tensor,
        out: Tensor,
    ) -> None:
        """Show the policy tokens that were just stored, and free what it lets go.

        Args:
            call: q, k and v of the new tokens.
            held: all that is stored, the new tokens among it.
            decision: the policy at work.
            ranks: ``[B, T]`` long.
            valid: ``[B, T]`` bool.
            due: ``[B]`` bool, sequences of which something may go now; of the others the scorer only takes note.
            out: the attention outputs of the new tokens, ``[B, H, T, D]``.
        """
        cache, scorer, start = self._cache, self._cache.policy.scorer, time.perf_counter()
        assert scorer is not None
        q, query_ranks, query_valid = self._with_lookback(call.q, ranks, valid, scorer.lookback)
        any_due = bool(due.any())
        if not (any_due or scorer.follows):
            return
        shape = (call.k.shape[0], call.k.shape[1])
        slots = held.ranks.unflatten(0, shape).long()
        filled = torch.ones_like(slots, dtype=torch.bool) if held.valid is None else held.valid.unflatten(0, shape)
        self.memory = {name: F.pad(x, (0, slots.shape[-1] - x.shape[-1])) for name, x in self.memory.items()}
        seen = Observation(
            q,
            held.keys.unflatten(0, shape),
            held.values.unflatten(0, shape),
            call.scaling,
            query_ranks,
            slots,
            query_valid,
            filled,
            call.layer,
            call.window,
            self._gate_probability(call.layer, slots, filled),
            call.q.shape[2],
            self.memory,
            cache.valid[:, : self.prompt_length].sum(1),
            self.seen > self.prompt_length,
            call.memo,
            out,
        )
        if any_due:
            for index, keep in decision.decide(seen, due).items():
                cache.evicting_layers[index].retain(keep)
        else:
            scorer.score(seen)
        self.scoring_seconds += time.perf_counter() - start

    def _with_lookback(self, q: Tensor, ranks: Tensor, valid: Tensor, last: int) -> tuple[Tensor, Tensor, Tensor]:
        """Put the last queries of earlier passes before the new ones, and remember the last of all."""
        policy = self._cache.policy
        if last == 0 or (policy.block is None and policy.steps is None):
            return q, ranks, valid
        if self._lookback is not None:
            before = self._lookback
            q, ranks, valid = (
                torch.cat(pair, dim)
                for pair, dim in zip(((before[0], q), (before[1], ranks), (before[2], valid)), (2, 1, 1), strict=True)
            )
        newest = torch.where(valid, ranks, -1).argsort(dim=1, stable=True)[:, -last:]
        index = newest[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[-1])
        self._lookback = q.gather(2, index), ranks.gather(1, newest), valid.gather(1, newest)
        return q, ranks, valid

    def _gate_probability(self, layer: int, slots: Tensor, filled: Tensor) -> Tensor | None:
        """Return the gate's probabilities ``[B, Hkv, N]`` of the held tokens, 1 for those that follow the prompt."""
        cache = self._cache
        if self._probability is None and cache.gating is not None and layer in cache.gating.logits:
            columns = cache.valid.long().argsort(dim=1, descending=True, stable=True)  # the logits are in columns
            logits = cache.gating.logits[layer]
            index = columns[:, None, : logits.shape[2]].clamp_max(logits.shape[2] - 1).expand_as(logits)
            own = torch.arange(logits.shape[2], device=logits.device) < cache.valid.sum(1, keepdim=True)
            self._probability = cache.gating.gates.probability(logits.gather(2, index)).where(own[:, None], 1.0)
            cache.gating.forget(layer)
        if self._probability is None:
            return None
        known = self._probability.shape[2]
        values = self._probability.gather(2, slots.clamp_max(known - 1))
        return values.masked_fill(slots >= known, 1.0).masked_fill(~filled, 0.0)

    def retain(self, keep: Tensor) -> None:
        """Free what is not in ``keep`` ``[B, Hkv, N]``, here and in what the scorer recorded."""
        assert self.store is not None
        if torch.equal(keep.sum(-1).flatten().cpu(), self.store.lengths):
            return
        self.store.retain(keep.flatten(0, 1))
        self.evicted_at = self.seen
        if not self.memory:
            return
        order = closing_order(keep)
        lengths = keep.sum(-1)[..., None]
        for name, x in self.memory.items():
            heads = x.shape[1] // keep.shape[1]
            index = order.repeat_interleave(heads, 1)
            empty = torch.arange(order.shape[-1], device=keep.device) >= lengths.repeat_interleave(heads, 1)
            while index.ndim < x.ndim:
                index, empty = index.unsqueeze(2), empty.unsqueeze(2)
            gathered = x.gather(-1, index.expand(*x.shape[:-1], -1))
            self.memory[name] = gathered.masked_fill(empty, 0.0)

    def extend(self, call: AttentionCall) -> Tensor:
        """Store tokens that follow the prompt and attend to everything stored; evict where the schedule says so."""
        cache, store = self._cache, self.store
        assert store is not None
        length = call.k.shape[2]
        store.append(call.k, call.v, cache.new_ranks, cache.valid[:, None, -length:] if cache.padded_step else None)
        stored = store.padded()
        out = self._attend(call, stored, cache.new_ranks)
        if self._fleeting:
            self._drop_expired(store, stored)
        steps, decision = cache.policy.steps, cache.decision
        if steps is not None and decision is not None and call.layer in decision.layers:
            new, counts = cache.valid[:, -length:], cache.valid.sum(1)
            due = counts - self._decided >= steps
            self._decided = torch.where(due, counts, self._decided)
            self._decide(call, stored, decision, cache.new_ranks, new, due, out)
        return out

    def _attend(self, call: AttentionCall, stored: Rows, ranks: Tensor) -> Tensor:
        """Attend from queries of ranks ``[B, T]`` to everything stored, ``[B, H, T, D]``."""
        starts = range(0, call.q.shape[2], QUERY_BLOCK)
        blocks = [slice(start, start + QUERY_BLOCK) for start in starts]
        return torch.cat([self._attend_block(call, stored, call.q[:, :, b], ranks[:, b]) for b in blocks], 2)

    def _attend_block(self, call: AttentionCall, stored: Rows, q: Tensor, ranks: Tensor) -> Tensor:
        batch, heads, length, dim = q.shape
        rows, tokens = stored.ranks.shape
        group = batch * heads // rows
        visible = None if stored.valid is None else stored.valid[:, None]
        if call.q.shape[2] > 1 or call.window is not None or self._fleeting:
            distance = ranks.repeat_interleave(rows // batch, 0)[:, :, None] - stored.ranks[:, None]
            near = distance >= 0
            if call.window is not None:
                near = near & (distance < call.window)
            if self._fleeting:
                near = near & (~stored.fleeting[:, None] | (distance < self._fleeting))
            visible = near if visible is None else visible & near
        if visible is not None:
            visible = visible[:, None].expand(rows, group, length, tokens).reshape(rows, 1, group * length, tokens)
        out = F.scaled_dot_product_attention(
            q.reshape(rows, 1, group * length, dim),
            stored.keys[:, None],
            stored.values[:, None],
            visible,
            scale=call.scaling,
        )
        return out.view(batch, heads, length, -1)

    def _drop_expired(self, store: RaggedStore, stored: Rows) -> None:
        """Free the prompt tokens that were kept only because they were recent and no longer are.

        Those that the first query of this pass saw stay, so that :meth:`EvictionCache.crop` can take the pass back.
        """
        first = self._cache.new_ranks[:, 0].repeat_interleave(store.kv_heads)
        gone = first[:, None] - stored.ranks >= self._fleeting
        if bool((stored.fleeting & gone).any()):
            store.retain(~(stored.fleeting & gone))
        if not bool((stored.fleeting & ~gone).any()):
            self._fleeting = 0

    def select_sequences(self, indices: Tensor) -> None:
        """Make the sequences those at ``indices``."""
        if self.store is not None:
            self.store.select_sequences(indices)
        self.memory = {name: x[indices.to(x.device)] for name, x in self.memory.items()}
        if len(self._decided):
            self._decided = self._decided[indices.to(self._decided.device)]
        if self._lookback is not None:
            q, ranks, valid = (x[indices.to(x.device)] for x in self._lookback)
            self._lookback = q, ranks, valid
        if self._probability is not None:
            self._probability = self._probability[indices.to(self._probability.device)]

    def crop_to(self, valid: Tensor) -> None:
        """Forget the tokens after those in ``valid`` ``[B, seen]``."""
        self.seen = valid.shape[1]
        if self.store is not None:
            self.store.crop(valid.sum(1))
        if len(self._decided):
            self._decided = self._decided.minimum(valid.sum(1))

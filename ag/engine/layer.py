"""One layer of the cache: what it holds, what its scorer remembers, and when something goes."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import CacheLayerMixin

from ag.engine.decide import Decision, closing_order
from ag.engine.observe import Observation
from ag.engine.storage import RaggedStore, Rows
from ag.errors import UserError
from ag.kernels.ragged_decode import ragged_decode
from ag.model.hooks import AttentionCall, rotate

if TYPE_CHECKING:
    from ag.engine.cache import EvictionCache

QUERY_BLOCK = 256  # queries that meet the stored keys at once


class Part(NamedTuple):
    """Some tokens of a forward pass, w of each sequence."""

    columns: Tensor | None  # [B, w], where they are among the tokens at hand; None: they are all of them
    ranks: Tensor  # [B, w], the place of each among its sequence's own tokens
    real: Tensor  # [B, w] bool, whether it exists

    @property
    def counts(self) -> Tensor:
        """Own tokens of each sequence up to the last of these, ``[B]``; 0 where none exists."""
        return torch.where(self.real, self.ranks + 1, 0).amax(1)


class EvictionLayer(CacheLayerMixin):
    """One layer of the cache."""

    is_sliding = False
    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, cache: EvictionCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.owner = weakref.ref(cache)  # a strong one would leave the memory to the garbage collector
        self.reset()

    @property
    def _cache(self) -> EvictionCache:
        cache = self.owner()
        assert cache is not None
        return cache

    def reset(self) -> None:
        """Forget everything."""
        self.store: RaggedStore | None = None
        self.seen = 0
        self._step = 0  # of the cache when this layer was last shown tokens
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

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Count the new tokens and hand them on; they are stored after the attention has seen them."""
        cache = self._cache
        if self._step == cache.step or key_states.shape[2] != cache.ranks.shape[1]:  # the model's hooks did not run
            raise UserError(
                "This cache was made for another model, or ag.detach(model) was called since; make one with "
                "EvictionCache(model, ...)."
            )
        self._step, self.seen = cache.step, cache.valid.shape[1]
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
        """Attend within the prompt and store what stays, where no budget decides."""
        cache = self._cache
        valid = cache.real if cache.padded else None
        keep = fleeting = None if valid is None else valid[:, None]
        gating = cache.gating
        if gating is None or call.layer not in gating.logits:
            out, fleeting = call.dense(valid, cache.left_padded), None
        else:
            config = gating.gates.config
            out = gating.attend(call) if config.prefill == "sparse" else call.dense(valid, cache.left_padded)
            flagged = gating.gates.flags(gating.logits[call.layer])
            flagged = F.pad(flagged, (0, call.k.shape[2] - flagged.shape[2])) & cache.real[:, None]
            flagged = flagged | (cache.real & (cache.ranks < config.sink_tokens))[:, None]
            # the next query stands one further on, so that it sees recent - 1 tokens of the prompt
            recent = cache.real & (cache.real.sum(1, keepdim=True) - cache.ranks < config.recent_tokens)
            keep = flagged | recent[:, None]
            fleeting = keep & ~flagged
            self._fleeting = config.recent_tokens if config.recent_tokens > 1 else 0
            gating.forget(call.layer)
        call = self._turned_back(call, cache.places) if self._by_slot else call
        self.store = RaggedStore(call.k.shape[0], call.k.shape[1], call.k, call.v)
        self.store.append(call.k, call.v, cache.ranks, keep, fleeting)
        return out

    def read(self, call: AttentionCall, decision: Decision) -> Tensor:
        """Attend within the prompt, or a part of it, and evict down to the budget where the schedule says so."""
        cache = self._cache
        if self.store is None:
            self.store = RaggedStore(call.k.shape[0], call.k.shape[1], call.k, call.v)
        self._decided = cache.counts
        whole = Part(None, cache.ranks, cache.real)
        parts = cache.parts(whole)
        out = self._read_part(call, whole, decision) if len(parts) == 1 else self._read_parts(call, parts, decision)
        if cache.prompt_over and cache.policy.steps is None:  # no later decision needs these
            self.memory, self._lookback, self._probability = {}, None, None
        return out

    def _read_parts(self, call: AttentionCall, parts: list[Part], decision: Decision) -> Tensor:
        length = call.q.shape[2]
        out = F.pad(torch.zeros_like(call.q), (0, 0, 0, 1))  # the last column: of no token
        for part in parts:
            assert part.columns is not None
            mixed = self._read_part(call.at(part.columns), part, decision)
            target = part.columns.where(part.real, length)[:, None, :, None]
            out.scatter_(2, target.expand_as(mixed), mixed)
        return out[:, :, :length]

    def _read_part(self, call: AttentionCall, part: Part, decision: Decision) -> Tensor:
        cache, store = self._cache, self.store
        assert store is not None
        padded = not bool(part.real.all())
        first = not len(store.lengths) or not bool(store.lengths.any())
        raw, call = call, self._turned_back(call, self._places_of(part)) if self._by_slot else call
        store.append(call.k, call.v, part.ranks, part.real[:, None] if padded else None)

        def dense() -> Tensor:
            return raw.dense(part.real if padded else None, padded and not bool(part.real[:, 0].all()))

        out = self._act(call, decision, part, cache.due(part), dense if first else None)
        return out.masked_fill(~part.real[:, None, :, None], 0.0) if padded else out

    def _act(
        self,
        call: AttentionCall,
        decision: Decision,
        part: Part,
        due: Tensor,
        dense: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """Attend to what is stored, the new tokens among it, and evict: in the order of the policy."""
        held = self._stored()
        if self._cache.policy.evict_before_attend and bool(due.any()):
            masks = self._judge(call, held, decision, part, due)
            out = self._attend(call, held, part.ranks, masks[call.layer])
        else:
            out = self._attend(call, held, part.ranks) if dense is None else dense()
            masks = self._judge(call, held, decision, part, due, out)
        for index, keep in masks.items():
            self._cache.evicting_layers[index].retain(keep)
        return out

    def _judge(
        self,
        call: AttentionCall,
        held: Rows,
        decision: Decision,
        part: Part,
        due: Tensor,
        out: Tensor | None = None,
    ) -> dict[int, Tensor]:
        """Show the policy tokens that were just stored; returns what stays ``[B, Hkv, N]``, by layer.

        Args:
            call: q, k and v of the new tokens.
            held: all that is stored, the new tokens among it.
            decision: the policy at work.
            part: which tokens these are.
            due: ``[B]`` bool, sequences of which something may go now; of the others the scorer only takes note.
            out: what the new tokens attended to, ``[B, H, T, D]``, where that is known.
        """
        cache, policy, start = self._cache, self._cache.policy, time.perf_counter()
        assert policy.scorer is not None
        lookback = policy.lookback if cache.reading else policy.scorer.lookback
        q, query_ranks, query_valid = self._with_lookback(call.q, part.ranks, part.real, lookback)
        any_due = bool(due.any())
        if not (any_due or policy.scorer.follows):
            return {}
        shape = (call.k.shape[0], call.k.shape[1])
        slots = held.ranks.unflatten(0, shape).long()
        filled = torch.ones_like(slots, dtype=torch.bool) if held.valid is None else held.valid.unflatten(0, shape)
        self.memory = {name: F.pad(x, (0, slots.shape[-1] - x.shape[-1])) for name, x in self.memory.items()}
        seen = Observation(
            self._placed(q, held, query_ranks),
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
            cache.prompt_lengths,
            not cache.reading,
            call.memo,
            out,
        )
        masks = {}
        if any_due:
            masks = decision.decide(seen, due)
        else:
            policy.scorer.score(seen)
        self.scoring_seconds += time.perf_counter() - start
        return masks

    @property
    def _by_slot(self) -> bool:
        return self._cache.policy.positions == "slot"

    def _places_of(self, part: Part) -> Tensor:
        """Return the positions ``[B, w]`` that the model rotated some of the tokens at hand by."""
        places = self._cache.places
        return places if part.columns is None else places.gather(1, part.columns)

    def _turned_back(self, call: AttentionCall, places: Tensor) -> AttentionCall:
        """Undo the rotation of queries and keys: by slots, keys are stored without one."""
        decoder, back = self._cache.decoder, -places[:, None]
        return replace(call, q=rotate(decoder, call.q, back), k=rotate(decoder, call.k, back))

    def _stored(self) -> Rows:
        """Return what is stored, keys rotated."""
        assert self.store is not None
        rows = self.store.padded()
        if not self._by_slot:
            return rows
        slots = torch.arange(rows.keys.shape[1], device=rows.keys.device)
        return rows._replace(keys=rotate(self._cache.decoder, rows.keys[:, None], slots[None, None])[:, 0])

    def _placed(self, q: Tensor, held: Rows, ranks: Tensor) -> Tensor:
        """Rotate queries ``[B, H, T, D]`` of ranks ``[B, T]`` to the slots of their tokens, counted from the last."""
        if not self._by_slot:
            return q
        batch, heads = q.shape[:2]
        held_ranks = held.ranks if held.valid is None else held.ranks.masked_fill(~held.valid, -1)
        count = torch.full_like(held_ranks[:, 0], held_ranks.shape[1]) if held.valid is None else held.valid.sum(1)
        shift = (count - 1 - held_ranks.amax(1)).view(batch, -1).repeat_interleave(heads * batch // len(count), 1)
        return rotate(self._cache.decoder, q, (shift[:, :, None] + ranks[:, None]).clamp_min(0))

    def _with_lookback(self, q: Tensor, ranks: Tensor, valid: Tensor, last: int) -> tuple[Tensor, Tensor, Tensor]:
        """Put the last queries of earlier passes before the new ones, and remember the last of all."""
        if last == 0:
            return q, ranks, valid
        if self._lookback is not None:
            before = self._lookback
            q, ranks, valid = (
                torch.cat(pair, dim)
                for pair, dim in zip(((before[0], q), (before[1], ranks), (before[2], valid)), (2, 1, 1), strict=True)
            )
        if self._cache.prompt_over and self._cache.policy.steps is None:  # nobody looks back at these
            return q, ranks, valid
        newest = torch.where(valid, ranks, -1).argsort(dim=1, stable=True)[:, -last:]
        index = newest[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[-1])
        self._lookback = q.gather(2, index), ranks.gather(1, newest), valid.gather(1, newest)
        return q, ranks, valid

    def _gate_probability(self, layer: int, slots: Tensor, filled: Tensor) -> Tensor | None:
        """Return the gate's probabilities ``[B, Hkv, N]`` of the held tokens, 1 for those that follow the prompt."""
        cache = self._cache
        if self._probability is None and cache.gating is not None and layer in cache.gating.logits:
            prompt = cache.valid[:, : cache.prompt_columns]
            columns = prompt.long().argsort(dim=1, descending=True, stable=True)  # the logits are in columns
            logits = cache.gating.logits[layer]
            index = columns[:, None, : logits.shape[2]].clamp_max(logits.shape[2] - 1).expand_as(logits)
            own = torch.arange(logits.shape[2], device=logits.device) < cache.prompt_lengths[:, None]
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
        if not self.store.retain(keep.flatten(0, 1)):
            return
        self.evicted_at = min(self.seen, self._cache.prompt_columns) if self._cache.reading else self.seen
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
        call = self._turned_back(call, cache.places) if self._by_slot else call
        store.append(call.k, call.v, cache.ranks, cache.real[:, None] if cache.padded else None)
        # what the first query sees stays, so that EvictionCache.crop can take this pass back
        if self._fleeting and not store.drop_fleeting(cache.ranks[:, 0] - self._fleeting + 1):
            self._fleeting = 0
        one = call.q.shape[2] == 1 and not self._by_slot and not call.q.requires_grad  # the kernel has no backward pass
        decode = partial(self._decode, call, store) if one else None
        steps, decision = cache.policy.steps, cache.decision
        if steps is None or decision is None or call.layer not in decision.layers or cache.reading:
            return self._attend(call, self._stored(), cache.ranks) if decode is None else decode()
        due = cache.counts - self._decided >= steps
        self._decided = torch.where(due, cache.counts, self._decided)
        return self._act(call, decision, Part(None, cache.ranks, cache.real), due, decode)

    def _decode(self, call: AttentionCall, store: RaggedStore) -> Tensor:
        """Attend from one query per sequence to the stored tokens where they are, ``[B, H, 1, D]``."""
        starts, lengths = store.rows
        if call.window is not None and self.seen > call.window:
            past = store.count_below(self._cache.ranks[:, 0] - call.window + 1)
            starts, lengths = starts + past, lengths - past
        out = ragged_decode(call.q[:, :, 0], store.keys, store.values, starts, lengths, call.scaling)
        return out[:, :, None]

    def _attend(self, call: AttentionCall, stored: Rows, ranks: Tensor, keep: Tensor | None = None) -> Tensor:
        """Attend from queries of ranks ``[B, T]`` to everything stored, ``[B, H, T, D]``.

        With ``keep`` ``[B, Hkv, N]`` they see those tokens and their own only.
        """
        q = self._placed(call.q, stored, ranks)
        starts = range(0, q.shape[2], QUERY_BLOCK)
        blocks = [slice(start, start + QUERY_BLOCK) for start in starts]
        return torch.cat([self._attend_block(call, stored, q[:, :, b], ranks[:, b], keep) for b in blocks], 2)

    def _attend_block(self, call: AttentionCall, stored: Rows, q: Tensor, ranks: Tensor, keep: Tensor | None) -> Tensor:
        batch, heads, length, dim = q.shape
        rows, tokens = stored.ranks.shape
        group = batch * heads // rows
        visible = None if stored.valid is None else stored.valid[:, None]
        if call.q.shape[2] > 1 or call.window is not None or self._fleeting or keep is not None:
            distance = ranks.repeat_interleave(rows // batch, 0)[:, :, None] - stored.ranks[:, None]
            near = distance >= 0
            if call.window is not None:
                near = near & (distance < call.window)
            if self._fleeting:
                near = near & (~stored.fleeting[:, None] | (distance < self._fleeting))
            if keep is not None:
                near = near & (keep.flatten(0, 1)[:, None] | (distance == 0))
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

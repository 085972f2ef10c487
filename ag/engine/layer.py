"""One layer of the cache: what it holds, what its scorer remembers, and what it does with a pass.

A pass goes through five stages: *store* the new keys and values, *attend* to what is held, *observe* the attention,
*decide* what stays, *retain* it. Prompts, blocks of them, later turns and single tokens take the same way. Where the
flags of a gate decide, :class:`ag.engine.gated.GatedLayer` stores, attends and retains instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ag.engine.attend import attend_one, attend_one_weights, attend_rows
from ag.engine.decide import Decision
from ag.engine.lookback import Lookback
from ag.engine.observe import Keys, Observation, Queries
from ag.engine.passes import Pass
from ag.engine.policy import Policy
from ag.engine.pool import PAGE, Pool
from ag.engine.positions import Original
from ag.engine.records import Records, fit, joined
from ag.engine.stopwatch import Stopwatch
from ag.engine.store import PagedStore, Rows
from ag.errors import UserError
from ag.gates.gate import AttentionGate, AttentionGates
from ag.gates.memory import GateMemory
from ag.kernels.paged_attend import paged_attend
from ag.kernels.pages import Reach
from ag.model.geometry import entry_sizes, fingerprint
from ag.model.hooks import AttentionCall, UnsupportedModelError
from ag.model.projection import output_weight
from ag.stateful import Attributes, Stateful


@dataclass
class Step:
    """A pass in one layer: what its stages work on, and leave for the next ones.

    Attributes:
        call: the model's call.
        now: the pass.
        decision: decides for this layer in this pass; None: no budget decision here.
        layers: all layers of the cache; a decision may concern earlier ones.
        fresh: whether nothing was held before, and new tokens attend to each other as the model has rotated them.
        unrotated: the call with keys as they are stored.
        logits: of the layer's gate, ``[B, Hkv, T]``; None: it was not asked.
        flags: what the gate decided of the new tokens, ``[B, Hkv, T]``; None: nothing.
        held: what is held, keys as queries meet them; None until a stage asks.
        seen: what the scorer is shown; None: nothing.
        one_goes: whether no more tokens go than came, one of each head; None: not asked yet.
        masks: what stays ``[B, Hkv, N]``, by layer.
        out: attention output ``[B, H, T, D]``.
        weights: attention weights ``[B, H, N]`` of one query per sequence; None: they are not at hand.
    """

    call: AttentionCall
    now: Pass
    decision: Decision | None
    layers: Sequence[EvictionLayer]
    fresh: bool
    unrotated: AttentionCall
    logits: Tensor | None
    flags: Tensor | None = None
    held: Rows | None = None
    seen: Observation | None = None
    one_goes: bool | None = None
    masks: dict[int, Tensor] = field(default_factory=dict)
    out: Tensor | None = None
    weights: Tensor | None = None


class EvictionLayer(CacheLayerMixin, Attributes):
    """One layer of the cache; see :class:`ag.stateful.Stateful` for what all parts of it do.

    Args:
        policy: of the cache.
        rotation: what keys are rotated by.
        gates: of the model, where this layer has a gate; else None.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = False
    supports_early_init = False
    STATE: ClassVar[Mapping[str, Any]] = {
        **dict.fromkeys(("columns_seen", "_number", "evicted_at", "_open"), int),
        **{"scoring_seconds": float, "window": int | None, "_settled": bool, "_alike": bool},
        "memory": dict,
    }

    def __init__(self, policy: Policy, rotation: Original, gates: AttentionGates | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.policy, self.rotation, self.gates = policy, rotation, gates
        #: Type of what a gate says of each token, which is stored with it; None: nothing.
        self.gate_type = None if gates is None else torch.float32
        #: Where its memory is from; None: a pool of its own, which grows.
        self.pool: Pool | None = None
        #: Newest tokens that a query sees whatever their flags, its own included; None: it sees all.
        self.recent: int | None = None
        #: What the layer's gate looks back at.
        self.gate_memory = GateMemory(0 if gates is None else gates.config.window)
        #: What the scorer looks back at.
        self.lookback = Lookback()
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.store: PagedStore | None = None
        #: Sliding window of the model's layer: no query sees a token at this distance or beyond; None: there is none.
        self.window: int | None = None
        self._settled = False  # whether all that is held was seen by the last query of each sequence
        self._open = 0  # newest tokens of each sequence that the host knows to be seen until they leave the window
        #: Columns of the input that this layer was shown.
        self.columns_seen = 0
        self._number = 0  # of the pass that this layer was last shown
        self._ran = 0  # of the pass that it last attended in
        # tokens that may come to each row before one goes; None: the host has not asked
        self._until_full: int | None = None
        self._alike = True  # whether the host knows that all heads of a sequence hold the same tokens in the same slots
        #: Columns that were seen when the policy last evicted something; 0: it never did.
        self.evicted_at = 0
        self._scoring = Stopwatch()
        #: What the scorer recorded, ``[..., N]`` by slot of the store.
        self.memory: Records = {}
        for part in self._parts.values():
            part.reset()

    @property
    def _parts(self) -> dict[str, Stateful]:
        return {"gate": self.gate_memory, "lookback": self.lookback}

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values, the gate's too."""
        return self.gate_memory.nbytes + (0 if self.store is None else self.store.nbytes)

    @property
    def plain_nbytes(self) -> int:
        """Bytes that transformers' own cache would hold for the same columns: in a window, all but the next token's."""
        if self.store is None:
            return 0
        pool, seen = self.store.pool, self.columns_seen
        columns = seen if self.window is None else min(seen, self.window - 1)
        return self.store.batch * self.store.kv_heads * columns * pool.token_nbytes

    @property
    def scoring_seconds(self) -> float:
        """Seconds spent on scores and decisions; on a card the host waits for the last of them."""
        return self._scoring.seconds

    @scoring_seconds.setter
    def scoring_seconds(self, seconds: float) -> None:
        self._scoring = Stopwatch(seconds)

    # ---- what transformers asks

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the storage is made when it is known what stays."""

    def update(
        self, key_states: Tensor, value_states: Tensor, now: Pass | None = None, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Count the new tokens of a pass and hand them on; they are stored when the attention function has them."""
        if now is None or self._number == now.number or key_states.shape[2] != now.ranks.shape[1]:
            raise UserError(  # the model's hooks did not run
                "This cache was made for another model, or ag.detach(model) was called since; make one with "
                "EvictionCache(model, ...)."
            )
        self._number, self.columns_seen = now.number, now.seen
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Return the columns seen, which drive positions."""
        return self.columns_seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the sizes of a mask over everything seen."""
        return self.columns_seen + query_length, 0

    def get_max_length(self) -> int:
        """Return -1: there is no limit."""
        return -1

    get_max_cache_shape = get_max_length  # the name before transformers 5.20

    # ---- a pass

    def judge(self, gate: AttentionGate, hidden: Tensor, now: Pass) -> Tensor:
        """Return the logits ``[B, Hkv, T]`` of the layer's gate for the tokens of a pass, ``hidden`` ``[B, T, d]``."""
        if now.remember or self.gate_memory or (now.gaps and gate.config.window):  # a window counts columns
            logits = gate.step(hidden, now.ranks, now.valid, self.gate_memory)
        else:
            logits = cast("Tensor", gate(hidden, now.valid, now.left_padded or now.gaps))
        if now.reading:  # no token of a prompt is taken back
            self.gate_memory.settle()
        if not now.remember:
            self.gate_memory.reset()
        return logits

    def run(self, call: AttentionCall, now: Pass, decision: Decision | None, layers: Sequence[EvictionLayer]) -> Tensor:
        """Take a pass through all stages; returns the attention output ``[B, H, T, D]``, 0 on padding.

        Raises:
            UnsupportedModelError: when the model attends twice in a layer; its tokens would be stored twice.
        """
        if self._ran == now.number:
            raise UnsupportedModelError(
                f"{type(call.module).__name__} attends twice in layer {call.layer}: expected one softmax over keys; "
                "use a model such as Llama, Mistral, Qwen2 or Qwen3."
            )
        self._ran = now.number
        fresh = self.store is None or (now.reading and not bool(self.store.lengths.any()))
        fresh = fresh and not self.rotation.bends(now.seen)
        logits = now.logits.pop(call.layer, None)
        logits = None if logits is None else logits.to(call.q.device)
        step = Step(call, now, decision, layers, fresh, self.rotation.unrotated(call, now), logits)
        stages = self._store, self._attend, self._observe, self._decide, self._retain, self._settle
        idle = now.padded and not bool(now.real.any()) and (self.store is None or not bool(self.store.lengths.any()))
        if idle:  # padding alone, and nothing is held
            step.out = call.v.new_zeros(*call.q.shape[:3], call.v.shape[-1])
        for stage in () if idle else stages:
            stage(step)
        if now.ends_prompt and not self._decides_again:  # no later decision needs these
            self._forget_scores()
        assert step.out is not None
        return step.out.masked_fill(~now.real[:, None, :, None], 0.0) if now.padded else step.out

    def reserve(self, tokens: int) -> None:
        """Make room for so many more tokens of each sequence, so that nothing grows in the steps to come.

        Where one goes for each that comes, a page ahead is enough.
        """
        if self.store is not None:
            self.store.reserve(min(tokens, PAGE) if self.policy.steps == 1 else tokens)

    def step_key(self, deciding: bool) -> tuple[Any, ...] | None:
        """Return what the next step depends on beside its tokens: addresses, and what the host knows.

        While it stays the same, steps are the same operations on the same memory. None: the next one is another.
        ``deciding``: something may go of this layer in a step.
        """
        store, scorer = self.store, self.policy.scorer
        if store is None or not self.rotation.in_place:
            return None
        if deciding:
            steady = scorer is not None and scorer.needs.steady and self.policy.steps == 1
            if not steady or self._until_full is None or self._until_full >= 0:
                return None
        held, looks_back = store.step_key(), self.gate_memory.step_key()
        if held is None or looks_back is None:
            return None
        memory = tuple((name, x.data_ptr(), x.shape) for name, x in self.memory.items())
        return *held, *looks_back, *memory, self._settled, self._stays

    def stepped(self, now: Pass, deciding: bool) -> None:
        """Take note of a step that was replayed; see :meth:`step_key`."""
        assert self.store is not None
        self._number = self._ran = now.number
        self.columns_seen = now.seen
        self.store.stepped()
        self._open = self._open + 1 if self.gates is None or not now.judged else 0
        if deciding and self._until_full is not None:
            self._until_full -= 1
            self.evicted_at = now.seen
        self.gate_memory.stepped()

    def demand(self, tokens: int, *, reading: bool = False) -> int:
        """Return the most pages that a pass of so many tokens of each sequence, behind others, may take."""
        if self.store is None:
            return 0
        decides = self.policy.block is not None if reading else self._decides_again
        return self.store.demand(tokens, evicting=self._forgets or decides)

    @property
    def _decides_again(self) -> bool:
        """Whether something may go after the prompt's last pass."""
        return self.policy.steps is not None or self.policy.rereads

    def decide_later(self, call: AttentionCall, now: Pass, decision: Decision, layers: Sequence[EvictionLayer]) -> None:
        """Decide about a prompt that was stored, attended to and observed, from the last queries of it, and evict."""
        assert self.lookback.queries is not None
        step = Step(call, now, decision, layers, fresh=False, unrotated=call, logits=None)
        q, ranks, valid = self.lookback.queries
        step.seen = self._seen(step, Queries(q=q, ranks=ranks, valid=valid))
        self._decide(step)
        self._retain(step)
        self._forget_scores()

    def _forget_scores(self) -> None:
        """Forget what only decisions need."""
        self.memory = {}
        self.lookback.reset()

    def _said(self, step: Step) -> Tensor | None:
        """Return what is stored of a gate beside the new tokens, ``[B, Hkv, T]``; None: nothing."""
        return None if self.gates is None or step.logits is None else self.gates.stored(step.logits)

    def _store(self, step: Step) -> None:
        """Store the new tokens, in place of what none of their queries sees."""
        call, now, gate = step.unrotated, step.now, self._said(step)
        if self.store is None:
            pool = self.pool or Pool.growing(call.k, call.v, self.policy.kv_dtype)
            pool.check_tokens(call.k, call.v)
            self.store, self.window = self._new_store(len(call.k), call.k.shape[1], pool), call.window
        keep, width = now.real[:, None] if now.padded else None, now.ranks.shape[1]
        stays = self._stays
        if keep is None:
            self._open = self._open + width if gate is None else 0
        if self._forgets and not now.reading and not (self._settled and stays and width == 1):
            one = self._settled and width == 1 and self.rotation.in_place
            if one and self.store.movable(self.memory):  # it takes the place of the one that it no longer sees
                reach = Reach(self._near, self.window)  # of padding: gone before
                self.store.append(call.k, call.v, now.ranks, keep, gate, reach, self.memory)
                return
            first = now.ranks[:, 0] + (~now.real[:, 0]).long()
            self.store.settle(first, self._near, self.window, self.memory)
        self.store.append(call.k, call.v, now.ranks, keep, gate)
        self._settled = width == 1

    def _new_store(self, batch: int, kv_heads: int, pool: Pool) -> PagedStore:
        return PagedStore(batch, kv_heads, pool, self.gate_type, in_order=not self.rotation.in_place)

    @property
    def _stays(self) -> bool:
        """Whether all newest tokens are flagged, so that none of them goes when it is recent no more."""
        return self.window is None and self.recent is not None and self._open >= self.recent

    @property
    def _forgets(self) -> bool:
        """Whether tokens go that no later query sees."""
        return self.recent is not None or self.window is not None

    @property
    def _near(self) -> int | None:
        """Newest tokens that a query sees whatever their flags: no more than its window; None: it sees all."""
        return self.recent if self.recent is None or self.window is None else min(self.recent, self.window)

    def _settle(self, step: Step) -> None:
        """Free what no query sees behind the tokens of a prompt, of which none is taken back; write the others."""
        assert self.store is not None
        if step.now.reading:
            if self._forgets and self._closes(step):
                self.store.settle(self._first(step), self._near, self.window, self.memory, in_order=True)
                self._settled = True
            step.held = None  # what is written can have its memory
            self.store.write()

    def _first(self, step: Step) -> Tensor:
        """Return the rank ``[B]`` of the next query of each prompt, or of the first that is looked back at later."""
        now = step.now
        if now.ends_prompt:  # each is over, in whichever part its last token came
            return now.prompt_lengths
        if step.decision is None:
            return now.lengths
        return now.lengths - self.policy.lookback * (now.lengths < now.prompt_lengths)

    def _closes(self, step: Step) -> bool:
        """Tell whether later queries of a prompt see no more than those behind it."""
        return True

    def _attend(self, step: Step) -> None:
        """Attend to what is held."""
        call, now = step.unrotated, step.now
        assert self.store is not None
        if step.fresh and not now.gaps:
            step.out = step.call.dense(now.valid, now.left_padded)
        elif self._one_by_one(step):
            if self._weighs(step):
                self._know_lengths(step)
                step.out, step.weights = attend_one_weights(call, self.store)
                if now.padded:
                    step.weights.masked_fill_(~now.real[:, :, None], 0.0)
            else:
                step.out = attend_one(call, self.store)
        else:
            step.out = self._attend_held(step)

    def _observe(self, step: Step) -> None:
        """Make what the scorer is shown, where something may go or the scorer follows every query."""
        policy, now = self.policy, step.now
        if step.decision is None:
            return
        assert policy.scorer is not None
        with self._scoring.running(step.call.q.device):
            lookback = policy.lookback if now.reading else policy.scorer.needs.lookback
            queries = self._with_lookback(step, lookback)
            if now.due is not None or policy.scorer.needs.every_query:
                step.seen = self._seen(step, queries)

    def _decide(self, step: Step) -> None:
        """Let the policy say what stays; where nothing may go the scorer only takes note."""
        if step.seen is None or step.decision is None:
            return
        with self._scoring.running(step.call.q.device):
            if step.now.due is not None and self._steps(step):
                self._evict_one(step, step.seen, step.decision)
                return
            self._until_full = None
            if step.now.due is not None:
                due = None if step.now.every_due else step.now.due
                step.masks = step.decision.decide(step.seen, due, self.memory)
            else:
                assert self.policy.scorer is not None
                self.policy.scorer.note(step.seen, self.memory)

    def _evict_one(self, step: Step, seen: Observation, decision: Decision) -> None:
        """Let go what exceeds the budget by the token that came to each row; the host does not learn which."""
        store, due = self.store, step.now.due
        assert store is not None and due is not None and self.policy.scorer is not None
        if self._until_full is None:
            self._until_full = decision.room(seen, store.lengths.view(store.batch, -1)) + 1
        self._until_full -= 1
        if self._until_full >= 0:
            if self.policy.scorer.needs.every_query:
                self.policy.scorer.note(seen, self.memory)
            return
        slots = store.going(decision.most(store.kv_heads))
        self._alike = decision.step(seen, due, slots, self.memory) and self._alike
        store.leave(slots, self.memory)
        self.evicted_at = step.now.seen

    def _steps(self, step: Step) -> bool:
        """Tell whether one token of each head came since the last decision, so that the host has not to know what goes.

        No more of them goes then than came. A layer with a sliding window frees what left it too.
        """
        if step.one_goes is None:
            policy, now = self.policy, step.now
            each = policy.steps == 1 and now.every_due and not now.padded and self.window is None
            moves = self.store is not None and self.store.movable(self.memory)
            step.one_goes = each and moves and self._one_by_one(step)
        return step.one_goes

    def _know_lengths(self, step: Step) -> None:
        """Ask the device for lengths, so that scores end with the longest row, unless the device alone decides.

        There scores cover free slots too, and ``pool_append`` clears what was recorded of a slot when the next token
        takes it.
        """
        if self.store is not None and not (step.now.due is not None and self._steps(step)):
            _ = self.store.lengths

    def _retain(self, step: Step) -> None:
        """Free what does not stay, here and in earlier layers that give way."""
        step.seen = step.held = None  # the new buffers can have their memory
        for index, keep in step.masks.items():
            step.layers[index].retain(keep, step.now)

    # ---- what the stages need

    def _one_by_one(self, step: Step) -> bool:
        """Tell whether one query per sequence can meet the stored rows where they lie."""
        return step.call.q.shape[2] == 1 and not step.now.reading and self.rotation.in_place

    def _weighs(self, step: Step) -> bool:
        """Tell whether the scorer is to be shown the attention of one query to all that is held."""
        scorer = self.policy.scorer
        if step.decision is None or scorer is None or not scorer.needs.rows:
            return False
        return step.now.due is not None or scorer.needs.every_query

    def _attend_held(self, step: Step, *, recent: int = 0) -> Tensor:
        """Attend from all queries to what is held, where it lies in pages; see :func:`ag.engine.attend.attend_rows`."""
        assert self.store is not None
        if self.rotation.in_place and not self.store.unwritten:
            ranks = step.now.ranks.masked_fill(~step.now.real, -1) if step.now.padded else step.now.ranks
            call, rows = step.unrotated, self.store.rows
            return paged_attend(call.q, rows, ranks, call.scaling, call.window, recent or None, call.softmax)
        ranks, outs = step.now.ranks, []
        bent = self.store.padded() if self.rotation.bends(step.now.seen) else None
        for part in [slice(None)] if bent is None else self.rotation.parts(ranks):
            at = ranks[:, part]
            held = self._held(step) if bent is None else self.rotation.keys(bent, at.amax(1))
            placed = replace(step.unrotated, q=self.rotation.queries(step.unrotated.q[:, :, part], held, at))
            outs.append(attend_rows(placed, held, at, recent=recent))
        return torch.cat(outs, 2)

    def _held(self, step: Step) -> Rows:
        """Return what is held, rows padded."""
        if step.held is None:
            assert self.store is not None
            self._know_lengths(step)
            step.held = self.rotation.keys(self.store.padded())
        return step.held

    def _seen(self, step: Step, queries: Queries) -> Observation:
        """Return queries against what is held."""
        call, now, store = step.call, step.now, self.store
        assert store is not None
        self._know_lengths(step)
        shape = (call.k.shape[0], call.k.shape[1])
        ranks, valid, gate = (None if x is None else x.unflatten(0, shape) for x in store.ledger())
        assert ranks is not None
        filled = torch.ones_like(ranks, dtype=torch.bool) if valid is None else valid
        fit(self.memory, ranks.shape[-1])
        # what a prompt brings is at hand, and others that read it may look at what comes of it later
        held = self._held(step) if now.reading or not self.rotation.in_place else step.held
        q = queries.q if held is None else self.rotation.queries(queries.q, held, queries.ranks)
        everything = step.fresh or self.window is None or now.seen < self.window
        return Observation(
            keys=Keys(
                stored=partial(store.padded, ranks.shape[-1]) if held is None else lambda: held,
                ranks=ranks,
                valid=filled,
                full=valid is None,
                whole=everything and not self.evicted_at,
                ordered=store.ordered,
                alike=self._alike,
                bend=self.rotation.bending(held, shape[0])
                if held is not None and self.rotation.bends(now.seen)
                else None,
            ),
            queries=queries if q is queries.q else replace(queries, q=q),
            scaling=call.scaling,
            softmax=call.softmax,
            layer=call.layer,
            sliding_window=call.window,
            gate=None if gate is None else gate.masked_fill(~filled, 0.0),
            decays=self.gates is not None and self.gates.decays,
            own_prompt=now.prompt_lengths,
            stays=now.stays(ranks),
            decoding=not now.reading,
            precise=self.policy.scorer is not None and self.policy.scorer.needs.precise,
            recorded=MappingProxyType(self.memory),
            sums=self.lookback.sums,
            rotation=partial(self.rotation.turn, layer=call.layer),
            projection=lambda: output_weight(call.module, call.q.shape[1]),
            memo=call.memo,
            memo_of_pass=now.memo,
            columns=now.seen,
            tokens_seen=now.lengths if queries.ranks is now.ranks else None,
        )

    def _with_lookback(self, step: Step, last: int) -> Queries:
        """Return the new queries, behind the last ones of earlier passes where somebody looks back at those."""
        now, q = step.now, step.unrotated.q
        queries = Queries(
            q=q,
            ranks=now.ranks,
            valid=now.real,
            new=q.shape[2],
            padded=now.padded,
            outputs=step.out,
            weights=step.weights,
        )
        if last == 0:
            return queries
        queries = self.lookback.before(queries)
        if not now.ends_prompt or self._decides_again:  # else nobody looks back at these
            self.lookback.remember(queries, last)
        return queries

    # ---- what goes

    def retain(self, keep: Tensor, now: Pass) -> None:
        """Free what is not in ``keep`` ``[B, Hkv, N]``, here and in what the scorer recorded."""
        assert self.store is not None
        self._alike = self._alike and bool((keep == keep[:, :1]).all())
        if self.store.retain(keep.flatten(0, 1), self.memory, in_order=now.reading):
            self.evicted_at = min(now.seen, now.prompt_columns) if now.reading else now.seen

    # ---- other sequences, going back, saving

    def join(self, other: EvictionLayer) -> None:
        """Append the sequences of the same layer of another cache, in the same pool; no column is taken back then."""
        assert self.store is not None and other.store is not None
        for store in (self.store, other.store):
            store.write()  # what waits to go, with what was recorded of it
        self.memory = joined(self.memory, other.memory, self.store.batch, other.store.batch)
        self.store.join(other.store)
        self._alike, self._until_full = self._alike and other._alike, None
        for name, part in self._parts.items():
            part.join(other._parts[name])
        self._settled, self._open = self._settled and other._settled, min(self._open, other._open)

    def select(self, indices: Tensor) -> None:
        """Make the sequences those at ``indices``."""
        self._until_full = None
        if self.store is not None:
            self.store.select(indices)
        self.memory = {name: x[indices.to(x.device)] for name, x in self.memory.items()}
        for part in self._parts.values():
            part.select(indices)

    def crop(self, counts: Tensor) -> None:
        """Forget the newest tokens; ``counts`` ``[B]`` of each sequence stay."""
        self._until_full = None
        if self.store is not None:
            self.store.crop(counts, self.memory)
            self._open = 0
        for part in self._parts.values():
            part.crop(counts)

    def state_dict(self) -> dict[str, Any]:
        """Return what later passes depend on, with what is held and what the gate looks back at."""
        store = None if self.store is None else self.store.state_dict()
        parts = {name: part.state_dict() for name, part in self._parts.items()}
        return {**super().state_dict(), **parts, "store": store}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a state over; keys and values are to be the model's."""
        own = dict(state)
        for name, part in self._parts.items():
            part.load_state_dict(own.pop(name))
        held = own.pop("store")
        super().load_state_dict(own)
        if self.window is not None and self.window < 1:
            raise ValueError("window")
        if held is None:
            return
        decoder = self.rotation.decoder
        geometry, device = fingerprint(decoder.config), held["keys"].device.type
        types = {decoder.dtype} | ({torch.get_autocast_dtype(device)} if torch.is_autocast_enabled(device) else set())
        token = (held["keys"], held["values"]) if self.policy.kv_dtype == "float" else held["token"]
        for name, x, size in zip(("keys", "values"), token, entry_sizes(decoder.config), strict=True):
            if x.dtype not in types or x.shape[1:] != (size,):
                raise ValueError(name)
        batch, rest = divmod(len(held["lengths"]), geometry["num_kv_heads"])
        if rest:
            raise ValueError("lengths")
        pool = Pool.growing(token[0], token[1], self.policy.kv_dtype)
        self.store = self._new_store(batch, geometry["num_kv_heads"], pool)
        self.store.load_state_dict(held)

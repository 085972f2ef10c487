"""The cache that evicts: hand it to ``model.generate(past_key_values=...)``."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ag.engine.core.block_pool import BLOCK, BlockPool
from ag.engine.core.evictor import Evictor
from ag.engine.core.kv_store import KVStore
from ag.engine.core.layer import Layer
from ag.engine.core.sequences import ForwardBatch, SequenceState
from ag.engine.policy import Option, Policy, policy
from ag.engine.pool import PoolFullError
from ag.engine.spec import PolicySpec
from ag.errors import UserError
from ag.gates.attach import alike, attached_gates, move_to_layers
from ag.gates.gate import AttentionGate
from ag.model.geometry import entry_sizes, fingerprint
from ag.model.hooks import AttentionCall, Interceptor, decoder_of, device_of, instrument
from ag.model.support import check_attention


class EvictionCache(Interceptor, Cache):
    """A key-value cache that forgets: evicted keys and values are dropped from memory, per sequence and KV head.

    Args:
        model: causal language model, plain or PEFT-wrapped; the cache works with this one only.
        spec: a policy or its text; see :func:`ag.policy`.
        budget: for a text: tokens per KV head, or a share of the prompt.
        schedule: for a text: when something is evicted.
        pool: blocks that several caches may share; None makes one of its own.
        options: for a text: hyper-parameters of its parts.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: str | PolicySpec | Policy,
        budget: int | float | None = None,
        schedule: str = "prefill",
        *,
        pool: BlockPool | None = None,
        **options: Option,
    ) -> None:
        Cache.__init__(self, layers=[])
        self.policy = spec if isinstance(spec, Policy) else policy(spec, budget, schedule, **options)
        self.gates = self.policy.gates
        if self.policy.by_gates and self.gates is None:
            self.gates = attached_gates(model)
        check_attention(model)
        self.decoder = decoder_of(model)
        if self.gates is not None:
            move_to_layers(model, self.gates)
            self.policy = self.policy.trained_with(self.gates)
        instrument(model)
        config = self.decoder.config
        geometry, device = fingerprint(config), device_of(self.decoder)
        if pool is None:
            key, value = (torch.empty(0, n, dtype=self.decoder.dtype, device=device) for n in entry_sizes(config))
            pool = BlockPool(key, value, self.policy.kv_dtype)
        self.pool, self.kv_heads, self.num_layers = pool, geometry["num_kv_heads"], len(self.decoder.layers)
        windowed = geometry["windowed_layers"]
        self.sharing = [index for index in range(self.num_layers) if index not in windowed]
        self.reset()

    def reset(self) -> None:
        """Forget everything: the next tokens are a new prompt, of any batch size."""
        gates, kind = self.gates, None
        if gates is not None:
            kind = torch.bool if self.policy.budget is None else torch.float32
        self.store = KVStore(self.pool, self.num_layers, self.kv_heads, kind)
        self.sequences = SequenceState(self.policy)
        self.evictor = None if self.policy.budget is None else Evictor(self.policy, self.sharing)
        mine = () if gates is None else gates.layer_indices
        self.parts = [
            Layer(self.policy, self.decoder, index, gates if index in mine else None)
            for index in range(self.num_layers)
        ]
        self.batch: ForwardBatch | None = None
        self._new: Tensor | None = None  # [B, T] bool, which columns of the forward pass at hand are tokens
        self._broken = False  # whether a forward pass began and did not end
        self._length = 0  # columns of the forward pass at hand

    # ---- a forward pass

    def expect(self, valid: Tensor, tokens: Tensor | None = None) -> None:
        """Take note of a prompt that comes in several forward passes."""
        if not self.sequences.columns:
            self.sequences.expect(valid.bool())

    def protect(self, spans: Sequence[Any]) -> None:
        """Let tokens stay whatever the policy says of them, until :meth:`reset`: a system prompt, say.

        They count in the budget, like sinks. A model's sliding window hides them in its layers all the same. Another
        call replaces what this one says.

        Args:
            spans: pairs (first token, the one behind the last) of each sequence's own tokens, counted from 0, or for
                each sequence a list of such pairs. What is gone already does not come back.

        Raises:
            UserError: for a pair that is none, or lists for another number of sequences.
        """
        self.sequences.protect(spans)

    def modules(self) -> list[nn.Module]:
        """Return the gates, which run in a forward pass beside the model's modules."""
        return [] if self.gates is None else [self.gates]

    def begin(self, decoder: nn.Module, attention_mask: Tensor | None, batch: int, length: int) -> None:
        """Turn the mask of a forward pass into ranks; see :class:`ag.model.hooks.Interceptor`."""
        if decoder is not self.decoder:
            raise UserError("This cache was made for another model; make one with EvictionCache(model, ...).")
        if self._broken:
            raise UserError(
                "EvictionCache: a forward pass was broken off, so that some layers have its tokens and others have "
                "not; call cache.reset(), and read the text anew."
            )
        state = self.sequences
        device = device_of(decoder) if attention_mask is None else attention_mask.device
        fresh = not state.columns
        new = state.extend(attention_mask, batch, length, device)
        if fresh:
            self.store.start(batch)
        if not fresh and self.pool.fixed:
            self._check_room(new)
        self._broken, self._length = True, length  # broken until finish
        if length == 1 and not fresh and state.ready and (attention_mask is None or bool(new.all())):
            self._begin_step()
        else:
            self._new = new

    def _check_room(self, new: Tensor) -> None:
        """Refuse a forward pass before it begins, where the pool has no room for its tokens ``[B, T]`` bool."""
        counts = new.sum(1).cpu()
        needed = self.store.demand(counts)
        if needed > self.pool.free:
            self.sequences.take_back(new)
            raise self.pool.full(f"{int(counts.max())} tokens of each of {len(counts)} sequences need", needed)

    def blocks(self) -> Iterator[Tensor] | None:
        """Yield the columns of the passes that a forward pass is cut into; None where it is one pass as it came."""
        if self._new is None:
            return None
        new, self._new = self._new, None
        batches = self.sequences.batches(new)
        first = next(batches)
        if first.columns is None:
            self.batch = first
            return None
        return self._one_by_one(chain([first], batches))

    def _one_by_one(self, batches: Iterator[ForwardBatch]) -> Iterator[Tensor]:
        for number, batch in enumerate(batches):
            if number:
                self._end_pass()
            self.batch = batch
            same = torch.arange(batch.ranks.shape[1], device=batch.ranks.device).expand_as(batch.ranks)
            yield same if batch.columns is None else batch.columns

    def _begin_step(self) -> None:
        """Do the host's part of a step: count, and take blocks for all layers at once."""
        self.batch = batch = self.sequences.step()
        self.store.make_room(slice(None), batch.counts, ahead=BLOCK)
        self.store.held += 1

    def _end_pass(self) -> None:
        batch = self.batch
        if batch is not None and batch.ends_prompt:
            self.pool.trim()
        if batch is not None and "expired" in batch.memo:
            self.sequences.evicted_at = self.sequences.num_tokens.clone()

    def positions(self, given: Tensor | None, columns: Tensor | None) -> Tensor | None:
        """Return the positions that the model rotates the tokens at hand by; None means the usual ones."""
        batch, state = self.batch, self.sequences
        assert batch is not None
        plain = given is None and batch.step and bool((state.num_tokens == state.columns).all())
        if state.own_positions or plain:  # of a step in the same memory each time
            return batch.ranks if batch.step else batch.ranks.clamp_min(0)
        if given is None:  # columns, as transformers counts; by now the cache has seen those of this pass
            given = torch.arange(state.columns - self._length, state.columns, device=batch.ranks.device)[None]
        if columns is None:
            return given
        at = columns.clamp_min(0).expand(*given.shape[:-2], -1, -1)
        return given.expand(*given.shape[:-2], len(columns), -1).gather(-1, at)

    def enter_layer(self, layer: int, hidden: Tensor) -> None:
        """Let the gate that reads this layer's input look at the new tokens."""
        batch, gates = self.batch, self.gates
        assert batch is not None
        if gates is None or not (batch.is_prefill or self.policy.asks_later(gates)):
            return
        target = str(layer + gates.config.layer_offset)
        if target in gates.layers:
            gate = cast("AttentionGate", gates.layers[target])
            memory, later = self.parts[int(target)].gate_memory, self.policy.asks_later(gates)
            there = None if batch.step or not batch.padded else batch.ranks >= 0
            with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
                if memory or later or not batch.ends_prompt:
                    logits = gate.step(hidden, batch.ranks, there, memory)
                else:
                    logits = gate(hidden, there, False)
                if batch.is_prefill:
                    memory.settle()
                if not (later or not batch.ends_prompt):
                    memory.reset()
            batch.memo["logits", int(target)] = logits

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Hand keys and values on: they are stored when the attention function has them."""
        return key_states, value_states

    def attend(self, call: AttentionCall) -> Tensor:
        """Hand a pass to a layer."""
        batch = self.batch
        assert batch is not None
        evictor = self.evictor if call.layer in self.sharing else None
        if not (batch.is_prefill or self.policy.steps is not None):
            evictor = None
        try:
            return self.parts[call.layer].run(call, batch, self.store, evictor)
        except PoolFullError:
            if batch.fresh:  # nothing is lost: the text can be read again
                held, tokens = self.store.num_blocks(), int(batch.counts.max())
                self.reset()
                needed = (held + 1) * self.num_layers // max(call.layer, 1)
                raise self.pool.full(f"a prompt of {tokens} tokens needs more than", needed) from None
            raise

    def finish(self) -> None:
        """End a forward pass, behind its last layer."""
        self._end_pass()
        self._broken = False

    # ---- going back, other sequences

    def crop(self, tokens_to_remove: int | Sequence[int]) -> None:
        """Forget the newest tokens of all sequences, or so many of each; back to the last eviction at most."""
        count = torch.as_tensor(tokens_to_remove).abs().long().expand(len(self.sequences)).clone()
        self.sequences.crop(count)
        self.store.truncate(count)
        for part in self.parts:
            part.gate_memory.crop(self.sequences.num_tokens)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Make the sequences those at ``indices``; repeated ones share their blocks."""
        self.sequences.select(indices)
        self.store.select(indices)
        for part in self.parts:
            part.select(indices)
        if self.evictor is not None:
            self.evictor.decision.select(indices)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make the sequences those at ``beam_idx``."""
        self.batch_select_indices(beam_idx)

    def remove(self, sequences: Sequence[int]) -> None:
        """Forget some sequences, whose blocks are free then; the others move up. A cache without any is as new.

        Args:
            sequences: their places in the batch.

        Raises:
            UserError: when one is not there.
        """
        count = len(self.sequences)
        strange = [place for place in sequences if not 0 <= place < count]
        if strange:
            raise UserError(
                f"remove({list(sequences)}): sequence {strange[0]} is not there: expected 0 to {count - 1}, as this "
                f"cache holds {count}."
            )
        left = [place for place in range(count) if place not in sequences]
        if left:
            self.batch_select_indices(torch.tensor(left))
        else:
            self.reset()

    def add(self, other: EvictionCache) -> None:
        """Append the sequences of another cache in the same pool, which is empty then; no key is copied.

        Args:
            other: of the same model, policy and gates, with its prompt read.

        Raises:
            UserError: when the two cannot be one; both are as they were.
        """
        same = (
            ("model", self.decoder is other.decoder),
            ("policy", self.policy == other.policy),
            ("gates", alike(self.gates, other.gates)),
            ("pool", self.pool is other.pool),
        )
        for what, fits in same:
            if not fits:
                raise UserError(
                    f"add: the caches ({self.policy!r} and {other.policy!r}) do not have the same {what}: expected two "
                    "of one model, policy and gates, made with the same pool."
                )
        if other is self or not all(x.sequences.ready for x in (self, other) if len(x.sequences) or x is other):
            raise UserError("add: expected another cache, both with their prompts read to the end.")
        if not len(self.sequences):
            vars(self).update(vars(copy.deepcopy(other)))
            other.reset()
            return
        self.sequences.add(other.sequences)
        self.store.add(other.store)
        for mine, theirs in zip(self.parts, other.parts, strict=True):
            mine.lookback.join(theirs.lookback)
            mine.gate_memory.join(theirs.gate_memory)
        if self.evictor is not None and other.evictor is not None:
            self.evictor.decision.join(other.evictor.decision)
        other.reset()

    def __deepcopy__(self, memo: dict[int, Any]) -> EvictionCache:
        """Fork: another continuation of the same text, which shares the blocks."""
        new = copy.copy(self)
        new.store, new.sequences = self.store.fork(), copy.deepcopy(self.sequences, {id(self.policy): self.policy})
        new.parts = []
        for part in self.parts:
            mine = copy.copy(part)
            mine.lookback, mine.gate_memory = copy.deepcopy(part.lookback), copy.deepcopy(part.gate_memory)
            new.parts.append(mine)
        if self.evictor is not None:
            new.evictor = copy.copy(self.evictor)
            new.evictor.decision = copy.deepcopy(self.evictor.decision, {id(self.policy): self.policy})
        return new

    # ---- what is held, and what transformers asks

    def kept_positions(self, layer: int) -> list[list[Tensor]]:
        """Return which of its tokens each sequence holds in each KV head of a layer, ascending."""
        _, ranks = self.store.ledger(layer)
        return [[row[row >= 0].sort().values for row in sequence] for sequence in ranks]

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks that are taken."""
        return self.store.num_blocks() * self.pool.block_nbytes(self.store.gate_type)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the columns seen, which drive positions."""
        return self.sequences.columns

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return the sizes of a mask over everything seen."""
        return self.sequences.columns + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1: there is no limit."""
        return -1

    is_compileable = is_initialized = is_croppable = property(lambda self: False)
    is_sliding = property(lambda self: [False] * self.num_layers)

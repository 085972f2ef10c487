"""What a cache does in a forward pass, in the order in which a model's hooks call it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ag.engine.block_pool import BLOCK, BlockPool, PoolFullError
from ag.engine.evictor import Evictor
from ag.engine.forward_batch import ForwardBatch
from ag.engine.kind import Kind, check_scope
from ag.engine.kv_store import KVStore
from ag.engine.layer import Layer
from ag.engine.policy import Policy
from ag.engine.positions import Original
from ag.engine.reconstruction import ReconstructionPass
from ag.engine.sequences import SequenceState
from ag.errors import UserError
from ag.gates.gate import AttentionGates
from ag.model.hooks import AttentionCall, Interceptor, device_of


class Forward(Interceptor):
    """The side of :class:`ag.engine.cache.EvictionCache` that a forward pass calls."""

    decoder: Any
    policy: Policy
    gates: AttentionGates | None
    pool: BlockPool
    store: KVStore
    sequences: SequenceState
    layers: list[Layer]
    #: Indices of the layers that share the budget: those without a sliding window.
    sharing: list[int]
    #: Decides what goes; None means that the policy has no budget.
    evictor: Evictor | None
    #: What keys and queries are rotated by.
    rotation: Original
    #: Lets the model repeat the prompt; None means that the policy needs no repetition.
    reconstruction: ReconstructionPass | None

    batch: ForwardBatch | None = None  # the pass at hand
    _new: Tensor | None = None  # [B, T] bool, which columns of the forward pass at hand are tokens
    _length = 0  # columns of the forward pass at hand
    #: Whether a forward pass began and has not ended; after an error within it only :meth:`reset` helps.
    broken = False
    #: The types in which the text at hand is read.
    kind: Kind
    #: Whether :class:`ag.engine.step_runner.StepRunner` does the host's part of the pass at hand.
    prepared = False

    @abstractmethod
    def reset(self) -> None:
        """Forget everything."""

    @property
    def prompt_sees(self) -> Literal["dense", "sparse", "blocks"]:
        """What later tokens of a prompt see of earlier ones: all, what the gates leave, what blocks left."""
        if self.policy.block is not None:
            return "blocks"
        if self.gates is not None and self.policy.budget is None:
            return self.gates.config.prefill
        return "dense"

    # ---- before a pass

    def expect(self, valid: Tensor, tokens: Tensor | None = None) -> None:
        """Take note of the text that is to come, whole or in parts: the prompt, or the same text grown longer.

        ``model.generate`` calls it. Without it the first forward pass is the prompt. While a prompt is being read, the
        rest of it may become another one. What comes must have the padding that is announced here.

        Args:
            valid: ``[B, T]`` bool, False on padding.
            tokens: ids ``[B, T]``, or of those alone that were not seen; None means that they are not known.

        Raises:
            UserError: when the text does not go on from the one seen.
        """
        self.check_whole()
        self.sequences.expect(valid.bool(), tokens)

    def saw(self, tokens: Tensor | None) -> None:
        """Take note of the text ``[B, T]`` that went by; ``model.generate`` calls it. None means that it is not known.

        What was announced is over.
        """
        self.sequences.saw(tokens)
        self.look()

    def look(self) -> None:
        """Look whether the scores of the last steps were finite; the host waits for the device.

        Raises:
            NonFiniteScoreError: when one was not, naming layer and scorer.
        """
        if self.evictor is not None:
            self.evictor.look()

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

    # ---- a pass

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin(self, decoder: nn.Module, attention_mask: Tensor | None, batch: int, length: int) -> None:
        """Turn the mask of a forward pass into ranks; see :class:`ag.model.hooks.Interceptor`.

        Raises:
            UserError: for a pass that cannot go on from what is held; nothing has changed then.
            PoolFullError: when the pool has no room for its tokens; nothing has changed then.
        """
        if self.prepared:
            return
        if decoder is not self.decoder:
            raise UserError("This cache was made for another model; make one with EvictionCache(model, ...).")
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise UserError(
                "EvictionCache: a CUDA graph of a forward pass would write every later token where the captured one "
                "went; use ag.StepRunner(model, cache), which records steps, capture parts of the model without the "
                "cache, or use torch.compile(model), which leaves it out."
            )
        self.check_whole()
        state = self.sequences
        fresh = not state.columns
        check_scope(self.policy, self.gates, state, length)
        self.kind.check(decoder, fresh)
        device = device_of(decoder) if attention_mask is None else attention_mask.device
        new = state.extend(attention_mask, batch, length, device)
        if fresh:
            self.store.start(batch)
        elif self.pool.fixed:
            self._check_room(new)
        self.broken, self._length = True, length  # broken until finish
        if length == 1 and not fresh and state.ready and (attention_mask is None or bool(new.all())):
            self._begin_step()
        else:
            self._new = new

    def check_whole(self) -> None:
        """Refuse a cache whose last forward pass did not end, as after Ctrl-C or an error within it.

        Raises:
            UserError: until :meth:`reset`.
        """
        if self.broken:
            raise UserError(
                f"{type(self).__name__}: a forward pass was broken off by an error or Ctrl-C, or runs in another "
                "thread: some layers have its tokens, and others have not; call cache.reset() and read the text again."
            )

    def _check_room(self, new: Tensor) -> None:
        """Refuse a forward pass before it begins, where the pool has no room for its tokens ``[B, T]`` bool."""
        counts = new.sum(1).cpu()
        if self.policy.block is not None and not self.sequences.ready:  # a chunk is evicted before the next one comes
            counts = counts.minimum(self.policy.block - self.sequences.num_tokens % self.policy.block)
        needed = self.store.demand(counts, self.sequences.may_evict(counts))
        if not self.pool.has(needed):
            self.sequences.take_back(new)
            raise self.pool.full(f"{int(counts.max())} tokens of each of {len(counts)} sequences need", needed)

    def _begin_step(self) -> None:
        """Do the host's part of a step: count, and take blocks for all layers at once."""
        self.batch = batch = self.sequences.step()
        self.store.make_room(slice(None), batch.counts, ahead=BLOCK)
        self.store.held += 1
        if self.evictor is not None:
            self.evictor.begin_step(batch, self.store, self.layers[self.sharing[0]].window)

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

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def note(self, tokens: Tensor) -> None:
        """Take note of the tokens of a prompt, for a policy that lets the model repeat them."""
        if self.reconstruction is not None and not self.sequences.ready:
            self.reconstruction.note(tokens, self.sequences.columns - self._length)

    def positions(self, given: Tensor | None, columns: Tensor | None) -> Tensor | None:
        """Return the positions that the model rotates the tokens at hand by; None means the usual ones."""
        positions, batch = self._positions(given, columns), self.batch
        if self.reconstruction is not None and batch is not None and batch.is_prefill:
            self.reconstruction.follow(batch.ranks, positions)
        return positions

    def _positions(self, given: Tensor | None, columns: Tensor | None) -> Tensor | None:
        batch, state = self.batch, self.sequences
        assert batch is not None
        places = self.rotation.positions(batch, self.store)
        if places is not None:
            return places
        plain = given is None and batch.step and bool((state.num_tokens == state.columns).all())
        if state.own_positions or plain:  # of a step in the same memory each time
            return batch.ranks if batch.step else batch.ranks.clamp_min(0)
        state.by_column = given is None
        if given is None:  # columns, as transformers counts; by now the cache has seen those of this pass
            given = torch.arange(state.columns - self._length, state.columns, device=batch.ranks.device)[None]
        if columns is None:
            return given
        at = columns.clamp_min(0).expand(*given.shape[:-2], -1, -1)
        return given.expand(*given.shape[:-2], len(columns), -1).gather(-1, at)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def enter_layer(self, layer: int, hidden: Tensor) -> None:
        """Let the gate that reads this layer's input look at the new tokens."""
        batch, gates = self.batch, self.gates
        assert batch is not None
        if gates is None or not (batch.is_prefill or self.policy.asks_later(gates)):
            return
        target = layer + gates.config.layer_offset
        if str(target) in gates.layers:
            self.layers[target].judge(hidden, batch)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Hand keys and values on: they are stored when the attention function has them."""
        if not self.broken:
            raise UserError(
                "This cache was made for another model, or ag.detach(model) was called since; make one with "
                "EvictionCache(model, ...), or attach the gates again."
            )
        return key_states, value_states

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(self, call: AttentionCall) -> Tensor:
        """Hand a pass to a layer.

        Raises:
            UserError: when gradients would go through it.
        """
        if torch.is_grad_enabled() and any(x.requires_grad for x in (call.q, call.k, call.v)):
            raise UserError(
                "EvictionCache: gradients do not go through a cache; run the model under torch.no_grad(), or train "
                "without past_key_values."
            )
        batch = self.batch
        assert batch is not None
        if batch.fresh:
            self.hold_as(self.rotation.dtype(call.k.dtype), self.rotation.dtype(call.v.dtype))
        evictor = self.evictor if call.layer in self.sharing else None
        if not (batch.is_prefill or self.policy.steps is not None):
            evictor = None
        if self.reconstruction is not None and batch.is_prefill:
            self.reconstruction.look(call)
        try:
            return self.layers[call.layer].run(call, batch, self.store, evictor)
        except PoolFullError:
            if self.sequences.columns == self._length:  # the text can be read again
                held, tokens, layers = self.store.num_blocks(), int(batch.counts.max()), len(self.layers)
                self.reset()
                raise self.pool.full(
                    f"a prompt of {tokens} tokens needs more than", (held + 1) * layers // max(call.layer, 1)
                ) from None
            raise

    def hold_as(self, key: torch.dtype, value: torch.dtype) -> None:
        """Hold keys and values of these types, where autocast makes others than the model's weights have."""
        if (key, value) == tuple(x.dtype for x in self.pool.token):
            return
        if self.pool.fixed or self.store.num_blocks():
            raise UserError(
                f"Pool: it holds {self.pool.token[0].dtype}, and the model computed keys of {key} and values of "
                f"{value}; use the cache without torch.autocast, or without pool."
            )
        k, v = self.pool.token
        self.pool = BlockPool(k.to(key), v.to(value), self.policy.kv_dtype)
        mine = self.store
        self.store = KVStore(self.pool, mine.layers, mine.kv_heads, mine.gate_type, self.rotation)
        self.store.start(len(self.sequences))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def finish(self) -> None:
        """End a forward pass, behind its last layer; a policy that lets the model repeat the prompt evicts then."""
        if self.prepared:
            return
        if self.reconstruction is not None and self.reconstruction.due(self.sequences):
            try:
                self.reconstruction.run(self)
            except PoolFullError:
                if self.sequences.columns == self._length:  # the text can be read again
                    self.reset()
                raise
        self._end_pass()
        self.broken = False

    def _end_pass(self) -> None:
        batch, evictor = self.batch, self.evictor
        if batch is None:
            return
        if evictor is not None:
            evictor.end_pass(batch, self.store)
        if batch.step:
            for layer in self.layers:
                layer.expire(batch, self.store)
        if batch.ends_prompt:
            self.pool.trim()
            if self.policy.steps is None:  # nobody scores again
                self.store.records = [{} for _ in self.layers]
                for layer in self.layers:
                    layer.lookback.reset()
        state, span = self.sequences, self.gates.config.window if self.gates is not None else 0
        if "expired" in batch.memo:
            state.evicted_at = state.settled.maximum(state.evicted_at)
        if span and any(layer.gate_memory for layer in self.layers):  # which looks back at the newest so many alone
            state.evicted_at = state.settled.where(state.settled >= span, 0).maximum(state.evicted_at)

"""The work of a cache in a forward pass, in the order in which a model's hooks call it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ag.engine.block_pool import BlockPool, PoolFullError
from ag.engine.evictor import Evictor
from ag.engine.forward_batch import ForwardBatch
from ag.engine.kv_store import KVStore
from ag.engine.layer import Layer
from ag.engine.masks import check_frequencies
from ag.engine.policy import Policy
from ag.engine.positions import Turned
from ag.engine.reconstruction import ReconstructionPass
from ag.engine.sequences import SequenceState
from ag.errors import UserError
from ag.gates.gate import AttentionGates
from ag.model.hooks import AttentionCall, Interceptor
from ag.model.hybrid import States
from ag.model.rope import RopeByText

#: The types of weights and of autocast (None means off) of a pass, and whether it is under inference mode.
Kind = tuple[torch.dtype, torch.dtype | None, bool]


class Forward(Interceptor):
    """The side of :class:`ag.engine.cache.EvictionCache` that a forward pass calls."""

    decoder: Any
    policy: Policy
    gates: AttentionGates | None
    pool: BlockPool
    #: The rows, one for the layers of each kind of KV heads; and the one of each layer.
    stores: list[KVStore]
    store_of: list[KVStore]
    sequences: SequenceState
    layers: list[Layer]
    #: Indices of the layers that share the budget: under gates those that have one, else those without a sliding window
    #: where others have one.
    sharing: list[int]
    #: Decides what goes; None means that the policy has no budget.
    evictor: Evictor | None
    #: Rotates keys and queries again; None means that they stay at their places in the text.
    rotation: Turned | None
    states: States | None
    rope: RopeByText | None  # None means that RoPE's frequencies do not depend on the length of a text
    #: Lets the model repeat the prompt; None means that the policy needs no repetition.
    reconstruction: ReconstructionPass | None

    batch: ForwardBatch | None = None  # the pass at hand
    _new: Tensor | None = None  # [B, T] bool, which columns of the forward pass at hand are tokens
    _length = 0  # columns of the forward pass at hand
    #: Whether a forward pass began and has not ended; after an error within it only :meth:`reset` helps.
    broken = False
    #: How the text at hand is read; None means that no pass was made here yet.
    kind: Kind | None
    #: Whether :class:`ag.engine.step_runner.StepRunner` does the host's part of the pass at hand.
    prepared = False

    @abstractmethod
    def reset(self) -> None:
        """Forget everything."""

    @property
    def prompt_sees(self) -> Literal["dense", "sparse", "blocks"]:
        """What later tokens of a prompt see of earlier ones: all, those the gates leave, or those that blocks left."""
        if self.policy.block is not None:
            return "blocks"
        if self.gates is not None and self.policy.budget is None:
            return self.gates.config.prefill
        return "dense"

    @property
    def text_lengths(self) -> Tensor:  # type: ignore[override]
        """``[B]`` long on the host, by which a RoPE may choose frequencies: the tokens of each text as it began."""
        return self.sequences.text_len

    # ---- before a pass

    def expect(self, valid: Tensor, tokens: Tensor | None = None) -> None:
        """Announce the text that is to come, whole or in parts: the prompt, or the same text grown longer.

        ``model.generate`` calls it. Without it the first forward pass is the prompt. While a prompt is being read, the
        rest of it may become another one. What comes must have the padding that is announced here.

        Args:
            valid: ``[B, T]`` bool, False on padding.
            tokens: ids ``[B, T]``, or those of the new tokens alone; None means that they are not known.

        Raises:
            UserError: when the text does not go on from the one seen.
        """
        self.check_whole()
        self.sequences.expect(valid.bool(), tokens)

    def saw(self, tokens: Tensor | None) -> None:
        """Note the text ``[B, T]`` after generation; ``model.generate`` calls it. None means that it is not known."""
        self.sequences.saw(tokens)
        if self.states is not None:  # drafts end
            self.states.record(False)
        self.look()

    def look(self) -> None:
        """Look whether the scores of the last steps were finite; see :meth:`ag.engine.evictor.Evictor.end_pass`."""
        if self.evictor is not None:
            self.evictor.raise_if_nonfinite()

    def protect(self, spans: Sequence[Any]) -> None:
        """Keep tokens whatever the policy decides, until :meth:`reset`: a system prompt, say.

        They count in the budget, like sinks. A model's sliding window hides them in its layers all the same. Another
        call replaces this one.

        Args:
            spans: pairs (index of the first token, index after the last) of each sequence's own tokens, counted from 0,
                or for each sequence a list of such pairs.

        Raises:
            UserError: for something else than such pairs, lists for another number of sequences, or tokens of which
                some heads may have lost the key, as they were not protected when something was evicted.
        """
        self.sequences.protect(spans)

    # ---- a pass

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin(self, decoder: nn.Module, attention_mask: Tensor | None, tokens: Tensor) -> None:
        """Turn the mask of a forward pass into token indices; see :class:`ag.model.hooks.Interceptor`.

        A pass that cannot go on, or for which the pool has no room (``PoolFullError``), changes nothing.
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
        if self.broken:
            self.check_whole()
        state, (batch, length) = self.sequences, tokens.shape[:2]
        fresh, ready = not state.columns, state.ready
        device = tokens.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        kind = next(decoder.parameters()).dtype, autocast, torch.is_inference_mode_enabled()
        if not fresh and self.kind is not None and self.kind != kind:
            self._check_kind(self.kind, kind)
        self.kind = kind
        if not ready:
            self._check_prompt(tokens)
        new = state.extend(attention_mask, batch, length, tokens.device)
        if self.rope is not None:
            check_frequencies(self.rope, state, new, type(decoder).__name__)
        if fresh:
            for store in self.stores:
                store.start(batch)
        elif self.pool.fixed:
            self._check_room(new)
        self.broken, self._length = True, length  # broken until the end of the last pass
        if fresh and self.policy.budget is None and self.gates is None:  # all that comes stays
            self.pool.reserve(sum(store.demand(new.sum(1).cpu()) for store in self.stores))
        if length == 1 and ready and (attention_mask is None or bool(new.all())):  # a step: all layers get room at once
            self.batch = step = state.step()
            for store in self.stores:
                store.make_room(slice(None), step.counts)
            if self.evictor is not None:
                self.evictor.begin_step(step, self.stores, self.layers[self.sharing[0]].window)
        else:
            self._new = new

    def _check_kind(self, old_kind: Kind, new_kind: Kind) -> None:
        """Refuse a pass in other types, or outside of the inference mode, than those of the held tokens."""
        if old_kind[:2] != new_kind[:2]:
            texts = [f"{weights}, autocast {autocast or 'off'}" for weights, autocast, _ in (old_kind, new_kind)]
            raise UserError(
                f"EvictionCache: what is held was computed in {texts[0]}, and the model now computes in {texts[1]}: go "
                "on as before, or call cache.reset() and read the text again."
            )
        if old_kind[2]:
            raise UserError(
                "EvictionCache: a context was read, copied or cropped under torch.inference_mode(), whose tensors "
                "cannot be changed outside of it: go on under torch.inference_mode(), or use torch.no_grad()."
            )

    def note_mode(self) -> None:
        """Note that tensors change under inference mode, and can be changed there alone from now on."""
        if self.kind is not None and torch.is_inference_mode_enabled():
            self.kind = (*self.kind[:2], True)

    def _check_prompt(self, tokens: Tensor) -> None:
        """Refuse a part of a prompt for gates that read it whole, and note the ids for a policy that repeats them."""
        num_columns, announced, length = self.sequences.columns, self.sequences.announced, tokens.shape[1]
        if self.gates is not None and self.gates.config.scope == "prompt" and not num_columns and length < announced:
            raise UserError(
                f"{self.policy!r}: gates of gate.scope=prompt read the prompt in one forward pass, and {length} of "
                f"{announced} tokens came; leave prefill_chunk_size out, or use gates of gate.scope=causal."
            )
        if self.reconstruction is not None:
            self.reconstruction.note(tokens, num_columns)

    def check_whole(self) -> None:
        """Refuse a cache whose last forward pass did not end, as after Ctrl-C or an error, until :meth:`reset`."""
        if self.broken:
            raise UserError(
                f"{type(self).__name__}: a forward pass was broken off by an error or Ctrl-C, or runs in another "
                "thread: some layers have its tokens, and others have not; call cache.reset() and read the text again."
            )

    def _check_room(self, new: Tensor) -> None:
        """Refuse a forward pass before it begins, where the pool has no room for its tokens ``[B, T]`` bool."""
        counts = new.sum(1).cpu()
        if self.policy.block is not None and not self.sequences.ready:  # a chunk is evicted before the next one comes
            state, block = self.sequences, self.policy.block
            capacity = 0 if self.policy.budget is None else self.policy.capacity(state.prompt_len)
            counts = counts.minimum((block - state.num_tokens % block).maximum(capacity + block - state.num_held))
        evicts = self.rotation is not None or self.sequences.may_evict(counts)  # keys that turn are written anew
        # fewer copies are needed once nothing else refers to the blocks
        if not self.pool.has(lambda: sum(store.demand(counts, evicts) for store in self.stores)):
            self.sequences.take_back(new)
            needed = sum(store.demand(counts, evicts) for store in self.stores)
            raise self.pool.full(f"{int(counts.max())} tokens of each of {len(counts)} sequences need", needed)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def passes(self, position_ids: Tensor | None) -> Iterator[tuple[Tensor | None, Tensor | None]]:
        """Yield the columns and positions of each pass, and end it; see :class:`ag.model.hooks.Interceptor`."""
        new, self._new = self._new, None
        for number, batch in enumerate([self.batch] if new is None else self.sequences.batches(new)):
            assert batch is not None
            if number:
                self.end_pass()
            self.batch, self.broken = batch, True
            positions = self._positions(position_ids, batch)
            if self.reconstruction is not None and batch.is_prefill:
                self.reconstruction.follow(batch.token_indices, positions)
            yield batch.columns, positions
        if self.reconstruction is not None and self.reconstruction.due(self.sequences):
            self._reconstruct()
        if not self.prepared:
            self.end_pass()

    def _positions(self, position_ids: Tensor | None, batch: ForwardBatch) -> Tensor | None:
        """Return the positions that the model rotates the tokens of a pass by; None means those of their columns."""
        state = self.sequences
        rotated = None if self.rotation is None else self.rotation.positions(batch, self.stores)
        if rotated is not None:
            return rotated
        plain = position_ids is None and batch.step and bool((state.num_tokens == state.columns).all())
        if state.own_positions or plain:  # of a step in the same memory each time
            return batch.token_indices if batch.step else batch.token_indices.clamp_min(0)
        state.by_column = position_ids is None
        if position_ids is None:  # columns, as transformers counts; by now the cache has seen those of this pass
            position_ids = torch.arange(state.columns - self._length, state.columns, device=batch.token_indices.device)[
                None
            ]
        if batch.columns is None:
            return position_ids
        at = batch.columns.clamp_min(0).expand(*position_ids.shape[:-2], -1, -1)
        return position_ids.expand(*position_ids.shape[:-2], len(batch.columns), -1).gather(-1, at)

    def _reconstruct(self) -> None:
        """Let the model repeat the prompt, and evict by that."""
        assert self.reconstruction is not None
        try:
            self.reconstruction.run(self)
        except PoolFullError:
            if self.sequences.columns == self._length:  # the text can be read again
                self.reset()
            raise

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def enter_layer(self, layer: int, hidden: Tensor) -> None:
        """Apply the gate that reads this layer's input to the new tokens."""
        batch, gates = self.batch, self.gates
        assert batch is not None
        if gates is None or not (batch.is_prefill or self.policy.asks_later(gates)):
            return
        target = layer + gates.config.layer_offset
        if str(target) in gates.layers:
            self.layers[target].judge(hidden, batch)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return keys and values as they are: they are stored when the attention function has them."""
        if not self.broken:
            raise UserError(
                "This cache was made for another model, or ag.detach(model) was called since; make one with "
                "EvictionCache(model, ...), or attach the gates again."
            )
        return key_states, value_states

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(self, call: AttentionCall) -> Tensor:
        """Run a layer; raises ``UserError`` where gradients would go through it."""
        if torch.is_grad_enabled() and any(x.requires_grad for x in (call.q, call.k, call.v)):
            raise UserError(
                "EvictionCache: gradients do not go through a cache; run the model under torch.no_grad(), or train "
                "without past_key_values."
            )
        batch = self.batch
        assert batch is not None
        kind, computed_dtype = self.pool.dtype, torch.promote_types(call.k.dtype, call.v.dtype)
        if torch.promote_types(kind, computed_dtype) != kind:
            raise UserError(
                f"EvictionCache: the model computed keys of {call.k.dtype} and values of {call.v.dtype}, which {kind}, "
                "the type of its weights, does not hold: use it without torch.autocast, or load it in that type."
            )
        evictor = self.evictor if call.layer in self.sharing else None
        if not (batch.is_prefill or self.policy.steps is not None):
            evictor = None
        if self.reconstruction is not None and batch.is_prefill:
            self.reconstruction.look(call)
        try:
            return self.layers[call.layer].run(call, batch, self.store_of, evictor)
        except PoolFullError:
            if self.sequences.columns == self._length:  # the text can be read again
                tokens, num_blocks = int(batch.counts.max()), sum(store.num_blocks() for store in self.stores)
                needed = (num_blocks + 1) * len(self.layers) // max(call.layer, 1)
                self.reset()
                raise self.pool.full(f"a prompt of {tokens} tokens needs more than", needed) from None
            raise

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def end_pass(self) -> None:
        """End a pass behind its last layer: remove tokens that no later query sees, and look at scores."""
        batch, evictor = self.batch, self.evictor
        assert batch is not None
        if evictor is not None:
            evictor.end_pass(batch)
        if batch.step:
            for layer in self.layers:
                if layer.hides:
                    layer.expire(batch, self.store_of[layer.index])
        if batch.ends_prompt:
            self.pool.trim()
            if self.policy.steps is None:  # nothing is scored again
                for store in self.stores:
                    store.records = [{} for _ in self.layers]
                for layer in self.layers:
                    layer.observation_window.reset()
        state, span = self.sequences, self.gates.config.window if self.gates is not None else 0
        if "expired" in batch.memo:
            state.evicted_at = state.settled.maximum(state.evicted_at)
        if span and any(layer.gate_memory for layer in self.layers):  # which hold the newest tokens alone
            state.evicted_at = state.settled.where(state.settled >= span, 0).maximum(state.evicted_at)
        self.broken = False

"""A forward pass of a cache. Read it from top to bottom: a model's hooks call its methods in this order.

:meth:`ForwardPass.begin` turns the attention mask into token indices and takes blocks. :meth:`ForwardPass.passes` cuts
the new tokens into passes, for example the chunks of a prompt. Within a pass each layer calls
:meth:`ForwardPass.enter_layer`, which runs its gate, and :meth:`ForwardPass.attend`, which stores the new keys,
attends, scores and, if an eviction is due, evicts (:meth:`ag.engine.evictor.Evictor.evict`; a decoding step waits for
its last layer). :meth:`ForwardPass.end_pass` checks scores and frees memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ag.engine.allocators.uniform import Uniform
from ag.engine.block_pool import PoolFullError
from ag.engine.cache_state import CacheState, ComputeMode
from ag.engine.forward_batch import ForwardBatch
from ag.engine.masks import check_frequencies
from ag.engine.reconstruction import evict_by_reconstruction
from ag.errors import UserError
from ag.model.hybrid import States
from ag.model.interceptor import AttentionCall, Interceptor


class ForwardPass(Interceptor):
    """The forward passes of a cache; a model's hooks call it.

    Args:
        state: of the cache.
    """

    def __init__(self, state: CacheState) -> None:
        self.state, self.setup = state, state.setup
        gates = self.setup.gates
        self.modules = () if gates is None else [gates]
        #: Whether :class:`ag.engine.step_runner.StepRunner` does the host's part of the pass at hand.
        self.step_prepared = False
        #: The pass at hand; None before the first one.
        self.batch: ForwardBatch | None = None
        self._call_tokens: Tensor | None = None  # [B, T] bool, which columns of the model's call are tokens
        self.call_length = 0  # columns of the model's call, which may read them in several passes

    def reset(self) -> None:
        """Forget everything."""
        self.state.reset()
        self.batch, self._call_tokens, self.call_length = None, None, 0

    @property
    def states(self) -> States | None:
        """States of layers that do not attend; None means that all layers of the model attend."""
        return self.state.states

    @states.setter
    def states(self, states: States | None) -> None:
        self.state.states = states

    @property
    def text_lengths(self) -> Tensor:  # type: ignore[override]
        """``[B]`` long on the host, the tokens of each text as it began; a RoPE may choose frequencies by them."""
        return self.state.sequences.text_len

    @property
    def seen_tokens(self) -> int:
        """Columns that went by in earlier passes."""
        return self.state.sequences.columns

    # ---- before and after model.generate

    def expect(self, valid: Tensor, tokens: Tensor | None = None) -> None:
        """Announce the whole text; see :meth:`ag.engine.cache.EvictionCache.expect`."""
        self.state.check_pass_finished()
        self.state.sequences.expect(valid.bool(), tokens)

    def end_generation(self, tokens: Tensor | None, broken_off: bool) -> None:
        """Note the text ``[B, T]`` after generation, which an error may have ended; None means that it is not known."""
        self.state.sequences.end_generation(tokens, broken_off)
        if self.state.states is not None:  # drafts end
            self.state.states.record(False)
        self.state.check_scores()

    # ---- begin

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin(self, decoder: nn.Module, attention_mask: Tensor | None, tokens: Tensor) -> None:
        """Turn the mask of a forward pass into token indices; see :class:`ag.model.interceptor.Interceptor`.

        A pass that cannot go on, or for which the pool has no room (``PoolFullError``), changes nothing.
        """
        if self.step_prepared:
            return
        state, setup = self.state, self.setup
        if decoder is not setup.decoder:
            raise UserError("This cache was made for another model; make one with EvictionCache(model, ...).")
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise UserError(
                "EvictionCache: a CUDA graph of a forward pass would write every later token where the captured one "
                "went; use ag.StepRunner(model, cache), which records steps, capture parts of the model without the "
                "cache, or use torch.compile(model), which leaves it out."
            )
        if state.pass_open:  # asked here, so that a step needs no call for it
            state.check_pass_finished()
        sequences, (num_sequences, length) = state.sequences, tokens.shape[:2]
        is_first_pass, ready = not sequences.columns, sequences.ready
        device = tokens.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        compute_mode = ComputeMode(next(decoder.parameters()).dtype, autocast, torch.is_inference_mode_enabled())
        if not is_first_pass and state.compute_mode is not None and state.compute_mode != compute_mode:
            _check_compute_mode(state.compute_mode, compute_mode)
        if not ready:
            self._check_prompt(tokens)
        new = sequences.extend(attention_mask, num_sequences, length, tokens.device)
        if setup.rope is not None:
            counts = _count(new, attention_mask)
            check_frequencies(setup.rope, sequences, new, counts, type(decoder).__name__)
        if is_first_pass:
            for store in state.stores:
                store.start_batch(num_sequences)
        elif setup.pool.fixed:
            self._check_room(new, _count(new, attention_mask))
        state.compute_mode = compute_mode
        state.pass_open, self.call_length = True, length  # until the end of the last pass
        if is_first_pass and setup.policy.budget is None and setup.gates is None:
            # nothing is evicted: all blocks can be reserved at once
            counts = _count(new, attention_mask)
            setup.pool.reserve(sum(store.blocks_needed(counts) for store in state.stores))
        if length == 1 and ready and (attention_mask is None or bool(new.all())):  # a step: all layers get room at once
            self.batch = step = sequences.step()
            for store in state.stores:
                store.make_room(slice(None), step.counts)
            if state.evictor is not None:
                state.evictor.begin_step(step, state.stores, state.layers[setup.budget_layers[0]].window)
        else:
            self._call_tokens = new

    def _check_prompt(self, tokens: Tensor) -> None:
        """Refuse a part of a prompt for gates that read it whole, and note the ids for a policy that repeats them."""
        sequences, gates, length = self.state.sequences, self.setup.gates, tokens.shape[1]
        num_columns, announced = sequences.columns, sequences.announced
        if gates is not None and gates.config.scope == "prompt" and not num_columns and length < announced:
            raise UserError(
                f"{self.setup.policy!r}: gates of gate.scope=prompt read the prompt in one forward pass, and {length} "
                f"of {announced} tokens came; leave prefill_chunk_size out, or use gates of gate.scope=causal."
            )
        if self.state.recorded_prompt is not None:
            self.state.recorded_prompt.note_tokens(tokens, num_columns)

    def _check_room(self, new: Tensor, counts: Tensor) -> None:
        """Refuse a pass where the pool has no room for its tokens, ``new`` ``[B, T]`` bool and ``counts`` ``[B]``."""
        stores, sequences, policy = self.state.stores, self.state.sequences, self.setup.policy
        chunk, uneven = None if sequences.ready else policy.block, False
        if chunk is not None:  # each chunk is evicted from before the next one is read
            uneven = not isinstance(policy.allocator, Uniform)
            capacity = 0 if policy.budget is None else policy.capacity(sequences.prompt_len)
            to_chunk_end = chunk - sequences.num_tokens % chunk
            counts = counts.minimum(to_chunk_end.maximum(capacity + chunk - sequences.num_held))
        # These write into cached blocks, and shared blocks are copied first: evictions, rotations of cached keys, and
        # the end of an attention chunk, which frees the tokens of the chunk.
        in_chunks = any(layer.chunk is not None for layer in self.state.layers)
        rewrites = in_chunks or self.setup.rotation is not None or sequences.may_evict(counts)

        def needed() -> int:  # counted again as spare blocks are released: fewer shared blocks are copied then
            return sum(store.blocks_needed(counts, rewrites, uneven) for store in stores)

        if not self.setup.pool.has(needed):
            sequences.undo_extend(new)
            raise self.setup.pool.full(f"{int(counts.max())} tokens of each of {len(counts)} sequences need", needed())

    # ---- passes

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def passes(self, position_ids: Tensor | None) -> Iterator[tuple[Tensor | None, Tensor | None]]:
        """Yield the columns and positions of each pass, and end it; see :class:`ag.model.interceptor.Interceptor`."""
        state, new = self.state, self._call_tokens
        self._call_tokens = None
        for number, batch in enumerate([self.batch] if new is None else state.sequences.split_into_passes(new)):
            assert batch is not None
            if number:
                self.end_pass()
            self.batch, state.pass_open = batch, True
            positions = self._positions(position_ids, batch)
            if state.recorded_prompt is not None and batch.is_prefill:
                state.recorded_prompt.note_positions(batch.token_indices, positions)
            yield batch.columns, positions
        if state.recorded_prompt is not None and state.recorded_prompt.due(state.sequences):
            self._repeat_prompt()
        if not self.step_prepared:
            self.end_pass()

    def _positions(self, position_ids: Tensor | None, batch: ForwardBatch) -> Tensor:
        """Return the positions that the model rotates the tokens of a pass by."""
        sequences, rotation = self.state.sequences, self.setup.rotation
        rotated = None if rotation is None else rotation.positions(batch, self.state.stores)
        if rotated is not None:
            return rotated
        plain = position_ids is None and batch.step and bool((sequences.num_tokens == sequences.columns).all())
        if sequences.own_positions or plain:  # a step's positions lie at one address each time
            return batch.token_indices if batch.step else batch.token_indices.clamp_min(0)
        sequences.by_column = position_ids is None
        if position_ids is None:  # columns, as transformers counts; the cache counts this pass's columns already
            first = sequences.columns - self.call_length
            position_ids = torch.arange(first, sequences.columns, device=batch.token_indices.device)[None]
        if batch.columns is None:
            return position_ids
        columns_read = batch.columns.clamp_min(0).expand(*position_ids.shape[:-2], -1, -1)
        return position_ids.expand(*position_ids.shape[:-2], len(batch.columns), -1).gather(-1, columns_read)

    def _repeat_prompt(self) -> None:
        """Let the model repeat the prompt, and evict by that."""
        assert self.batch is not None
        try:
            evict_by_reconstruction(self.state, self.batch)
        except PoolFullError:
            self.forget_text()
            raise

    def forget_text(self) -> None:
        """Forget a text that will be read again; what the caller protects in it stays protected."""
        protected = self.state.sequences.protected
        self.reset()
        if protected is not None:  # the next batch may have another size, if all texts have the same marks
            same = bool((protected == protected[:1]).all())
            self.state.sequences.protected = protected[:1] if same else protected

    # ---- a layer

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def enter_layer(self, layer: int, hidden: Tensor) -> None:
        """Apply the gate that reads this layer's input to the new tokens."""
        batch, gates = self.batch, self.setup.gates
        assert batch is not None
        if gates is None or not (batch.is_prefill or self.setup.policy.runs_gates_in_decode(gates)):
            return
        target = layer + gates.config.layer_offset
        if str(target) in gates.layers:
            self.state.layers[target].run_gate(hidden, batch)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(self, call: AttentionCall) -> Tensor:
        """Store the new keys and values of a layer, attend, and let the policy score and evict.

        Raises:
            UserError: where gradients would go through it, or the keys are of a type that the pool does not hold.
        """
        batch, state, setup = self.batch, self.state, self.setup
        assert batch is not None
        if torch.is_grad_enabled() and any(x.requires_grad for x in (call.q, call.k, call.v)):
            raise UserError(
                "EvictionCache: gradients do not go through a cache; call cache.reset() and run the model under "
                "torch.no_grad(), or train without past_key_values."
            )
        held_type, computed_type = setup.pool.dtype, torch.promote_types(call.k.dtype, call.v.dtype)
        if torch.promote_types(held_type, computed_type) != held_type:
            raise UserError(
                f"EvictionCache: the model computed keys of {call.k.dtype} and values of {call.v.dtype}, which "
                f"{held_type}, the type of its weights, does not hold: call cache.reset() and use it without "
                "torch.autocast, or load it in that type."
            )
        evictor = state.evictor if call.layer in setup.budget_layers else None
        if not (batch.is_prefill or setup.policy.steps is not None):
            evictor = None
        if state.recorded_prompt is not None and batch.is_prefill:
            state.recorded_prompt.note_call(call)
        try:
            return state.layers[call.layer].forward(call, batch, state.layer_stores, evictor)
        except PoolFullError as error:
            if state.sequences.columns == self.call_length:  # the text can be read again
                tokens, num_blocks = int(batch.counts.max()), sum(store.num_blocks() for store in state.stores)
                as_layers_before = (num_blocks + 1) * len(state.layers) // max(call.layer, 1)
                needed = max(num_blocks + error.blocks, as_layers_before)
                self.forget_text()
                raise setup.pool.full(f"a prompt of {tokens} tokens needs at least", needed) from None
            raise

    # ---- end

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def end_pass(self) -> None:
        """End a pass after its last layer: check scores, and remove tokens that no later query sees."""
        batch, state, policy, gates = self.batch, self.state, self.setup.policy, self.setup.gates
        assert batch is not None
        if state.evictor is not None:
            state.evictor.end_pass(batch)
        if batch.step or batch.evicting is not None:  # in other passes each layer has done it
            for layer in state.layers:
                if layer.can_expire:
                    layer.free_expired_if_many(batch, state.layer_stores[layer.index])
        if batch.ends_prompt:
            self.setup.pool.trim()
            for store in state.stores:
                store.narrow()
            if policy.steps is None:  # nothing is scored again
                for store in state.stores:
                    store.records = [{} for _ in state.layers]
                for layer in state.layers:
                    layer.observation_window.reset()
        sequences, span = state.sequences, 0 if gates is None else gates.config.window
        if batch.ends_prompt and policy.by_gates and policy.budget is None:  # flags: what expires later is decided now
            sequences.evicted_at = sequences.num_tokens.maximum(sequences.evicted_at)
        if batch.notes.expired:
            sequences.evicted_at = sequences.num_committed.maximum(sequences.evicted_at)
        if span and any(layer.gate_memory for layer in state.layers):  # which hold the newest tokens alone
            num_committed = sequences.num_committed.where(sequences.num_committed >= span, 0)
            sequences.evicted_at = num_committed.maximum(sequences.evicted_at)
        state.pass_open = False


def _check_compute_mode(old_mode: ComputeMode, new_mode: ComputeMode) -> None:
    """Refuse a pass whose types or inference mode differ from the passes that computed the held tokens."""
    if old_mode.types != new_mode.types:
        texts = [f"{mode.weights}, autocast {mode.autocast or 'off'}" for mode in (old_mode, new_mode)]
        raise UserError(
            f"EvictionCache: what is held was computed in {texts[0]}, and the model now computes in {texts[1]}: go "
            "on as before, or call cache.reset() and read the text again."
        )
    if old_mode.inference:
        raise UserError(
            "EvictionCache: a context was read, copied or cropped under torch.inference_mode(), whose tensors "
            "cannot be changed outside of it: go on under torch.inference_mode(), or use torch.no_grad()."
        )


def _count(new: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return the tokens of each sequence in new columns ``[B, T]`` bool; only with a mask does the host wait."""
    return torch.full((new.shape[0],), new.shape[1]) if attention_mask is None else new.sum(1).cpu()

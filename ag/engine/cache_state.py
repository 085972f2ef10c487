"""The contents of a cache between forward passes, and how sequences are copied, cut and joined."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from ag.engine.cache_setup import CacheSetup
from ag.engine.evictor import Evictor
from ag.engine.kv_store import KVStore, stores_of
from ag.engine.layer import Layer
from ag.engine.recorded_prompt import RecordedPrompt
from ag.engine.sequences import SequenceState
from ag.errors import UserError
from ag.gates.attach import same_gates
from ag.model.hybrid import States
from ag.model.support import check_one_position_per_token


class ComputeMode(NamedTuple):
    """How a pass was computed."""

    weights: torch.dtype
    autocast: torch.dtype | None  # None: off
    inference: bool  # under torch.inference_mode()

    @property
    def types(self) -> tuple[torch.dtype, torch.dtype | None]:
        """The types of weights and of autocast."""
        return self.weights, self.autocast


class CacheState:
    """The contents of a cache: lengths of sequences, their rows of keys and values, and the memory of each layer.

    Args:
        setup: model, policy and pool of the cache.
    """

    #: Lengths of the sequences, and which tokens may be evicted or taken back.
    sequences: SequenceState
    #: The rows, one store for the layers of each shape of KV heads; and the store of each layer.
    stores: list[KVStore]
    layer_stores: list[KVStore]
    layers: list[Layer]
    #: Decides which tokens are evicted; None means that the policy has no budget.
    evictor: Evictor | None
    #: States of layers that do not attend; None means that all layers of the model attend.
    states: States | None
    #: The prompt, for a policy that lets the model repeat it; None means that the policy needs no repetition.
    recorded_prompt: RecordedPrompt | None
    #: How the contents were computed; None means that no pass was made yet.
    compute_mode: ComputeMode | None
    #: Whether a forward pass began and has not ended; after an error within it only :meth:`reset` helps.
    pass_open: bool

    def __init__(self, setup: CacheSetup) -> None:
        self.setup = setup
        self.reset()

    def reset(self) -> None:
        """Forget everything: the next tokens are a new prompt, of any batch size."""
        setup, policy = self.setup, self.setup.policy
        gates, gate_type = setup.gates, None
        if gates is not None:
            gate_type = torch.bool if policy.budget is None else torch.float32
        self.layer_stores = stores_of(setup.pool, setup.heads, gate_type, setup.rotation)
        self.stores = [*dict.fromkeys(self.layer_stores)]
        self.states = States.of(setup.decoder.config)
        self.sequences = SequenceState(policy, setup.chunk, None if self.states is None else setup.goes_on)
        numbers = [heads.number for heads in setup.heads]
        self.evictor = None if policy.budget is None else Evictor(policy, setup.budget_layers, numbers)
        scorer = policy.reconstruction_scorer
        self.recorded_prompt = None if scorer is None else RecordedPrompt(scorer)
        gated_layers = () if gates is None else gates.layer_indices
        self.layers = [
            Layer(policy, setup.decoder, index, gates if index in gated_layers else None, setup.kv_reader_counts[index])
            for index in range(len(setup.heads))
        ]
        self.pass_open, self.compute_mode = False, None

    # ---- checks

    def check_pass_finished(self) -> None:
        """Refuse to go on where the last forward pass did not end, as after Ctrl-C or an error, until :meth:`reset`."""
        if self.pass_open:
            raise UserError(
                "EvictionCache: a forward pass was broken off by an error or Ctrl-C, or runs in another thread: some "
                "layers have its tokens, and others have not; call cache.reset() and read the text again."
            )

    def check_scores(self) -> None:
        """Check that the scores of the last steps were finite; see :meth:`ag.engine.evictor.Evictor.end_pass`."""
        if self.evictor is not None:
            self.evictor.raise_if_nonfinite()

    def check_going_back(self, operation: str, columns: int | None) -> None:
        """Refuse to take ``columns`` back where states of layers do not; None means unequal numbers of tokens.

        Raises:
            UserError: for linear attention and state spaces, and for inputs of convolutions that were not recorded.
        """
        states, model = self.states, type(self.setup.decoder).__name__
        if states is None:
            return
        if not states.can_crop:
            raise UserError(
                f"{operation}: {model} has layers of linear attention, whose states cannot go back: expected no token "
                "to be taken back; call cache.reset() and read the text again."
            )
        recorded = states.recorded(self.sequences.columns)
        if columns is None or columns > recorded:
            raise UserError(
                f"{operation}: the convolutions of {model} go back by columns of all sequences, here {recorded} at "
                "most: expected crop(-n), and cache.activate_past_recording() before those columns; else call "
                "cache.reset() and read the text again."
            )

    def has_frequencies_of(self, length: int, left: int) -> bool:
        """Return whether RoPE goes on as for a text of ``length`` tokens where the first ``left`` columns stay."""
        rope, sequences = self.setup.rope, self.sequences
        if rope is None:
            return True
        text_len, new_len = sequences.text_len, torch.full_like(sequences.text_len, length)
        in_prompt = left < sequences.prompt_len  # a shorter text is a prompt of its own where it differs in the prompt
        other = (rope.set_of(text_len) != rope.set_of(new_len)) & in_prompt
        return not bool((other | rope.outgrows(text_len, new_len)).any())

    def note_mode(self) -> None:
        """Note that tensors change under inference mode, and can be changed there alone from now on."""
        if self.compute_mode is not None and torch.is_inference_mode_enabled():
            self.compute_mode = self.compute_mode._replace(inference=True)

    # ---- other sequences, and fewer tokens

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Mark the state as broken until all of its parts have changed: after an error only :meth:`reset` helps."""
        was_open, self.pass_open = self.pass_open, True
        yield  # an error, such as a pool without room for copies, leaves it marked
        self.pass_open = was_open

    def fork(self) -> CacheState:
        """Return a copy that shares the blocks, for another continuation of the text."""
        self.check_scores()
        self.note_mode()
        new = copy.copy(self)
        new.sequences = copy.deepcopy(self.sequences, {id(self.setup.policy): self.setup.policy})
        forks = {store: store.fork() for store in self.stores}
        new.stores, new.layer_stores = [*forks.values()], [forks[store] for store in self.layer_stores]
        new.layers = [layer.fork() for layer in self.layers]
        new.evictor = None if self.evictor is None else self.evictor.fork()
        new.recorded_prompt = None if self.recorded_prompt is None else self.recorded_prompt.fork()
        new.states = copy.deepcopy(self.states)
        return new

    def crop(self, remove: int | Sequence[int]) -> None:
        """Forget the newest tokens; see :meth:`ag.engine.cache.EvictionCache.crop`.

        Args:
            remove: columns of all sequences; or of each sequence how many of its tokens.
        """
        columns = self.sequences.equal_columns(remove)
        if columns == 0 or not self.sequences.columns:
            if self.states is not None:
                self.states.crop(0)
            return
        self.check_pass_finished()
        self.check_scores()
        self.check_going_back("crop", columns)
        # what was computed under inference mode can be changed there alone
        computed = self.compute_mode is not None and self.compute_mode.inference
        with torch.inference_mode() if computed else nullcontext():
            removed_tokens = self.sequences.crop(remove)
            self.note_mode()
            with self._changing():
                self._crop_layers(removed_tokens, columns or 0)

    def _crop_layers(self, removed_tokens: Tensor, columns: int) -> None:
        """Shorten the rows and the memory of all layers; ``removed_tokens`` ``[B]`` are those of ``columns``."""
        left, rotation = self.sequences.num_tokens, self.setup.rotation
        if self.states is not None and bool(left.any()):
            self.states.crop(columns)
        elif self.states is not None:  # the next text may have another batch size
            recording, self.states = bool(self.states.recording), States(self.setup.decoder.config)
            self.states.record(recording)
        if rotation is not None:
            rotation.crop(self.layer_stores, left + removed_tokens, left)
        if any(layer.frees_expired for layer in self.layers):
            for layer in self.layers:
                layer.crop(self.layer_stores[layer.index], removed_tokens, left)
        else:
            for store in self.stores:
                store.truncate(removed_tokens)
        for layer in self.layers:
            layer.gate_memory.crop(left)

    def select(self, sequence_indices: Tensor) -> None:
        """Make the sequences those at some indices, ``[B']`` long on the CPU; repeated ones share their blocks."""
        self.check_scores()
        self.note_mode()
        with self._changing():
            self.sequences.select(sequence_indices)
            for store in self.stores:
                store.select(sequence_indices)
            for layer in self.layers:
                layer.select(sequence_indices)
            if self.states is not None:
                self.states.select(sequence_indices)
            if self.recorded_prompt is not None:
                self.recorded_prompt.select(sequence_indices)
            if self.evictor is not None:
                self.evictor.budgets.select(sequence_indices)

    def add(self, other: CacheState) -> None:
        """Append the sequences of another state, which :meth:`check_add` has accepted; that state is empty then."""
        self.check_scores()
        other.check_scores()
        modes = [state.compute_mode for state in (self, other) if state.compute_mode is not None]
        self.compute_mode = max(modes, key=lambda mode: mode.inference, default=None)
        self.note_mode()
        with self._changing(), other._changing():
            num_sequences = len(self.sequences)
            self.sequences.add(other.sequences)
            for store, added_store in zip(self.stores, other.stores, strict=True):
                store.add(added_store)
            for layer, added_layer in zip(self.layers, other.layers, strict=True):
                layer.observation_window.join(added_layer.observation_window)
                layer.gate_memory.join(added_layer.gate_memory)
            if self.states is not None and other.states is not None:
                self.states.join(other.states)
            if self.evictor is not None and other.evictor is not None:
                self.evictor.budgets.join(other.evictor.budgets, num_sequences, len(self.sequences) - num_sequences)

    def check_add(self, other: CacheState) -> None:
        """Refuse a state whose sequences cannot be appended."""
        setup, added, modes = self.setup, other.setup, (self.compute_mode, other.compute_mode)
        same = (
            ("model", setup.decoder is added.decoder),
            ("policy", setup.policy == added.policy),
            ("gates", same_gates(setup.gates, added.gates)),
            ("pool", setup.pool is added.pool),
            ("data types", len({mode.types for mode in modes if mode is not None}) < 2),
        )
        for property_name, fits in same:
            if not fits:
                raise UserError(
                    f"add: the caches ({setup.policy!r} and {added.policy!r}) differ in {property_name}: expected two "
                    "of one model, policy and gates, made with the same pool=ag.Pool(model, nbytes), and read in one "
                    "type."
                )
        if not len(self.sequences) and self.sequences.protected is not None:
            raise UserError(
                "add: protect() marked tokens of this cache, which has none: expected the marks on the cache that is "
                "added; call protect() there before its prompt, and reset() here."
            )
        if other is self or not len(other.sequences):
            raise UserError("add: expected another cache that has read its prompt; read it first.")
        for state in (self, other):
            check_one_position_per_token(state.setup.decoder, "add")
            state.check_pass_finished()
            state.sequences.check_positions_skip_padding("add")
            if len(state.sequences) and not state.sequences.ready:
                raise UserError(
                    f"add: {state.sequences.num_tokens.tolist()} of {state.sequences.prompt_len.tolist()} tokens of "
                    "prompts were read so far: expected all; add the cache after them."
                )

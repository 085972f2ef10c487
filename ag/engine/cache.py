"""The cache that evicts: hand it to ``model.generate(past_key_values=...)``."""

from __future__ import annotations

import copy
import operator
import os
from collections.abc import Sequence
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ag.config.spec import PolicySpec
from ag.engine import saved
from ag.engine.block_pool import BlockPool, Pool
from ag.engine.checks import attached, check_add, check_needs, fitted
from ag.engine.evictor import Evictor
from ag.engine.held import CacheQueries
from ag.engine.kv_store import stores_of
from ag.engine.layer import Layer
from ag.engine.policy import Option, Policy, policy
from ag.engine.positions import ROTATIONS
from ag.engine.reconstruction import ReconstructionPass
from ag.engine.sequences import SequenceState
from ag.errors import UserError
from ag.model.geometry import attention_layers, chunk_size, fingerprint, kv_heads, shared_layers
from ag.model.hooks import decoder_of, device_of, instrument
from ag.model.hybrid import HoldsStates, States
from ag.model.support import check_attention, check_one_position_per_token, states_go_on


class EvictionCache(CacheQueries, HoldsStates):  # type: ignore[misc] # its layers are no layers of transformers
    """A key-value cache that evicts: evicted keys and values leave memory, per sequence and KV head.

    The first forward pass is the prompt. By the policy's schedule tokens are evicted after the prompt, within it block
    by block, or also while decoding.

    Args:
        model: causal language model, plain or PEFT-wrapped; the cache works with this one only.
        spec: a policy or its text; see :func:`ag.policy`.
        budget: for a text: tokens per KV head, or a share of the prompt.
        schedule: for a text: when tokens are evicted.
        pool: the blocks of any number of caches of a model; None means a pool for this cache alone. Where it is full, a
            pass raises :class:`ag.PoolFullError`, and the cache is as before, or empty if its prompt did not fit.
        options: for a text: hyper-parameters of its parts.

    Raises:
        UnsupportedModelError: when the model class cannot take a custom attention function.
        UserError: when the gates or the pool were made for another model, or a policy ``gates`` finds none attached.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: str | PolicySpec | Policy,
        budget: int | float | None = None,
        schedule: str = "prefill",
        *,
        pool: Pool | None = None,
        **options: Option,
    ) -> None:
        Cache.__init__(self, layers=[])
        if isinstance(spec, Policy) and (budget is not None or options):
            raise UserError(f"{spec!r} has its budget and options already; give them to ag.policy.")
        self.policy = spec if isinstance(spec, Policy) else policy(spec, budget, schedule, **options)
        self.gates = self.policy.gates
        if self.policy.by_gates and self.gates is None:
            self.gates = attached(model, self.policy)
        check_attention(model)
        self.decoder = decoder_of(model)
        if pool is not None:
            pool.check(self.decoder)
            self.policy = self.policy.held_as(pool.kv_dtype)
        if self.gates is not None:
            self.modules = [self.gates]
            self.policy = fitted(model, self.gates, self.policy)
        self.rope = instrument(model).rope
        check_needs(self.policy, self.decoder)
        turned = ROTATIONS.get(self.policy.positions)
        self.rotation = None if turned is None else turned(self.decoder)
        config = self.decoder.config
        self.heads, windowed = kv_heads(config), fingerprint(config)["windowed_layers"]
        if pool is None:
            kind_held = self.decoder.dtype if self.rotation is None else self.rotation.dtype(self.decoder.dtype)
            like = torch.empty(0, dtype=kind_held, device=device_of(self.decoder.layers[0]))
            self.pool = BlockPool(self.heads, like, self.policy.kv_dtype)
        else:
            self.pool = pool
        if self.rotation is not None:
            self.rotation.check(self.pool)
        self.sharing = [index for index in range(len(self.heads)) if index not in windowed]
        if self.gates is not None and self.policy.budget is not None:
            self.sharing = self.gates.layer_indices
        self.chunk, attending_layers = chunk_size(config), attention_layers(config)
        self.goes_on = states_go_on(self.decoder)
        self.readers = [attending_layers.index(source) for source in shared_layers(config).values()]
        self.reset()

    def reset(self) -> None:
        """Forget everything: the next tokens are a new prompt, of any batch size."""
        gates, kind = self.gates, None
        if gates is not None:
            kind = torch.bool if self.policy.budget is None else torch.float32
        self.store_of = stores_of(self.pool, self.heads, kind, self.rotation)
        self.stores = [*dict.fromkeys(self.store_of)]
        self.states = States.of(self.decoder.config)
        self.sequences = SequenceState(self.policy, self.chunk, None if self.states is None else self.goes_on)
        numbers = [layer.number for layer in self.heads]
        self.evictor = None if self.policy.budget is None else Evictor(self.policy, self.sharing, numbers)
        rereader = None if self.policy.scorer is None else self.policy.scorer.rereader
        self.reconstruction = None if rereader is None else ReconstructionPass(rereader)
        gated_layers = () if gates is None else gates.layer_indices
        self.layers = [
            Layer(self.policy, self.decoder, index, gates if index in gated_layers else None, self.readers.count(index))
            for index in range(len(self.heads))
        ]
        self.batch, self._new, self.broken, self._length, self.kind = None, None, False, 0, None

    def __repr__(self) -> str:
        """Return one line: the policy, and the share and bytes that are held."""
        content = f"{self.seen_tokens} tokens seen, {self.kept_share():.1%} held in {self.nbytes:,} bytes"
        return f"<{type(self).__name__} {self.policy!r}: {content if self.seen_tokens else 'empty'}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Fork: another continuation of the same text, which shares the blocks."""
        self.note_mode()
        new = object.__new__(type(self))  # copy.copy would ask __reduce__
        vars(new).update(vars(self), batch=None)
        new.sequences = copy.deepcopy(self.sequences, {id(self.policy): self.policy})
        forks = {store: store.fork() for store in self.stores}
        new.stores, new.store_of = [*forks.values()], [forks[store] for store in self.store_of]
        new.layers = [layer.fork() for layer in self.layers]
        if self.evictor is not None:
            new.evictor = self.evictor.fork()
        if self.reconstruction is not None:
            new.reconstruction = self.reconstruction.fork()
        new.states = copy.deepcopy(self.states)
        return new

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled, as by ``torch.save``: the model would go with it."""
        raise UserError(
            f"{type(self).__name__}: a cache refers to its model and cannot be pickled: use cache.save(path) and "
            f"{type(self).__name__}.load(path, model), or copy.deepcopy(cache) in the same process."
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the cache behind a prompt to one safetensors file, which takes its name when it is whole.

        Args:
            path: of the file; an earlier saved cache there is replaced.

        Raises:
            UserError: before the end of a prompt, where something else is in the way, or for a policy that
                :func:`ag.policy` cannot make again.
        """
        self.check_whole()
        self.look()
        saved.save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: nn.Module) -> Self:
        """Read a saved cache, with which the text goes on as with the one that was saved.

        Args:
            path: of the file.
            model: of the same geometry and data type, and with the same weights, which are not compared. A policy
                ``gates`` takes the gates attached to it, which are.

        Raises:
            UserError: when the file is no whole saved cache of this schema, or of another model or other gates.
        """
        return saved.load(cls, path, model)

    # ---- going back

    def crop(self, tokens_to_remove: int | Sequence[int]) -> None:
        """Forget the newest tokens, back to the last eviction at most.

        Args:
            tokens_to_remove: -n for the last n columns; or for each sequence how many of its own tokens: drafts of
                which a batch accepts unequal numbers.

        Raises:
            UserError: when what was evicted since, or what the scorer recorded, cannot be restored; for a positive
                number, as in transformers.
        """
        if isinstance(tokens_to_remove, Sequence):
            if any(tokens_to_remove):
                check_one_position_per_token(self.decoder, f"crop({[*tokens_to_remove]})")
            remove: int | Sequence[int] = tokens_to_remove
        else:
            remove = -operator.index(tokens_to_remove)
            if remove < 0:
                raise UserError(f"crop({-remove}): expected a negative number: crop(-n) forgets the last n columns.")
        columns = self.sequences.equal_columns(remove)
        if columns == 0 or not self.seen_tokens:
            return self.crop_states(0)
        self.check_whole()
        self.look()
        self.check_going_back("crop", columns, self.seen_tokens)
        self.note_mode()
        tokens = self.sequences.crop(remove)
        self.crop_states(columns or 0)
        if self.rotation is not None:
            self.rotation.crop(self.store_of, self.sequences.num_tokens + tokens, self.sequences.num_tokens)
        left = self.sequences.num_tokens
        if any(layer.removes for layer in self.layers):
            for layer in self.layers:
                layer.crop(self.store_of[layer.index], tokens, left)
        else:
            for store in self.stores:
                store.truncate(tokens)
        for layer in self.layers:
            layer.gate_memory.crop(left)

    def rewind(self, input_ids: Tensor) -> int:
        """Go back to where a text parts from the one that was read, so that ``model.generate`` takes it from there.

        A chat template may write a turn otherwise once others follow, such as without its thoughts.

        Args:
            input_ids: ``[B, T]``, the whole text that ``model.generate`` gets next.

        Returns:
            How many of its columns are held. 0 means that none is in common, that RoPE has other frequencies for a text
            of that length, or that what was evicted or recorded behind it cannot come back (:meth:`crop`); then the
            cache is as after :meth:`reset`, and reads the text anew.
        """
        rope, tokens = self.rope, torch.tensor(input_ids.shape[1])
        outgrown = rope is not None and bool(rope.outgrows(self.text_lengths, tokens).any())
        common = 0 if self.broken or outgrown else self.sequences.ids.common(input_ids, self.seen_tokens)
        if common:
            try:
                self.crop(common - self.seen_tokens)
                return common
            except UserError:
                pass
        self.reset()
        return 0

    def activate_past_recording(self) -> None:
        """Prepare for drafts that :meth:`crop` takes back; refuse a policy that may evict what is then wanted back."""
        self.check_going_back("drafts", 0, self.seen_tokens)
        if not self.is_croppable:
            reason = "repeats a prompt before anything follows it"
            if self.policy.steps is not None:
                reason = "evicts while drafts come, and cannot take that back"
            raise UserError(
                f"{self.policy!r} {reason}; generate without an assistant model and prompt lookup, or use another "
                "policy with the schedule prefill."
            )
        if self.states is not None:
            self.states.record(True)

    @property
    def is_croppable(self) -> bool:
        """Whether drafts can be taken back; ``model.generate`` reads it after the prompt."""
        evicts_later = self.policy.rereads or self.policy.steps is not None
        return (self.states is None or self.states.go_back) and (self.policy.scorer is None or not evicts_later)

    # ---- other sequences

    def batch_select_indices(self, indices: Tensor | Sequence[int] | Sequence[bool]) -> None:
        """Make the sequences those at ``indices``, or where a mask is True; repeated ones share their blocks."""
        if not self.seen_tokens:
            return
        device = indices.device if isinstance(indices, Tensor) else None
        sequence_indices = torch.arange(len(self.sequences), device=device)[indices, ...].cpu()
        self.look()
        self.note_mode()
        self.sequences.select(sequence_indices)
        for store in self.stores:
            store.select(sequence_indices)
        for layer in self.layers:
            layer.select(sequence_indices)
        if self.states is not None:
            self.states.select(sequence_indices)
        if self.reconstruction is not None:
            self.reconstruction.select(sequence_indices)
        if self.evictor is not None:
            self.evictor.budgets.select(sequence_indices)

    def batch_repeat_interleave(self, repeats: int | Tensor) -> None:
        """Repeat each sequence, all equally often, or each by its number in a tensor ``[B]``."""
        if self.seen_tokens:
            self.batch_select_indices(torch.arange(len(self.sequences)).repeat_interleave(repeats))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make the sequences those at ``beam_idx``."""
        self.batch_select_indices(beam_idx)

    def remove(self, sequences: Sequence[int]) -> None:
        """Forget the sequences at some places in the batch, whose blocks are free then; the others move up.

        Raises:
            UserError: when one is not there.
        """
        count = len(self.sequences)
        strange = [index for index in sequences if not 0 <= index < count]
        if strange:
            raise UserError(
                f"remove({list(sequences)}): sequence {strange[0]} is not there: expected 0 to {count - 1}, as this "
                f"cache holds {count}."
            )
        left = [index for index in range(count) if index not in sequences]
        if left:
            self.batch_select_indices(torch.tensor(left))
        else:
            self.reset()

    def add(self, other: EvictionCache) -> None:
        """Append the sequences of another cache in the same pool, which is empty then; no key is copied.

        Sequences with fewer columns get padding on their left. Each goes on at its own next position, whatever
        ``position_ids`` say; an ``attention_mask`` begins with :attr:`valid`.

        Raises:
            UserError: when ``other`` has another model, policy or gates, or no prompt; nothing changes then.
        """
        check_add(self, other)
        if not len(self.sequences):
            vars(self).update(vars(copy.deepcopy(other)))
            other.reset()
            return
        self.look()
        other.look()
        kinds_of_pass = [each.kind for each in (self, other) if each.kind is not None]
        self.kind = max(kinds_of_pass, key=lambda kind: kind[2], default=None)  # of inference mode, where one is
        self.note_mode()
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
        other.reset()

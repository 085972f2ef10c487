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

from ag.engine import saved
from ag.engine.decide import Decision
from ag.engine.forward import Forward
from ag.engine.gated import GatedLayer
from ag.engine.layer import EvictionLayer
from ag.engine.policy import Option, Policy, policy
from ag.engine.pool import Pool
from ag.engine.positions import POSITIONS, Original
from ag.engine.reread import Reread
from ag.engine.spec import PolicySpec
from ag.engine.text import Text
from ag.errors import UserError
from ag.gates.attach import alike, attached_gates, check_geometry, move_to_layers
from ag.gates.gate import AttentionGates
from ag.model.geometry import fingerprint
from ag.model.hooks import decoder_of, instrument
from ag.model.projection import output_projection
from ag.model.support import check_attention, check_ranks, check_rotations


class EvictionCache(Forward, Cache):
    """A key-value cache that forgets: evicted keys and values are dropped from memory, per sequence and KV head.

    The first forward pass is the prompt. The policy's schedule says when something goes: after the prompt, within it
    block by block, or also while decoding.

    Args:
        model: causal language model, plain or PEFT-wrapped; the cache works with this one only.
        spec: a policy or its text; see :func:`ag.policy`.
        budget: for a text: tokens per KV head, or a share of the prompt.
        schedule: for a text: when something is evicted.
        pool: where keys and values lie, and in which form; any number of caches of a model may share one. None: memory
            of its own. Where it is full a forward pass raises :class:`ag.engine.pool.PoolFullError`, and the cache is
            as it was before; one that could not take its prompt is empty.
        options: for a text: hyper-parameters of its parts.

    Raises:
        UnsupportedModelError: when the model class cannot take a custom attention function.
        UserError: when the gates or the pool were made for another model, or ``gates`` is asked for and none are
            attached.
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
        if isinstance(spec, Policy) and (budget is not None or options):
            raise UserError(f"{spec!r} has its budget and options already; give them to ag.policy.")
        self.policy = spec if isinstance(spec, Policy) else policy(spec, budget, schedule, **options)
        self.gates = self.policy.gates
        if self.policy.by_gates and self.gates is None:
            self.gates = _attached(model, self.policy)
        check_attention(model)
        self.decoder = decoder_of(model)
        if pool is not None:
            pool.check(self.decoder)
            self.policy = self.policy.held_as(pool.kv_dtype)
        self.pool = pool
        if self.gates is not None:
            check_geometry(model, self.gates)
            if self.gates.adapter is not None:
                self.gates.adapter.check(model, times=1)
            move_to_layers(model, self.gates)
            if self.gates.config.scope == "prompt" and self.policy.block is not None:
                raise UserError(
                    f"{self.policy!r}: gates of gate.scope=prompt read a prompt in one forward pass; use the schedule "
                    "prefill, or gates of gate.scope=causal."
                )
            self.policy = self.policy.trained_with(self.gates)
        instrument(model)
        rotation = POSITIONS[self.policy.positions](self.decoder)
        _check_needs(self.policy, self.decoder)
        count, windowed = len(self.decoder.layers), fingerprint(self.decoder.config)["windowed_layers"]
        self.evicting_layers = [_layer(index, self.policy, rotation, self.gates, pool) for index in range(count)]
        super().__init__(layers=[*self.evicting_layers])
        self.sharing = [index for index in range(count) if index not in windowed]
        self.text = Text(self.policy, self.gates, rotation, self.evicting_layers)
        self.decision = None if self.policy.budget is None else Decision(self.policy, self.sharing)
        self.parts = {"text": self.text}
        if self.decision is not None:
            self.parts["shares"] = self.decision
        self.parts |= {f"layers.{index}": layer for index, layer in enumerate(self.evicting_layers)}
        self.reset()

    def __repr__(self) -> str:
        """Return one line: the policy and what is held."""
        held = f"{self.seen_tokens} tokens seen, {self.kept_share():.1%} held in {self.nbytes:,} bytes"
        return f"<{type(self).__name__} {self.policy!r}: {held if self.seen_tokens else 'empty'}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> EvictionCache:
        """Copy what is held, for another continuation of the same prompt; the model stays the same one."""
        new = memo[id(self)] = object.__new__(type(self))
        memo |= {id(shared): shared for shared in (self.decoder, self.policy, self.gates)}
        for name, value in vars(self).items():
            setattr(new, name, copy.deepcopy(value, memo))
        return new

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled, as by ``torch.save``: the model would go with it."""
        raise UserError(
            f"{type(self).__name__}: a cache refers to its model and cannot be pickled: use cache.save(path) and "
            f"{type(self).__name__}.load(path, model), or copy.deepcopy(cache) in the same process."
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write what is held after a prompt to one safetensors file, which takes its name when it is whole.

        Args:
            path: of the file; an earlier saved cache there is replaced.

        Raises:
            UserError: before the end of a prompt, where something else is in the way, or for a state that no file can
                have: records of a scorer that are not tensors, or a policy that :func:`ag.policy` cannot make again.
        """
        self.check_whole()
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

    def reserve(self, tokens: int) -> None:
        """Make room for so many more tokens of each sequence, so that the steps to come work on the same memory.

        Args:
            tokens: that will come one by one, behind the prompt.

        Raises:
            PoolFullError: when the pool has no room for them; nothing has changed then.
        """
        self._require(tokens)
        self.text.reserve(tokens)
        for layer in self.evicting_layers:
            layer.reserve(tokens)

    # ---- going back, other sequences, other texts

    def crop(self, tokens_to_remove: int | Sequence[int]) -> None:
        """Forget the newest tokens, back to those that came since something was evicted.

        Args:
            tokens_to_remove: -n for the last n columns; or for each sequence how many of its own tokens: drafts of
                which a batch accepts unequal numbers.

        Raises:
            UserError: when what was evicted since, or what the scorer recorded, cannot be restored; for a positive
                number, as in transformers.
        """
        remove: int | Sequence[int]
        remove = tokens_to_remove if isinstance(tokens_to_remove, Sequence) else -operator.index(tokens_to_remove)
        if isinstance(remove, int) and remove < 0:
            raise UserError(f"crop({-remove}): expected a negative number: crop(-n) forgets the last n columns.")
        if remove == 0 or (not isinstance(remove, int) and not any(remove)):
            return
        self._require(0)
        counts = self.text.take_back(remove)
        for part in self.parts.values():
            part.crop(counts)
        for layer in self.evicting_layers:
            layer.columns_seen = self.text.seen

    def rewind(self, input_ids: Tensor) -> int:
        """Go back to where a text parts from the one that was read, so that ``model.generate`` takes it from there.

        A chat template may write a turn otherwise once others follow, such as without its thoughts.

        Args:
            input_ids: ``[B, T]``, the whole text that ``model.generate`` gets next.

        Returns:
            How many of its columns are held. 0: none is in common, or what was evicted or recorded behind it cannot
            come back (:meth:`crop`); then the cache is as after :meth:`reset`, and reads the text anew.
        """
        common = 0 if self.unfinished else self.text.common(input_ids)
        if common:
            try:
                self.crop(common - self.text.seen)
                return common
            except UserError:
                pass
        self.reset()
        return 0

    def activate_past_recording(self) -> None:
        """Prepare for drafts that :meth:`crop` takes back.

        Raises:
            UserError: when drafts could make something go that is then wanted back.
        """
        self.text.check_drafts()

    @property
    def is_initialized(self) -> bool:
        """Whether something was read."""
        return self.text.seen > 0

    @property
    def is_croppable(self) -> bool:
        """Whether drafts can be taken back; ``model.generate`` asks after the prompt."""
        try:
            self.text.check_drafts()
        except UserError:
            return False
        return True

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make the sequences those at ``beam_idx``."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor | Sequence[int] | Sequence[bool]) -> None:
        """Make the sequences those at ``indices``, or those where a mask is True; an empty cache stays as it is."""
        if not self.text.seen:
            return
        device = indices.device if isinstance(indices, Tensor) else None
        places = torch.arange(len(self.valid), device=device)[indices, ...]
        for part in self.parts.values():
            part.select(places)

    def batch_repeat_interleave(self, repeats: int | Tensor) -> None:
        """Repeat each sequence, so many times or each as often as a tensor ``[B]`` says."""
        if self.text.seen:
            self.batch_select_indices(torch.arange(len(self.valid)).repeat_interleave(repeats))

    def release(self, sequences: Sequence[int]) -> None:
        """Forget some sequences, whose memory is free then; the others move up. A cache without any is as new.

        Args:
            sequences: their places in the batch.

        Raises:
            UserError: when one is not there.
        """
        count = len(self.valid)
        strange = [place for place in sequences if not 0 <= place < count]
        if strange:
            raise UserError(
                f"release({list(sequences)}): sequence {strange[0]} is not there: expected 0 to {count - 1}, as this "
                f"cache holds {count}."
            )
        left = [place for place in range(count) if place not in sequences]
        if left:
            self.batch_select_indices(torch.tensor(left))
        else:
            self.reset()

    def join(self, other: EvictionCache) -> None:
        """Append the sequences of another cache in the same pool, which is empty then; no key is copied.

        Sequences with fewer columns get padding on their left, and what was read so far is not taken back. Each goes on
        at its own next position, whatever ``position_ids`` say; an ``attention_mask`` begins with :attr:`valid`.

        Args:
            other: of the same model, policy and gates, with its prompt read.

        Raises:
            UserError: when the two cannot be one; both are as they were.
        """
        _check_join(self, other)
        if self.text.seen:
            for name, part in self.parts.items():
                part.join(other.parts[name])
            for layer in self.evicting_layers:
                layer.columns_seen = layer.evicted_at = self.text.seen
        else:
            vars(self).update(vars(copy.deepcopy(other)))
        other.reset()

    def reset(self) -> None:
        """Forget everything: the next tokens are a new prompt, of any batch size."""
        self.unfinished, self.made_as = False, None
        for part in self.parts.values():
            part.reset()
        rereader = None if self.policy.scorer is None else self.policy.scorer.rereader
        self.reread = None if rereader is None else Reread(rereader)


def _attached(model: nn.Module, wanting: Policy) -> AttentionGates:
    """Return the gates attached to a model, for a policy that names none."""
    gates = attached_gates(model)
    if gates is None:
        spec = wanting.spec
        raise UserError(
            f"Policy '{spec}': no gates are attached; call ag.attach(model, gates) or name {spec.scorer}:PATH."
        )
    return gates


def _check_needs(wanting: Policy, decoder: Any) -> None:
    """Refuse a model that does not show what the scorer of a policy asks for."""
    if wanting.scorer is None:
        return
    if wanting.rereads:
        check_ranks(decoder, repr(wanting))
    if wanting.scorer.needs.rotations:
        check_rotations(decoder, repr(wanting), "Use another policy.")
    for layer in decoder.layers if wanting.scorer.needs.output_projection else ():
        output_projection(layer.self_attn)


def _layer(
    index: int, wanting: Policy, rotation: Original, gates: AttentionGates | None, pool: Pool | None
) -> EvictionLayer:
    """Make the layer of a cache that fits the model's layer at ``index``."""
    mine = None if gates is None or index not in gates.layer_indices else gates
    if mine is None or wanting.budget is not None:
        layer = EvictionLayer(wanting, rotation, mine)
    else:
        layer = GatedLayer(wanting, rotation, mine)
    layer.pool = pool
    return layer


def _check_join(cache: EvictionCache, other: EvictionCache) -> None:
    """Refuse a cache whose sequences cannot be appended."""
    same = (
        ("model", cache.decoder is other.decoder),
        ("policy", cache.policy == other.policy),
        ("gates", alike(cache.gates, other.gates)),
        ("pool", cache.pool is not None and cache.pool is other.pool),
    )
    for what, fits in same:
        if not fits:
            raise UserError(
                f"join: the caches ({cache.policy!r} and {other.policy!r}) do not have the same {what}: expected "
                "two of one model, policy and gates, made with the same pool=ag.Pool(model, nbytes)."
            )
    if other is cache or not other.text.seen:
        raise UserError("join: expected another cache that has read its prompt; read it first.")
    for each in (cache, other):
        each.text.check_by_rank("join")
        each.check_whole()
        if each.text.seen < each.text.prompt_columns:
            raise UserError(
                f"join: {each.text.seen} of {each.text.prompt_columns} columns of a prompt were read so far: "
                "expected all; join the caches after them."
            )

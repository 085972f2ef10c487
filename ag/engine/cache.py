"""The cache that evicts: hand it to ``model.generate(past_key_values=...)``."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal, NoReturn, Self, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ag.engine import saved
from ag.engine.decide import Decision
from ag.engine.gated import GatedLayer
from ag.engine.history import History
from ag.engine.layer import EvictionLayer
from ag.engine.passes import Pass
from ag.engine.policy import Option, Policy, policy
from ag.engine.pool import Pool, PoolFullError
from ag.engine.positions import Original, Slots
from ag.engine.repeat import Repetition
from ag.engine.report import Report
from ag.engine.schedule import Schedule
from ag.engine.scorers import Scorer
from ag.engine.spec import PolicySpec
from ag.engine.undo import Undo
from ag.errors import UserError
from ag.gates.attach import alike, attached_gates, check_geometry, move_to_layers
from ag.gates.gate import AttentionGate
from ag.model.geometry import fingerprint
from ag.model.hooks import AttentionCall, Interceptor, decoder_of, device_of, instrument
from ag.model.projection import output_projection
from ag.model.support import check_attention, check_rotations

LOOK = 16  # steps after which the host looks at what their decisions found, such as scores that are not finite


class EvictionCache(Cache, Interceptor):
    """A key-value cache that forgets: evicted keys and values are dropped from memory, per sequence and KV head.

    The first forward pass is the prompt. The policy's schedule says when something goes: after the prompt, within it
    block by block, or also while decoding.

    Args:
        model: causal language model, plain or PEFT-wrapped; the cache works with this one only.
        spec: a policy or its text; see :func:`ag.policy`.
        budget: for a text: tokens per KV head, or a share of the prompt.
        schedule: for a text: when something is evicted.
        pool: where keys and values lie; any number of caches of a model may share one. None: memory of its own. Where
            it is full a forward pass raises :class:`ag.engine.pool.PoolFullError`, and the cache is as it was before;
            one that could not take its prompt is empty.
        options: for a text: hyper-parameters of its parts.

    Raises:
        UnsupportedModelError: when the model class cannot take a custom attention function.
        UserError: when the gates or the pool were made for another model, or ``gates`` is asked for and none are
            attached.
    """

    #: What the layers are shown at present; None before the first forward pass.
    now: Pass | None
    decision: Decision | None
    #: What has gone by.
    history: History
    #: What lets the model repeat the prompt, for a policy that scores by that.
    repetition: Repetition | None

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
            self.gates = attached_gates(model)
            if self.gates is None:
                spec = self.policy.spec
                raise UserError(
                    f"Policy '{spec}': no gates are attached; call ag.attach(model, gates) or name {spec.scorer}:PATH."
                )
        check_attention(model)
        self.decoder = decoder_of(model)
        if pool is not None:
            pool.check(self.decoder)
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
        self.rotation = Slots(self.decoder) if self.policy.positions == "slot" else Original(self.decoder)
        if self.policy.scorer is not None:
            self._check_needs(self.policy.scorer)
        #: The layers, with their own type.
        self.evicting_layers = [self._layer(index) for index in range(len(self.decoder.layers))]
        super().__init__(layers=[*self.evicting_layers])
        windowed = fingerprint(self.decoder.config)["windowed_layers"]
        self._sharing = [index for index in range(len(self.layers)) if index not in windowed]
        self._schedule = Schedule(self.policy, self.gates, self.rotation, self.evicting_layers)
        self._undo = Undo(self.policy, self.gates, self.evicting_layers)
        self.reset()

    def _check_needs(self, scorer: Scorer) -> None:
        """Refuse a model that does not show what a scorer asks for."""
        if scorer.needs.rotations:
            check_rotations(self.decoder, repr(self.policy), "Use another policy.")
        for layer in self.decoder.layers if scorer.needs.output_projection else ():
            output_projection(layer.self_attn)

    def _layer(self, index: int) -> EvictionLayer:
        if self.gates is None or index not in self.gates.layer_indices:
            layer = EvictionLayer(self.policy, self.rotation)
        else:
            layer = (GatedLayer if self.policy.budget is None else EvictionLayer)(
                self.policy, self.rotation, self.gates
            )
        layer.pool = self.pool
        return layer

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

    # ---- what it holds

    @property
    def valid(self) -> Tensor:
        """``[B, seen]`` bool, False on padding."""
        return self.history.valid

    @property
    def real(self) -> Tensor:
        """``[B, w]`` bool, which of the tokens at hand are not padding."""
        return self._pass.real

    @property
    def _pass(self) -> Pass:
        assert self.now is not None
        return self.now

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values, and for what gates look back at."""
        return sum(layer.nbytes for layer in self.evicting_layers)

    @property
    def prompt_sees(self) -> Literal["dense", "sparse", "blocks"]:
        """What later tokens of a prompt see of earlier ones: all, what the gates leave, what blocks left."""
        if self.policy.block is not None:
            return "blocks"
        if self.policy.evict_before_attend:
            return "sparse"
        if self.gates is not None and self.policy.budget is None:
            return self.gates.config.prefill
        return "dense"

    @property
    def seen_tokens(self) -> int:
        """Columns of the input that went by, padding and evicted tokens included."""
        return self.get_seq_length()

    @property
    def over_budget(self) -> Tensor:
        """``[B]`` bool on the CPU: sequences that hold more than the budget, because more is protected than it allows.

        False where nothing had to go so far.
        """
        if self.decision is not None:
            self.decision.look()
        known = None if self.decision is None else self.decision.shares.over_budget
        return torch.zeros(len(self.valid), dtype=torch.bool) if known is None else known

    def kept_positions(self, layer: int) -> list[list[Tensor]]:
        """Return, for each sequence and KV head, the sorted columns that a layer still holds.

        Columns are those of the input row, padding counted, and go on with the tokens that follow the prompt: of a
        prompt of 10 columns the first generated token has column 10.
        """
        store = self.evicting_layers[layer].store
        if store is None:
            return []
        kept = store.kept()
        columns = [row.nonzero().flatten().to(kept[0].device) for row in self.valid for _ in range(store.kv_heads)]
        heads = [own[ranks.long()] for own, ranks in zip(columns, kept, strict=True)]
        return [heads[first : first + store.kv_heads] for first in range(0, len(heads), store.kv_heads)]

    def kept_share(self, *, prompt: bool = False) -> float:
        """Return the share of the (token, KV head) pairs seen so far that is still held, over all layers.

        Tokens of all sequences count, without padding: those of the prompt, and those that followed it (generated ones
        and later turns).

        Args:
            prompt: count those of the prompt alone.
        """
        stores = [layer.store for layer in self.evicting_layers if layer.store is not None]
        if prompt:
            seen_of_prompt = self.valid[:, : self.history.prompt_columns].sum(1)
            own = seen_of_prompt.minimum(self.history.prompt_lengths).tolist()  # lower ranks are the prompt's
            rows = [(ranks, own[row // store.kv_heads]) for store in stores for row, ranks in enumerate(store.kept())]
            seen, held = sum(limit for _, limit in rows), sum(int((ranks < limit).sum()) for ranks, limit in rows)
        else:
            seen = sum(int(self.valid.sum()) * store.kv_heads for store in stores)
            held = sum(int(store.lengths.sum()) for store in stores)
        return held / seen if seen else 1.0

    def report(self) -> Report:
        """Return what each layer and head holds, what it costs, and the time that scoring took."""
        stores = [layer.store for layer in self.evicting_layers]
        return Report(
            policy=repr(self.policy),
            tokens=int(self.valid.sum()),
            over_budget=int(self.over_budget.sum()),
            kept=[[] if s is None else s.lengths.view(-1, s.kv_heads).sum(0).tolist() for s in stores],
            nbytes=[layer.nbytes for layer in self.evicting_layers],
            seconds=[layer.scoring_seconds for layer in self.evicting_layers],
            plain_nbytes=sum(layer.plain_nbytes for layer in self.evicting_layers),
        )

    # ---- the text

    def expect(self, valid: Tensor, tokens: Tensor | None = None) -> None:
        """Take note of the text that is to come, whole or in parts: the prompt, or the same text grown longer.

        ``model.generate`` calls it. Without it the first forward pass is the prompt.

        Args:
            valid: ``[B, T]`` bool, False on padding.
            tokens: ``[B, T]`` ids, where they are known.

        Raises:
            UserError: when the tokens do not go on from those seen.
        """
        self.history.expect(valid, tokens)

    def saw(self, tokens: Tensor) -> None:
        """Take note of the text ``[B, T]`` that went by; ``model.generate`` calls it."""
        self.history.saw(tokens)

    # ---- a forward pass, in the order in which it calls

    def modules(self) -> list[nn.Module]:
        """Return the gates, which run in a forward pass beside the model's modules."""
        return [] if self.gates is None else [self.gates]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin(self, decoder: nn.Module, attention_mask: Tensor | None, batch: int, length: int) -> None:
        """Take the padding of the coming tokens; see :class:`ag.model.hooks.Interceptor`.

        With an ``attention_mask`` the host waits here, once a forward pass, to learn whether the new tokens are padded.
        """
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise UserError(
                "EvictionCache: a CUDA graph of a forward pass would write every later token where the captured one "
                "went; capture parts of the model without the cache, or use torch.compile(model), which leaves it out."
            )
        if decoder is not self.decoder:
            raise UserError("This cache was made for another model; make one with EvictionCache(model, ...).")
        history, device = self.history, device_of(decoder) if attention_mask is None else attention_mask.device
        new, first = history.real(attention_mask, batch, length, device), not history.seen
        coming = history.prompt_to_come(length) if first else length
        if self.gates is not None and self.gates.config.scope == "prompt" and length < coming:
            raise UserError(
                f"{self.policy!r}: gates of gate.scope=prompt read the prompt in one forward pass, and {length} of "
                f"{coming} tokens came; leave prefill_chunk_size out, or use gates of gate.scope=causal."
            )
        self._require(length)
        if first and self.policy.budget is not None:
            self.decision = Decision(self.policy, self._sharing)
        padded = attention_mask is not None and not bool(new.all())
        self._show(self._schedule.whole(history.extend(new, padded=padded), history, padded=padded))

    def _require(self, tokens: int) -> None:
        """Refuse a pass of so many tokens of each sequence before it begins, where the pool may have no room for it."""
        if self.pool is None:
            return
        pages = sum(layer.demand(tokens) for layer in self.evicting_layers)
        if pages > self.pool.free:
            raise PoolFullError.of(f"{tokens} tokens of each of {len(self.valid)} sequences need", pages, self.pool)

    @contextmanager
    def _whole_prompt(self) -> Iterator[None]:
        """Drop what was written of a prompt where the pool has no room for all of it."""
        try:
            yield
        except PoolFullError as error:
            history = self.history
            if self.pool is None or history.before:
                raise
            held = [len(layer.store.pages()) for layer in self.evicting_layers if layer.store is not None]
            layers, columns = len(self.evicting_layers), history.prompt_columns
            self.reset()
            pages = max(sum(held) + error.pages, (sum(held) + error.pages) * layers // max(len(held), 1))
            raise PoolFullError.of(f"a prompt of {columns} tokens needs about", pages, self.pool) from error

    def _show(self, now: Pass) -> None:
        self.now = now
        self._undo.note(now)

    def blocks(self) -> Iterator[Tensor] | None:
        """Let the model read the prompt in the blocks of the schedule, and what comes with it (a draft) after it."""
        parts = self._schedule.parts(self._pass, self.history)
        return None if parts is None else self._one_by_one(parts)

    def _one_by_one(self, parts: Iterator[Pass]) -> Iterator[Tensor]:
        for part in parts:
            self._show(part)
            assert part.columns is not None
            yield part.columns.where(part.real, -1)

    def positions(self, given: Tensor | None, columns: Tensor | None) -> Tensor | None:
        """Return the positions ``[B, w]`` that the model rotates the tokens at hand by."""
        positions = self.history.positions(self._pass, given, columns)
        if self.repetition is not None:
            self.repetition.follow(self._pass, self.history, positions)
        return positions

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def note(self, tokens: Tensor) -> None:
        """Take note of the tokens of a forward pass, for a policy that lets the model repeat them."""
        if self.repetition is not None:
            self.repetition.note(tokens)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def enter_layer(self, layer: int, hidden: Tensor) -> None:
        """Let the gate that reads this layer's input look at the new tokens."""
        if self.repetition is not None:
            self.repetition.enter_layer(hidden)
        if not self._pass.judged or self.gates is None:
            return
        target = str(layer + self.gates.config.layer_offset)
        if target in self.gates.layers:
            gate = cast("AttentionGate", self.gates.layers[target])
            with torch.no_grad() if torch.is_grad_enabled() else nullcontext():  # a step has little time for each layer
                self.evicting_layers[int(target)].judge(gate, hidden, self._near(hidden.device))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Count the new tokens of a layer; transformers calls it before the attention function."""
        return self.evicting_layers[layer_idx].update(key_states, value_states, self.now)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(self, call: AttentionCall) -> Tensor:
        """Hand the pass to a layer."""
        now = self._near(call.q.device)
        deciding = call.layer in self._sharing and (now.reading or self.policy.steps is not None)
        decision = self.decision if deciding else None
        with self._whole_prompt():
            out = self.evicting_layers[call.layer].run(call, now, decision, self.evicting_layers)
        if self.repetition is not None and self.repetition.active and call.layer in self._sharing:
            self.repetition.measure(self.evicting_layers[call.layer], call, now)
        return out

    def _near(self, device: torch.device) -> Pass:
        """Return the pass on a device: that of the layers to come, where a model lies on several."""
        if device != self._pass.ranks.device:
            self.now = self._pass.to(device)
        return self._pass

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def finish(self, states: Tensor) -> Tensor:
        """Put each sequence's own last token in the last column, where ``model.generate`` looks for it; trim memory.

        Columns of padding have no meaning, so that nothing is lost; those on the right would otherwise be continued.
        """
        out = self.history.ended(states)
        if self.repetition is not None and not self.repetition.active and not self.repetition.done:
            with self._whole_prompt():
                self._repeat(self.repetition)
        if self.decision is not None:
            self.decision.look(LOOK)
        if self._pass.completes_prompt:
            for layer in self.evicting_layers:
                if layer.store is not None:
                    layer.store.trim()
        return out

    def _repeat(self, repetition: Repetition) -> None:
        """Let the model repeat the prompt once it is there, and evict; then be as if only the prompt had come."""
        if self.history.seen < self.history.prompt_columns:
            return
        before, history = self._pass, copy.copy(self.history)
        repetition.run(self)
        self.now, self.history = replace(before, number=self._pass.number), history

    # ---- going back, other sequences, other texts

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest tokens; a negative number is the same as a positive one.

        Raises:
            UserError: when what was evicted since, or what the scorer recorded, cannot be restored.
        """
        remove = abs(tokens_to_remove)
        if remove == 0:
            return
        self._require(0)
        self._undo.take_back(remove, self.history)
        self.history.crop(remove)
        self._schedule.crop(self.history)
        for layer in self.evicting_layers:
            layer.crop_to(self.valid)

    def activate_past_recording(self) -> None:
        """Prepare for drafts that :meth:`crop` takes back.

        Raises:
            UserError: when drafts could make something go that is then wanted back.
        """
        self._undo.check_drafts()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make the sequences those at ``beam_idx``."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Make the sequences those at ``indices``."""
        for part in (self.history, self._schedule, self._undo):
            part.select_sequences(indices)
        if self.now is not None:
            self.now = self.now.select_sequences(indices)
        for layer in self.evicting_layers:
            layer.select_sequences(indices)
        if self.decision is not None:
            self.decision.settle()
            self.decision.shares.select_sequences(indices)

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
        self._check_join(other)
        if not self.history.seen:
            vars(self).update(vars(copy.deepcopy(other)))
            other.reset()
            return
        sequences = len(self.valid), len(other.valid)
        self.history.join(other.history)
        self._schedule.join(other._schedule)
        self._undo.join(self.history)
        for mine, theirs in zip(self.evicting_layers, other.evicting_layers, strict=True):
            mine.join(theirs, self.history.seen)
        if self.decision is not None and other.decision is not None:
            self.decision.settle()
            other.decision.settle()
            self.decision.shares.join(other.decision.shares, sequences)
        self.now = None
        other.reset()

    def _check_join(self, other: EvictionCache) -> None:
        """Refuse a cache whose sequences cannot be appended."""
        same = (
            ("model", self.decoder is other.decoder),
            ("policy", self.policy == other.policy),
            ("gates", alike(self.gates, other.gates)),
            ("pool", self.pool is not None and self.pool is other.pool),
        )
        for what, fits in same:
            if not fits:
                raise UserError(
                    f"join: the caches ({self.policy!r} and {other.policy!r}) do not have the same {what}: expected "
                    "two of one model, policy and gates, made with the same pool=ag.Pool(model, nbytes)."
                )
        if other is self or not other.history.seen:
            raise UserError("join: expected another cache that has read its prompt; read it first.")
        for each in (self, other):
            if each.history.seen < each.history.prompt_columns:
                raise UserError(
                    f"join: {each.history.seen} of {each.history.prompt_columns} columns of a prompt were read so far: "
                    "expected all; join the caches after them."
                )

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence."""
        self.batch_select_indices(torch.arange(len(self.valid)).repeat_interleave(repeats))

    def reset(self) -> None:
        """Forget everything: the next tokens are a new prompt, of any batch size."""
        self.history = History()
        self.repetition = None if self.policy.scorer is None else self.policy.scorer.repetition()
        self.decision = self.now = None
        self._schedule.reset()
        self._undo.reset()
        for layer in self.evicting_layers:
            layer.reset()

"""The cache that evicts: hand it to ``model.generate(past_key_values=...)``."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal, NoReturn, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ag.engine.decide import Decision
from ag.engine.gated import GatedLayer
from ag.engine.layer import EvictionLayer
from ag.engine.passes import Pass, Tokens
from ag.engine.policy import Option, Policy, policy
from ag.engine.positions import Original, Slots
from ag.engine.repeat import Repetition
from ag.engine.report import Report
from ag.engine.ring import RingStore
from ag.engine.scorers.kvzip import KVzip
from ag.engine.spec import PolicySpec
from ag.errors import UserError
from ag.gates.attach import attached_gates, check_geometry, place
from ag.gates.gate import AttentionGate
from ag.model.geometry import fingerprint
from ag.model.hooks import AttentionCall, Plan, check_rotations, decoder_of, device_of, instrument


class EvictionCache(Cache, Plan):
    """A key-value cache that forgets: evicted keys and values are dropped from memory, per sequence and KV head.

    The first forward pass is the prompt. The policy's schedule says when something goes: after the prompt, within it
    block by block, or also while decoding.

    Args:
        model: causal language model, plain or PEFT-wrapped; the cache works with this one only.
        spec: a policy or its text; see :func:`ag.policy`.
        budget: for a text: tokens per KV head, or a share of the prompt.
        schedule: for a text: when something is evicted.
        options: for a text: hyper-parameters of its parts.

    Raises:
        UnsupportedModelError: when the model class cannot take a custom attention function.
        UserError: when the gates were made for another model, or ``gates`` is asked for and none are attached.
    """

    #: ``[B, seen]``, False on padding.
    valid: Tensor
    #: Columns of the prompt, and the own tokens ``[B]`` of each sequence's prompt.
    prompt_columns: int
    prompt_lengths: Tensor
    #: What the layers are shown at present; None before the first forward pass.
    now: Pass | None
    decision: Decision | None
    _expected: Tensor | None
    #: Own tokens ``[B]`` of each sequence when something could last go.
    _decided: Tensor
    #: Columns seen when something could last be evicted by flags: before the last forward pass, or after the prompt.
    _settled: int
    #: Columns that came without padding: each sequence has at least so many own tokens.
    _unpadded: int
    #: The most own tokens ``[B]`` of each sequence in such columns when :meth:`crop` was called; None: it was not.
    _taken: Tensor | None
    #: What ``model.generate`` said of the text so far, ``[B, T]``; None where it said nothing.
    _text: Tensor | None
    #: Positions ``[B]`` of the tokens that come next, where a policy repeats the prompt.
    _following: Tensor
    #: Final hidden states ``[B, d]`` of the last own tokens so far, while parts of a prompt come.
    _ends: Tensor | None

    def __init__(
        self,
        model: nn.Module,
        spec: str | PolicySpec | Policy,
        budget: int | float | None = None,
        schedule: str = "prefill",
        **options: Option,
    ) -> None:
        if isinstance(spec, Policy) and (budget is not None or options):
            raise UserError(f"{spec!r} has its budget and options already; give them to ag.policy.")
        self.policy = spec if isinstance(spec, Policy) else policy(spec, budget, schedule, **options)
        self.gates = self.policy.gates
        if self.policy.by_gates and self.gates is None:
            self.gates = attached_gates(model)
            if self.gates is None:
                raise UserError(
                    "Policy 'gates': no gates are attached; call ag.attach(model, gates) or name gates:PATH."
                )
        self.decoder = decoder_of(model)
        if self.gates is not None:
            check_geometry(model, self.gates)
            if self.gates.adapter is not None:
                self.gates.adapter.check(model, times=1)
            place(model, self.gates)
            if self.gates.config.scope == "prompt" and self.policy.block is not None:
                raise UserError(
                    f"{self.policy!r}: gates of gate.scope=prompt read a prompt in one forward pass; use the schedule "
                    "prefill, or gates of gate.scope=causal."
                )
            self.policy = self.policy.trained_with(self.gates)
        instrument(model)
        self.rotation = Slots(self.decoder) if self.policy.positions == "slot" else Original(self.decoder)
        if self.policy.scorer is not None and self.policy.scorer.turns:
            check_rotations(self.decoder, repr(self.policy), "Use another policy.")
        #: The layers, with their own type.
        self.evicting_layers = [self._layer(index) for index in range(len(self.decoder.layers))]
        super().__init__(layers=[*self.evicting_layers])
        windowed = fingerprint(self.decoder.config)["windowed_layers"]
        self._sharing = [index for index in range(len(self.layers)) if index not in windowed]
        self.reset()

    def _layer(self, index: int) -> EvictionLayer:
        if self.gates is None or index not in self.gates.layer_indices:
            return EvictionLayer(self.policy, self.rotation)
        kind = GatedLayer if self.policy.budget is None else EvictionLayer
        return kind(self.policy, self.rotation, self.gates)

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
            f"{type(self).__name__}: a cache refers to its model and cannot be pickled: use copy.deepcopy(cache) in "
            "the same process, or read the prompt again."
        )

    # ---- what it holds

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
    def prefill(self) -> Literal["dense", "sparse", "blocks"]:
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

    def kept_positions(self, layer: int) -> list[list[Tensor]]:
        """Return, for each sequence and KV head, the sorted columns of the input row that a layer still holds."""
        store = self.evicting_layers[layer].store
        if store is None:
            return []
        kept = store.kept()
        columns = [row.nonzero().flatten().to(kept[0].device) for row in self.valid for _ in range(store.kv_heads)]
        heads = [own[ranks.long()] for own, ranks in zip(columns, kept, strict=True)]
        return [heads[first : first + store.kv_heads] for first in range(0, len(heads), store.kv_heads)]

    def kept_share(self) -> float:
        """Return the share of the (token, KV head) pairs seen so far that is still held, over all layers."""
        stores = [layer.store for layer in self.evicting_layers if layer.store is not None]
        seen = sum(int(self.valid.sum()) * store.kv_heads for store in stores)
        return sum(int(store.counts().sum()) for store in stores) / seen if seen else 1.0

    def report(self) -> Report:
        """Return what each layer and head holds, what it costs, and the time that scoring took."""
        stores = [layer.store for layer in self.evicting_layers]
        return Report(
            policy=repr(self.policy),
            tokens=int(self.valid.sum()),
            kept=[[] if s is None else s.counts().view(-1, s.kv_heads).sum(0).tolist() for s in stores],
            nbytes=[layer.nbytes for layer in self.evicting_layers],
            seconds=[layer.scoring_seconds for layer in self.evicting_layers],
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
        if tokens is not None:
            self._check_goes_on(tokens)
            self._text = tokens
        if not self.seen_tokens:
            self._expected = valid

    def saw(self, tokens: Tensor) -> None:
        """Take note of the text ``[B, T]`` that went by; ``model.generate`` calls it."""
        if self._text is not None and len(self._text) == len(tokens) == len(self.valid):  # no beams
            self._text = tokens

    def _check_goes_on(self, tokens: Tensor) -> None:
        seen = self.seen_tokens
        again = "to continue, give the whole text so far and what follows; for another text call cache.reset() first"
        if seen and tokens.shape[1] <= seen:
            raise UserError(
                f"model.generate was given {tokens.shape[1]} tokens, and this cache has seen {seen}: {again}."
            )
        if not seen or self._text is None or len(self._text) != len(tokens):
            return
        before = self._text[:, :seen].to(tokens.device)
        differs = (before != tokens[:, : before.shape[1]]).any(0)
        if bool(differs.any()):
            raise UserError(
                f"The tokens that model.generate was given differ from those that this cache has seen, from column "
                f"{int(differs.long().argmax())} on: {again}."
            )

    # ---- a forward pass, in the order in which it calls

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin(self, decoder: nn.Module, attention_mask: Tensor | None, batch: int, length: int) -> None:
        """Take the padding of the coming tokens; see :class:`ag.model.hooks.Plan`.

        With an ``attention_mask`` the host waits here, once a forward pass, to learn whether the new tokens are padded.
        """
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise UserError(
                "EvictionCache: a CUDA graph of a forward pass would write every later token where the captured one "
                "went; capture parts of the model without the cache, or use torch.compile(model), which leaves it out."
            )
        if decoder is not self.decoder:
            raise UserError("This cache was made for another model; make one with EvictionCache(model, ...).")
        seen = self.get_seq_length()
        device = device_of(decoder) if attention_mask is None else attention_mask.device
        if seen and batch != len(self.valid):
            raise UserError(
                f"This cache holds {len(self.valid)} sequences, not {batch}; for another text call cache.reset() first."
            )
        if attention_mask is None:
            new = torch.ones(batch, length, dtype=torch.bool, device=device)
        elif attention_mask.ndim == 2 and attention_mask.shape[1] == seen + length:
            new = attention_mask[:, seen:].bool()
        else:
            raise UserError(
                f"attention_mask {tuple(attention_mask.shape)}: expected {(batch, seen + length)}, one entry for each "
                "token seen and coming; for another text call cache.reset() first."
            )
        coming = self._expected.shape[1] if self._expected is not None and not seen else length
        if self.gates is not None and self.gates.config.scope == "prompt" and length < coming:
            raise UserError(
                f"{self.policy!r}: gates of gate.scope=prompt read the prompt in one forward pass, and {length} of "
                f"{coming} tokens came; leave prefill_chunk_size out, or use gates of gate.scope=causal."
            )
        self.valid = torch.cat([self.valid.to(device), new], 1) if seen else new
        self.prompt_lengths = self.prompt_lengths.to(device)
        self._before = seen
        if not seen:
            self._begin_prompt(new)
        if seen + length >= self.prompt_columns > seen:
            self.prompt_lengths = self.valid[:, : self.prompt_columns].sum(1)
        padded = attention_mask is not None and not bool(new.all())
        self._right_padded = padded and not bool(new[:, -1].all())
        self._gaps |= self._right_padded
        tokens = Tokens(ranks=(self.valid.cumsum(1) - 1)[:, seen:], real=new)
        self._unpadded += 0 if padded else length
        self._turn(tokens, padded=padded, reading=seen < self.prompt_columns)

    def _begin_prompt(self, new: Tensor) -> None:
        whole = new if self._expected is None else self._expected.to(new.device)
        self._expected = None
        if len(whole) != len(new):  # beams: each prompt comes several times
            whole = whole.repeat_interleave(len(new) // len(whole), 0)
        self.prompt_columns, self.prompt_lengths = whole.shape[1], whole.sum(1)
        if self.policy.budget is not None:
            self.decision = Decision(self.policy, self._sharing)

    def _turn(self, tokens: Tokens, *, padded: bool, reading: bool, last: bool = True) -> None:
        """Make the pass of the next tokens.

        Args:
            tokens: which these are.
            padded: whether some of them are not real.
            reading: whether they are of the prompt.
            last: whether they are the last ones of the forward pass, or of its part of the prompt.
        """
        stores = [layer.store for layer in self.evicting_layers if layer.store is not None]
        seen = self.valid.shape[1]
        ends = last and seen >= self.prompt_columns
        later = self._judges_later
        self.now = Pass(
            **vars(tokens),
            number=1 if self.now is None else self.now.number + 1,
            reading=reading,
            ends_prompt=ends,
            padded=padded,
            left_padded=padded and not bool(tokens.real[:, 0].all()),
            seen=seen,
            prompt_columns=self.prompt_columns,
            prompt_lengths=self.prompt_lengths,
            due=self._due(tokens, reading),
            places=self.rotation.places(tokens, seen, stores),
            at_least=0 if reading else max(0, self._unpadded - tokens.ranks.shape[1]),
            judged=self.gates is not None and (reading or later),
            remember=self.gates is not None and (later or (reading and not ends)),
        )
        self._settled = min(seen, self.prompt_columns) if reading else seen - tokens.ranks.shape[1]

    @property
    def _judges_later(self) -> bool:
        """Whether gates are asked about the tokens that follow the prompt."""
        wanted = self.policy.budget is None or self.policy.steps is not None
        return self.gates is not None and self.gates.config.covers == "all" and wanted

    def _due(self, tokens: Tokens, reading: bool) -> Tensor | None:
        """Return ``[B]`` bool, the sequences of which something may go after these tokens; None: of none.

        In a prompt those which it, or a block of it, ends; later those that have grown by the steps of the schedule.
        """
        block, steps = self.policy.block, self.policy.steps
        if self.decision is None or self.policy.rereads or not (reading or steps is not None):
            return None
        seen = self.valid.sum(1)
        if reading:
            count = tokens.counts
            ends = count == self.prompt_lengths
            due = (count > 0) & (ends if block is None else ends | (count % block == 0))
            self._decided = seen
        else:
            due = seen - self._decided.to(seen.device) >= (steps or 0)
            self._decided = seen.where(due, self._decided.to(seen.device))
        return due if bool(due.any()) else None

    def blocks(self) -> Iterator[Tensor] | None:
        """Let the model read the prompt in the blocks of the schedule, and what comes with it (a draft) after it."""
        whole = self._pass
        if not whole.reading:
            return None
        prompt, rest = whole.split(self.prompt_columns - self._before)
        parts = prompt.blocks(self.policy.block)
        return self._one_by_one(parts, rest) if len(parts) > 1 or rest.ranks.shape[1] else None

    def _one_by_one(self, parts: list[Tokens], rest: Tokens) -> Iterator[Tensor]:
        for number, part in enumerate(parts, 1):
            padded = not bool(part.real.all())
            self._turn(part, padded=padded, reading=True, last=number == len(parts))
            assert part.columns is not None
            yield part.columns.where(part.real, -1)
        if rest.columns is not None and rest.columns.shape[1]:
            self._turn(rest, padded=not bool(rest.real.all()), reading=False)
            yield rest.columns.where(rest.real, -1)

    def positions(self, given: Tensor | None, columns: Tensor | None) -> Tensor | None:
        """Return the positions ``[B, w]`` that the model rotates the tokens at hand by."""
        positions = self._positions(given, columns)
        if self.repetition is not None:
            real = self._pass.real
            columns = torch.arange(self._before, self.valid.shape[1], device=real.device)
            used = columns if positions is None else positions.to(real.device)
            following = torch.where(real, used, -1).amax(1) + 1
            # a later part of the prompt may hold nothing but padding of a sequence
            self._following = following.maximum(self._following.to(real.device)) if self._before else following
        return positions

    def _positions(self, given: Tensor | None, columns: Tensor | None) -> Tensor | None:
        now = self._pass
        if now.places is not None:
            return now.places
        if self._gaps:  # transformers goes on counting from the padding
            return now.ranks.clamp_min(0)
        if columns is None:
            return given
        if given is None:
            given = torch.arange(self._before, self.valid.shape[1], device=columns.device)[None]
        return given.expand(len(columns), -1).gather(1, columns.clamp_min(0))

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
        """Put each sequence's own last token in the last column, where ``model.generate`` looks for it.

        Columns of padding have no meaning, so that nothing is lost; those on the right would otherwise be continued.
        """
        out = self._ended(states)
        if self.repetition is not None and not self.repetition.active and not self.repetition.done:
            self._repeat()
        return out

    def _repeat(self) -> None:
        """Let the model repeat the prompt once it is there, and evict; then be as if only the prompt had come."""
        if self.repetition is None or self.seen_tokens < self.prompt_columns:
            return
        before, kept = self._pass, {name: getattr(self, name) for name in ("_before", "_right_padded", "_gaps")}
        self.repetition.run(self, self._following)
        self.now = replace(before, number=self._pass.number)
        vars(self).update(kept)

    def _ended(self, states: Tensor) -> Tensor:
        more = self.seen_tokens < self.prompt_columns  # a later part may hold nothing but padding of a sequence
        if not (more or self._right_padded):
            return states
        real = self.valid[:, self._before :].to(states.device)
        last = real.long().cumsum(1).argmax(1)
        ends = states[torch.arange(len(states), device=states.device), last]
        if self._ends is not None:
            ends = ends.where(real.any(1, keepdim=True), self._ends.to(states.device))
        self._ends = ends if more else None
        return torch.cat([states[:, :-1], ends[:, None]], 1) if self._right_padded else states

    # ---- going back, other sequences, other texts

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest tokens; a negative number is the same as a positive one.

        Raises:
            UserError: when what was evicted since, or what the scorer recorded, cannot be restored.
        """
        remove = abs(tokens_to_remove)
        if remove == 0:
            return
        self._check_crop(remove)
        self._taken, self._settled = self._settled_tokens(), min(self._settled, self.valid.shape[1] - remove)
        self.valid, self._unpadded = self.valid[:, :-remove], max(0, self._unpadded - remove)
        self.prompt_columns = min(self.prompt_columns, self.valid.shape[1])
        if len(self._decided):
            self._decided = self._decided.minimum(self.valid.sum(1))
        for layer in self.evicting_layers:
            layer.crop_to(self.valid)

    def activate_past_recording(self) -> None:
        """Prepare for drafts that :meth:`crop` takes back.

        Raises:
            UserError: when drafts could make something go that is then wanted back.
        """
        if self.policy.scorer is None:
            return
        if self.policy.rereads:
            raise UserError(
                f"{self.policy!r} repeats a prompt before anything follows it; generate without an assistant model and "
                "prompt lookup."
            )
        if self.policy.steps is not None:
            raise UserError(
                f"{self.policy!r} evicts while drafts come, and cannot take that back; generate without an assistant "
                "model and prompt lookup, or use the schedule prefill."
            )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make the sequences those at ``beam_idx``."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Make the sequences those at ``indices``."""
        if self._text is not None:  # beams are more than the text has rows
            self._text = self._text[indices.to(self._text.device)] if len(self._text) == len(self.valid) else None
        self.valid, self.prompt_lengths = (x[indices.to(x.device)] for x in (self.valid, self.prompt_lengths))
        if len(self._decided):
            self._decided = self._decided[indices.to(self._decided.device)]
        if self._taken is not None:
            self._taken = self._taken[indices.to(self._taken.device)]
        if self.now is not None:
            self.now = self.now.select_sequences(indices)
        for layer in self.evicting_layers:
            layer.select_sequences(indices)
        if self.decision is not None:
            self.decision.shares.select_sequences(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence."""
        self.batch_select_indices(torch.arange(len(self.valid)).repeat_interleave(repeats))

    def reset(self) -> None:
        """Forget everything: the next tokens are a new prompt, of any batch size."""
        self.valid, self.prompt_lengths = torch.empty(0, 0, dtype=torch.bool), torch.empty(0, dtype=torch.long)
        self._decided = torch.empty(0, dtype=torch.long)
        self.prompt_columns = 0
        self._gaps = False  # whether some sequence was padded on its right
        self._settled = self._unpadded = 0
        scorer = getattr(self.policy.scorer, "inner", self.policy.scorer)
        #: What lets the model repeat the prompt, for a policy that scores by that.
        self.repetition = Repetition(scorer) if isinstance(scorer, KVzip) else None
        self._following = torch.empty(0, dtype=torch.long)
        self._expected = self._text = self._ends = self._taken = self.decision = self.now = None
        for layer in self.evicting_layers:
            layer.reset()

    def _check_crop(self, remove: int) -> None:
        """Refuse to go back to a state of which something was evicted since."""
        scorer, left = self.policy.scorer, self.get_seq_length() - remove
        if scorer is None:
            return
        columns = self.prompt_columns
        if left < columns:
            raise UserError(f"crop({-remove}): only tokens after the prompt can go; prefill a shorter prompt.")
        self._check_recent(remove)
        if self.decision is None:
            return
        if self.policy.steps is not None and (scorer.follows or scorer.lookback):
            raise UserError(
                f"crop({-remove}): {self.policy!r} has recorded the queries of the tokens that would go; use the "
                "schedule prefill, or make a new cache."
            )
        elif left < max(layer.evicted_at for layer in self.evicting_layers):
            raise UserError(
                f"crop({-remove}): {self.policy!r} has evicted something since, which cannot come back; use the "
                "schedule prefill, or make a new cache."
            )

    def _check_recent(self, remove: int) -> None:
        """Refuse where tokens that are evicted would be recent again.

        The next query of a text of n tokens sees all ranks from n + 1 - r on. Below that what had settled for n tokens
        has only those that stay for another reason.
        """
        left, settled = self.valid[:, :-remove].sum(1), self._settled_tokens()
        for name, recent, last in self._recents():
            first = settled + 1 - recent if last is None else (settled + 1 - recent).minimum(last)
            if bool(((first > 0) & (left + 1 - recent < first)).any()):
                raise UserError(
                    f"crop({-remove}): some of the {recent} recent tokens ({name}) are evicted; crop no more than the "
                    "last forward pass, or make a new cache."
                )

    def _recents(self) -> Iterator[tuple[str, int, Tensor | None]]:
        """Yield the numbers of newest tokens that are held whatever gates say, and below which rank others went."""
        if self.gates is None:
            return
        config = self.gates.config
        if self.policy.budget is None:
            prompt = None if self._judges_later else self.valid[:, : self.prompt_columns].sum(1)
            yield "gate.recent_tokens", config.recent_tokens, prompt
        if config.window and self._judges_later:
            yield "gate.window", config.window, None
        windows = {x.store.window for x in self.evicting_layers if isinstance(x.store, RingStore)} - {None}
        for window in windows:
            yield "the model's sliding window", int(window or 0), None

    def _settled_tokens(self) -> Tensor:
        """Return ``[B]``, the most own tokens of each sequence that something was evicted for."""
        settled = self.valid[:, : self._settled].sum(1)
        return settled if self._taken is None else settled.maximum(self._taken.to(settled.device))

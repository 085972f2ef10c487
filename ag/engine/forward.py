"""What a cache does in a forward pass, in the order in which that calls."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from ag.engine.holdings import Holdings
from ag.engine.pool import Pool, PoolFullError
from ag.engine.reread import Reread
from ag.errors import UserError
from ag.gates.gate import AttentionGate, AttentionGates
from ag.model.hooks import AttentionCall, Interceptor, device_of

LOOK = 16  # passes after which the host looks at what decisions of steps found, such as scores that are not finite


class Forward(Holdings, Interceptor):
    """The side of :class:`ag.engine.cache.EvictionCache` that a forward pass calls."""

    gates: AttentionGates | None
    pool: Pool | None
    #: What lets the model repeat the prompt, for a policy that scores by that.
    reread: Reread | None
    #: Indices of the layers that share the budget.
    sharing: list[int]

    #: Whether a step is being recorded at present.
    recording = False
    #: Whether a pass has begun and not ended: some layers have its tokens, and others may not.
    unfinished = False
    #: Types of weights and of autocast in the first pass, and whether tensors were made under inference mode.
    made_as: tuple[torch.dtype, torch.dtype | None] | None = None
    inference = False

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

    def expect(self, valid: Tensor, tokens: Tensor | None = None) -> None:
        """Take note of the text that is to come, whole or in parts: the prompt, or the same text grown longer.

        ``model.generate`` calls it. Without it the first forward pass is the prompt. While a prompt is being read, the
        rest of it may become another one. What comes must have the padding that is announced here.

        Args:
            valid: ``[B, T]`` bool, False on padding.
            tokens: ids ``[B, T]``, or of those alone that were not seen; None: they are not known.

        Raises:
            UserError: when the text does not go on from the one seen.
        """
        self.check_whole()
        self.text.expect(valid, tokens)

    def check_whole(self) -> None:
        """Refuse a cache whose last forward pass did not end, as after Ctrl-C or an error within it.

        Raises:
            UserError: until :meth:`reset`.
        """
        if self.unfinished:
            raise UserError(
                f"{type(self).__name__}: a forward pass was broken off by an error or Ctrl-C, or runs in another "
                "thread: some layers have its tokens, and others have not; call cache.reset() and read the text again."
            )

    def _check_kind(self, decoder: nn.Module, device: torch.device) -> None:
        """Refuse tokens that cannot lie beside those that are held."""
        autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        kind = next(decoder.parameters()).dtype, autocast
        if self.made_as is None or not self.text.seen:
            self.made_as, self.inference = kind, False
        if self.made_as != kind:
            said = [f"{weights}, autocast {auto or 'off'}" for weights, auto in (self.made_as, kind)]
            raise UserError(
                f"{type(self).__name__}: what is held was computed in {said[0]}, and the model now computes in "
                f"{said[1]}: go on as before, or call cache.reset() and read the text again."
            )
        if self.inference and not torch.is_inference_mode_enabled():
            raise UserError(
                f"{type(self).__name__}: a context was read under torch.inference_mode(), whose tensors cannot be "
                "changed outside of it: go on under torch.inference_mode(), or read it under torch.no_grad()."
            )
        self.inference |= torch.is_inference_mode_enabled()

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
        self.text.protect(spans)

    def saw(self, tokens: Tensor | None) -> None:
        """Take note of the text ``[B, T]`` that went by, None where it is not known; ``model.generate`` calls it."""
        self.text.saw(tokens)

    def modules(self) -> list[nn.Module]:
        """Return the gates, which run in a forward pass beside the model's modules."""
        return [] if self.gates is None else [self.gates]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin(self, decoder: nn.Module, attention_mask: Tensor | None, batch: int, length: int) -> None:
        """Take the padding of the coming tokens; see :class:`ag.model.hooks.Interceptor`.

        With an ``attention_mask`` the host waits here, once a forward pass, to learn whether the new tokens are padded.
        """
        if not self.recording and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise UserError(
                "EvictionCache: a CUDA graph of a forward pass would write every later token where the captured one "
                "went; use ag.NextToken(model, cache), which records steps, capture parts of the model without the "
                "cache, or use torch.compile(model), which leaves it out."
            )
        if decoder is not self.decoder:
            raise UserError("This cache was made for another model; make one with EvictionCache(model, ...).")
        self._require(length)
        self._check_kind(decoder, device_of(decoder))
        device = device_of(decoder) if attention_mask is None else attention_mask.device
        self.text.extend(attention_mask, batch, length, device)
        self.unfinished = True

    def demand(self, tokens: int) -> int:
        """Return the most pages that a pass of so many tokens of each sequence may take.

        Of the first pass it is not known, and of the last one of a prompt only what its tokens take.
        """
        reading = self.text.seen < self.text.prompt_columns
        return sum(layer.demand(tokens, reading=reading) for layer in self.evicting_layers)

    def _require(self, tokens: int) -> None:
        """Refuse a pass of so many tokens of each sequence before it begins, where the pool may have no room for it."""
        self.check_whole()
        if self.pool is None:
            return
        pages = self.demand(tokens)
        if pages > self.pool.free:
            raise PoolFullError.of(f"{tokens} tokens of each of {len(self.valid)} sequences need", pages, self.pool)

    @contextmanager
    def _whole_prompt(self) -> Iterator[None]:
        """Drop what was written of a prompt where the pool has no room for all of it."""
        try:
            yield
        except PoolFullError as error:
            if self.pool is None or self.text.before:
                raise
            held = [len(layer.store.table.numbers()) for layer in self.evicting_layers if layer.store is not None]
            layers, columns = len(self.evicting_layers), self.text.prompt_columns
            self.reset()
            pages = max(sum(held) + error.pages, (sum(held) + error.pages) * layers // max(len(held), 1))
            raise PoolFullError.of(f"a prompt of {columns} tokens needs about", pages, self.pool) from error

    def blocks(self) -> Iterator[Tensor] | None:
        """Let the model read the prompt in the blocks of the schedule, and what comes with it (a draft) after it."""
        return self.text.blocks()

    def positions(self, given: Tensor | None, columns: Tensor | None) -> Tensor | None:
        """Return the positions ``[B, w]`` that the model rotates the tokens at hand by."""
        positions = self.text.positions(given, columns)
        if self.reread is not None and self.text.now is not None:
            self.reread.follow(self.text.now, positions)
        return positions

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def note(self, tokens: Tensor) -> None:
        """Take note of the tokens of a forward pass, for a policy that lets the model repeat them."""
        if self.reread is not None:
            self.reread.note(tokens)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def enter_layer(self, layer: int, hidden: Tensor) -> None:
        """Let the gate that reads this layer's input look at the new tokens."""
        if self.reread is not None:
            self.reread.enter_layer(hidden)
        now = self.text.near(hidden.device)
        if not now.judged or self.gates is None:
            return
        target = str(layer + self.gates.config.layer_offset)
        if target in self.gates.layers:
            gate = cast("AttentionGate", self.gates.layers[target])
            with torch.no_grad() if torch.is_grad_enabled() else nullcontext():  # a step has little time for each layer
                now.logits[int(target)] = self.evicting_layers[int(target)].judge(gate, hidden, now)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Count the new tokens of a layer; transformers calls it before the attention function."""
        return self.evicting_layers[layer_idx].update(key_states, value_states, self.text.now)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(self, call: AttentionCall) -> Tensor:
        """Hand the pass to a layer.

        Raises:
            UserError: when gradients would go through it.
        """
        if torch.is_grad_enabled() and any(x.requires_grad for x in (call.q, call.k, call.v)):
            raise UserError(
                "EvictionCache: gradients do not go through a cache; run the model under torch.no_grad(), or train "
                "without past_key_values."
            )
        now = self.text.near(call.q.device)
        deciding = call.layer in self.sharing if now.reading else self._deciding(call.layer)
        decision = self.decision if deciding else None
        with self._whole_prompt():
            out = self.evicting_layers[call.layer].run(call, now, decision, self.evicting_layers)
        if self.reread is not None and call.layer in self.sharing:
            self.reread.look(self.evicting_layers[call.layer], call, now)
        return out

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def finish(self) -> None:
        """Trim memory behind a prompt.

        A policy that rereads lets the model repeat a prompt once it is there, and evicts then.
        """
        self.unfinished, again = False, self.reread
        pending = again is not None and not again.active and not again.done
        if again is not None and pending and self.text.seen >= self.text.prompt_columns:
            with self._whole_prompt(), self.text.aside():
                again.run(self)
        if not self.recording:
            self.look()
        now = self.text.now
        if now is not None and now.reading and now.ends_prompt:
            for layer in self.evicting_layers:
                if layer.store is not None:
                    layer.store.trim()

    # ---- steps, see ag.engine.step

    def look(self) -> None:
        """Look, once in a while, at what decisions of steps found; the host waits for it.

        Raises:
            ag.engine.decide.NonFiniteScoreError: when a score was not finite.
        """
        if self.decision is not None:
            self.decision.look(LOOK)

    def step_key(self) -> tuple[Any, ...] | None:
        """Return what the next step depends on beside its tokens; None: it is not like the one before."""
        if self.reread is not None or not self.text.ends:
            return None
        keys = [layer.step_key(self._deciding(index)) for index, layer in enumerate(self.evicting_layers)]
        return None if None in keys else (*keys, *self.text.step_key())

    def stepped(self) -> None:
        """Take note of a step that was replayed."""
        self.text.stepped()
        assert self.text.now is not None
        for index, layer in enumerate(self.evicting_layers):
            layer.stepped(self.text.now, self._deciding(index))

    def _deciding(self, layer: int) -> bool:
        """Tell whether something may go of a layer behind the prompt."""
        return layer in self.sharing and self.policy.steps is not None

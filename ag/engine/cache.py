"""The cache that evicts: hand it to ``model.generate(past_key_values=...)``."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ag.attach import AttentionCall, Plan, attached_gates, check_geometry, decoder_of, instrument, place
from ag.engine.decide import Decision
from ag.engine.layer import EvictionLayer
from ag.engine.policy import Option, Policy, policy
from ag.engine.report import Report
from ag.errors import UserError
from ag.gate import fingerprint
from ag.gating import Gating


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

    def __init__(
        self,
        model: nn.Module,
        spec: str | Policy,
        budget: int | float | None = None,
        schedule: str = "prefill",
        **options: Option,
    ) -> None:
        if not isinstance(spec, str) and (budget is not None or options):
            raise UserError(f"{spec!r} has its budget and options already; give them to ag.policy.")
        self.policy = policy(spec, budget, schedule, **options) if isinstance(spec, str) else spec
        self.gates = self.policy.gates
        if self.policy.by_gates and self.gates is None:
            self.gates = attached_gates(model)
            if self.gates is None:
                raise UserError(
                    "Policy 'gates': no gates are attached; call ag.attach(model, gates) or name gates:PATH."
                )
        self._decoder = decoder_of(model)
        if self.gates is not None:
            check_geometry(model, self.gates)
            place(model, self.gates)
        instrument(model)
        super().__init__(layers=[EvictionLayer(self) for _ in self._decoder.layers])
        windowed = fingerprint(self._decoder.config)["windowed_layers"]
        self._sharing = [index for index in range(len(self.layers)) if index not in windowed]
        self.decision: Decision | None = None
        #: ``[B, seen]`` bool, False on padding.
        self.valid = torch.empty(0, 0, dtype=torch.bool)
        self.gating: Gating | None = None
        self.padded_step = False

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values."""
        return sum(layer.store.nbytes for layer in self.evicting_layers if layer.store is not None)

    @property
    def prefill(self) -> Literal["dense", "sparse", "blocks"]:
        """What later tokens of a prompt see of earlier ones: all, what the gates leave, what blocks left."""
        if self.policy.block is not None:
            return "blocks"
        if self.gates is not None and self.policy.budget is None:
            return self.gates.config.prefill
        return "dense"

    @property
    def seen_tokens(self) -> int:
        """Columns of the input that went by, padding and evicted tokens included."""
        return self.get_seq_length()

    @property
    def evicting_layers(self) -> list[EvictionLayer]:
        """The layers, with their own type."""
        return [layer for layer in self.layers if isinstance(layer, EvictionLayer)]

    def kept_positions(self, layer: int) -> list[list[Tensor]]:
        """Return, for each sequence and KV head, the sorted columns of the input row that a layer still holds."""
        store = self.evicting_layers[layer].store
        if store is None:
            return []
        ranks = store.padded().ranks
        columns = [row.nonzero().flatten() for row in self.valid]
        return [
            [columns[b][ranks[row, : int(store.lengths[row])].long()] for row in range(first, first + store.kv_heads)]
            for b, first in enumerate(range(0, len(ranks), store.kv_heads))
        ]

    def kept_share(self) -> float:
        """Return the share of the (token, KV head) pairs seen so far that is still held, over all layers."""
        stores = [layer.store for layer in self.evicting_layers if layer.store is not None]
        seen = sum(int(self.valid.sum()) * store.kv_heads for store in stores)
        return sum(int(store.lengths.sum()) for store in stores) / seen if seen else 1.0

    def report(self) -> Report:
        """Return what each layer and head holds, what it costs, and the time that scoring took."""
        stores = [layer.store for layer in self.evicting_layers]
        return Report(
            policy=repr(self.policy),
            tokens=int(self.valid.sum()),
            kept=[[] if s is None else s.lengths.view(-1, s.kv_heads).sum(0).tolist() for s in stores],
            nbytes=[0 if s is None else s.nbytes for s in stores],
            seconds=[layer.scoring_seconds for layer in self.evicting_layers],
        )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin(self, decoder: nn.Module, attention_mask: Tensor | None, batch: int, length: int) -> None:
        """Take the padding of the coming tokens; see :class:`ag.attach.Plan`."""
        if decoder is not self._decoder:
            raise UserError("This cache was made for another model; make one with EvictionCache(model, ...).")
        seen = self.get_seq_length()
        device = next(decoder.parameters()).device
        if seen and batch != len(self.valid):
            raise UserError(f"This cache holds {len(self.valid)} sequences, not {batch}; make a new cache.")
        if attention_mask is None:
            new = torch.ones(batch, length, dtype=torch.bool, device=device)
        elif attention_mask.ndim == 2 and attention_mask.shape[1] == seen + length:
            new = attention_mask[:, seen:].bool()
        else:
            raise UserError(
                f"attention_mask {tuple(attention_mask.shape)}: expected {(batch, seen + length)}, one entry for each "
                "token seen and coming."
            )
        self.valid = torch.cat([self.valid, new], 1) if seen else new
        self.new_ranks = self.valid.cumsum(1)[:, seen:] - 1
        self.padded_step = not bool(new.all())
        self.left_padded = self.padded_step and not bool(new[:, 0].all())
        self.gating = None
        if not seen and self.policy.budget is not None:
            self.decision = Decision(self.policy, self._sharing)
        if not seen and self.gates is not None:
            self.gating = Gating(self.gates, self.valid, self.valid.sum(1), hard=True)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def enter_layer(self, layer: int, hidden: Tensor) -> None:
        """Let the layer's gate look at the prompt."""
        if self.gating is not None:
            with torch.no_grad():
                self.gating.enter_layer(layer, hidden)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(self, call: AttentionCall) -> Tensor:
        """Attend, evict and store."""
        layer = self.evicting_layers[call.layer]
        if layer.store is not None:
            return layer.extend(call)
        if self.decision is None or call.layer not in self._sharing:
            return layer.prefill(call)
        return layer.prefill_within(call, self.decision)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest tokens; a negative number is the same as a positive one.

        Raises:
            UserError: when what was evicted since, or what the scorer recorded, cannot be restored.
        """
        remove = abs(tokens_to_remove)
        if remove == 0:
            return
        self._check_crop(remove)
        self.valid = self.valid[:, :-remove]
        for layer in self.evicting_layers:
            layer.crop_to(self.valid)

    def activate_past_recording(self) -> None:
        """Prepare for drafts that :meth:`crop` takes back.

        Raises:
            UserError: when drafts could make something go that is then wanted back: while decoding, or before the
                prompt was seen, as the first draft comes with it as if it were a part.
        """
        if self.policy.scorer is None:
            return
        if not self.seen_tokens:
            raise UserError(
                f"Policy {self.policy.spec!r} cannot tell a prompt from a draft; generate without an assistant model "
                "and prompt lookup, or use the policy full."
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
        self.valid = self.valid[indices.to(self.valid.device)]
        self.new_ranks = self.new_ranks[indices.to(self.new_ranks.device)]
        for layer in self.evicting_layers:
            layer.select_sequences(indices)
        if self.decision is not None:
            self.decision.select_sequences(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence."""
        self.batch_select_indices(torch.arange(len(self.valid)).repeat_interleave(repeats))

    def reset(self) -> None:
        """Forget everything."""
        self.valid = self.valid[:0, :0]
        self.decision = None
        for layer in self.evicting_layers:
            layer.reset()

    def _check_crop(self, remove: int) -> None:
        """Refuse to go back to a state of which something was evicted since."""
        scorer, left = self.policy.scorer, self.get_seq_length() - remove
        if scorer is None:
            return
        columns = min(layer.prompt_length for layer in self.evicting_layers)
        if left < columns:
            raise UserError(f"crop({-remove}): only tokens after the prompt can go; prefill a shorter prompt.")
        if self.decision is None:
            self._check_crop_by_flags(remove, columns)
        elif self.policy.steps is not None and (scorer.follows or scorer.lookback):
            raise UserError(
                f"crop({-remove}): {self.policy!r} has recorded the queries of the tokens that would go; use the "
                "schedule prefill, or make a new cache."
            )
        elif left < max(layer.evicted_at for layer in self.evicting_layers):
            raise UserError(
                f"crop({-remove}): {self.policy!r} has evicted something since, which cannot come back; use the "
                "schedule prefill, or make a new cache."
            )

    def _check_crop_by_flags(self, remove: int, columns: int) -> None:
        """Refuse where prompt tokens that are evicted would be recent again."""
        assert self.gates is not None
        prompt, left = self.valid[:, :columns].sum(1), self.valid[:, :-remove].sum(1)
        recent = self.gates.config.recent_tokens
        if bool(((left < prompt + recent - 1) & (left < self.new_ranks[:, 0])).any()):
            raise UserError(
                f"crop({-remove}): some of the prompt's {recent} recent tokens are evicted; crop no more than the last "
                "forward pass, or make a new cache."
            )

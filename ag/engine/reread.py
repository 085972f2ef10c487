"""Rereading: the model repeats a prompt under the whole cache, which measures and then evicts once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ag.engine.holdings import Holdings
from ag.engine.layer import EvictionLayer
from ag.engine.passes import Pass
from ag.engine.scorers.base import Rereader
from ag.engine.stopwatch import Stopwatch
from ag.errors import UserError
from ag.kernels.column_max import column_max
from ag.model.hooks import AttentionCall
from ag.model.projection import output_weight, projected_norms


@dataclass
class Measured:
    """What rereading says of a prompt.

    Attributes:
        scores: by layer, ``[B, Hkv, N]``.
        calls: by layer, that of its attention without tokens.
        seconds: of the model and of measuring.
    """

    scores: dict[int, Tensor] = field(default_factory=dict)
    calls: dict[int, AttentionCall] = field(default_factory=dict)
    seconds: float = 0.0


class Reread:
    """What a cache has to do between a prompt and the tokens that follow it, for a scorer that rereads."""

    def __init__(self, scorer: Rereader) -> None:
        self.scorer = scorer
        #: Whether the model repeats at present, and whether it has.
        self.active = self.done = False
        #: What was measured, by scorer; caches that read the same prompt may share it (see :func:`read_prompt`).
        self.known: dict[Rereader, Measured] = {}
        self._tokens: list[Tensor] = []
        self._places: list[range] = []  # what is repeated at present, by sequence
        self._measured = Measured()
        self._norms: Tensor | None = None  # of what the layer at hand reads, [B, m]
        self._following: Tensor | None = None  # positions [B] that the next tokens would be rotated by

    def note(self, tokens: Tensor) -> None:
        """Take note of the tokens ``[B, T]`` of a forward pass.

        Raises:
            UserError: when they are embeddings.
        """
        if self.active or self.done:
            return
        if tokens.ndim != 2:
            raise UserError("kvzip repeats the prompt by its token ids: give input_ids, not inputs_embeds.")
        self._tokens.append(tokens)

    def follow(self, now: Pass, positions: Tensor | None) -> None:
        """Take note of the positions ``[B or 1, w]`` that the tokens of a pass are rotated by; None: their columns."""
        if self.active or self.done:
            return
        columns = torch.arange(now.seen - now.real.shape[1], now.seen, device=now.real.device)
        used = columns if positions is None else positions.to(now.real.device)
        following = torch.where(now.real, used, -1).amax(1) + 1
        if self._following is not None:  # a later part of the prompt may hold nothing but padding of a sequence
            following = following.maximum(self._following.to(following.device))
        self._following = following

    @torch.no_grad()
    def run(self, cache: Holdings) -> None:
        """Let the model repeat the prompt that a cache holds, whole and nothing else, and evict."""
        measured = self.known.get(self.scorer)
        if measured is None:
            measured = self.known[self.scorer] = self._measure(cache)
        self.done, self.known = True, {}
        self._tokens.clear()
        for layer in cache.evicting_layers:  # each cache as if it had been alone
            layer.scoring_seconds += measured.seconds / len(cache.evicting_layers)
        self._evict(cache, measured)

    def _measure(self, cache: Holdings) -> Measured:
        """Let the model repeat the prompt, chunk by chunk."""
        ids, watch = torch.cat(self._tokens, 1), Stopwatch()
        seen, prompt = cache.text.seen, cache.text.prompt_columns
        if ids.shape[1] != seen or seen > prompt:
            raise UserError(
                f"{cache.policy!r} repeats a prompt before anything follows it, and {seen} tokens came with a prompt "
                f"of {prompt}; generate without an assistant model and prompt lookup."
            )
        own = [row[valid].tolist() for row, valid in zip(ids.cpu(), cache.text.valid.cpu(), strict=True)]
        inputs = [self.scorer.inputs(row) for row in own]
        self.active = True
        with watch.running(ids.device):
            for number in range(max(map(len, inputs))):
                parts = [chunks[number] if number < len(chunks) else (range(0), []) for chunks in inputs]
                self._places = [places for places, _ in parts]
                self._repeat(cache, [asked for _, asked in parts])
        self.active = False
        measured, self._measured = self._measured, Measured()
        measured.seconds = watch.seconds
        return measured

    def _repeat(self, cache: Holdings, rows: Sequence[list[int]]) -> None:
        """Read rows of tokens, padded on their left, and forget them."""
        assert self._following is not None
        width, device = max(map(len, rows)), cache.text.valid.device
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=device)
        real = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
        cache.decoder(
            input_ids=ids,
            attention_mask=torch.cat([cache.text.valid.long(), real], 1),
            position_ids=(self._following.to(device)[:, None] + real.cumsum(1) - 1).clamp_min(0),
            past_key_values=cache,
            use_cache=True,
        )
        cache.crop(-width)

    def enter_layer(self, hidden: Tensor) -> None:
        """Look at the hidden states ``[B, m, d]`` that enter the attention of a layer."""
        if self.active and self.scorer.normalize:
            self._norms = torch.linalg.vector_norm(hidden.float(), dim=-1)

    def look(self, layer: EvictionLayer, call: AttentionCall, now: Pass) -> None:
        """Look at a layer's attention: of the prompt, which has no scores yet, or of a repetition, which makes them."""
        if self.active:
            self._measure_repeated(layer, call, now)
        elif not self.done:
            q, k, v = (x[:, :, :0] for x in (call.q, call.k, call.v))
            self._measured.calls[call.layer] = AttentionCall(  # without what others that share the pass add to it
                call.module, call.layer, q, k, v, call.scaling, call.window, call.softmax
            )
            shape = *call.k.shape[:2], now.prompt_columns
            self._measured.scores[call.layer] = torch.zeros(shape, device=call.k.device)

    def _measure_repeated(self, layer: EvictionLayer, call: AttentionCall, now: Pass) -> None:
        """Measure what the queries of a repetition pay the chunk that they repeat, in a layer that holds both."""
        if call.window is not None and now.seen > call.window:
            raise UserError(
                f"kvzip: the model attends within a window of {call.window} tokens, which hides a prompt of "
                f"{now.prompt_columns} tokens from its repetition of up to {call.q.shape[2]}; use a shorter chunk, a "
                "shorter prompt or another policy."
            )
        if layer.rotation.bends(now.seen):
            raise UserError(
                f"kvzip: positions={layer.policy.positions} squeezes what is farther away than the model's context is "
                f"long, and a prompt of {now.prompt_columns} tokens with its repetition of up to {call.q.shape[2]} is "
                "longer; use a shorter chunk, a shorter prompt or another policy."
            )
        assert layer.store is not None
        batch, kv_heads = call.k.shape[:2]
        held = layer.rotation.keys(layer.store.padded())
        q = layer.rotation.queries(layer.rotation.unrotated(call, now).q, held, now.ranks)
        slots, mine = self._slots(q.device)
        at, width = torch.cat([slots, now.ranks.clamp_min(0)], 1), slots.shape[1]  # all is held: a slot is a rank
        k, v = (
            x.unflatten(0, (batch, kv_heads)).gather(2, i[:, None, :, None].expand(-1, kv_heads, -1, x.shape[-1]))
            for x, i in ((held.keys, at), (held.values, slots))
        )
        factors = None if self._norms is None else 1 / self._norms.clamp_min(1e-12)
        valid = torch.cat([mine, now.real], 1)
        options: dict[str, Any] = {"factors": factors, "softmax": call.softmax}
        largest = column_max(q.to(k.dtype), k, call.scaling, now.real, valid, **options)[:, :, :width]
        if self.scorer.normalize:
            largest = largest * projected_norms(v.float(), output_weight(call.module, q.shape[1]), 2)
        scored = (mine & (slots >= self.scorer.sinks))[:, None].expand(-1, kv_heads, -1)
        best = largest.unflatten(1, (kv_heads, -1)).amax(2).float().masked_fill(~scored, 0.0)
        self._measured.scores[call.layer].scatter_reduce_(2, slots[:, None].expand_as(best), best, "amax")

    def _slots(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the slots ``[B, P]`` of the sinks and of the chunk, padded on the left, and which exist."""
        rows = [[*range(min(self.scorer.sinks, places.start)), *places] for places in self._places]
        width = max(map(len, rows))
        padded = torch.tensor([[-1] * (width - len(row)) + row for row in rows], device=device)
        return padded.clamp_min(0), padded >= 0

    def _evict(self, cache: Holdings, measured: Measured) -> None:
        """Decide and evict, layer by layer."""
        assert cache.text.now is not None and cache.decision is not None
        now = replace(cache.text.now, reading=True, due=torch.ones(len(cache.text.valid), dtype=torch.bool))
        for index, scores in measured.scores.items():
            layer, call = cache.evicting_layers[index], measured.calls[index]
            layer.memory["repeated"] = scores
            layer.decide_later(call, now.to(scores.device), cache.decision, cache.evicting_layers)

"""Forward passes of training and validation: evicted tokens are masked, and gradients reach the gates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ag.errors import UserError
from ag.gates.gate import AttentionGates
from ag.gates.memory import has_gaps
from ag.kernels.attention_stats import attention_stats
from ag.kernels.gated_attention import gated_attention
from ag.kernels.gated_prefill import gated_prefill
from ag.model.hybrid import States
from ag.model.interceptor import AttentionCall, Interceptor


class Gating(Interceptor):
    """Run ``model(..., gating=Gating(...), use_cache=False)`` under gates, after ``ag.attach(model, gates)``.

    After the forward pass ``logits`` holds the gate logits by layer.

    Args:
        gates: gates of the model. None: attention is causal, and sees every earlier token of its document.
        valid: ``[B, T]``, nonzero on tokens; padding on the left or the right. None, without gates: no padding.
        prompt_length: ``[B]`` long, tokens of each prompt; with ``covers="prompt"`` gates may evict only these. None:
            every token belongs to the prompt.
        hard: use the flags, without an estimator's gradient or noise.
        first: ``[B, T]`` long, the column where the document of each token begins. Tokens before it are invisible, and
            positions count from it. None: a row is one document.
        boundary: logit above which a token is kept. None: the configuration's boundary.
        open: run the gates for their logits, and evict nothing.

    Raises:
        UserError: ``scope="prompt"`` or ``prefill="dense"`` has no prompt length, documents have one, or padding lies
            between tokens.
    """

    def __init__(
        self,
        gates: AttentionGates | None,
        valid: Tensor | None = None,
        prompt_length: Tensor | None = None,
        hard: bool = False,
        first: Tensor | None = None,
        boundary: float | None = None,
        open: bool = False,
    ) -> None:
        if valid is not None and has_gaps(valid.bool()):
            raise UserError("Padding between tokens of a row: expected it on the left or the right; pack documents.")
        self.gates, self.hard, self.open = gates, hard, open
        self.left_padded = valid is not None and not bool(valid[:, 0].all())
        self.valid = None if valid is None or bool(valid.all()) else valid.bool()
        self.tokens = self.valid
        self.first = None if first is None or not bool(first.any()) else first
        self._logits: dict[int, Tensor] = {}
        self._keep: dict[int, Tensor] = {}
        if gates is None:
            return
        assert valid is not None
        config = gates.config
        if prompt_length is None and (config.scope == "prompt" or config.prefill == "dense"):
            raise UserError(
                f"gate.scope={config.scope}, gate.prefill={config.prefill}: expected batches with a prompt and a "
                "response; for plain packed text use scope=causal with prefill=sparse."
            )
        if prompt_length is not None and first is not None:
            raise UserError("A row of several documents has no prompt: give Gating first or prompt_length, not both.")
        valid = valid.bool()
        #: Subtracted from all logits, so that the configured boundary acts as ``boundary``.
        self._shift = 0.0 if boundary is None else boundary - config.boundary
        token_indices = valid.cumsum(1) - 1
        #: ``[B, T]`` bool: the tokens of the prompts.
        self.in_prompt = valid if prompt_length is None else valid & (token_indices < prompt_length[:, None])
        #: ``[B, T]`` bool: the tokens that gates may evict. Losses and metrics count these.
        self.evictable = valid if config.covers == "all" else self.in_prompt
        columns = torch.arange(1, valid.shape[1] + 1, device=valid.device)
        #: Columns up to the last evictable token, which gates are run on.
        self._end = int((self.evictable * columns).amax())
        gate_valid = self.evictable if config.scope == "prompt" else valid
        gate_valid = gate_valid[:, : self._end]
        self._gate_valid = None if bool(gate_valid.all()) else gate_valid
        self._dense_until = (self.in_prompt * columns).amax(1) if config.prefill == "dense" else None

    @property
    def logits(self) -> dict[int, Tensor]:
        """Gate logits ``[B, Hkv, T']`` by layer; T' is one past the last evictable column."""
        if self.gates is not None and not self._logits:
            raise UserError(
                "Gating: no forward pass has run under it: expected model(..., gating=gating) on a model with the "
                "hooks of ag.attach(model, gates); without them transformers drops the argument."
            )
        return self._logits

    @logits.setter
    def logits(self, logits: dict[int, Tensor]) -> None:
        self._logits = logits

    def counted(self) -> Tensor:
        """Return ``[B, T']`` bool: the columns of ``logits`` whose tokens gates may evict."""
        return self.evictable[:, : self._end]

    def passes(self, position_ids: Tensor | None) -> Iterator[tuple[Tensor | None, Tensor | None]]:
        """Yield one pass. Positions count from the start of each document, unless the caller gives ``position_ids``."""
        if position_ids is None and self.first is not None:
            position_ids = torch.arange(self.first.shape[1], device=self.first.device) - self.first
        yield None, position_ids

    def begin(self, decoder: Any, attention_mask: Tensor | None, tokens: Tensor) -> None:
        """Check the shape of the batch, and that no layer reads across the documents of a row."""
        if self.gates is not None and tokens.shape[:2] != self.evictable.shape:
            raise UserError(
                f"Gating was made for a batch {tuple(self.evictable.shape)}, not {tuple(tokens.shape[:2])}."
            )
        if self.first is not None and States.of(decoder.config) is not None:
            raise UserError(
                f"A row holds several documents, and {type(decoder).__name__} has layers whose states go on from one "
                "document to the next: expected rows of one document, or of documents that see each other; use "
                "data.packing=split or data.cross_documents=true."
            )
        self.text_lengths = self._lengths(*tokens.shape[:2])
        self.logits, self._keep = {}, {}

    def _lengths(self, batch: int, length: int) -> Tensor:
        """Return the tokens of each row ``[B]`` on the host, or of the document of each token ``[B, T]``."""
        if self.first is None:
            return torch.full((batch,), length) if self.valid is None else self.valid.sum(1).cpu()
        first = self.first.cpu()
        is_real = torch.ones_like(first) if self.valid is None else self.valid.long().cpu()
        return torch.zeros_like(first).scatter_add_(1, first, is_real).gather(1, first)

    def enter_layer(self, layer: int, hidden: Tensor) -> None:
        """Run the gate that reads this layer's input."""
        target = layer if self.gates is None else layer + self.gates.config.layer_offset
        if self.gates is None or str(target) not in self.gates.layers:
            return
        gate_valid, first = (_to(x, hidden.device) for x in (self._gate_valid, self.first))
        first = None if first is None else first[:, : self._end]
        logits: Tensor = self.gates.layers[str(target)](hidden[:, : self._end], gate_valid, self.left_padded, first)
        logits = logits - self._shift if self._shift else logits
        # gradient checkpointing runs a layer twice; the graph of the second run must be freed
        self._logits.setdefault(target, logits)
        if self.open:
            return
        keep = self.gates.flags(logits).float() if self.hard else self.gates.keep(logits)
        keep = torch.where(self.counted()[:, None].to(keep.device), keep, 1.0)
        self._keep.setdefault(target, F.pad(keep, (0, hidden.shape[1] - self._end), value=1.0))

    def attend(self, call: AttentionCall) -> Tensor:
        """Attend under the flags of the layer. Without flags attention is dense."""
        keep, device = self._keep.get(call.layer), call.q.device
        valid, first = _to(self.valid, device), _to(self._first_visible(call), device)
        if keep is None and first is None:
            return call.dense(valid, self.left_padded)
        options: dict[str, Any] = {"scaling": call.scaling, "window": call.window, "softmax": call.softmax}
        if self.gates is None or keep is None:
            return gated_attention(call.q, call.k, call.v, None, valid, first=first, **options)
        options |= {"recent": self.gates.config.recent_tokens, "sinks": self.gates.config.sink_tokens}
        learning = torch.is_grad_enabled() and any(x.requires_grad for x in (call.q, call.k, call.v))
        if self.hard and self._dense_until is None and first is None and not learning:
            return gated_prefill(call.q, call.k, call.v, keep.to(device, torch.bool), key_valid=valid, **options)
        options |= {"dense_until": _to(self._dense_until, device), "first": first}
        return gated_attention(call.q, call.k, call.v, keep.to(device), valid, **options)

    def _first_visible(self, call: AttentionCall) -> Tensor | None:
        """Return the column ``[B, T]`` of the first token that a query can see: of its document, or of its chunk there.

        None: the first token of the row.
        """
        length = call.q.shape[2]
        if call.chunk is None or length <= call.chunk:
            return self.first
        columns = torch.arange(length, device=call.q.device)
        start = torch.zeros(len(call.q), 1, dtype=torch.long, device=call.q.device)
        if self.first is not None:
            start = self.first.to(call.q.device)
        elif self.valid is not None:
            start = self.valid.to(call.q.device).long().argmax(1, keepdim=True)
        return start + (columns - start).clamp_min(0) // call.chunk * call.chunk

    def boundary_of(self, share: float) -> float:
        """Return the logit above which this share of the logits of :meth:`counted` lies, over all layers and heads.

        It lies halfway between two logits: rounding moves no logit across it.
        """
        counted, (first, *_) = self.counted(), self.logits.values()
        layer_logits = (x.masked_fill(~counted.to(x.device)[:, None], float("inf")) for x in self.logits.values())
        # +inf, for tokens that do not count, comes last
        logits = torch.cat([x.flatten().to(first.device) for x in layer_logits]).sort().values
        count = int(counted.sum()) * sum(x.shape[1] for x in self.logits.values())
        lowest = round((1 - share) * count)  # index of the lowest logit above the boundary
        if not 0 < lowest < count:
            return float(logits[0]) - 1 if lowest == 0 else float(logits[count - 1]) + 1
        return float(logits[lowest - 1 : lowest + 1].double().mean())


class TargetPass(Gating):
    """A dense forward pass that runs the gates and records the targets of their regression.

    Meant to run under ``torch.no_grad()``: only the gates build a graph, and a step needs no backward pass through the
    model. ``targets`` holds by layer ``[B, Hkv, T']`` float32: for each evictable key, the log of its attention from
    later queries. With ``prefill="dense"`` only queries of the response count, because eviction affects only these.

    Args:
        gates: gates of the model.
        valid: ``[B, T]``, nonzero on tokens.
        prompt_length: ``[B]`` long. None: every token counts.
        target: ``attention``: the mean weight over queries. ``kvzip``: for tokens of the prompt, the largest weight
            from a query of the response, over the query heads of the group, times the norm of the value (KVzip, whose
            response repeats the prompt).
        copied: ``[B, 2]`` long, the first column that the response repeats, and one past the last. With ``kvzip`` only
            these columns have a target. None: all tokens of the prompt have a target.
    """

    gates: AttentionGates

    def __init__(
        self,
        gates: AttentionGates,
        valid: Tensor,
        prompt_length: Tensor | None = None,
        target: str = "attention",
        copied: Tensor | None = None,
    ) -> None:
        super().__init__(gates, valid, prompt_length, open=True)
        self.target, self.copied = target, copied
        self.window: int | None = None
        self.targets: dict[int, Tensor] = {}
        only_responses = prompt_length is not None and (gates.config.prefill == "dense" or target == "kvzip")
        self._queries = valid.bool() & ~self.in_prompt if only_responses else valid.bool()

    def enter_layer(self, layer: int, hidden: Tensor) -> None:
        """Run the gate with a graph that ends at its input."""
        with torch.enable_grad():
            super().enter_layer(layer, hidden.detach())

    def has_target(self) -> Tensor:
        """Return ``[B, T']`` bool: evictable tokens that at least one counted query can see."""
        columns = torch.arange(self.evictable.shape[1], device=self.evictable.device)
        first_query = columns.where(self._queries, columns.numel()).amin(1, keepdim=True)
        last_query = columns.where(self._queries, -1).amax(1, keepdim=True)
        columns = columns[: self._end]
        # the nearest query that does not see a token as recent
        nearest = torch.maximum(columns + self.gates.config.recent_tokens, first_query)
        has_query = nearest <= last_query
        if self.window is not None:
            has_query &= nearest - columns < self.window
        targets = self.counted() & has_query
        if self.target == "kvzip":
            targets &= self.in_prompt[:, : self._end]
            if self.copied is not None:
                targets &= (columns >= self.copied[:, :1]) & (columns < self.copied[:, 1:])
        return targets

    @torch.no_grad()
    def attend(self, call: AttentionCall) -> Tensor:
        """Attend densely, and record the targets of the keys if the layer has a gate."""
        out = super().attend(call)
        if str(call.layer) in self.gates.layers:
            self.targets[call.layer] = self._key_targets(call)[..., : self._end]
            self.window = call.window
        return out

    def _key_targets(self, call: AttentionCall) -> Tensor:
        """Return the target of each key ``[B, Hkv, T]``."""
        columns = torch.arange(call.k.shape[2], device=call.k.device)
        query_indices = columns.where(self._queries, -1)
        key_indices = columns.expand(len(query_indices), -1) if self.valid is None else columns.where(self.valid, -1)
        stats_inputs = call.q, call.k, query_indices, key_indices[:, None], call.scaling, call.window
        shape = (*call.k.shape[:2], -1, call.k.shape[2])
        if self.target == "kvzip":
            largest = attention_stats("max", *stats_inputs, softmax=call.softmax).view(shape).amax(2)
            sizes: Tensor = call.v.float().norm(dim=-1).clamp_min(1e-12)
            return largest.clamp_min(1e-12).log() + sizes.log()
        skip = self.gates.config.recent_tokens
        sums = attention_stats("sum", *stats_inputs, skip=skip, softmax=call.softmax)
        sums = sums / self._num_queries(skip, call.window).clamp_min(1)[:, None]
        log: Tensor = sums.view(shape).mean(2).clamp_min(1e-12).log()
        return log

    def _num_queries(self, skip: int, window: int | None) -> Tensor:
        """Return how many queries count for each key, ``[B, T]``."""
        length = self._queries.shape[1]
        queries_before = F.pad(self._queries.cumsum(1), (1, 0))
        columns = torch.arange(length, device=queries_before.device)
        first, stop = ((columns + offset).clamp_max(length) for offset in (skip, length if window is None else window))
        return queries_before[:, stop.maximum(first)] - queries_before[:, first]


def _to(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device)  # layers may lie on several devices

"""Forward passes of training and validation: evicted tokens are masked, so that gradients reach the gates."""

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
from ag.model.hooks import AttentionCall, Interceptor
from ag.model.hybrid import States


class Gating(Interceptor):
    """Run ``model(..., gating=Gating(...), use_cache=False)`` under gates.

    After the forward pass ``logits`` holds the gate logits by layer.

    Args:
        gates: gates of the model; None means that attention is causal and sees every token of the same document.
        valid: ``[B, T]``, nonzero on real tokens; padding on either side. None, without gates, means no padding.
        prompt_length: ``[B]`` long, tokens of each prompt; with ``covers="prompt"`` gates may evict only these. None
            means that every token belongs to a prompt.
        hard: use the flags, without an estimator's gradient or noise.
        first: ``[B, T]`` long, the column where the document of each token begins. Tokens before it are invisible, and
            positions count from it. None means that a row is one document.
        boundary: logit above which a token is kept, in place of that of the configuration.
        open: run the gates for their logits, and evict nothing.

    Raises:
        UserError: when ``scope="prompt"`` or ``prefill="dense"`` has no prompt length, when documents have one, or for
            padding between tokens.
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
        #: Gate logits ``[B, Hkv, T']`` of each gated layer, T' being the columns up to the last that gates may evict.
        self.logits: dict[int, Tensor] = {}
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
        self._shift = 0.0 if boundary is None else boundary - config.boundary
        rank = valid.cumsum(1) - 1
        #: ``[B, T]`` bool: the tokens of the prompts.
        self.read = valid if prompt_length is None else valid & (rank < prompt_length[:, None])
        #: ``[B, T]`` bool: the tokens that gates may evict, which losses and metrics count.
        self.prompt = valid if config.covers == "all" else self.read
        columns = torch.arange(1, valid.shape[1] + 1, device=valid.device)
        self._end = int((self.prompt * columns).amax())
        seen = self.prompt if config.scope == "prompt" else valid
        seen = seen[:, : self._end]
        self._seen = None if bool(seen.all()) else seen
        self._dense_until = (self.read * columns).amax(1) if config.prefill == "dense" else None

    def counted(self) -> Tensor:
        """Return ``[B, T']`` bool: the columns of ``logits`` whose tokens gates may evict."""
        return self.prompt[:, : self._end]

    def passes(self, given: Tensor | None) -> Iterator[tuple[Tensor | None, Tensor | None]]:
        """Yield one pass, whose positions count from the start of each document unless the caller gave some."""
        if given is None and self.first is not None:
            given = torch.arange(self.first.shape[1], device=self.first.device) - self.first
        yield None, given

    def begin(self, decoder: Any, attention_mask: Tensor | None, tokens: Tensor) -> None:
        """Check the shape of the batch, and that no layer reads across the documents of a row."""
        if self.gates is not None and tokens.shape[:2] != self.prompt.shape:
            raise UserError(f"Gating was made for a batch {tuple(self.prompt.shape)}, not {tuple(tokens.shape[:2])}.")
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
        there = torch.ones_like(first) if self.valid is None else self.valid.long().cpu()
        return torch.zeros_like(first).scatter_add_(1, first, there).gather(1, first)

    def enter_layer(self, layer: int, hidden: Tensor) -> None:
        """Run the gate that reads this layer's input."""
        target = layer if self.gates is None else layer + self.gates.config.layer_offset
        if self.gates is None or str(target) not in self.gates.layers:
            return
        seen, first = (_to(x, hidden.device) for x in (self._seen, self.first))
        first = None if first is None else first[:, : self._end]
        logits: Tensor = self.gates.layers[str(target)](hidden[:, : self._end], seen, self.left_padded, first)
        logits = logits - self._shift if self._shift else logits
        # gradient checkpointing runs a layer twice, and the graph of the second run has to be freed
        self.logits.setdefault(target, logits)
        if self.open:
            return
        keep = self.gates.flags(logits).float() if self.hard else self.gates.keep(logits)
        keep = torch.where(self.counted()[:, None].to(keep.device), keep, 1.0)
        self._keep.setdefault(target, F.pad(keep, (0, hidden.shape[1] - self._end), value=1.0))

    def attend(self, call: AttentionCall) -> Tensor:
        """Attend under the flags of the layer, or densely without flags."""
        keep, device = self._keep.get(call.layer), call.q.device
        valid, first = _to(self.valid, device), _to(self.first, device)
        if keep is None and first is None:
            return call.dense(valid, self.left_padded)
        shared: dict[str, Any] = {"scaling": call.scaling, "window": call.window, "softmax": call.softmax}
        if self.gates is None or keep is None:
            return gated_attention(call.q, call.k, call.v, None, valid, first=first, **shared)
        shared |= {"recent": self.gates.config.recent_tokens, "sinks": self.gates.config.sink_tokens}
        learning = torch.is_grad_enabled() and any(x.requires_grad for x in (call.q, call.k, call.v))
        if self.hard and self._dense_until is None and first is None and not learning:
            return gated_prefill(call.q, call.k, call.v, keep.to(device, torch.bool), key_valid=valid, **shared)
        shared |= {"dense_until": _to(self._dense_until, device), "first": first}
        return gated_attention(call.q, call.k, call.v, keep.to(device), valid, **shared)

    def boundary_of(self, share: float) -> float:
        """Return a logit above which this share of the logits of :meth:`counted` lies, over all layers and heads.

        It lies halfway between two logits, so that rounding moves none across it.
        """
        counted, (nearest, *_) = self.counted(), self.logits.values()
        each = (x.masked_fill(~counted.to(x.device)[:, None], float("inf")) for x in self.logits.values())
        logits = (
            torch.cat([x.flatten().to(nearest.device) for x in each]).sort().values
        )  # logits that do not count come last
        count = int(counted.sum()) * sum(x.shape[1] for x in self.logits.values())
        lowest = round((1 - share) * count)  # of the logits above
        if not 0 < lowest < count:
            return float(logits[0]) - 1 if lowest == 0 else float(logits[count - 1]) + 1
        return float(logits[lowest - 1 : lowest + 1].double().mean())


class Observing(Gating):
    """A dense forward pass that runs the gates and records the targets of their regression.

    Meant to run under ``torch.no_grad()``: only the gates build a graph, so a step costs no backward through the model.
    ``targets`` holds, by gated layer, the log of the attention from later queries on each key that gates may evict,
    ``[B, Hkv, T']`` float32. With ``prefill="dense"`` only queries of the response count, which eviction would affect.

    Args:
        gates: gates of the model.
        valid: ``[B, T]``, nonzero on real tokens.
        prompt_length: ``[B]`` long; None means that every token counts.
        target: ``attention``: the mean weight over queries; ``kvzip``: the largest weight that any query of the
            response, in any query head of the group, gives, times the norm of the value (KVzip, where the response
            repeats the prompt), of the prompt's tokens alone.
        copied: ``[B, 2]`` long, the first column that the response repeats, and one past the last; with ``kvzip`` no
            others have a target. None means that all tokens of the prompt have one.
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
        self._queries = valid.bool() & ~self.read if only_responses else valid.bool()

    def enter_layer(self, layer: int, hidden: Tensor) -> None:
        """Run the gate with a graph that ends at its input."""
        with torch.enable_grad():
            super().enter_layer(layer, hidden.detach())

    def has_target(self) -> Tensor:
        """Return ``[B, T']`` bool: the tokens that gates may evict and that some counting query could see."""
        columns = torch.arange(self.prompt.shape[1], device=self.prompt.device)
        first = torch.where(self._queries, columns, columns.numel()).amin(1, keepdim=True)
        last = torch.where(self._queries, columns, -1).amax(1, keepdim=True)
        columns = columns[: self._end]
        nearest = torch.maximum(columns + self.gates.config.recent_tokens, first)
        seen = nearest <= last
        counted = self.counted()
        if self.target == "kvzip":
            counted = counted & self.read[:, : self._end]
            if self.copied is not None:
                counted = counted & (columns >= self.copied[:, :1]) & (columns < self.copied[:, 1:])
        return counted & (seen if self.window is None else seen & (nearest - columns < self.window))

    @torch.no_grad()
    def attend(self, call: AttentionCall) -> Tensor:
        """Attend densely, and record."""
        out = super().attend(call)
        self.record(call, out)
        return out

    def record(self, call: AttentionCall, out: Tensor) -> None:
        """Record the targets of a layer from its attention; ``out`` is the output ``[B, H, T, D]``."""
        if str(call.layer) in self.gates.layers:
            self.targets[call.layer] = self._measure(call)[..., : self._end]
            self.window = call.window

    def _measure(self, call: AttentionCall) -> Tensor:
        """Return the target of each key ``[B, Hkv, T]``."""
        columns = torch.arange(call.k.shape[2], device=call.k.device)
        own = columns.where(self._queries, -1)
        held = columns.where(self.valid, -1) if self.valid is not None else columns.expand(len(own), -1)
        given = call.q, call.k, own, held[:, None], call.scaling, call.window
        shape = (*call.k.shape[:2], -1, call.k.shape[2])
        if self.target == "kvzip":
            largest = attention_stats("max", *given, softmax=call.softmax).view(shape).amax(2)
            sizes: Tensor = call.v.float().norm(dim=-1).clamp_min(1e-12)
            return largest.clamp_min(1e-12).log() + sizes.log()
        skip = self.gates.config.recent_tokens
        sums = attention_stats("sum", *given, skip=skip, softmax=call.softmax)
        sums = sums / self._counting(skip, call.window).clamp_min(1)[:, None]
        log: Tensor = sums.view(shape).mean(2).clamp_min(1e-12).log()
        return log

    def _counting(self, skip: int, window: int | None) -> Tensor:
        """Return how many queries count for each key, ``[B, T]``."""
        length = self._queries.shape[1]
        before = F.pad(self._queries.cumsum(1), (1, 0))
        columns = torch.arange(length, device=before.device)
        first, stop = ((columns + more).clamp_max(length) for more in (skip, length if window is None else window))
        return before[:, stop.maximum(first)] - before[:, first]


def _to(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device)  # layers may lie on several devices

"""Plans for training and evaluation: evicted tokens are masked, not removed, so that gradients reach the gates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ag.errors import UserError
from ag.gates.gate import AttentionGates
from ag.gates.memory import has_gaps
from ag.kernels.attention_stats import attention_stats
from ag.kernels.gated_attention import gated_attention
from ag.kernels.gated_prefill import gated_prefill
from ag.model.hooks import AttentionCall, Interceptor
from ag.model.projection import output_weight, projected_norms


class Dense(Interceptor):
    """Causal attention to every token of the same document, by the model's own implementation where possible.

    Args:
        valid: ``[B, T]``, nonzero on real tokens; padding on either side. None without padding.
        first: ``[B, T]`` long, the column where the document of each token begins. Tokens before it are invisible, and
            positions count from it, so that a document is computed as if it were alone. None: a row is one document.
    """

    def __init__(self, valid: Tensor | None = None, first: Tensor | None = None) -> None:
        if valid is not None and has_gaps(valid.bool()):
            raise UserError(
                "Padding between tokens of a row: expected it on the left or the right, as columns say how far tokens "
                "are apart; documents share a row by packing."
            )
        self.left_padded = valid is not None and not bool(valid[:, 0].all())
        self.valid = None if valid is None or bool(valid.all()) else valid.bool()
        self.first = None if first is None or not bool(first.any()) else first

    def passes(self, given: Tensor | None) -> Iterator[tuple[Tensor | None, Tensor | None]]:
        """Yield one pass, whose positions count from the start of each document unless the caller gave some."""
        if given is None and self.first is not None:
            given = torch.arange(self.first.shape[1], device=self.first.device) - self.first
        yield None, given

    def attend(self, call: AttentionCall) -> Tensor:
        """Attend as the model does."""
        valid, first = (_to(x, call.q.device) for x in (self.valid, self.first))
        if first is None:
            return call.dense(valid, self.left_padded)
        options: dict[str, Any] = {"window": call.window, "first": first, "softmax": call.softmax}
        return gated_attention(call.q, call.k, call.v, None, valid, call.scaling, **options)


class Gating(Dense):
    """Run ``model(..., gating=Gating(...), use_cache=False)`` under gates.

    After the forward pass ``logits`` holds the gate logits by layer.

    Args:
        gates: gates of the model.
        valid: ``[B, T]``, nonzero on real tokens; padding on either side.
        prompt_length: ``[B]`` long, tokens of each prompt; with ``covers="prompt"`` gates may evict only these. None:
            every token.
        hard: use the flags as they are, without an estimator's gradient or noise.
        first: ``[B, T]`` long, the column where the document of each token begins; None: a row is one document.
        boundary: logit above which a token is kept, in place of that of the configuration.

    Raises:
        UserError: when ``scope="prompt"`` or ``prefill="dense"`` has no prompt length, or documents have one.
    """

    def __init__(
        self,
        gates: AttentionGates,
        valid: Tensor,
        prompt_length: Tensor | None = None,
        hard: bool = False,
        first: Tensor | None = None,
        boundary: float | None = None,
    ) -> None:
        config = gates.config
        if prompt_length is None and (config.scope == "prompt" or config.prefill == "dense"):
            raise UserError(
                f"gate.scope={config.scope}, gate.prefill={config.prefill}: expected batches with a prompt and a "
                "response; for plain packed text use scope=causal with prefill=sparse."
            )
        if prompt_length is not None and first is not None:
            raise UserError("A row of several documents has no prompt: give Gating first or prompt_length, not both.")
        super().__init__(valid, first)
        valid = valid.bool()
        self.gates, self.hard = gates, hard
        self._shift = 0.0 if boundary is None else boundary - config.boundary
        rank = valid.cumsum(1) - 1
        #: ``[B, T]`` bool: the tokens of the prompts.
        self.read = valid if prompt_length is None else valid & (rank < prompt_length[:, None])
        #: ``[B, T]`` bool: the tokens that gates may evict, which are also those that losses and metrics count.
        self.prompt = valid if config.covers == "all" else self.read
        columns = torch.arange(1, valid.shape[1] + 1, device=valid.device)
        self._end = int((self.prompt * columns).amax())
        seen = self.prompt if config.scope == "prompt" else valid
        seen = seen[:, : self._end]
        self._seen = None if bool(seen.all()) else seen
        self._dense_until = (self.read * columns).amax(1) if config.prefill == "dense" else None
        #: Gate logits ``[B, Hkv, T']`` of each gated layer, T' being the columns up to the last that gates may evict.
        self.logits: dict[int, Tensor] = {}
        self._keep: dict[int, Tensor] = {}

    def counted(self) -> Tensor:
        """Return ``[B, T']`` bool: the columns of ``logits`` whose tokens gates may evict."""
        return self.prompt[:, : self._end]

    def begin(self, decoder: nn.Module, attention_mask: Tensor | None, tokens: Tensor) -> None:
        """Check that the batch is the one this object was made for."""
        if tokens.shape[:2] != self.prompt.shape:
            raise UserError(f"Gating was made for a batch {tuple(self.prompt.shape)}, not {tuple(tokens.shape[:2])}.")
        self.logits, self._keep = {}, {}

    def enter_layer(self, layer: int, hidden: Tensor) -> None:
        """Run the gate that reads this layer's input."""
        logits = self._run_gate(layer, hidden)
        if logits is None:
            return
        target = layer + self.gates.config.layer_offset
        keep = self.gates.flags(logits).float() if self.hard else self.gates.keep(logits)
        keep = torch.where(self.counted()[:, None].to(keep.device), keep, 1.0)
        keep = nn.functional.pad(keep, (0, hidden.shape[1] - self._end), value=1.0)
        # gradient checkpointing runs a layer twice: what the second run computes is not held, nor is its graph
        self.logits.setdefault(target, logits)
        self._keep.setdefault(target, keep)

    def attend(self, call: AttentionCall) -> Tensor:
        """Attend under the flags of the layer, or as the model does where it has no gate."""
        keep, device = self._keep.get(call.layer), call.q.device
        if keep is None:
            return super().attend(call)
        config = self.gates.config
        shared: dict[str, Any] = {
            "key_valid": _to(self.valid, device),
            "scaling": call.scaling,
            "recent": config.recent_tokens,
            "sinks": config.sink_tokens,
            "window": call.window,
            "softmax": call.softmax,
        }
        learning = torch.is_grad_enabled() and any(x.requires_grad for x in (call.q, call.k, call.v))
        if self.hard and self._dense_until is None and self.first is None and not learning:
            return gated_prefill(call.q, call.k, call.v, keep.to(device, torch.bool), **shared)
        shared |= {"dense_until": _to(self._dense_until, device), "first": _to(self.first, device)}
        return gated_attention(call.q, call.k, call.v, keep.to(device), **shared)

    def _run_gate(self, layer: int, hidden: Tensor) -> Tensor | None:
        name = str(layer + self.gates.config.layer_offset)
        if name not in self.gates.layers:
            return None
        device = hidden.device
        first = None if self.first is None else self.first[:, : self._end]
        gate = self.gates.layers[name]
        logits: Tensor = gate(hidden[:, : self._end], _to(self._seen, device), self.left_padded, _to(first, device))
        return logits - self._shift if self._shift else logits


class Open(Gating):
    """A dense forward pass that runs the gates without a gradient, for their logits; nothing is evicted."""

    @torch.no_grad()
    def enter_layer(self, layer: int, hidden: Tensor) -> None:
        """Run the gate."""
        logits = self._run_gate(layer, hidden)
        if logits is not None:
            self.logits[layer + self.gates.config.layer_offset] = logits

    def attend(self, call: AttentionCall) -> Tensor:
        """Attend as the model does."""
        return Dense.attend(self, call)

    def boundary(self, share: float) -> float:
        """Return a logit above which this share of the logits of :meth:`counted` lies, over all layers and heads.

        It lies halfway between two logits, so that rounding moves none across it. They are sorted on their device, the
        first one's where there are several; the host waits twice.
        """
        counted, (first, *_) = self.counted(), self.logits.values()
        each = (x.masked_fill(~counted.to(x.device)[:, None], float("inf")) for x in self.logits.values())
        logits = torch.cat([x.flatten().to(first.device) for x in each]).sort().values  # those not counted come last
        count = int(counted.sum()) * sum(x.shape[1] for x in self.logits.values())
        lowest = round((1 - share) * count)  # of those above
        if not 0 < lowest < count:
            return float(logits[0]) - 1 if lowest == 0 else float(logits[count - 1]) + 1
        return float(logits[lowest - 1 : lowest + 1].double().mean())


class Observing(Gating):
    """A dense forward pass that runs the gates and records the targets of their regression.

    Meant to run under ``torch.no_grad()``: only the gates build a graph, so a step costs no backward through the model.
    ``targets`` holds, by gated layer, the log of the attention from later queries on each key that gates may evict,
    ``[B, Hkv, T']`` float32. Later queries are those that eviction would affect: the response's with
    ``prefill="dense"``, else all.

    Args:
        gates: gates of the model.
        valid: ``[B, T]``, nonzero on real tokens.
        prompt_length: ``[B]`` long, or None: then every token counts.
        target: ``attention``: the mean over queries of the summed weights; ``obcache_value``: the root of the mean of
            squared weights, times the norm of the value (OBCache, value term, of the future); ``kvzip``: the largest
            weight that any query of the response, in any query head of the group, gives, times the norm of the value
            (KVzip, where the response repeats the prompt); ``kvzip_plus``: that of the value behind the head's output
            projection instead, and each weight over the norm of the hidden state that its query was made of (KVzip+).
            With these two, only tokens of the prompt have a target.
        copied: ``[B, 2]`` long, the columns from which to which (not included) the response repeats the prompt: with
            these two, no others have a target. None: all that could be seen.
    """

    def __init__(
        self,
        gates: AttentionGates,
        valid: Tensor,
        prompt_length: Tensor | None = None,
        target: str = "attention",
        copied: Tensor | None = None,
    ) -> None:
        super().__init__(gates, valid, prompt_length)
        self.target, self.copied = target, copied
        self.repeats = target in ("kvzip", "kvzip_plus")
        self.window: int | None = None
        self.targets: dict[int, Tensor] = {}
        only_responses = prompt_length is not None and (gates.config.prefill == "dense" or self.repeats)
        self._queries = valid.bool() & ~self.read if only_responses else valid.bool()
        self._factors: Tensor | None = None  # of the queries' weights in the layer at hand, [B, T]

    def enter_layer(self, layer: int, hidden: Tensor) -> None:
        """Run the gate with a graph of its own."""
        with torch.enable_grad():
            logits = self._run_gate(layer, hidden.detach())
        if logits is not None:
            self.logits[layer + self.gates.config.layer_offset] = logits
        if self.target == "kvzip_plus":
            self._factors = 1 / hidden.detach().float().norm(dim=-1).clamp_min(1e-12)

    def has_target(self) -> Tensor:
        """Return ``[B, T']`` bool: the tokens that gates may evict and some counting query could see."""
        columns = torch.arange(self.prompt.shape[1], device=self.prompt.device)
        first = torch.where(self._queries, columns, columns.numel()).amin(1, keepdim=True)
        last = torch.where(self._queries, columns, -1).amax(1, keepdim=True)
        columns = columns[: self._end]
        nearest = torch.maximum(columns + self.gates.config.recent_tokens, first)
        seen = nearest <= last
        counted = self.counted()
        if self.repeats:
            counted = counted & self.read[:, : self._end]
            if self.copied is not None:
                counted = counted & (columns >= self.copied[:, :1]) & (columns < self.copied[:, 1:])
        return counted & (seen if self.window is None else seen & (nearest - columns < self.window))

    @torch.no_grad()
    def attend(self, call: AttentionCall) -> Tensor:
        """Attend densely and keep the statistics of the layers that have a gate."""
        if str(call.layer) in self.gates.layers:
            log = self._measure(call)
            self.targets[call.layer] = log[..., : self._end]
            self.window = call.window
        return Dense.attend(self, call)

    def _measure(self, call: AttentionCall) -> Tensor:
        """Return the target of each key ``[B, Hkv, T]``."""
        columns = torch.arange(call.k.shape[2], device=call.k.device)
        own = columns.where(self._queries, -1)
        held = columns.where(self.valid, -1) if self.valid is not None else columns.expand(len(own), -1)
        given = call.q, call.k, own, held[:, None], call.scaling, call.window
        shape = (*call.k.shape[:2], -1, call.k.shape[2])
        if self.target == "kvzip_plus":
            largest = attention_stats("max", *given, factors=self._factors, softmax=call.softmax)
            largest = largest * projected_norms(call.v.float(), output_weight(call.module, call.q.shape[1]), 2)
            return largest.view(shape).amax(2).clamp_min(1e-12).log()
        sizes: Tensor = call.v.float().norm(dim=-1).clamp_min(1e-12).log()
        if self.target == "kvzip":
            largest = attention_stats("max", *given, softmax=call.softmax).view(shape).amax(2)
            return largest.clamp_min(1e-12).log() + sizes
        squares, skip = self.target != "attention", self.gates.config.recent_tokens
        sums = attention_stats("squares" if squares else "sum", *given, skip=skip, softmax=call.softmax)
        sums = sums / self._counting(skip, call.window).clamp_min(1)[:, None]
        log: Tensor = sums.view(shape).mean(2).clamp_min(1e-12).log()
        return 0.5 * log + sizes if squares else log

    def _counting(self, skip: int, window: int | None) -> Tensor:
        """Return how many queries count for each key, ``[B, T]``."""
        length = self._queries.shape[1]
        before = torch.nn.functional.pad(self._queries.cumsum(1), (1, 0))
        columns = torch.arange(length, device=before.device)
        first, stop = ((columns + more).clamp_max(length) for more in (skip, length if window is None else window))
        return before[:, stop.maximum(first)] - before[:, first]


def _to(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device)  # layers may lie on several devices

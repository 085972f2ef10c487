"""The loss of gates by replay: a context is read once, evicted under drawn shares, and only its response runs.

The model reads a context densely, as the engine does before it evicts. A step ranks the tokens of the context over all
layers and heads by the gates' logits, keeps a share of them, and runs forward and backward over the response alone,
whose queries attend to what is kept. The loss is the divergence from the response behind the whole context.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanMetric

from ag import retention
from ag.config import Config
from ag.engine.policy import policy
from ag.errors import UserError
from ag.files import replacing
from ag.gates.gate import AttentionGates
from ag.model.geometry import shared_layers, sliding_windows
from ag.model.hooks import AttentionCall, Interceptor, UnsupportedModelError, decoder_of, instrument
from ag.training import losses
from ag.training.gated_loss import Batch, GatedLoss, Measured, measured_values
from ag.training.replay_attention import replay_attention
from ag.training.rereading import Rereading
from ag.training.validation import SAMPLES, Validation

SHARES = 2  # drawn for each response, one from each half of the range
VALIDATED = (0.5, 0.3, 0.2, 0.1)  # shares of a validation
SOFTNESS = 0.3  # width of the flags' slope, in standard deviations of the logits


@dataclass
class Context:
    """What is kept of a context of N tokens, by layer."""

    keys: dict[int, Tensor] = field(default_factory=dict)  # [Hkv, N, D], post-RoPE
    values: dict[int, Tensor] = field(default_factory=dict)  # [Hkv, N, D]
    hidden: dict[int, Tensor] = field(default_factory=dict)  # [N, d], the states that the layer's gate reads
    targets: dict[int, Tensor] = field(default_factory=dict)  # [Hkv, N], of a reread, where gates learn them

    @property
    def length(self) -> int:
        """Tokens of the context."""
        return next(iter(self.keys.values())).shape[1]


class Reading(Interceptor):
    """A dense pass over one context that keeps keys, values and what the gates read."""

    def __init__(self, gates: AttentionGates) -> None:
        self.offset, self.gated = gates.config.layer_offset, set(gates.layer_indices)
        self.context = Context()

    def enter_layer(self, layer: int, hidden: Tensor) -> None:
        """Keep the states ``[1, N, d]`` if the gate of some layer reads them."""
        if layer + self.offset in self.gated:
            self.context.hidden[layer + self.offset] = hidden[0].detach()

    def attend(self, call: AttentionCall) -> Tensor:
        """Keep keys and values, and attend densely."""
        self.keep(call)
        return call.dense(None, False)

    def keep(self, call: AttentionCall) -> None:
        """Keep keys and values of a layer."""
        if call.chunk is not None or not call.softmax.plain:
            raise UnsupportedModelError(
                f"{type(call.module).__name__} attends in chunks, or caps its logits or has sink logits: expected a "
                "model with plain attention for loss.replay; set loss.replay=false."
            )
        self.context.keys[call.layer] = call.k[0].detach()
        self.context.values[call.layer] = call.v[0].detach()


class ReadingTwice(Rereading):
    """A dense pass over one context as :class:`Reading`, after which the model repeats it for the targets of gates."""

    def __init__(self, model: nn.Module, gates: AttentionGates, tokens: Tensor) -> None:
        super().__init__(model, gates, torch.ones_like(tokens[None]))
        self._reading = Reading(gates)

    def enter_layer(self, layer: int, hidden: Tensor) -> None:
        """Keep the states; gates run on them later."""
        self._reading.enter_layer(layer, hidden)

    def attend(self, call: AttentionCall) -> Tensor:
        """Keep keys and values, and attend densely."""
        self._reading.keep(call)
        return super().attend(call)

    @property
    def context(self) -> Context:
        """The context, with targets."""
        return replace(self._reading.context, targets={layer: x[0] for layer, x in self.targets.items()})


class Reply(Interceptor):
    """A pass over the response to a context of which flags say what is kept.

    Args:
        context: the context of N tokens.
        keep: flags ``[S, Hkv, N]`` by layer, S of the batch of the pass; a layer without flags keeps everything.
    """

    def __init__(self, context: Context, keep: Mapping[int, Tensor]) -> None:
        self.context, self.keep = context, keep

    def passes(self, given: Tensor | None) -> Iterator[tuple[Tensor | None, Tensor | None]]:
        """Yield one pass, whose positions count from the end of the context."""
        yield None, self.positions

    def begin(self, decoder: nn.Module, attention_mask: Tensor | None, tokens: Tensor) -> None:
        """Count the positions of the response."""
        start = self.context.length
        self.positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)[None]
        self.text_lengths = torch.full(tokens.shape[:1], start)

    def attend(self, call: AttentionCall) -> Tensor:
        """Attend to what is kept of the context, and to the response."""
        keys, values = self.context.keys[call.layer], self.context.values[call.layer]
        keep = self.keep.get(call.layer)
        return replay_attention(call.q, call.k, call.v, keys, values, keep, call.scaling, call.window)


class Contexts:
    """Contexts that a model has read, kept in a folder.

    A file is named by a hash of the model's configuration and weights, of the layers whose states it holds, of the
    type of autocast, and of the tokens, so that several runs and ranks may share a folder.

    Args:
        model: the model.
        gates: its gates.
        folder: the folder; None means one that is deleted with this object.
        twice: read each context a second time, for the targets of gates.
    """

    def __init__(self, model: nn.Module, gates: AttentionGates, folder: str | None, twice: bool = False) -> None:
        self.model, self.gates, self.twice = model, gates, twice
        self._temporary = tempfile.TemporaryDirectory(prefix="ag-contexts-") if folder is None else None
        self.folder = Path(folder or self._temporary.name)  # type: ignore[union-attr]
        self.folder.mkdir(parents=True, exist_ok=True)
        decoder = decoder_of(model)
        if instrument(model).hybrid or shared_layers(decoder.config):
            raise UnsupportedModelError(
                f"{type(decoder).__name__} has layers that do not attend, or that read another layer's keys: expected "
                "a model whose layers all attend to keys of their own for loss.replay; set loss.replay=false."
            )
        sums = [f"{name}={float(x.detach().sum(dtype=torch.float64))}" for name, x in decoder.named_parameters()]
        layers = [gates.config.layer_offset, *gates.layer_indices]
        about = decoder.config.to_json_string(), sums, layers, next(model.parameters()).dtype
        self._identity = hashlib.sha256(str(about).encode())
        if twice:  # sinks are not repeated
            self._identity.update(f"reread behind {gates.config.sink_tokens}".encode())

    def read(self, tokens: Tensor) -> Context:
        """Return the context of tokens ``[N]``, which the model reads unless the folder has it."""
        digest, device = self._identity.copy(), tokens.device.type
        mixed = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        digest.update(str(mixed).encode() + tokens.cpu().numpy().tobytes())
        path = self.folder / f"{digest.hexdigest()[:32]}.safetensors"
        try:
            parts = load_file(path, device=str(tokens.device))
        except (OSError, SafetensorError):
            return self._write(path, tokens)
        context = Context()
        for key in sorted(parts, key=lambda key: int(key.partition(".")[2])):  # layers in order, as they are read
            name, _, layer = key.partition(".")
            getattr(context, name)[int(layer)] = parts[key]
        return context

    @torch.no_grad()
    def _write(self, path: Path, tokens: Tensor) -> Context:
        reading = ReadingTwice(self.model, self.gates, tokens) if self.twice else Reading(self.gates)
        decoder_of(self.model)(input_ids=tokens[None], use_cache=False, gating=reading)
        context = reading.context
        parts = {f"{name}.{layer}": x for name, by in vars(context).items() for layer, x in by.items()}
        try:
            with replacing(path) as partial:
                save_file({key: x.contiguous() for key, x in parts.items()}, partial)
        except OSError as error:
            raise UserError(
                f"loss.contexts={self.folder}: a context of {tokens.numel()} tokens cannot be written ({error}): name "
                "a folder with room and permission, or use fewer or shorter contexts."
            ) from error
        return context


def in_window(length: int, window: int | None, device: torch.device) -> Tensor:
    """Return which tokens of a context the next query sees, bool ``[N]``: the newest ``window`` - 1, or all."""
    token_index = torch.arange(length, device=device)
    if window is None:
        return torch.ones_like(token_index, dtype=torch.bool)
    return ~retention.expired_mask(token_index[None, None], torch.tensor([length], device=device), window)[0, 0]


def ranked_flags(logits: Tensor, share: float, gates: AttentionGates, window: int | None = None) -> Tensor:
    """Return the flags of the tokens that ``gates@global`` keeps of a context at its end, with a slope.

    Sinks and recents stay as the engine protects them; of the rest the highest logits of all gated layers and heads, of
    equal ones the first. The gradient is the straight-through one of a sigmoid around the boundary, which moves with
    the logits next to it, as the number of kept tokens is fixed: raising all logits by the same number changes nothing.

    Args:
        logits: gate logits ``[L, Hkv, N]`` of the gated layers.
        share: share of the tokens to keep, in (0, 1].
        gates: the gates, for what they protect.
        window: sliding window of the gated layers, in tokens; None means that they have none.

    Returns:
        ``[L, Hkv, N]``, each 0 or 1; 0 where a token has left the window.
    """
    ranked, token_index = policy("gates", share).trained_with(gates), torch.arange(logits.shape[-1])[None, None]
    assert ranked.scorer is not None
    num_tokens = torch.tensor([logits.shape[-1]])
    capacity = ranked.capacity(num_tokens)
    protected = retention.protected_mask(token_index, num_tokens, *ranked.scorer.limits(capacity))[0, 0]
    expired = ~in_window(logits.shape[-1], window, protected.device)
    protected, expired, capacity = (x.to(logits.device) for x in (protected & ~expired, expired, capacity))
    competing, num_heads = ~(protected | expired), logits[..., 0].numel()
    score = retention.eviction_score(gates.stored(logits.detach()), protected, expired)
    keep = retention.keep_mask(score.flatten(), capacity[0] * num_heads).view_as(logits) & ~expired
    flags = keep.to(logits)
    num_kept = int(capacity - protected.sum()) * num_heads
    competing_logits = logits.detach()[..., competing].flatten()
    if not 0 < num_kept < len(competing_logits):
        return flags + 0.0 * logits  # a backward pass needs a graph
    with torch.no_grad():
        boundary, spread = competing_logits.topk(num_kept + 1).values[-2:].mean(), competing_logits.std()
        width = SOFTNESS * spread.where(spread > 0, 1.0)
        slope = torch.sigmoid((logits - boundary) / width)
        near = slope * (1 - slope) * competing
    mean_near_boundary = (near * logits).sum() / near.sum()
    shift = mean_near_boundary - mean_near_boundary.detach()
    soft = torch.sigmoid((logits - boundary - shift) / width)
    return torch.where(competing, flags + (soft - soft.detach()), flags)


class ReplayLoss(GatedLoss):
    """Compute the divergence of responses under two drawn shares, each times the square of its share.

    At half the share the divergence is about four times as large, so that each share counts about the same.

    Args:
        config: ``loss`` and ``warmup`` are read.
        model: causal language model, frozen.
        gates: gates of the model.
    """

    def __init__(self, config: Config, model: nn.Module, gates: AttentionGates | None) -> None:
        super().__init__(config, model, gates)
        assert gates is not None
        gates.check_flags()
        self.contexts = Contexts(model, gates, config.loss.contexts, twice=config.warmup.regress_steps > 0)
        #: Sliding window of the gated layers, which is one; None means that they have none.
        self.window = sliding_windows(decoder_of(model).config)[gates.layer_indices[0]]

    def _regression(self, batch: Batch) -> Measured:
        """Regress the gates on KVzip's scores of whole contexts, each of which the model reads and repeats once."""
        assert self.gates is not None
        warm, lengths = self.config.warmup, batch["prompt_length"]
        contexts = [self.parts_of(batch, row)[0] for row in range(len(lengths))]
        mask = torch.arange(int(lengths.max()), device=lengths.device) < lengths[:, None]
        gating = self.gating({"attention_mask": mask, "prompt_length": lengths}, open=True)
        logits = _padded([self.logits_of(context) for context in contexts])
        targets = _padded([torch.stack([x.targets[layer] for layer in x.hidden]) for x in contexts])
        gating.logits = dict(zip(contexts[0].hidden, logits, strict=True))
        repeated = gating.counted() & ~self.sinks(gating)
        loss = losses.regression(self.gates, logits, targets, repeated, warm.keep, warm.scale)
        means = losses.gate_means(self.gates, gating)
        return measured_values(loss, {"regress_loss": loss}, *self._of_gates(gating, means))

    def _objective(self, batch: Batch, step: int) -> Measured:
        low, high = self.config.loss.share_low, self.config.loss.share_high
        labels = batch["labels"].scatter(1, batch["prompt_length"][:, None], -100)  # a first token precedes eviction
        drawn = losses.sampled(labels, self.config.loss.sampled_tokens)
        batch, rows = batch | {"labels": drawn}, losses.response_positions(drawn)[0]
        places = (torch.arange(SHARES) + torch.rand(SHARES)) / SHARES
        shares = (low * (high / low) ** places).tolist()
        found = [self.replay(batch, row, shares) for row in range(len(batch["labels"]))]
        weights = torch.tensor(shares, device=labels.device).square()
        values = torch.cat([(one.values * weights[:, None]).mean(0) for one in found])
        loss = losses.sample_mean(values, rows, labels)
        evicted = torch.stack([1 - one.kept for one in found]).mean(0)
        measured = {
            "kl_loss": loss,
            "evicted": self.over_all_layers(losses.global_sum(evicted.mean()) / losses.world_size()),
        }
        return measured_values(loss, measured, evicted=evicted)

    def replay(self, batch: Batch, row: int, shares: Sequence[float]) -> Replayed:
        """Run the response of a row of a batch under several shares of its context."""
        assert self.gates is not None
        context, tokens, labels = self.parts_of(batch, row)
        logits = self.logits_of(context)
        flags = torch.stack([self.flags_of(logits, share) for share in shares])
        tokens, labels = (x.expand(len(shares), -1) for x in (tokens, labels))
        hidden = self.hidden_of(
            context, tokens, Reply(context, dict(zip(context.hidden, flags.unbind(1), strict=True)))
        )
        with torch.no_grad():
            teacher = self.hidden_of(context, tokens[:1], Reply(context, {})).expand_as(hidden)
        values, _ = self.tokens({"labels": labels}, hidden, teacher)
        by_layer = dict(zip(context.hidden, logits, strict=True))
        return Replayed(values.view(len(shares), -1), flags.detach().mean((0, 2, 3)), hidden, labels, by_layer)

    def parts_of(self, batch: Batch, row: int) -> tuple[Context, Tensor, Tensor]:
        """Return the context of a row of a batch, and its response: token ids and labels ``[1, R]``."""
        prompt, length = int(batch["prompt_length"][row]), int(batch["attention_mask"][row].sum())
        tokens, labels = (batch[name][row, None, prompt:length] for name in ("input_ids", "labels"))
        return self.contexts.read(batch["input_ids"][row, :prompt]), tokens, labels

    def logits_of(self, context: Context) -> Tensor:
        """Return the gate logits ``[L, Hkv, N]`` of a context, of the gated layers in order."""
        assert self.gates is not None
        return torch.stack([self.gates.layers[str(layer)](x[None])[0] for layer, x in context.hidden.items()])

    def flags_of(self, logits: Tensor, share: float) -> Tensor:
        """Return the flags ``[L, Hkv, N]`` of a context under a share; see :func:`ranked_flags`."""
        assert self.gates is not None
        return ranked_flags(logits, share, self.gates, self.window)

    def hidden_of(self, context: Context, tokens: Tensor, reply: Reply) -> Tensor:
        """Return the final hidden states ``[S, R, d]`` of a response ``[S, R]`` behind what is kept of a context."""
        output = decoder_of(self.model)(input_ids=tokens, use_cache=False, gating=reply)
        states: Tensor = output.last_hidden_state
        return states


def _padded(rows: Sequence[Tensor]) -> Tensor:
    """Return ``[L, B, Hkv, T]`` from rows ``[L, Hkv, N]`` of several lengths, with zeros behind the shorter ones."""
    longest = max(row.shape[-1] for row in rows)
    return torch.stack([F.pad(row, (0, longest - row.shape[-1])) for row in rows], 1)


class Replayed(NamedTuple):
    """A response under S shares of its context."""

    values: Tensor  # [S, N], the divergence of each token with loss, but for the first, which precedes eviction
    kept: Tensor  # [L], the share of the gated layers' tokens that is kept, the mean over the shares
    hidden: Tensor  # [S, R, d]
    labels: Tensor  # [S, R]
    logits: Mapping[int, Tensor]  # [Hkv, N], of the context, by gated layer

    @property
    def divergence(self) -> Tensor:
        """The divergence of the response under each share ``[S]``, in nats per token; 0 without tokens."""
        return self.values.sum(1) / max(self.values.shape[1], 1)


class ReplayValidation(Validation):
    """The metrics of validation by replay: means over the shares ``VALIDATED``, and the divergence at each.

    Args:
        gated_loss: how training measures a batch.
    """

    gated_loss: ReplayLoss

    def __init__(self, gated_loss: ReplayLoss) -> None:
        super().__init__(gated_loss)
        for place in range(len(VALIDATED)):
            self.add_module(f"at_{place}", MeanMetric())

    @torch.no_grad()
    def update(self, batch: Batch, keep_samples: bool = False) -> None:
        """Measure a batch, and with ``keep_samples`` keep the flags of its first contexts for pictures."""
        of = self.gated_loss
        for row in range(len(batch["labels"])):
            wrong = "choice" in batch and bool(batch["choice"][row] != batch["target"][row])
            behind = batch["labels"][row, int(batch["prompt_length"][row]) + 1 :]
            if wrong or not bool((behind != -100).any()):
                continue  # a choice that is not the answer, a filler row, or one token, which precedes eviction
            found = of.replay(batch, row, VALIDATED)
            nll, _ = losses.token_nll(of.model, found.hidden, found.labels, self.loss.chunk_tokens)
            self.nll.update(nll)
            self.lm_loss.update(nll.mean())
            weights = torch.tensor(VALIDATED, device=found.divergence.device).square()
            self.objective_mean.update((found.divergence * weights).mean())
            for metric, value in zip(self._at(), found.divergence, strict=True):
                metric.update(value)
            ids = batch["input_ids"][row, None, : next(iter(found.logits.values())).shape[-1]]
            context = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.zeros_like(ids)}
            gating = of.gating(context | {"prompt_length": torch.tensor([ids.shape[1]], device=ids.device)}, open=True)
            gating.logits = {layer: x[None] for layer, x in found.logits.items()}
            self._measure_gates(context, gating, gating, keep_samples and len(self.sample_flags) < SAMPLES)

    def compute(self) -> dict[str, Tensor]:
        """Return the measurements by name, and set the calibration of the gates."""
        values = super().compute()
        return values | {f"kl_at_{share:g}": x.compute() for share, x in zip(VALIDATED, self._at(), strict=True)}

    def _at(self) -> list[MeanMetric]:
        return [cast("MeanMetric", getattr(self, f"at_{place}")) for place in range(len(VALIDATED))]

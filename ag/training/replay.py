"""The loss of gates by replay: a context is read once, evicted under drawn shares, and only its response runs.

The model reads a context densely, as the engine does before it evicts. A step ranks the tokens of the context over all
layers and heads by the gates' logits, keeps a share of them, and runs forward and backward over the response alone,
whose queries attend to what is kept. The loss is the divergence from the response behind the whole context.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torchmetrics import MeanMetric

from ag.config import Config
from ag.engine.policy import policy
from ag.engine.scorers.gates import Gates
from ag.errors import UserError
from ag.files import replacing
from ag.gates.gate import AttentionGates
from ag.model.geometry import shared_layers
from ag.model.hooks import AttentionCall, Interceptor, UnsupportedModelError, decoder_of, instrument
from ag.training import losses
from ag.training.gated_loss import Batch, GatedLoss, Measured, measured_values
from ag.training.replay_attention import replay_attention
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
        if call.chunk is not None or not call.softmax.plain:
            raise UnsupportedModelError(
                f"{type(call.module).__name__} attends in chunks, or caps its logits or has sink logits: expected a "
                "model with plain attention for loss.replay; set loss.replay=false."
            )
        self.context.keys[call.layer] = call.k[0].detach()
        self.context.values[call.layer] = call.v[0].detach()
        return call.dense(None, False)


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
    """

    def __init__(self, model: nn.Module, gates: AttentionGates, folder: str | None) -> None:
        self.model, self.gates = model, gates
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
        reading = Reading(self.gates)
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


def ranked_flags(logits: Tensor, share: float, gates: AttentionGates) -> Tensor:
    """Return the flags of the tokens that ``gates@global`` keeps of a context at its end, with a slope.

    Sinks and recents stay as the engine protects them; of the rest the highest logits of all layers and heads. The
    gradient is the straight-through one of a sigmoid around the boundary, which moves with the logits next to it, as
    the number of kept tokens is fixed: raising all logits by the same number changes nothing.

    Args:
        logits: gate logits ``[L, Hkv, N]`` of the gated layers.
        share: share of the tokens to keep, in (0, 1].
        gates: the gates, for what they protect.

    Returns:
        ``[L, Hkv, N]``, each 0 or 1.
    """
    length = logits.shape[-1]
    config = gates.config
    capacity = policy("gates", share).capacity(torch.tensor([length]))
    scorer = Gates().trained_with(config.sink_tokens, max(config.recent_tokens - 1, 0))
    sinks, recent = (int(x) for x in scorer.limits(capacity))
    at = torch.arange(length, device=logits.device)
    sure = (at < sinks) | (at >= length - recent)
    heads = logits.shape[0] * logits.shape[1]
    count = (int(capacity) - int(sure.sum())) * heads
    rest = logits.detach()[..., ~sure].flatten()
    if not 0 < count < len(rest):
        return torch.where(sure, 1.0, 0.0 * logits + float(count > 0))  # a backward pass needs a graph
    with torch.no_grad():
        highest = rest.topk(count + 1).values[-2:]
        boundary, width = highest.mean(), SOFTNESS * rest.std()
        slope = torch.sigmoid((logits - boundary) / width)
        near = slope * (1 - slope) * ~sure
        flags = (logits >= highest[0]).to(logits)
    level = (near * logits).sum() / near.sum()
    soft = torch.sigmoid((logits - boundary - (level - level.detach())) / width)
    return torch.where(sure, 1.0, flags + (soft - soft.detach()))


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
        self.contexts = Contexts(model, gates, config.loss.contexts)

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
        flags = torch.stack([ranked_flags(logits, share, self.gates) for share in shares])
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

    def hidden_of(self, context: Context, tokens: Tensor, reply: Reply) -> Tensor:
        """Return the final hidden states ``[S, R, d]`` of a response ``[S, R]`` behind what is kept of a context."""
        output = decoder_of(self.model)(input_ids=tokens, use_cache=False, gating=reply)
        states: Tensor = output.last_hidden_state
        return states


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

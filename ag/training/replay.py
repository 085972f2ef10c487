"""The loss of gates by replay: a prompt is read once, evicted under sampled shares, and only its response runs.

The model reads a prompt densely, as the engine does before it evicts. A step ranks the prompt's tokens over all layers
and heads by the gates' logits, keeps a share of them, and runs forward and backward over the response alone, whose
queries attend to the kept tokens. The loss is the divergence from the response after the whole prompt.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, cast

import torch
from filelock import FileLock
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torchmetrics import MeanMetric

from ag import retention
from ag.config import Config
from ag.config.loss import ReplayConfig
from ag.data.rows import Row
from ag.data.sources import DataError
from ag.engine.cache import EvictionCache
from ag.engine.policy import policy
from ag.engine.prompt import PrecomputedAttention
from ag.engine.reconstruction import measure_reconstruction
from ag.errors import UserError
from ag.files import replacing
from ag.gates.gate import AttentionGates
from ag.gates.gating import Gating
from ag.model.geometry import shared_layers, sliding_windows
from ag.model.hooks import instrument
from ag.model.interceptor import AttentionCall, Interceptor
from ag.model.structure import UnsupportedModelError, decoder_of
from ag.training import losses
from ag.training.gated_loss import Batch, GatedLoss, LossTerms, loss_terms
from ag.training.replay_attention import replay_attention
from ag.training.validation import SAMPLES, Validation

SHARES_PER_RESPONSE = 2  # one is sampled from each half of the range
VALIDATION_SHARES = (0.5, 0.3, 0.2, 0.1)  # a validation measures at each of them
SOFTNESS = 0.3  # width of the flags' slope, in standard deviations of the logits


@dataclass
class CachedPrompt:
    """Tensors of a prompt of N tokens, by layer. The fields' names are saved in files."""

    keys: dict[int, Tensor] = field(default_factory=dict)  # [Hkv, N, D], post-RoPE
    values: dict[int, Tensor] = field(default_factory=dict)  # [Hkv, N, D]
    hidden: dict[int, Tensor] = field(default_factory=dict)  # [N, d], the input of the layer's gate
    targets: dict[int, Tensor] = field(default_factory=dict)  # [Hkv, N], of the reconstruction, if gates learn them

    @property
    def length(self) -> int:
        """Number of the prompt's tokens."""
        return next(iter(self.keys.values())).shape[1]

    def prefix(self, length: int) -> CachedPrompt:
        """Return the first ``length`` tokens. Under a RoPE of fixed frequencies they do not depend on later tokens."""
        return CachedPrompt(
            {layer: x[:, :length] for layer, x in self.keys.items()},
            {layer: x[:, :length] for layer, x in self.values.items()},
            {layer: x[:length] for layer, x in self.hidden.items()},
            {layer: x[:, :length] for layer, x in self.targets.items()},
        )


class PromptRecorder(Interceptor):
    """A dense pass over one prompt that stores keys, values and the inputs of the gates."""

    def __init__(self, gates: AttentionGates) -> None:
        self.offset, self.gated = gates.config.layer_offset, set(gates.layer_indices)
        self.cached_prompt = CachedPrompt()

    def enter_layer(self, layer: int, hidden: Tensor) -> None:
        """Store the states ``[1, N, d]`` if a layer's gate reads them."""
        if layer + self.offset in self.gated:
            self.cached_prompt.hidden[layer + self.offset] = hidden[0].detach()

    def attend(self, call: AttentionCall) -> Tensor:
        """Store keys and values, and attend densely."""
        if call.chunk is not None or not call.softmax.plain:
            raise UnsupportedModelError(
                f"{type(call.module).__name__} attends in chunks, or caps its logits or has sink logits: expected a "
                "model with plain attention for loss.replay; set loss.replay=false."
            )
        self.cached_prompt.keys[call.layer] = call.k[0].detach()
        self.cached_prompt.values[call.layer] = call.v[0].detach()
        return call.dense(None, False)


class TargetRecorder(PromptRecorder):
    """A dense pass like :class:`PromptRecorder`, after which the model repeats the prompt in chunks.

    The targets of the gates are the logs of the scores of :class:`ag.engine.scorers.kvzip.KVzip`: the largest weight
    that a token of the repetition gives each key, in any query head of the group. Sinks have no target.
    """

    def __init__(self, model: nn.Module, gates: AttentionGates) -> None:
        super().__init__(gates)
        #: Holds the prompt while it is repeated, and evicts nothing.
        self._cache = EvictionCache(model, policy("kvzip", 1.0, sinks=gates.config.sink_tokens))

    def begin(self, decoder: nn.Module, attention_mask: Tensor | None, tokens: Tensor) -> None:
        """Begin the pass of the cache too."""
        super().begin(decoder, attention_mask, tokens)
        self._cache.interceptor.begin(decoder, None, tokens)

    def passes(self, position_ids: Tensor | None) -> Iterator[tuple[Tensor | None, Tensor | None]]:
        """Yield one pass, and let the model repeat the prompt after it."""
        next(self._cache.interceptor.passes(position_ids))
        yield None, position_ids
        state, batch = self._cache.state, self._cache.interceptor.batch
        assert batch is not None
        scores = measure_reconstruction(state, batch).scores
        self._cache.reset()
        targets = {layer: x[0].clamp_min(1e-12).log() for layer, x in scores.items() if layer in self.gated}
        self.cached_prompt = replace(self.cached_prompt, targets=targets)

    def attend(self, call: AttentionCall) -> Tensor:
        """Store keys and values, also in the cache, and attend densely."""
        out = super().attend(call)
        self._cache.interceptor.attend(PrecomputedAttention(**vars(call), output=out))
        return out


class ResponsePass(Interceptor):
    """A pass over a response. It attends to the prompt tokens that ``keep`` marks.

    Args:
        prompt: the prompt of N tokens.
        keep: flags ``[S, Hkv, N]`` by layer, S being the batch of the pass; a layer without flags keeps all tokens.
    """

    def __init__(self, prompt: CachedPrompt, keep: Mapping[int, Tensor]) -> None:
        self.prompt, self.keep = prompt, keep

    def passes(self, position_ids: Tensor | None) -> Iterator[tuple[Tensor | None, Tensor | None]]:
        """Yield one pass, whose positions continue those of the prompt."""
        yield None, self.positions

    def begin(self, decoder: nn.Module, attention_mask: Tensor | None, tokens: Tensor) -> None:
        """Count the positions of the response."""
        start = self.prompt.length
        self.positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)[None]
        self.text_lengths = torch.full(tokens.shape[:1], start)

    def attend(self, call: AttentionCall) -> Tensor:
        """Attend to the kept tokens of the prompt, and to the response."""
        keys, values = self.prompt.keys[call.layer], self.prompt.values[call.layer]
        keep = self.keep.get(call.layer)
        return replay_attention(call.q, call.k, call.v, keys, values, keep, call.scaling, call.window)


class PromptStore:
    """Prompts that a model has read, stored in a folder.

    A file's name is a hash of the model's configuration and weights, the layers whose states it holds, autocast's dtype
    and the tokens. Several runs and ranks may therefore share a folder; after a failure a file ``*.lock`` may stay,
    which locks nothing. A ``folder`` of None is a temporary one, which is deleted with this object. If
    ``with_targets``, the model repeats each prompt, for the targets of gates.
    """

    def __init__(self, model: nn.Module, gates: AttentionGates, folder: str | None, with_targets: bool = False) -> None:
        self.model, self.gates, self.with_targets = model, gates, with_targets
        if folder is None:
            folder = tempfile.mkdtemp(prefix="ag-contexts-")
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        decoder = decoder_of(model)
        if instrument(model).hybrid or shared_layers(decoder.config):
            raise UnsupportedModelError(
                f"{type(decoder).__name__} has layers that do not attend, or that read another layer's keys: expected "
                "a model whose layers all attend to keys of their own for loss.replay; set loss.replay=false."
            )
        sums = [f"{name}={float(x.detach().sum(dtype=torch.float64))}" for name, x in decoder.named_parameters()]
        layers = [gates.config.layer_offset, *gates.layer_indices]
        identity = decoder.config.to_json_string(), sums, layers, next(model.parameters()).dtype
        self._identity = hashlib.sha256(str(identity).encode())
        if with_targets:  # sinks have no target; the text below is part of saved file names
            self._identity.update(f"reread behind {gates.config.sink_tokens}".encode())

    def read(self, tokens: Tensor) -> CachedPrompt:
        """Return the prompt of tokens ``[N]`` from the folder; the model reads it if it is not there.

        Of several processes that need a new prompt, one reads it while the others wait.
        """
        digest, device = self._identity.copy(), tokens.device.type
        mixed = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        digest.update(str(mixed).encode() + tokens.cpu().numpy().tobytes())
        path = self.folder / f"{digest.hexdigest()[:32]}.safetensors"
        parts = _load(path, tokens.device)
        if parts is None:
            self._write_once(path, tokens)
            # the model's own tensors have other strides, and products with them round differently in a later run
            parts = load_file(path, device=str(tokens.device))
        prompt = CachedPrompt()
        for key in sorted(parts, key=lambda key: int(key.partition(".")[2])):  # layers in order, as they are read
            name, _, layer = key.partition(".")
            getattr(prompt, name)[int(layer)] = parts[key]
        return prompt

    def _write_once(self, path: Path, tokens: Tensor) -> None:
        """Let the model read a prompt and write it, or wait until another process has done so."""
        lock = Path(f"{path}.lock")
        try:
            with FileLock(lock):  # ends with the process
                if _load(path, tokens.device) is None:
                    self._write(path, tokens)
                lock.unlink(missing_ok=True)  # whoever locks a new file of this name finds the prompt
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"loss.contexts={self.folder}: a context of {tokens.numel()} tokens cannot be written ({error}): name "
                "a folder with room and permission, or use fewer or shorter contexts."
            ) from error

    @torch.no_grad()
    def _write(self, path: Path, tokens: Tensor) -> None:
        recorder = TargetRecorder(self.model, self.gates) if self.with_targets else PromptRecorder(self.gates)
        decoder_of(self.model)(input_ids=tokens[None], use_cache=False, gating=recorder)
        recorded = vars(recorder.cached_prompt)
        parts = {f"{name}.{layer}": x for name, layers in recorded.items() for layer, x in layers.items()}
        with replacing(path) as partial:
            save_file({key: x.contiguous() for key, x in parts.items()}, partial)


def _load(path: Path, device: torch.device) -> dict[str, Tensor] | None:
    """Return the tensors of a file. None: it is missing or damaged."""
    try:
        return load_file(path, device=str(device))
    except (OSError, SafetensorError):
        return None


def check_rows(rows: Sequence[Row]) -> None:
    """Raise a ``DataError`` if no row has a second token with loss after its prompt; the first precedes eviction."""
    if not any(row.loss_mask()[(row.prompt_length or 0) + 1 :].any() for row in rows):
        raise DataError(
            "loss.replay=true: no training row has a second token with loss after its prompt, and the first one "
            "precedes eviction: expected longer responses, or set loss.replay=false."
        )


def in_window(length: int, window: int | None, device: torch.device) -> Tensor:
    """Return which prompt tokens the next query sees, bool ``[N]``: the newest ``window`` - 1. None: no window."""
    token_index = torch.arange(length, device=device)
    if window is None:
        return torch.ones_like(token_index, dtype=torch.bool)
    return ~retention.expired_mask(token_index[None, None], torch.tensor([length], device=device), window)[0, 0]


def topk_flags(logits: Tensor, share: float, gates: AttentionGates, window: int | None = None) -> Tensor:
    """Return the flags of the tokens that ``gates@global`` keeps at a prompt's end, with a gradient.

    Sinks and recents are protected as in the engine. Further tokens are kept by the highest logits over all gated
    layers and heads; of two equal logits the first is kept. The gradient is the straight-through one of a sigmoid
    around the boundary. The number of kept tokens is fixed: the boundary moves with the logits next to it, and adding
    one number to all logits changes nothing.

    Args:
        logits: gate logits ``[L, Hkv, N]`` of the gated layers.
        share: share of the tokens to keep, in (0, 1].
        gates: the gates; their sinks and recents are protected.
        window: sliding window of the gated layers, in tokens. None: no window.

    Returns:
        ``[L, Hkv, N]``, each 0 or 1; 0 for a token that has left the window.
    """
    ranked, token_index = (
        policy("gates", share).with_trained_protection(gates),
        torch.arange(logits.shape[-1])[None, None],
    )
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
        slope_weights = slope * (1 - slope) * competing
    mean_near_boundary = (slope_weights * logits).sum() / slope_weights.sum()
    shift = mean_near_boundary - mean_near_boundary.detach()
    soft = torch.sigmoid((logits - boundary - shift) / width)
    return torch.where(competing, flags + (soft - soft.detach()), flags)


class ReplayLoss(GatedLoss):
    """Compute the divergence of responses under two sampled shares, each times the square of its share.

    At half the share the divergence is about four times as large; with the square all shares count about equally.
    """

    def __init__(self, config: Config, model: nn.Module, gates: AttentionGates | None) -> None:
        super().__init__(config, model, gates)
        assert gates is not None and isinstance(config.loss, ReplayConfig)
        gates.check_flags()
        self.settings, regresses = config.loss, config.warmup.regress_steps > 0
        self.prompt_store = PromptStore(model, gates, config.loss.contexts, with_targets=regresses)
        #: The one sliding window of the gated layers. None: they have no window.
        self.window = sliding_windows(decoder_of(model).config)[gates.layer_indices[0]]

    def loss(self, batch: Batch, step: int) -> LossTerms:
        """Compute the loss of a training batch; see :meth:`GatedLoss.loss`."""
        low, high = self.settings.share_low, self.settings.share_high
        labels = batch["labels"].scatter(1, batch["prompt_length"][:, None], -100)  # a first token precedes eviction
        sampled_labels = losses.sample_labels(labels, self.config.loss.sampled_tokens)
        batch, rows = batch | {"labels": sampled_labels}, losses.response_positions(sampled_labels)[0]
        exponents = (torch.arange(SHARES_PER_RESPONSE) + torch.rand(SHARES_PER_RESPONSE)) / SHARES_PER_RESPONSE
        shares = (low * (high / low) ** exponents).tolist()
        replays = [self.replay_row(batch, row, shares) for row in range(len(batch["labels"]))]
        weights = torch.tensor(shares, device=labels.device).square()
        token_kl = torch.cat([(replay.token_kl * weights[:, None]).mean(0) for replay in replays])
        loss = losses.sample_mean(token_kl, rows, labels)
        evicted = torch.stack([1 - replay.kept for replay in replays]).mean(0)
        values = {
            "kl_loss": loss,
            "evicted": self.over_all_layers(losses.global_sum(evicted.mean()) / losses.world_size()),
        }
        return loss_terms(loss, values, evicted=evicted)

    def replay_row(self, batch: Batch, row: int, shares: Sequence[float]) -> ReplayResult:
        """Run the response of a row of a batch under several kept shares of its prompt."""
        assert self.gates is not None
        prompt, tokens, labels = self.split_row(batch, row)
        logits = self.gate_logits(prompt)
        flags = torch.stack([self.keep_flags(logits, share) for share in shares])
        tokens, labels = (x.expand(len(shares), -1) for x in (tokens, labels))
        evicted_pass = ResponsePass(prompt, dict(zip(prompt.hidden, flags.unbind(1), strict=True)))
        hidden = self.run_decoder({"input_ids": tokens}, evicted_pass)
        with torch.no_grad():
            teacher = self.run_decoder({"input_ids": tokens[:1]}, ResponsePass(prompt, {})).expand_as(hidden)
        token_kl, _ = self.token_losses({"labels": labels}, hidden, teacher)
        by_layer = dict(zip(prompt.hidden, logits, strict=True))
        return ReplayResult(token_kl.view(len(shares), -1), flags.detach().mean((0, 2, 3)), hidden, labels, by_layer)

    def split_row(self, batch: Batch, row: int) -> tuple[CachedPrompt, Tensor, Tensor]:
        """Return the prompt of a row of a batch, and its response: token ids and labels ``[1, R]``.

        A prompt that is a part of its context is taken from the whole context, which is read once for all its rows. It
        is read alone if RoPE rotates a text of the context's length by other frequencies.
        """
        prompt_length = int(batch["prompt_length"][row])
        context_length = int(batch["context_length"][row]) if "context_length" in batch else prompt_length
        rope, lengths = instrument(self.model).rope, torch.tensor([context_length, prompt_length])
        if rope is not None and len(rope.set_of(lengths).unique()) > 1:
            context_length = prompt_length
        with_loss = (batch["labels"][row] != -100).nonzero()[:, 0]
        end = int(with_loss[-1]) + 1 if len(with_loss) else int(batch["attention_mask"][row].sum())
        tokens, labels = (batch[name][row, None, prompt_length:end] for name in ("input_ids", "labels"))
        context = self.prompt_store.read(batch["input_ids"][row, :context_length])
        return context.prefix(prompt_length), tokens, labels

    def gate_logits(self, prompt: CachedPrompt) -> Tensor:
        """Return the gate logits ``[L, Hkv, N]`` of a prompt, of the gated layers in order."""
        assert self.gates is not None
        return torch.stack([self.gates.layers[str(layer)](x[None])[0] for layer, x in prompt.hidden.items()])

    def open_gating(self, logits: Tensor, lengths: Tensor) -> Gating:
        """Return the gating of a dense pass over prompts: gate logits ``[L, B, Hkv, N]`` of prompts of B lengths."""
        assert self.gates is not None
        mask = torch.arange(logits.shape[-1], device=lengths.device) < lengths[:, None]
        gating = self.gating({"attention_mask": mask, "prompt_length": lengths}, open=True)
        gating.logits = dict(zip(self.gates.layer_indices, logits, strict=True))
        return gating

    def keep_flags(self, logits: Tensor, share: float) -> Tensor:
        """Return the flags ``[L, Hkv, N]`` of a prompt under a share; see :func:`topk_flags`."""
        assert self.gates is not None
        return topk_flags(logits, share, self.gates, self.window)


class ReplayResult(NamedTuple):
    """A response under S kept shares of its prompt."""

    token_kl: Tensor  # [S, N], divergence of each token with loss, without the first, which precedes eviction
    kept: Tensor  # [L], kept share of the gated layers' tokens, the mean over S
    hidden: Tensor  # [S, R, d]
    labels: Tensor  # [S, R]
    logits: Mapping[int, Tensor]  # [Hkv, N] of the prompt, by gated layer

    @property
    def divergence(self) -> Tensor:
        """The divergence of the response under each share ``[S]``, in nats per token; 0 without tokens."""
        return self.token_kl.sum(1) / max(self.token_kl.shape[1], 1)


class ReplayValidation(Validation):
    """The metrics of validation by replay: means over ``VALIDATION_SHARES``, and the divergence at each."""

    gated_loss: ReplayLoss

    def __init__(self, gated_loss: ReplayLoss) -> None:
        super().__init__(gated_loss)
        self.divergences = nn.ModuleList(MeanMetric() for _ in VALIDATION_SHARES)

    @torch.no_grad()
    def update(self, batch: Batch, keep_samples: bool = False) -> None:
        """Measure a batch, and with ``keep_samples`` keep the flags of its first prompts for pictures."""
        gated_loss = self.gated_loss
        for row in range(len(batch["labels"])):
            is_wrong_choice = "choice" in batch and bool(batch["choice"][row] != batch["target"][row])
            response_labels = batch["labels"][row, int(batch["prompt_length"][row]) + 1 :]
            if is_wrong_choice or not bool((response_labels != -100).any()):
                continue  # a wrong choice, a filler row, or a response of one token, which precedes eviction
            result = gated_loss.replay_row(batch, row, VALIDATION_SHARES)
            nll, _ = losses.token_nll(gated_loss.model, result.hidden, result.labels, self.loss.chunk_tokens)
            self.nll.update(nll)
            self.lm_loss.update(nll.mean())
            weights = torch.tensor(VALIDATION_SHARES, device=result.divergence.device).square()
            self.objective_mean.update((result.divergence * weights).mean())
            for metric, value in zip(self.divergences, result.divergence, strict=True):
                cast(MeanMetric, metric).update(value)
            ids = batch["input_ids"][row, None, : next(iter(result.logits.values())).shape[-1]]
            prompt_batch = {"input_ids": ids, "labels": torch.zeros_like(ids)}
            logits = torch.stack([*result.logits.values()])[:, None]
            gating = gated_loss.open_gating(logits, torch.tensor([ids.shape[1]], device=ids.device))
            self._measure_gates(prompt_batch, gating, gating, keep_samples and len(self.sample_flags) < SAMPLES)

    def compute(self) -> dict[str, Tensor]:
        """Return the measurements by name, and set the calibration of the gates."""
        means = zip(VALIDATION_SHARES, self.divergences, strict=True)
        return super().compute() | {f"kl_at_{share:g}": cast(MeanMetric, mean).compute() for share, mean in means}

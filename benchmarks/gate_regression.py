"""What gates of each kind learn of KVzip's scores: ``python -m benchmarks.gate_regression root=DATA``.

The model reads rows of documents and repeats them (:mod:`ag.training.rereading`) once. What enters the attention of
each layer and the scores stay in ``output/rows``, so that a command that is cut off goes on. Gates are trained on them
alone by the regression of a warm start, and rank the tokens of held rows. A kind's measure is how much it keeps of what
the scores would keep, over all layers and heads. Writes ``gates.json`` and the gates that ``gates:FOLDER`` takes into
``output``, and prints a table.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from ag.config import DataConfig, ModelConfig, key
from ag.config.command_line import command, parse
from ag.config.gate import GateConfig
from ag.data.sources import dataset_of
from ag.errors import UserError
from ag.evaluate.comparison.statistics import bootstrap
from ag.files import replacing
from ag.gates.gate import KINDS, AttentionGates, MLPGate, RetentionGate
from ag.gates.gating import Observing
from ag.model.base import load_base
from ag.model.hooks import decoder_of
from ag.training.losses import regression_loss
from ag.training.rereading import Rereading
from benchmarks.report import report

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

PROGRAM = "gate_regression"
SHARES = (0.5, 0.2, 0.1)
SINKS = 4  # first tokens, which are not repeated
FLOOR = 1e-12  # least score


@dataclass
class Config:
    """What the measurement can be told."""

    root: str = key("", "folder with train.jsonl and validation.jsonl of documents (field text), or their folder")
    model: str = key("smollm2", "base model")
    dtype: str = key("bfloat16", "of the model")
    name: str = key("corpus", "dataset below root")
    length: int = key(2048, "tokens of a row", low=64)
    written: int = key(0, "of these, how many at the end the model writes itself (sampled)", low=0)
    rows: int = key(50, "rows of the training documents", low=1)
    held: int = key(10, "rows of the validation documents", low=2)
    seed: int = key(0, "of the rows' draw", low=0)
    epochs: int = key(5, "times that each row is shown", low=1)
    lr: float = key(1e-3, "largest learning rate")
    kinds: list[str] = key(["mlp"], "of gates", words="kinds of benchmarks/gate_regression.py")
    init: str | None = key(None, "folder of exported gates, which kinds init (all of them) and lines train on")
    mix: float = key(1.0, "share of what kind init has learned that stays; the rest is as it was", low=0, high=1)
    output: str = key("runs/gate_regression", "folder for rows, gates and gates.json")


@dataclass
class Found:
    """What gates of a kind learned.

    Attributes:
        kind: of gates.
        parameters: that were trained.
        seconds: of training.
        loss: over the held rows.
        kept: of each held row, the shares of what the scores keep that the gates keep, by :data:`SHARES`.
    """

    kind: str
    parameters: int
    seconds: float = 0.0
    loss: float = 0.0
    kept: list[list[float]] = field(default_factory=list)


# ---- gates that only this measurement has


class Ahead(MLPGate):
    """Two layers on a token and the mean of the ``ahead`` tokens behind it, which a late decision could see."""

    ahead = 0

    def build(self, hidden_size: int, heads: int) -> None:
        """Make the parameters; half as many units, as each reads twice as much."""
        self.inner = nn.Linear(2 * hidden_size, self.config.hidden // 2)
        self.outer = nn.Linear(self.config.hidden // 2, heads)

    def mix(self, hidden: Tensor, valid: Tensor | None, left_padded: bool, first: Tensor | None) -> Tensor:
        """Return the logits ``[B, T, heads]``; at the end of a row fewer tokens follow, and none the last one."""
        sums = F.pad(hidden.double().cumsum(1), (0, 0, 1, 0))
        begin = torch.arange(1, hidden.shape[1] + 1)
        end = (begin + self.ahead).clamp_max(hidden.shape[1])
        mean = (sums[:, end] - sums[:, begin]) / (end - begin).clamp_min(1)[:, None]
        result: Tensor = self.outer(F.gelu(self.inner(torch.cat([hidden, mean.to(hidden.dtype)], -1))))
        return result


class Ahead8(Ahead):
    """Eight tokens ahead."""

    ahead = 8


class Ahead48(Ahead):
    """48 tokens ahead."""

    ahead = 48


class Lines(MLPGate):
    """Gates of two layers that are not trained, and a line for each head that is: only how heads compare changes."""

    def build(self, hidden_size: int, heads: int) -> None:
        """Make the parameters."""
        super().build(hidden_size, heads)
        self.slope, self.shift = nn.Parameter(torch.zeros(heads)), nn.Parameter(torch.zeros(heads))

    def start(self) -> None:
        """Leave the logits as they are."""

    def mix(self, hidden: Tensor, valid: Tensor | None, left_padded: bool, first: Tensor | None) -> Tensor:
        """Return ``exp(slope)`` times the logits, plus ``shift``, ``[B, T, heads]``."""
        return self.slope.exp() * super().mix(hidden, valid, left_padded, first) + self.shift

    def folded(self) -> MLPGate:
        """Return a gate of two layers with the mapped logits."""
        width, heads = self.inner.in_features, self.outer.out_features
        gate = MLPGate(width, heads, self.kv_heads, self.config).to(self.outer.weight)
        gate.inner.load_state_dict(self.inner.state_dict())
        with torch.no_grad():
            gate.outer.weight.copy_(self.outer.weight * self.slope.exp()[:, None])
            gate.outer.bias.copy_(self.outer.bias * self.slope.exp() + self.shift)
        return gate


class Decaying(RetentionGate):
    """What is left of a token's worth at the end of the row, scaled and shifted as the other layers' is."""

    decays = False  # the logit is what is left

    def build(self, hidden_size: int, heads: int) -> None:
        """Make the parameters."""
        super().build(hidden_size, heads)
        self.scale, self.shift = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

    def start(self) -> None:
        """Begin with a worth that lasts for about the length of a row."""
        for layer in (self.inner, self.outer):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
        nn.init.constant_(self.outer.bias, 6.0)

    def mix(self, hidden: Tensor, valid: Tensor | None, left_padded: bool, first: Tensor | None) -> Tensor:
        """Return ``scale (age + 2) log b + shift``, ``[B, T, heads]``, the scale positive."""
        age = torch.arange(hidden.shape[1] - 1, -1, -1)[:, None]
        left = (age + 2) * F.logsigmoid(super().mix(hidden, valid, left_padded, first))
        return self.scale.exp() * left + self.shift


GATE = GateConfig(covers="all", bias=0.0, sink_tokens=SINKS, recent_tokens=64, kind="mlp", hidden=128)
FAST_KVZIP = {"kind": "fast_kvzip", "granularity": "query_head", "head_dim": 16, "hidden": 16}
WINDOWED = {"kind": "attention", "head_dim": 16, "window": 64, "shortcut": True}
#: Of each kind its class where ag has none of the name, its settings, and what all layers share.
GATES: dict[str, tuple[type[nn.Module] | None, dict[str, Any], tuple[str, ...]]] = {
    "linear": (None, {"kind": "linear"}, ()),
    "mlp": (None, {}, ()),
    "attention": (None, WINDOWED, ()),
    "fast_kvzip": (None, FAST_KVZIP, ()),
    "shared": (MLPGate, {}, ("outer",)),
    "decaying": (Decaying, {}, ("scale", "shift")),
    "ahead8": (Ahead8, {}, ()),
    "ahead48": (Ahead48, {}, ()),
}


def made(kind: str, geometry: PretrainedConfig, init: str | None) -> AttentionGates:
    """Return gates to train.

    Raises:
        UserError: there is no such kind, or nothing that it could go on from.
    """
    if kind in ("init", "lines"):
        if init is None:
            raise UserError(f"kinds=[{kind}]: it goes on from gates that are there: give init=FOLDER.")
        begun = AttentionGates.from_pretrained(init)
        return begun.requires_grad_(True) if kind == "init" else lined(begun)
    if kind not in GATES:
        raise UserError(f"kinds=[{kind}]: expected some of {', '.join([*GATES, 'init', 'lines'])}.")
    cls, settings, shared = GATES[kind]
    if cls is not None:
        KINDS[kind] = cast(Any, cls)
        settings = settings | {"kind": kind}
    gates = AttentionGates(geometry, replace(GATE, **settings))
    first, *others = gates.layers.values()
    for layer in others:
        for name in shared:
            setattr(layer, name, getattr(first, name))
    return gates


def lined(gates: AttentionGates) -> AttentionGates:
    """Put a line for each head behind gates of two layers.

    Raises:
        UserError: the gates are of another kind.
    """
    if gates.config.kind != "mlp":
        raise UserError(f"kinds=[lines] init=...: expected gates of gate.kind=mlp, and these are {gates.config.kind}.")
    for index, layer in gates.requires_grad_(False).layers.items():
        gate = cast(MLPGate, layer)
        line = Lines(gate.inner.in_features, gate.outer.out_features, gate.kv_heads, gates.config)
        line.inner, line.outer = gate.inner, gate.outer
        gates.layers[index] = line
    return gates


# ---- rows


@dataclass
class Row:
    """A row that was read and repeated.

    Attributes:
        hidden: ``[L, T, d]``, what enters the attention of the layers that may evict.
        scores: ``[L, Hkv, T]``.
    """

    hidden: Tensor
    scores: Tensor


class Reading(Rereading):
    """Keeps what enters the attention of the layers, ``[1, T, d]`` each, and runs no gates."""

    def __init__(self, model: nn.Module, gates: AttentionGates, valid: Tensor, tokenizer: Any) -> None:
        super().__init__(model, gates, valid, tokenizer)
        self.hidden: dict[int, Tensor] = {}

    def enter_layer(self, layer: int, hidden: Tensor) -> None:
        """Keep it."""
        self.hidden[layer] = hidden


@torch.no_grad()
def read(model: PreTrainedModel, tokenizer: Any, ids: list[int]) -> dict[int, tuple[Tensor, Tensor]]:
    """Let the model read and repeat a row; returns hidden states and scores by layer."""
    reading = Reading(model, AttentionGates(model.config, GATE), torch.ones(1, len(ids)), tokenizer)
    decoder_of(model)(torch.tensor([ids]), gating=reading, use_cache=False)
    return {layer: (reading.hidden[layer][0].clone(), scores[0]) for layer, scores in reading.scores.items()}


def drawn(documents: list[str], tokenizer: Any, config: Config) -> Iterator[list[int]]:
    """Draw rows without end: a part of whole documents that are joined by the end-of-sequence token."""
    draw = random.Random(config.seed)
    while True:
        ids: list[int] = []
        while len(ids) < config.length:
            text = documents[draw.randrange(len(documents))]
            ids += ([tokenizer.eos_token_id] if ids else []) + tokenizer(text, add_special_tokens=False)["input_ids"]
        first = draw.randrange(len(ids) - config.length + 1)
        yield ids[first : first + config.length]


@torch.no_grad()
def written(model: PreTrainedModel, ids: list[int], count: int, seed: int) -> list[int]:
    """Return a row whose last ``count`` tokens are what the model says behind the others."""
    if not count:
        return ids
    torch.manual_seed(seed)
    begin = torch.tensor([ids[:-count]])
    told = cast(Any, model).generate(
        begin, attention_mask=torch.ones_like(begin), do_sample=True, min_new_tokens=count, max_new_tokens=count
    )
    return [int(token) for token in told[0]]


def files(config: Config, model: PreTrainedModel, tokenizer: Any) -> tuple[list[Path], list[Path]]:
    """Return the files of the rows for training and those that are held, reading what is not there yet."""
    source = dataset_of(DataConfig(kind="text", name=config.name, root=config.root))
    folder = Path(config.output) / "rows"
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for split, count in (("train", config.rows), ("validation", config.held)):
        documents = [row["text"] for row in source.read(split)]
        name = f"{split}_{config.length}_{config.written}_{config.seed}"
        found.append([folder / f"{name}_{number}.pt" for number in range(count)])
        for number, (path, ids) in enumerate(zip(found[-1], drawn(documents, tokenizer, config), strict=False)):
            if not path.exists():
                row = written(model, ids, config.written, number)
                with replacing(path) as partial:
                    torch.save(read(model, tokenizer, row), partial)
    return found[0], found[1]


def load(path: Path, layers: list[int]) -> Row:
    """Return the row of a file, for the layers that have a gate."""
    by_layer = torch.load(path, weights_only=True)
    return Row(*(torch.stack([by_layer[index][part] for index in layers]) for part in (0, 1)))


# ---- training


class Regressed:
    """A row as :func:`ag.training.losses.regression_loss` takes it, after :class:`ag.gates.gating.Observing`."""

    def __init__(self, gates: AttentionGates, row: Row) -> None:
        pairs = zip(gates.layers.values(), row.hidden, strict=True)
        self.logits = {index: gate(hidden[None]) for index, (gate, hidden) in enumerate(pairs)}
        self.targets = {index: scores[None].clamp_min(FLOOR).log() for index, scores in enumerate(row.scores)}

    def has_target(self) -> Tensor:
        """Return ``[1, T]``: all but the sinks."""
        return torch.arange(self.targets[0].shape[-1])[None] >= SINKS

    def loss(self, gates: AttentionGates) -> Tensor:
        """Return the loss of the recipe of ``gates:smollm2``."""
        return regression_loss(gates, cast(Observing, self), 0.5, "global")

    def kept(self, share: float) -> float:
        """Return how much of what the scores keep at a share of the tokens the logits keep too."""
        logits, targets = (
            torch.cat([x[..., SINKS:].flatten() for x in values.values()]) for values in (self.logits, self.targets)
        )
        count, chosen = int(share * len(logits)), torch.zeros(len(logits), dtype=torch.bool)
        chosen[logits.topk(count).indices] = True
        return float(chosen[targets.topk(count).indices].double().mean())


def train(config: Config, kind: str, gates: AttentionGates, rows: list[Path], held: list[Path]) -> Found:
    """Train gates, and ask them about the held rows."""
    layers = gates.layer_indices
    parameters = [one for one in gates.parameters() if one.requires_grad]  # what layers share comes once
    found, start = Found(kind, sum(x.numel() for x in parameters)), time.process_time()
    optimiser = torch.optim.AdamW(parameters, config.lr, weight_decay=0.0)
    steps, draw = config.epochs * len(rows), random.Random(0)
    warm = LambdaLR(optimiser, lambda n: min(1.0, 5 * (n + 1) / steps) * 0.5 * (1 + np.cos(np.pi * n / steps)))
    for _ in range(config.epochs):
        for path in draw.sample(rows, len(rows)):
            loss = Regressed(gates, load(path, layers)).loss(gates)
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimiser.step()
            warm.step()
    if kind == "init":
        begun = AttentionGates.from_pretrained(cast(str, config.init))
        with torch.no_grad():
            for now, before in zip(parameters, begun.parameters(), strict=True):
                now.copy_(before.lerp(now, config.mix))
    found.seconds = time.process_time() - start
    with torch.no_grad():
        asked = [Regressed(gates, load(path, layers)) for path in held]
        found.loss = sum(float(x.loss(gates)) for x in asked) / len(asked)
        found.kept = [[x.kept(share) for share in SHARES] for x in asked]
    if kind == "lines":
        for index, gate in gates.layers.items():
            gates.layers[index] = cast(Lines, gate).folded()
    if GATES.get(kind, (None,))[0] is None:
        gates.save_pretrained(str(Path(config.output) / "gates" / kind))
    return found


def measure(config: Config) -> Iterator[Found]:
    """Train gates of each kind in turn."""
    if config.written >= config.length:
        raise UserError(f"written={config.written}: expected fewer than the {config.length} tokens of a row (length=).")
    model, tokenizer = load_base(ModelConfig(name=config.model, dtype=cast(Any, config.dtype)))
    kinds = {}
    for kind in config.kinds:
        torch.manual_seed(0)
        kinds[kind] = made(kind, model.config, config.init)  # what is wrong is said before rows are read
    rows, held = files(config, model, tokenizer)
    for kind, gates in kinds.items():
        yield train(config, kind, gates, rows, held)


def table(results: list[Found]) -> str:
    """Return what was found as a table; intervals are those of the difference to the first kind, paired by row."""
    shares = " | ".join(f"kept of {share:.0%}" for share in SHARES)
    lines = [f"| kind | parameters | loss | {shares} | to the first at {SHARES[1]:.0%} |", "|---" * 7 + "|"]
    first = np.array(results[0].kept)
    for one in results:
        kept = np.array(one.kept)
        low, high = bootstrap(kept[:, 1] - first[:, 1])
        difference = f"{(kept - first)[:, 1].mean():+.3f} [{low:+.3f}, {high:+.3f}]"
        means = " | ".join(f"{mean:.3f}" for mean in kept.mean(0))
        lines.append(f"| {one.kind} | {one.parameters:,} | {one.loss:.4f} | {means} | {difference} |")
    return "\n".join(lines)


@command(PROGRAM)
def main(argv: list[str]) -> int:
    """Measure, and write down what was found."""
    config = parse(argv, Config, PROGRAM).config
    report(measure(config), table, config, "gates.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())

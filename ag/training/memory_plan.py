"""Memory and time of a training step, computed without weights or a GPU: ``python -m ag.plan recipe=NAME``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.benchmark import Timer
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from ag.config import Config
from ag.errors import first_line
from ag.gates.gate import AttentionGate, AttentionGates, FastKVzipGate
from ag.model import base as models
from ag.model import random_base
from ag.model.geometry import fingerprint
from ag.model.hooks import decoder_of

READ = ("self_attn", False)  # what enters a layer's attention, and so its gate
AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
GIB = 1 << 30
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)  # a nibble, an 8-bit maximum per 64, a float32 per 256 of those


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one GPU by part, and the work of one step."""

    parameters: dict[str, int]  # how many: base, gates, LoRA
    memory: dict[str, float]  # bytes by part, under the settings of the configuration; their sum is a step's peak
    activations: tuple[float, float]  # bytes kept for the backward pass, without and with checkpointing
    kv_cache: int  # bytes of a full KV cache of one row, for inference
    flops: float  # operations of one optimiser step on one GPU
    tokens: int  # of one optimiser step on all GPUs

    @property
    def total(self) -> float:
        """Bytes of the peak of a step."""
        return sum(self.memory.values())


def plan(config: Config) -> MemoryPlan:
    """Compute the memory and the work of a training step.

    The rows are taken to be full: ``data.batch_size`` of the longest length that the data settings allow.

    Args:
        config: a whole configuration; ``model.name`` may also be the path of a JSON file with a model's configuration.

    Raises:
        ModelError: the model's configuration cannot be read.
    """
    geometry = _geometry(config)
    length, loss_tokens = _row(config, geometry)
    base, adapted, gates = _build(config, geometry)
    counts, sizes = _weights(config, base, adapted, gates)
    plain, kept = _steps(config, geometry, adapted, gates, length)
    step = kept if config.model.gradient_checkpointing else plain
    world = config.trainer.devices * config.trainer.num_nodes
    trained = sizes["gates"] + sizes["LoRA"]
    states = {"gradients": trained, "optimiser": 2 * trained}
    if config.trainer.strategy == "fsdp2":
        head = sum(p.nbytes for p in _outside_layers(base))
        layers = sizes["base weights"] - head
        gathered = 2 * (layers + trained) / geometry.get_text_config().num_hidden_layers  # this layer and the next
        sizes = {"base weights": head + layers / world} | {name: sizes[name] / world for name in ("gates", "LoRA")}
        states = {name: size / world for name, size in states.items()} | {"gathered layers": gathered}
    elif world > 1:
        states["all-reduce buckets"] = trained
    loss_tokens = min(loss_tokens, config.loss.sampled_tokens or loss_tokens)
    chunk = min(config.loss.chunk_tokens, loss_tokens)
    vocabulary = geometry.get_text_config().vocab_size
    logits = chunk * vocabulary * _logit_bytes(config)
    head_flops = 2 * loss_tokens * vocabulary * geometry.get_text_config().hidden_size
    passes = 2 if loss_tokens <= chunk else 3  # forward, backward to the states; each chunk is computed again
    text = gates.fingerprint if gates is not None else AttentionGates(geometry, config.gate).fingerprint
    row = 2 * text["num_layers"] * text["num_kv_heads"] * text["head_dim"] * length
    return MemoryPlan(
        parameters=counts,
        memory=sizes | states | {"activations": step.saved, "logits or temporary": max(logits, step.temporary)},
        activations=(plain.saved, kept.saved),
        kv_cache=row * _dtype(config).itemsize,
        flops=config.trainer.accumulate * (step.flops + passes * head_flops),
        tokens=world * config.trainer.accumulate * config.data.batch_size * length,
    )


def report(config: Config, tflops: float | None = None) -> str:
    """Write the plan as a table; ``tflops`` are 10^12 operations a second of one device, None: measured here."""
    found = plan(config)
    source = "measured on matrix products here: a lower bound" if tflops is None else "given"
    tflops = _measured_tflops(config) if tflops is None else tflops
    seconds = found.flops / tflops / 1e12
    counts = ", ".join(f"{name} {count / 1e6:,.1f} M" for name, count in found.parameters.items())
    gpus = config.trainer.devices * config.trainer.num_nodes
    lines = [f"{config.model.name} on {gpus} x {config.trainer.strategy}; parameters: {counts}", ""]
    lines += [f"{'memory per device':<30}     GiB"]
    lines += [f"  {name:<28}{size / GIB:>8.2f}" for name, size in found.memory.items()]
    lines += [f"  {'peak of a step':<28}{found.total / GIB:>8.2f}", ""]
    for name, size in zip(("without", "with"), found.activations, strict=True):
        lines += [f"activations {name + ' checkpointing':<18}{size / GIB:>8.2f}"]
    lines += [f"{'KV cache of one row, full':<30}{found.kv_cache / GIB:>8.2f}", ""]
    lines += [
        f"one step: {found.tokens:,} tokens, {found.flops / 1e12:,.3g} tera-operations per device",
        f"at {tflops:.3g} tera-operations a second ({source}): {seconds:.3g} s a step, "
        f"{found.tokens / seconds:,.0f} tokens a second on all devices",
    ]
    return "\n".join(lines)


def _geometry(config: Config) -> PretrainedConfig:
    """Read the configuration of ``model.name``: random weights, a JSON file, a folder, a hub id or an alias.

    Raises:
        ModelError: when there is none.
    """
    name = config.model.name
    if name.startswith(random_base.PREFIX):
        return random_base.geometry(name)
    path = name if name.endswith(".json") and Path(name).is_file() else models.resolve(name, config.model.revision)
    try:
        found: PretrainedConfig = AutoConfig.from_pretrained(
            path, revision=config.model.revision, trust_remote_code=config.model.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise models.ModelError(
            f"model.name={name!r} has no configuration to plan with ({first_line(error)}): give a hub id "
            "that can be reached, a folder or a config.json"
        ) from error
    return found


def _row(config: Config, geometry: PretrainedConfig) -> tuple[int, int]:
    """Return the tokens of the longest row, and how many of a batch carry loss."""
    data = config.data
    length = min(data.max_length, geometry.get_text_config().max_position_embeddings)
    if data.kind == "text" and data.packing == "split":
        length = min(length, data.prompt_max + data.continuation)
        return length, data.batch_size * data.continuation
    if data.kind == "worked":
        return length, data.batch_size * min(length, data.solution_max)
    if data.kind == "facts":
        length = min(length, data.prompt_max)
    return length, data.batch_size * length


def _dtype(config: Config) -> torch.dtype:
    """Return the type that matrices are multiplied in."""
    found: torch.dtype = AUTOCAST.get(config.trainer.precision, getattr(torch, config.model.dtype))
    return found


def _build(config: Config, geometry: PretrainedConfig) -> tuple[Any, Any, AttentionGates | None]:
    """Make a model without contents, the same with LoRA where that is trained, and its gates, or None."""
    stored, trusted = getattr(torch, config.model.dtype), config.model.trust_remote_code
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(
            geometry, dtype=stored, attn_implementation="sdpa", trust_remote_code=trusted
        )
        base.requires_grad_(False)
        gates = None if config.train == "lora" else AttentionGates(geometry, config.gate)
        return base, base if config.train == "gates" else models.add_lora(base, config.lora), gates


@dataclass(frozen=True)
class _Step:
    """One batch through all layers: bytes kept for the backward pass, further bytes at its peak, operations."""

    saved: float
    temporary: float
    flops: float


@dataclass(frozen=True)
class _Layer:
    """A layer with its gate, by token.

    Attributes:
        saved: bytes kept for the backward pass.
        inner: numbers that enter the last product of the MLP.
        copies: bytes of the weights that autocast converted, whatever the number of tokens.
        forward: operations of the forward pass.
        again: operations of the forward pass that checkpointing repeats.
        backward: operations of the backward pass.
    """

    saved: float
    inner: float
    copies: float
    forward: float
    again: float
    backward: float


class _Layers:
    """The closed form of a layer of a decoder such as Llama's, for rows of T tokens.

    A hidden state has d numbers; matrices are multiplied in a type of e bytes; attention has H query and Hkv KV heads
    of D numbers, the MLP I inner units. For each token the graph of the layer keeps, in bytes:

    - of each norm (two of d numbers, others of queries and keys) 4 a number, for a float32 copy of what enters it;
    - of attention ``e (2 H + 2 Hkv) D``, for queries, keys, values and outputs, and 4 H, for the sums of its softmax;
    - of a gated MLP ``3 e I``, for both products and the activation, of another one ``e I``, for the first product; of
      experts those that a token goes to count, and e d for what each of them gives;
    - of each trained matrix what enters it: for LoRA's A what enters the adapted matrix, for its B the rank. Autocast
      makes a copy for each of them, while in float32 throughout matrices that read the same share it;
    - of a gate what enters each of its matrices, what leaves the first of several (queries, keys and values, whose
      mixture enters the last; of Fast KVzip queries and keys three times, to normalise them, and a logit for each
      learned key), and 16 Hkv for its logits, two sigmoids of them and the flags.

    Operations are 2 a weight forward, 2 backward to what enters and 2 more to a weight that is trained. A query sees
    ``T / 2`` keys in the mean, fewer under a window, and each takes ``4 H D`` for two products forward, and ``10 H D``
    for five backward.
    """

    def __init__(self, config: Config, geometry: PretrainedConfig, length: int) -> None:
        sizes, text = fingerprint(geometry), geometry.get_text_config()
        self.width, self.head_dim, self.length = sizes["hidden_size"], sizes["head_dim"], length
        self.heads, self.kv_heads = sizes["num_heads"], sizes["num_kv_heads"]
        self.experts = getattr(text, "num_experts_per_tok", None) or 0
        self.product, self.stored = _dtype(config).itemsize, getattr(torch, config.model.dtype).itemsize
        self.mixed = config.trainer.precision in AUTOCAST
        self.trained = self.product if self.mixed else 4  # bytes of a number that gates and adapters compute with

    def count(self, layer: Any, gate: Any) -> _Layer:
        """Count a layer and its gate; None means that the layer has no gate."""
        linear = {name: m.weight for name, m in layer.named_modules() if isinstance(m, nn.Linear)}
        stacks = [p.numel() / len(p) * self.experts for p in layer.parameters() if p.ndim == 3]
        frozen = {n: w for n, w in linear.items() if not n.startswith("self_attn.") and not w.requires_grad}
        mlp = list(frozen.values())
        inner, first = (mlp[-1].shape[1] if mlp else 0), sum(w.shape[0] for w in mlp[:-1])
        wide = first + inner * (first > inner) + sum(stacks) / self.width + self.experts * self.width
        heads = (self.heads + self.kv_heads) * self.head_dim
        norms = [p.numel() for name, p in layer.named_parameters() if "norm" in name and p.ndim == 1]
        normed = sum(heads / 2 if n == self.head_dim else n for n in norms)  # those of heads come in pairs
        ends = norms.count(self.width) <= 2 and not stacks and mlp and not list(frozen)[-1].endswith("base_layer")
        last = mlp[-1].numel() if ends else 0  # its output is kept by nothing: no norm or adapter follows
        saved = 4 * normed + self.product * (2 * heads + wide) + 4 * self.heads
        products = 4 * self.heads * self.head_dim * self._keys(getattr(layer.self_attn, "sliding_window", None))
        entering = self._entering(linear)
        if gate is not None:
            maps = {f"gate.{name}": m.weight for name, m in gate.named_modules() if isinstance(m, nn.Linear)}
            reading = [name for name, w in maps.items() if w.shape[1] == self.width]
            leaving = sum(maps[name].shape[0] for name in reading)
            if len(reading) < len(maps):
                saved += self.trained * leaving
            if isinstance(gate, FastKVzipGate):
                learned = gate.q_proj.weight.shape[0] / gate.config.head_dim * gate.config.hidden
                saved += (8 + self.trained) * leaving + self.trained * learned
            if type(gate).mix is AttentionGate.mix:
                seen = self.length if gate.config.scope == "prompt" else self._keys(gate.config.window or None)
                products += 4 * gate.config.num_heads * gate.config.head_dim * seen
            saved += 16 * self.kv_heads
            linear |= maps
            entering |= {name if self.mixed or name not in reading else READ: w.shape[1] for name, w in maps.items()}
        trained = sum(w.numel() for w in linear.values() if w.requires_grad)
        weights = sum(w.numel() for w in linear.values()) + sum(stacks)
        converted = (trained if self.stored == self.product else weights) if self.mixed else 0
        return _Layer(
            saved=saved + self.trained * sum(entering.values()),
            inner=inner + sum(stacks) / 3 / self.width,
            copies=self.product * converted,
            forward=2 * weights + products,
            again=2 * (weights - last) + products,
            backward=2 * (weights + trained) + 2.5 * products,
        )

    def _keys(self, window: int | None) -> float:
        """Return how many keys a query sees in the mean; None means that no window hides any."""
        seen = min(window or self.length, self.length)
        return seen - seen * seen / (2 * self.length)

    def _entering(self, linear: Mapping[str, Tensor]) -> dict[Any, int]:
        """Return the numbers that are kept of what enters the trained matrices of a layer, by what they read."""
        parts = {name: f"{name}.".split(".")[:2] for name in linear}  # the block, and the matrix in it
        last = dict(parts[name] for name, w in linear.items() if not w.requires_grad)
        found: dict[Any, int] = {}
        for name, weight in linear.items():
            block, part = parts[name]
            shared = not self.mixed and self.stored == 4 and "lora_A" in name
            if weight.requires_grad:
                found[(block, part == last[block]) if shared else name] = weight.shape[1]
        return found


def _steps(
    config: Config, geometry: PretrainedConfig, adapted: Any, gates: AttentionGates | None, length: int
) -> tuple[_Step, _Step]:
    """Compute a batch without and with checkpointing of activations; its loss is not in it.

    With s bytes for a number of a hidden state between layers, checkpointing keeps, of each layer and token, s d for
    what enters it, and of a gate 12 Hkv for its logits, their sigmoids and the flags. Both keep 4 d + s d of the last
    norm, and s d of a teacher's states. Where gates alone are trained, the layers below the first have no graph.

    At its peak the backward pass has in addition the gradient of a hidden state, s d, and the larger of two: in the MLP
    the gradients of the product that enters its last matrix and of both factors, 3 e I, and in the last norm five
    float32 copies, 20 d. Under checkpointing the peak is in an MLP, with the whole graph of its layer, whose forward
    pass has run again, to the last number that is kept: of Llama's layers all but the last matrix.
    """
    layers, tokens = _Layers(config, geometry, length), config.data.batch_size * length
    found = [
        layers.count(layer, gates.layers[str(index)] if gates is not None and str(index) in gates.layers else None)
        for index, layer in enumerate(decoder_of(adapted).layers)
    ]
    learning = found[gates.layer_indices[0] :] if gates is not None and config.train == "gates" else found
    state = layers.stored * layers.width
    once = 4 * layers.width + state * (2 if config.loss.objective == "kl" else 1)
    rotations = 2 * length * layers.head_dim * layers.stored
    entering = state * len(found) + 12 * layers.kv_heads * (0 if gates is None else len(gates.layers))
    whole = max(learning, key=lambda layer: layer.saved)
    working = 3 * layers.product * whole.inner
    forward = tokens * sum(layer.forward for layer in found)
    flops = forward + tokens * sum(layer.backward for layer in learning)
    if config.loss.objective == "kl" or config.loss.draws_share:  # a teacher
        flops += forward
    plain = _Step(
        saved=tokens * (sum(layer.saved for layer in learning) + once)
        + sum(layer.copies for layer in learning)
        + rotations,
        temporary=tokens * (state + max(working, 20 * layers.width)),
        flops=flops,
    )
    kept = _Step(
        saved=tokens * (entering + once) + rotations,
        temporary=tokens * (whole.saved + state + working) + whole.copies,
        flops=flops + tokens * sum(layer.again for layer in learning),
    )
    return plain, kept


def _outside_layers(base: Any) -> Iterator[nn.Parameter]:
    inside = {id(parameter) for parameter in decoder_of(base).layers.parameters()}
    return (parameter for parameter in base.parameters() if id(parameter) not in inside)


def _weights(
    config: Config, base: Any, adapted: Any, gates: AttentionGates | None
) -> tuple[dict[str, int], dict[str, float]]:
    lora = [p for p in adapted.parameters() if p.requires_grad]
    frozen = {id(p): p for p in adapted.parameters() if not p.requires_grad}
    parts = {"gates": [] if gates is None else list(gates.parameters()), "LoRA": lora}
    counts = {"base": sum(p.numel() for p in frozen.values())}
    sizes: dict[str, float] = {"base weights": sum(p.nbytes for p in frozen.values())}
    if config.model.quantization == "nf4":
        head = base.get_output_embeddings()
        linear = [m.weight for m in adapted.modules() if isinstance(m, nn.Linear) and m is not head]
        for weight in (w for w in linear if not w.requires_grad):
            sizes["base weights"] += weight.numel() * NF4_BYTES - weight.nbytes
    counts |= {name: sum(p.numel() for p in group) for name, group in parts.items()}
    return counts, sizes | {name: float(sum(p.nbytes for p in group)) for name, group in parts.items()}


def _logit_bytes(config: Config) -> int:
    """Return the bytes of one logit in the loss: its own type and float32, log-softmax, and their gradients."""
    element = _dtype(config).itemsize
    copies = 0 if element == 4 else 2 * element
    teacher = element + (4 if element != 4 else 0) + 8 if config.loss.objective == "kl" else 0
    return copies + 12 + teacher


def _measured_tflops(config: Config) -> float:
    """Multiply matrices for half a second in the precision of the run."""
    device = "cpu" if config.trainer.accelerator == "cpu" or not torch.cuda.is_available() else "cuda"
    size = 512 if device == "cpu" else 8192
    matrix = torch.randn(size, size, device=device).to(_dtype(config))
    timer = Timer("matrix @ matrix", globals={"matrix": matrix}, num_threads=torch.get_num_threads())
    seconds: float = timer.blocked_autorange(min_run_time=0.5).median
    return 2 * size**3 / seconds / 1e12

"""Memory and time of a training step, computed without weights or a GPU: ``python -m ag.plan recipe=NAME``.

The closed form of a decoder such as Llama's, for rows of T tokens. A hidden state has d numbers, of s bytes between
layers; matrices are multiplied in a type of e bytes; attention has H query and Hkv KV heads of D numbers, the MLP I
inner units. For each token the graph of a layer keeps, in bytes:

- of each norm (two of d numbers, others of queries and keys) 4 a number, for a float32 copy of what enters it;
- of attention ``e (2 H + 2 Hkv) D``, for queries, keys, values and outputs, and 4 H, for the sums of its softmax;
- of a gated MLP ``3 e I``, for both products and the activation, of another one ``e I``, for the first product; of
  experts those that a token goes to count, and e d for what each of them gives;
- of each trained matrix what enters it: for LoRA's A what enters the adapted matrix, for its B the rank. Autocast
  makes a copy for each of them, while in float32 throughout matrices that read the same share it;
- of a gate what enters each of its matrices, what leaves the first of several (queries, keys and values, whose
  mixture enters the last), and 16 Hkv for its logits, two sigmoids of them and the flags.

Operations are 2 a weight forward, 2 backward to what enters and 2 more to a weight that is trained. A query sees
``T / 2`` keys in the mean, fewer under a window, and each takes ``4 H D`` for two products forward, and ``10 H D``
for five backward.

Checkpointing keeps, of each layer and token, s d for what enters it, and of a gate 12 Hkv for its logits, their
sigmoids and the flags. With or without it 4 d + s d of the last norm are kept, and s d of a teacher's states. Where
gates alone are trained, the layers below the first have no graph.

At its peak the backward pass has in addition the gradient of a hidden state, s d, and the larger of two: in the MLP
the gradients of the product that enters its last matrix and of both factors, 3 e I, and in the last norm five
float32 copies, 20 d. Under checkpointing the peak is in an MLP, with the whole graph of its layer, whose forward
pass has run again, to the last number that is kept: of Llama's layers all but the last matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.benchmark import Timer
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from ag.config import Config
from ag.data.facts import TRAIN_ROWS as FACTS
from ag.data.problems import TRAIN_ROWS as PROBLEMS
from ag.data.templates import TASKS
from ag.errors import UserError, first_line
from ag.gates.gate import AttentionGate, AttentionGates
from ag.model import base as models
from ag.model import configurations, random_base
from ag.model.geometry import attention_layers, fingerprint, kv_heads
from ag.model.hooks import decoder_of
from ag.model.structure import attention_of

AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
GIB = 1 << 30
TFLOPS = 70  # 10^12 operations a second of a GPU such as an RTX 4090 in training
GENERATED = {"facts": FACTS, "worked": PROBLEMS}  # training rows where data.train_samples does not say how many
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
        UserError: for a run with replay, whose steps run a response alone.
    """
    if config.loss.replay:
        raise UserError(
            "loss.replay=true: a plan is of steps that run whole rows, and a step of replay takes less: expected "
            "loss.replay=false, for an upper bound."
        )
    geometry = _geometry(config)
    shape, vocabulary = fingerprint(geometry), geometry.get_text_config().vocab_size
    length, loss_tokens = _row(config, geometry.get_text_config().max_position_embeddings)
    base, adapted, gates = _build(config, geometry)
    decoder, tokens = decoder_of(adapted), config.data.batch_size * length

    # the weights
    trained = {
        "gates": [] if gates is None else list(gates.parameters()),
        "LoRA": [p for p in adapted.parameters() if p.requires_grad],
    }
    frozen = [p for p in adapted.parameters() if not p.requires_grad]
    inside = {id(p) for p in decoder.layers.parameters()}
    outside = sum(p.nbytes for p in frozen if id(p) not in inside)  # embeddings, last norm, head
    sizes: dict[str, float] = {"base weights": sum(p.nbytes for p in frozen)}
    if config.model.quantization == "nf4":
        head = base.get_output_embeddings()
        linear = [m.weight for m in adapted.modules() if isinstance(m, nn.Linear) and m is not head]
        sizes["base weights"] += sum(w.numel() * NF4_BYTES - w.nbytes for w in linear if not w.requires_grad)
    sizes |= {name: float(sum(p.nbytes for p in group)) for name, group in trained.items()}
    learned = sizes["gates"] + sizes["LoRA"]
    states = {"gradients": learned, "optimiser": 2 * learned}
    world = config.trainer.devices * config.trainer.num_nodes
    if config.trainer.strategy == "fsdp2":
        layers = sizes["base weights"] - outside
        gathered = 2 * (layers + learned) / shape["num_layers"]  # this layer and the next
        sizes = {"base weights": outside + layers / world} | {name: sizes[name] / world for name in trained}
        states = {name: size / world for name, size in states.items()} | {"gathered layers": gathered}
    elif world > 1:
        states["all-reduce buckets"] = learned

    # the layers
    attending = attention_layers(decoder.config)  # which gates count
    places = {index: place for place, index in enumerate(attending)}
    found = [_layer(config, shape, length, layer, gates, places.get(n)) for n, layer in enumerate(decoder.layers)]
    learning = found[attending[gates.layer_indices[0]] :] if gates is not None and config.train == "gates" else found
    number, product = getattr(torch, config.model.dtype).itemsize, _dtype(config).itemsize
    teacher, width = config.loss.objective == "kl", shape["hidden_size"]
    state = number * width
    last = tokens * (4 * width + state * (1 + teacher)) + 2 * length * shape["head_dim"] * number  # and rotations
    plain = last + sum(tokens * layer.saved + layer.copies for layer in learning)
    count = 0 if gates is None else len(gates.layers)
    kept = last + tokens * (state * len(found) + 12 * shape["num_kv_heads"] * count)
    whole = max(learning, key=lambda layer: layer.saved)
    working = state + 3 * product * whole.inner
    forward = sum(layer.forward for layer in found)
    flops = tokens * (forward * (1 + (teacher or config.loss.draws_share)) + sum(layer.backward for layer in learning))
    checkpointing = config.model.gradient_checkpointing
    if checkpointing:
        temporary = tokens * (whole.saved + working) + whole.copies
        flops += tokens * sum(layer.again for layer in learning)
    else:
        temporary = tokens * max(working, state + 20 * width)

    # the head
    loss_tokens = min(loss_tokens, config.loss.sampled_tokens or loss_tokens)
    chunk = min(config.loss.chunk_tokens, loss_tokens)
    # bytes of a logit: its own type and float32, log-softmax, and their gradients; those of a teacher
    logit = 12 + (product != 4) * 2 * product + teacher * (product + 8 + (product != 4) * 4)
    passes = 2 if loss_tokens <= chunk else 3  # forward, backward to the states; each chunk is computed again
    flops += passes * 2 * loss_tokens * vocabulary * width
    return MemoryPlan(
        parameters={"base": sum(p.numel() for p in frozen)}
        | {name: sum(p.numel() for p in group) for name, group in trained.items()},
        memory=sizes
        | states
        | {
            "activations": kept if checkpointing else plain,
            "logits or temporary": max(chunk * vocabulary * logit, temporary),
        },
        activations=(plain, kept),
        kv_cache=sum(x.number * (x.key + x.value) for x in kv_heads(geometry)) * length * product,
        flops=config.trainer.accumulate * flops,
        tokens=world * config.trainer.accumulate * tokens,
    )


def report(config: Config, tflops: float | None = None) -> str:
    """Return the plan as a table; ``tflops`` are 10^12 operations a second of one device, measured here by default."""
    found = plan(config)
    source = "measured on matrix products here: a lower bound" if tflops is None else "given"
    tflops = _measured_tflops(config) if tflops is None else tflops
    seconds = found.flops / tflops / 1e12
    counts = ", ".join(f"{name} {count / 1e6:,.1f} M" for name, count in found.parameters.items())
    gpus = config.trainer.devices * config.trainer.num_nodes
    count = steps(config)
    whole = [] if count is None else [f"the run: {count:,} steps, at most {duration(count * seconds)}"]
    plain, kept = found.activations
    sizes = {f"  {name}": size for name, size in {**found.memory, "peak of a step": found.total}.items()}
    sizes |= {"activations without checkpointing": plain, "activations with checkpointing": kept}
    sizes |= {"KV cache of one row, full": found.kv_cache}
    return "\n".join(
        [
            f"{config.model.name} on {gpus} x {config.trainer.strategy}; parameters: {counts}",
            "",
            f"{'memory per device':<34}     GiB",
            *(f"{name:<34}{size / GIB:>8.2f}" for name, size in sizes.items()),
            "",
            f"one step: {found.tokens:,} tokens, {found.flops / 1e12:,.3g} tera-operations per device",
            f"at {tflops:.3g} tera-operations a second ({source}): {seconds:.3g} s a step, "
            f"{found.tokens / seconds:,.0f} tokens a second on all devices",
            *whole,
        ]
    )


def steps(config: Config) -> int | None:
    """Return the optimiser steps of a run; None where the number of rows is known after reading the data only."""
    trainer, sizes = config.trainer, [config.data.train_samples]
    if trainer.max_steps >= 0:
        return trainer.max_steps
    if config.data.kind == "sft" and config.data.name in TASKS:
        sizes.append(TASKS[config.data.name].train_rows)
    elif config.data.kind in GENERATED and sizes == [None]:
        sizes.append(GENERATED[config.data.kind])
    rows = min((size for size in sizes if size is not None), default=None)
    if rows is None:
        return None
    batches = rows // (config.data.batch_size * trainer.devices * trainer.num_nodes)
    return trainer.max_epochs * -(-batches // trainer.accumulate)


def duration(seconds: float) -> str:
    """Return a time in hours, or in minutes if it is less than one."""
    return f"{seconds / 3600:.1f} hours" if seconds >= 3600 else f"{seconds / 60:.1f} minutes"


class _Layer(NamedTuple):
    """A layer with its gate, by token."""

    saved: float  # bytes kept for the backward pass
    inner: float  # numbers that enter the last product of the MLP
    copies: float  # bytes of the weights that autocast converted, whatever the number of tokens
    forward: float  # operations of the forward pass
    again: float  # operations of the forward pass that checkpointing repeats
    backward: float  # operations of the backward pass


def _layer(
    config: Config, shape: dict[str, Any], length: int, layer: Any, gates: AttentionGates | None, place: int | None
) -> _Layer:
    """Count a layer of the adapted model of this shape, and its gate where it has one.

    ``place`` is that of the layer among those that attend; None means that it does not attend.
    """
    width, head_dim = shape["hidden_size"], shape["head_dim"]
    heads = (shape["num_heads"] + shape["num_kv_heads"]) * head_dim
    product, stored = _dtype(config).itemsize, getattr(torch, config.model.dtype).itemsize
    mixed = config.trainer.precision in AUTOCAST
    e = product if mixed else 4  # bytes of a number that gates and adapters compute with
    attention = attention_of(layer)  # None: its operations by token are in its matrices
    experts = getattr(getattr(attention, "config", None), "num_experts_per_tok", None) or 0
    stacks = sum(p.numel() / len(p) * experts for p in layer.parameters() if p.ndim == 3)

    linear = {name: m.weight for name, m in layer.named_modules() if isinstance(m, nn.Linear)}
    mlp = {n: w for n, w in linear.items() if not n.startswith("self_attn.") and not w.requires_grad}
    *firsts, last = mlp.values() if mlp else (torch.empty(0, 0),)
    inner, first = last.shape[1], sum(w.shape[0] for w in firsts)
    wide = first + inner * (first > inner) + stacks / width + experts * width
    norms = [p.numel() for name, p in layer.named_parameters() if "norm" in name and p.ndim == 1]
    normed = sum(heads / 2 if n == head_dim else n for n in norms)  # those of heads come in pairs
    # the output of the last matrix is kept by nothing where no norm or adapter follows
    ends = norms.count(width) <= 2 and not stacks and mlp and not list(mlp)[-1].endswith("base_layer")
    saved = 4 * normed + product * (2 * heads + wide) + 4 * shape["num_heads"]
    seen = 0 if attention is None else _keys(length, getattr(attention, "sliding_window", None))
    products = 4 * shape["num_heads"] * head_dim * seen

    read: dict[Any, int] = {}  # numbers that are kept of what enters the trained matrices, by what they read
    blocks = {name: (f"{name}.".split(".")[0], f"{name}.".split(".")[1]) for name in linear}  # and matrices in them
    ending = dict(blocks[name] for name, w in linear.items() if not w.requires_grad)
    for name, weight in linear.items():
        block, part = blocks[name]
        shared = not mixed and stored == 4 and "lora_A" in name
        if weight.requires_grad:
            read[(block, part == ending[block]) if shared else name] = weight.shape[1]
    if gates is not None and str(place) in gates.layers:
        gate: Any = gates.layers[str(place)]
        maps = {f"gate.{name}": m.weight for name, m in gate.named_modules() if isinstance(m, nn.Linear)}
        reading = [name for name, w in maps.items() if w.shape[1] == width]
        leaving = sum(maps[name].shape[0] for name in reading)
        saved += 16 * shape["num_kv_heads"] + e * leaving * (len(reading) < len(maps))
        if type(gate).mix is AttentionGate.mix:
            seen = length if gate.config.scope == "prompt" else _keys(length, gate.config.window)
            products += 4 * gate.config.num_heads * gate.config.head_dim * seen
        linear |= maps
        # in float32 throughout a gate shares what enters the layer's attention
        read |= {name if mixed or name not in reading else ("self_attn", False): w.shape[1] for name, w in maps.items()}
    trained = sum(w.numel() for w in linear.values() if w.requires_grad)
    weights = sum(w.numel() for w in linear.values()) + stacks
    return _Layer(
        saved=saved + e * sum(read.values()),
        inner=inner + stacks / 3 / width,
        copies=product * mixed * (trained if stored == product else weights),
        forward=2 * weights + products,
        again=2 * (weights - (last.numel() if ends else 0)) + products,
        backward=2 * (weights + trained) + 2.5 * products,
    )


def _keys(length: int, window: int | None) -> float:
    """Return how many keys a query sees in the mean; None or 0 means that no window hides any."""
    seen = min(window or length, length)
    return seen - seen * seen / (2 * length)


def _dtype(config: Config) -> torch.dtype:
    """Return the type that matrices are multiplied in."""
    found: torch.dtype = AUTOCAST.get(config.trainer.precision, getattr(torch, config.model.dtype))
    return found


def _geometry(config: Config) -> PretrainedConfig:
    """Read the configuration of ``model.name``: of random weights, the package, a JSON file, a folder or the hub.

    Raises:
        ModelError: when there is none.
    """
    name = config.model.name
    if name.startswith(random_base.PREFIX):
        return random_base.geometry(name)
    packaged = None if config.model.revision is not None else configurations.find(models.hub_name(name))
    if packaged is not None:
        path = str(packaged)
    elif name.endswith(".json") and Path(name).is_file():
        path = name
    else:
        path = models.resolve(name, config.model.revision)
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


def _row(config: Config, context: int) -> tuple[int, int]:
    """Return the tokens of the longest row, and how many of a batch carry loss."""
    data = config.data
    length = min(data.max_length, context)
    if data.kind == "text" and data.packing == "split":
        length = min(length, data.prompt_max + data.continuation)
        return length, data.batch_size * data.continuation
    if data.kind == "worked":
        return length, data.batch_size * min(length, data.solution_max)
    if data.kind == "facts":
        length = min(length, data.prompt_max)
    return length, data.batch_size * length


def _build(config: Config, geometry: PretrainedConfig) -> tuple[Any, Any, AttentionGates | None]:
    """Make the model on the meta device, the same with LoRA if that is trained, and its gates, if there are any."""
    stored, trusted = getattr(torch, config.model.dtype), config.model.trust_remote_code
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(geometry, dtype=stored, trust_remote_code=trusted)
        base.requires_grad_(False)
        gates = None if config.train == "lora" else AttentionGates(geometry, config.gate)
        return base, base if config.train == "gates" else models.add_lora(base, config.lora), gates


def _measured_tflops(config: Config) -> float:
    """Multiply matrices for half a second in the precision of the run."""
    device = "cpu" if config.trainer.accelerator == "cpu" or not torch.cuda.is_available() else "cuda"
    size = 512 if device == "cpu" else 8192
    matrix = torch.randn(size, size, device=device).to(_dtype(config))
    timer = Timer("matrix @ matrix", globals={"matrix": matrix}, num_threads=torch.get_num_threads())
    seconds: float = timer.blocked_autorange(min_run_time=0.5).median
    return 2 * size**3 / seconds / 1e12

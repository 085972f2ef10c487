"""Memory and time of a training step, computed without weights or a GPU: ``python -m ag.plan recipe=NAME``.

The closed form of a decoder like Llama's, for rows of T tokens. A hidden state has d numbers of s bytes each between
layers. Matrices are multiplied in a type of e bytes. Attention has H query and Hkv KV heads of D numbers, the MLP I
inner units. For each token the graph of a layer keeps these bytes:

- each norm (two of d numbers, further norms of queries and keys): 4 a number, a float32 copy of its input;
- attention: ``e (2 H + 2 Hkv) D`` for queries, keys, values and outputs, and 4 H for the sums of its softmax;
- a gated MLP: ``3 e I`` for both products and the activation; an MLP without a gate: ``e I`` for the first product;
  experts: only the experts of a token count, and e d for the output of each;
- each trained matrix: its input. LoRA's A has the input of the adapted matrix, its B the rank. Autocast makes a copy
  for each matrix; in float32 throughout, matrices with a common input share it;
- a gate: the input of each of its matrices, the output of the first of several (queries, keys and values, whose
  mixture enters the last), and 16 Hkv for its logits, two sigmoids of them and the flags.

A weight takes 2 operations forward, 2 backward to its input, and 2 more if it is trained. A query sees ``T / 2`` keys
in the mean, fewer under a window; each key takes ``4 H D`` for two products forward, and ``10 H D`` for five backward.

Checkpointing keeps, for each layer and token, s d for the layer's input, and for a gate 12 Hkv for its logits, their
sigmoids and the flags. With and without it, the last norm keeps 4 d + s d, and a teacher's states s d. If gates alone
are trained, the layers below the first gate have no graph.

At its peak the backward pass also has the gradient of a hidden state, s d, and the larger of two numbers: in the MLP
3 e I, for the gradients of the product that enters its last matrix and of both factors; in the last norm 20 d, for five
float32 copies. Under checkpointing the peak is in an MLP, with the whole graph of its layer, whose forward pass has run
again up to its last kept number: in Llama's layers everything before the last matrix.
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
from ag.config.data import FactsConfig, SplitConfig, WorkedConfig
from ag.data.facts import TRAIN_ROWS as FACTS
from ag.data.problems import TRAIN_ROWS as PROBLEMS
from ag.data.templates import TASKS
from ag.errors import UserError, first_line
from ag.gates.gate import AttentionGate, AttentionGates
from ag.hardware import Card
from ag.model import base as models
from ag.model import configurations, random_base
from ag.model.geometry import attention_layers, fingerprint, kv_heads
from ag.model.structure import attention_of, decoder_of

AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
GIB = 1 << 30
USABLE = 0.85  # part of a device's memory that a plan may fill; see docs/planning.md
TFLOPS = 70  # 10^12 operations a second of a GPU like an RTX 4090 in training
GENERATED = {"facts": FACTS, "worked": PROBLEMS}  # training rows without data.train_samples
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)  # a nibble, an 8-bit maximum per 64 weights, a float32 per 256 maxima


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one GPU by part, and the work of one step."""

    parameters: dict[str, int]  # number of parameters of base, gates, LoRA
    memory: dict[str, float]  # bytes by part under the configuration's settings; their sum is a step's peak
    activations: tuple[float, float]  # bytes kept for the backward pass, without and with checkpointing
    kv_cache: int  # bytes of a full KV cache of one row, for inference
    flops: float  # operations of one optimiser step on one GPU
    tokens: int  # tokens of one optimiser step on all GPUs

    @property
    def total(self) -> float:
        """Peak bytes of a step."""
        return sum(self.memory.values())


def plan(config: Config) -> MemoryPlan:
    """Compute the memory and the work of a training step.

    All rows are assumed full: ``data.batch_size`` rows of the longest length that the data settings allow.

    Args:
        config: a whole configuration; ``model.name`` may also be the path of a JSON file with a model's configuration.

    Raises:
        ModelError: the model's configuration cannot be read.
        UserError: the run uses replay, whose steps run a response alone.
    """
    if config.loss.replay:
        raise UserError(
            "loss.replay=true: a plan is of steps that run whole rows, and a step of replay takes less: expected "
            "loss.replay=false, for an upper bound."
        )
    geometry = read_geometry(config)
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
    attending = attention_layers(decoder.config)  # gates count these layers alone
    gate_layer_indices = {index: gate_layer_index for gate_layer_index, index in enumerate(attending)}
    layers = [
        _layer(config, shape, length, layer, gates, gate_layer_indices.get(n)) for n, layer in enumerate(decoder.layers)
    ]
    layers_with_graph = (
        layers[attending[gates.layer_indices[0]] :] if gates is not None and config.train == "gates" else layers
    )
    storage_bytes, product_bytes = getattr(torch, config.model.dtype).itemsize, _dtype(config).itemsize
    teacher, width = config.loss.objective == "kl", shape["hidden_size"]
    state = storage_bytes * width
    rotations = 2 * length * shape["head_dim"] * storage_bytes
    last = tokens * (4 * width + state * (1 + teacher)) + rotations
    without_checkpointing = last + sum(tokens * layer.saved + layer.copies for layer in layers_with_graph)
    count = 0 if gates is None else len(gates.layers)
    checkpointed = last + tokens * (state * len(layers) + 12 * shape["num_kv_heads"] * count)
    largest_layer = max(layers_with_graph, key=lambda layer: layer.saved)
    working = state + 3 * product_bytes * largest_layer.inner
    forward = sum(layer.forward for layer in layers)
    backward = sum(layer.backward for layer in layers_with_graph)
    flops = tokens * (forward * (1 + (teacher or config.loss.draws_share)) + backward)
    checkpointing = config.model.gradient_checkpointing
    if checkpointing:
        temporary = tokens * (largest_layer.saved + working) + largest_layer.copies
        flops += tokens * sum(layer.recomputed for layer in layers_with_graph)
    else:
        temporary = tokens * max(working, state + 20 * width)

    # the head
    loss_tokens = min(loss_tokens, config.loss.sampled_tokens or loss_tokens)
    chunk = min(config.loss.chunk_tokens, loss_tokens)
    # bytes of a logit: its own type and float32, log-softmax, and their gradients; then the teacher's bytes
    logit = 12 + (product_bytes != 4) * 2 * product_bytes + teacher * (product_bytes + 8 + (product_bytes != 4) * 4)
    passes = 2 if loss_tokens <= chunk else 3  # forward, backward to the states; each chunk is computed again
    flops += passes * 2 * loss_tokens * vocabulary * width
    return MemoryPlan(
        parameters={"base": sum(p.numel() for p in frozen)}
        | {name: sum(p.numel() for p in group) for name, group in trained.items()},
        memory=sizes
        | states
        | {
            "activations": checkpointed if checkpointing else without_checkpointing,
            "logits or temporary": max(chunk * vocabulary * logit, temporary),
        },
        activations=(without_checkpointing, checkpointed),
        kv_cache=sum(x.number * (x.key + x.value) for x in kv_heads(geometry)) * length * product_bytes,
        flops=config.trainer.accumulate * flops,
        tokens=world * config.trainer.accumulate * tokens,
    )


def report(config: Config, tflops: float | None = None, card: Card | None = None) -> str:
    """Return the plan as a table.

    Args:
        config: a whole configuration.
        tflops: 10^12 operations a second of one device. None: measured here.
        card: the device, for a verdict on training and inference. None: no verdict.
    """
    step_plan = plan(config)
    source = "measured on matrix products here: a lower bound" if tflops is None else "given"
    tflops = _measured_tflops(config) if tflops is None else tflops
    seconds = step_plan.flops / tflops / 1e12
    counts = ", ".join(f"{name} {count / 1e6:,.1f} M" for name, count in step_plan.parameters.items())
    gpus = config.trainer.devices * config.trainer.num_nodes
    count = steps(config)
    run_lines = [] if count is None else [f"the run: {count:,} steps, at most {duration(count * seconds)}"]
    plain, kept = step_plan.activations
    sizes = {f"  {name}": size for name, size in {**step_plan.memory, "peak of a step": step_plan.total}.items()}
    sizes |= {"activations without checkpointing": plain, "activations with checkpointing": kept}
    sizes |= {"KV cache of one row, full": step_plan.kv_cache}
    return "\n".join(
        [
            f"{config.model.name} on {gpus} x {config.trainer.strategy}; parameters: {counts}",
            "",
            f"{'memory per device':<34}     GiB",
            *(f"{name:<34}{size / GIB:>8.2f}" for name, size in sizes.items()),
            "",
            f"one step: {step_plan.tokens:,} tokens, {step_plan.flops / 1e12:,.3g} tera-operations per device",
            f"at {tflops:.3g} tera-operations a second ({source}): {seconds:.3g} s a step, "
            f"{step_plan.tokens / seconds:,.0f} tokens a second on all devices",
            *run_lines,
            *([] if card is None else _verdict(step_plan, card)),
        ]
    )


def _verdict(step_plan: MemoryPlan, card: Card) -> list[str]:
    """Say whether a step fits a device, and how many whole rows its memory holds without training."""
    usable, needed = USABLE * card.gib, step_plan.total / GIB
    answer = "yes" if needed <= usable else "no"
    weights = step_plan.memory["base weights"]
    num_rows = max(0, int((usable * GIB - weights) // step_plan.kv_cache))
    return [
        f"training fits {card.name}: {answer}, {needed:.1f} of {usable:.1f} GiB usable ({USABLE:.0%} of {card.gib:g})",
        f"inference: {weights / GIB:.1f} GiB of weights, and room for the whole KV caches of {num_rows:,} rows",
    ]


def steps(config: Config) -> int | None:
    """Return the optimiser steps of a run. None: the number of rows is known only after reading the data."""
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
    """Return a time in hours, or in minutes if it is less than an hour."""
    return f"{seconds / 3600:.1f} hours" if seconds >= 3600 else f"{seconds / 60:.1f} minutes"


class _Layer(NamedTuple):
    """Bytes and operations per token of a layer and its gate."""

    saved: float  # bytes kept for the backward pass
    inner: float  # numbers that enter the last product of the MLP
    copies: float  # bytes of the weights that autocast converted, independent of the number of tokens
    forward: float  # operations of the forward pass
    recomputed: float  # operations of the forward pass that checkpointing repeats
    backward: float  # operations of the backward pass


def _layer(
    config: Config,
    shape: dict[str, Any],
    length: int,
    layer: Any,
    gates: AttentionGates | None,
    attending_index: int | None,
) -> _Layer:
    """Count a layer of the adapted model of this shape, and the layer's gate, if any.

    ``attending_index`` is the layer's index among the layers that attend. None: it does not attend.
    """
    width, head_dim = shape["hidden_size"], shape["head_dim"]
    heads = (shape["num_heads"] + shape["num_kv_heads"]) * head_dim
    product, stored = _dtype(config).itemsize, getattr(torch, config.model.dtype).itemsize
    mixed = config.trainer.precision in AUTOCAST
    e = product if mixed else 4  # bytes of a number that gates and adapters compute with
    attention = attention_of(layer)  # None: the matrices below hold all its operations
    experts = getattr(getattr(attention, "config", None), "num_experts_per_tok", None) or 0
    stacks = sum(p.numel() / len(p) * experts for p in layer.parameters() if p.ndim == 3)

    linear = {name: m.weight for name, m in layer.named_modules() if isinstance(m, nn.Linear)}
    mlp = {n: w for n, w in linear.items() if not n.startswith("self_attn.") and not w.requires_grad}
    *up_weights, down_weight = mlp.values() if mlp else (torch.empty(0, 0),)
    inner, up_numbers = down_weight.shape[1], sum(w.shape[0] for w in up_weights)
    mlp_numbers = up_numbers + inner * (up_numbers > inner) + stacks / width + experts * width
    norms = [p.numel() for name, p in layer.named_parameters() if "norm" in name and p.ndim == 1]
    norm_numbers = sum(heads / 2 if n == head_dim else n for n in norms)  # norms of heads are in pairs
    # the output of the last matrix is not kept if no norm or adapter follows
    output_is_dropped = norms.count(width) <= 2 and not stacks and mlp and not list(mlp)[-1].endswith("base_layer")
    saved = 4 * norm_numbers + product * (2 * heads + mlp_numbers) + 4 * shape["num_heads"]
    num_keys = 0 if attention is None else _keys(length, getattr(attention, "sliding_window", None))
    products = 4 * shape["num_heads"] * head_dim * num_keys

    kept_inputs: dict[Any, int] = {}  # kept numbers of the inputs of trained matrices, by input
    blocks = {name: (f"{name}.".split(".")[0], f"{name}.".split(".")[1]) for name in linear}  # block and matrix of each
    last_parts = dict(blocks[name] for name, w in linear.items() if not w.requires_grad)
    for name, weight in linear.items():
        block, part = blocks[name]
        input_is_shared = not mixed and stored == 4 and "lora_A" in name
        if weight.requires_grad:
            kept_inputs[(block, part == last_parts[block]) if input_is_shared else name] = weight.shape[1]
    if gates is not None and str(attending_index) in gates.layers:
        gate: Any = gates.layers[str(attending_index)]
        gate_weights = {f"gate.{name}": m.weight for name, m in gate.named_modules() if isinstance(m, nn.Linear)}
        input_matrices = [name for name, w in gate_weights.items() if w.shape[1] == width]
        num_outputs = sum(gate_weights[name].shape[0] for name in input_matrices)
        saved += 16 * shape["num_kv_heads"] + e * num_outputs * (len(input_matrices) < len(gate_weights))
        if type(gate).mix is AttentionGate.mix:
            num_keys = length if gate.config.scope == "prompt" else _keys(length, gate.config.window)
            products += 4 * gate.config.num_heads * gate.config.head_dim * num_keys
        linear |= gate_weights
        # in float32 throughout a gate shares the input of the layer's attention
        shared = set() if mixed else {*input_matrices}
        kept_inputs |= {("self_attn", False) if n in shared else n: w.shape[1] for n, w in gate_weights.items()}
    trained = sum(w.numel() for w in linear.values() if w.requires_grad)
    weights = sum(w.numel() for w in linear.values()) + stacks
    return _Layer(
        saved=saved + e * sum(kept_inputs.values()),
        inner=inner + stacks / 3 / width,
        copies=product * mixed * (trained if stored == product else weights),
        forward=2 * weights + products,
        recomputed=2 * (weights - (down_weight.numel() if output_is_dropped else 0)) + products,
        backward=2 * (weights + trained) + 2.5 * products,
    )


def _keys(length: int, window: int | None) -> float:
    """Return the mean number of keys that a query sees. A window of None or 0: no window."""
    num_keys = min(window or length, length)
    return num_keys - num_keys * num_keys / (2 * length)


def _dtype(config: Config) -> torch.dtype:
    """Return the dtype of matrix products."""
    dtype: torch.dtype = AUTOCAST.get(config.trainer.precision, getattr(torch, config.model.dtype))
    return dtype


def read_geometry(config: Config) -> PretrainedConfig:
    """Read the configuration of ``model.name``: of random weights, from the package, a JSON file, a folder or the hub.

    Raises:
        ModelError: there is no configuration.
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
        geometry: PretrainedConfig = AutoConfig.from_pretrained(
            path, revision=config.model.revision, trust_remote_code=config.model.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise models.ModelError(
            f"model.name={name!r} has no configuration to plan with ({first_line(error)}): give a hub id "
            "that can be reached, a folder or a config.json"
        ) from error
    return geometry


def _row(config: Config, context: int) -> tuple[int, int]:
    """Return the tokens of the longest row, and the number of a batch's tokens with loss."""
    data = config.data
    length = min(data.max_length, context)
    if isinstance(data, SplitConfig):
        length = min(length, data.prompt_max + data.continuation)
        return length, data.batch_size * data.continuation
    if isinstance(data, WorkedConfig):
        return length, data.batch_size * min(length, data.solution_max)
    if isinstance(data, FactsConfig):
        length = min(length, data.prompt_max)
    return length, data.batch_size * length


def _build(config: Config, geometry: PretrainedConfig) -> tuple[Any, Any, AttentionGates | None]:
    """Make on the meta device the base model, the model with LoRA if that is trained, and the gates, if any."""
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

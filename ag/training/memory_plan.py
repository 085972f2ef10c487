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
are trained, the layers below the first gate have no graph. Under ``loss.objective=regress`` no layer has one: only what
the gates keep and their backward pass count, and there are no logits.

At its peak the backward pass also has the gradient of a hidden state, s d, and the larger of two numbers: in the MLP
3 e I, for the gradients of the product that enters its last matrix and of both factors; in the last norm 20 d, for five
float32 copies. Under checkpointing the peak is in an MLP, with the whole graph of its layer, whose forward pass has run
again up to its last kept number: in Llama's layers everything before the last matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ag.config import Config
from ag.config.data import FactsConfig, SftConfig, SplitConfig, WorkedConfig
from ag.config.loss import REGRESS
from ag.data.lengths import RowSample
from ag.data.templates import TASKS
from ag.errors import UserError
from ag.hardware import Card
from ag.training.outline import ITEM_BYTES, LayerOutline, Matrix, Outline, read_outline

AUTOCAST = {"bf16-mixed": "bfloat16", "16-mixed": "float16"}  # type of matrix products by precision
GIB = 1 << 30
USABLE = 0.85  # part of a device's memory that a plan may fill; see docs/planning.md
TFLOPS = 70  # 10^12 operations a second of a GPU like an RTX 4090 in training
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)  # a nibble, an 8-bit maximum per 64 weights, a float32 per 256 maxima


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one GPU by part, and the work of one step."""

    parameters: dict[str, int]  # number of parameters of base, gates, LoRA
    memory: dict[str, float]  # bytes by part under the configuration's settings; their sum is a step's peak
    activations: tuple[float, float]  # bytes kept for the backward pass, without and with checkpointing
    weights: float  # bytes of the whole base weights on one device, for inference
    kv_cache: int  # bytes of a full KV cache of one row, for inference
    flops: float  # operations of one optimiser step on one GPU
    tokens: int  # tokens of one optimiser step on all GPUs, padding included

    @property
    def total(self) -> float:
        """Peak bytes of a step."""
        return sum(self.memory.values())


def plan(config: Config, row: tuple[float, float] | None = None) -> MemoryPlan:
    """Compute the memory and the work of a training step.

    Args:
        config: a whole configuration; ``model.name`` may also be the path of a JSON file with a model's configuration.
        row: the tokens of each of the ``data.batch_size`` rows, and how many of them carry loss, at most as many as of
            a full row. None: all rows are assumed full, of the longest length that the data settings allow.

    Raises:
        ModelError: the model's configuration cannot be read.
        UserError: the run uses replay, whose steps run a response alone.
    """
    if config.loss.replay:
        raise UserError(
            "loss.replay=true: a plan is of steps that run whole rows, and a step of replay takes less: expected "
            "loss.replay=false, with warmup.rounds=0 and warmup.target=attention, for an upper bound."
        )
    model = outline_of(config)
    full_length, loss_tokens = _full_row(config, model.context)
    length: float = full_length
    if row is not None:
        length, loss_tokens = row[0], min(loss_tokens, config.data.batch_size * row[1])
    tokens = config.data.batch_size * length

    base_nbytes = _base_nbytes(config, model)

    # the layers
    gate_of = {model.attending[index]: gate for index, gate in model.gates.items()}
    regresses = config.loss.objective == REGRESS
    count_layer = _regressed_layer if regresses else _layer
    layers = [count_layer(config, model, length, layer, gate_of.get(n)) for n, layer in enumerate(model.layers)]
    layers_with_graph = layers[min(gate_of) :] if config.train == "gates" else layers
    stored_bytes, product_bytes = ITEM_BYTES[config.model.dtype], _product_bytes(config)
    teacher, width = config.loss.objective == "kl", model.width
    state = stored_bytes * width
    rotations = 2 * length * model.head_dim * stored_bytes
    last = 0 if regresses else tokens * (4 * width + state * (1 + teacher)) + rotations
    without_checkpointing = last + sum(tokens * layer.saved + layer.copies for layer in layers_with_graph)
    checkpointed = last + tokens * (state * len(layers) + 12 * model.num_kv_heads * len(model.gates))
    largest_layer = max(layers_with_graph, key=lambda layer: layer.saved)
    working = state + 3 * product_bytes * largest_layer.inner
    forward = sum(layer.forward for layer in layers)
    backward = sum(layer.backward for layer in layers_with_graph)
    dense_passes = int(teacher or config.loss.draws_share)
    if teacher and config.loss.draws_share and config.train != "gates":  # with adapters, and without
        dense_passes = 2
    flops = tokens * (forward * (1 + dense_passes) + backward)
    checkpointing = config.model.gradient_checkpointing and not regresses
    if checkpointing:
        temporary = tokens * (largest_layer.saved + working) + largest_layer.copies
        flops += tokens * sum(layer.recomputed for layer in layers_with_graph)
    else:
        temporary = tokens * max(working, state + 20 * width)

    # the head
    loss_tokens = 0 if regresses else min(loss_tokens, config.loss.sampled_tokens or loss_tokens)
    chunk = min(config.loss.chunk_tokens, loss_tokens)
    # bytes of a logit: its own type and float32, log-softmax, and their gradients; then the teacher's bytes
    logit = 12 + (product_bytes != 4) * 2 * product_bytes + teacher * (product_bytes + 8 + (product_bytes != 4) * 4)
    passes = 2 + teacher  # forward, and backward to the states
    flops += passes * 2 * loss_tokens * model.vocabulary * width
    return MemoryPlan(
        parameters=dict(model.counts),
        memory=_weight_memory(config, model, base_nbytes)
        | {
            "activations": checkpointed if checkpointing else without_checkpointing,
            "logits or temporary": max(chunk * model.vocabulary * logit, temporary),
        },
        activations=(without_checkpointing, without_checkpointing if regresses else checkpointed),
        weights=base_nbytes,
        kv_cache=model.kv_count * full_length * stored_bytes,  # a model that is loaded for inference has no autocast
        flops=config.trainer.accumulate * flops,
        tokens=round(config.trainer.world_size * config.trainer.accumulate * tokens),
    )


def _base_nbytes(config: Config, model: Outline) -> float:
    """Return the bytes of the whole base weights, in NF4 if the configuration says so."""
    nbytes: float = model.nbytes["base"]
    if config.model.quantization == "nf4":
        nbytes += model.linear_count * NF4_BYTES - model.linear_nbytes
    return nbytes


def _weight_memory(config: Config, model: Outline, base: float) -> dict[str, float]:
    """Return the bytes per device of weights, gradients and optimiser states; ``base`` is of the whole base weights."""
    trained = ("gates", "LoRA")
    sizes = {"base weights": base} | {name: float(model.nbytes[name]) for name in trained}
    learned, world = sizes["gates"] + sizes["LoRA"], config.trainer.world_size
    states = {"gradients": learned, "optimiser": 2 * learned}
    if config.trainer.strategy == "fsdp2":
        layer_weights = base - model.outside_nbytes
        gathered = 2 * (layer_weights + learned) / len(model.attending)  # this layer and the next
        sizes = {"base weights": model.outside_nbytes + layer_weights / world} | {x: sizes[x] / world for x in trained}
        states = {name: size / world for name, size in states.items()} | {"gathered layers": gathered}
    elif world > 1:
        states["all-reduce buckets"] = learned
    return sizes | states


def outline_of(config: Config) -> Outline:
    """Return the sizes of a run's model; raises as :func:`ag.training.made_outline.make_outline` does."""
    outline = read_outline(config)
    if outline is None:
        from ag.training.made_outline import make_outline  # loads torch and transformers, which takes seconds

        outline = make_outline(config)
    return outline


def report(
    config: Config,
    tflops: float | Literal["here"] | None = None,
    card: Card | None = None,
    rows: RowSample | str | None = None,
) -> str:
    """Return the plan as a table.

    Args:
        config: a whole configuration.
        tflops: 10^12 operations a second of one device; ``here`` measures them. None: the table has no time.
        card: the device, for a verdict on training and inference. None: no verdict.
        rows: lengths of the data's rows, or why there are none. None: the table does not mention rows.
    """
    step_plan = full_plan = plan(config)
    row_lines = []
    if isinstance(rows, RowSample):
        step_plan = plan(config, (rows.mean_batch_length, rows.with_loss))
        longest = plan(config, (rows.longest, rows.longest))
        row_lines += [
            f"this memory is of full rows; rows of {rows.longest:,} tokens, the longest of the first {rows.count:,}, "
            f"take {longest.total / GIB:.2f} GiB",
            f"tokens of a step: the first {rows.count:,} rows of {rows.name} have {rows.mean:,.0f} tokens in the mean, "
            f"and batches are padded to {rows.mean_batch_length:,.0f}",
        ]
    elif rows is not None:
        row_lines.append(f"tokens of a step: all rows are full, because {rows}")
    counts = ", ".join(f"{name} {count / 1e6:,.1f} M" for name, count in full_plan.parameters.items())
    gpus = config.trainer.world_size
    plain, kept = full_plan.activations
    sizes = {f"  {name}": size for name, size in {**full_plan.memory, "peak of a step": full_plan.total}.items()}
    sizes |= {"activations without checkpointing": plain, "activations with checkpointing": kept}
    sizes |= {"KV cache of one row, full": full_plan.kv_cache}
    return "\n".join(
        [
            f"{config.model.name} on {gpus} x {config.trainer.strategy}; parameters: {counts}",
            "",
            f"{'memory per device':<34}     GiB",
            *(f"{name:<34}{size / GIB:>8.2f}" for name, size in sizes.items()),
            "",
            *row_lines,
            f"one step: {step_plan.tokens:,} tokens, {step_plan.flops / 1e12:,.3g} tera-operations per device",
            *_times(config, step_plan, tflops, "about" if isinstance(rows, RowSample) else "at most"),
            *([] if card is None else _verdict(full_plan, card)),
        ]
    )


def _times(config: Config, step_plan: MemoryPlan, tflops: float | Literal["here"] | None, bound: str) -> list[str]:
    """Say how long a step and the run take, or how to learn it."""
    count = steps(config)
    if tflops is None:
        number = "" if count is None else f"the run: {count:,} steps; "
        return [
            f"{number}for its time give tflops=NUMBER, the tera-operations a second that one device reaches in "
            f"training, such as {TFLOPS}, or tflops=here, which measures this machine"
        ]
    source = "given"
    if tflops == "here":
        source, bound = "measured on matrix products here: a lower bound of the time", "about"
        tflops = _measured_tflops(config)
    seconds = step_plan.flops / tflops / 1e12
    run_lines = [] if count is None else [f"the run: {count:,} steps, {bound} {duration(count * seconds)}"]
    speed = f"{step_plan.tokens / seconds:,.0f} tokens a second on all devices"
    return [f"at {tflops:.3g} tera-operations a second ({source}): {seconds:.3g} s a step, {speed}", *run_lines]


def _verdict(step_plan: MemoryPlan, card: Card) -> list[str]:
    """Say whether a step fits a device, and how many whole rows its memory holds without training."""
    usable, needed = USABLE * card.gib, step_plan.total / GIB
    answer = "yes" if needed <= usable else "no"
    weights = step_plan.weights
    num_rows = max(0, int((usable * GIB - weights) // step_plan.kv_cache))
    return [
        f"training fits {card.name}: {answer}, {needed:.1f} of {usable:.1f} GiB usable ({USABLE:.0%} of {card.gib:g})",
        f"inference: {weights / GIB:.1f} GiB of weights, and room for the whole KV caches of {num_rows:,} rows",
    ]


def steps(config: Config) -> int | None:
    """Return the optimiser steps of a run. None: the number of rows is known only after reading the data."""
    trainer, data, sizes = config.trainer, config.data, [config.data.train_samples]
    if trainer.max_steps >= 0:
        return trainer.max_steps
    if isinstance(data, SftConfig) and data.name in TASKS and data.root is None:  # a local folder may hold other rows
        sizes.append(TASKS[data.name].train_rows)
    elif isinstance(data, FactsConfig | WorkedConfig) and sizes == [None]:
        sizes.append(data.DEFAULT_TRAIN_ROWS)
    rows = min((size for size in sizes if size is not None), default=None)
    if rows is None:
        return None
    batches = rows // (data.batch_size * trainer.world_size)
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
    config: Config, model: Outline, length: float, layer: LayerOutline, gate: Mapping[str, Matrix] | None
) -> _Layer:
    """Count a layer of the adapted model, and its gate; a gate of None means that the layer has none."""
    width, head_dim = model.width, model.head_dim
    heads = (model.num_heads + model.num_kv_heads) * head_dim
    product_bytes, stored_bytes = _product_bytes(config), ITEM_BYTES[config.model.dtype]
    mixed = config.trainer.precision in AUTOCAST
    trained_bytes = product_bytes if mixed else 4  # of a number that gates and adapters compute with

    linear = dict(layer.linear)
    mlp = {n: w for n, w in linear.items() if not n.startswith("self_attn.") and not w.trained}
    *up_weights, down_weight = mlp.values() if mlp else (Matrix(0, 0),)
    inner, up_numbers = down_weight.inputs, sum(w.outputs for w in up_weights)
    mlp_numbers = up_numbers + inner * (up_numbers > inner) + layer.expert_count / width + layer.experts * width
    norm_numbers = sum(heads / 2 if n == head_dim else n for n in layer.norms)  # norms of heads are in pairs
    # the output of the last matrix is not kept if no norm or adapter follows
    output_is_dropped = (
        layer.norms.count(width) <= 2 and not layer.expert_count and mlp and not list(mlp)[-1].endswith("base_layer")
    )
    saved = 4 * norm_numbers + product_bytes * (2 * heads + mlp_numbers) + 4 * model.num_heads
    products = 4 * model.num_heads * head_dim * (_keys(length, layer.window) if layer.attends else 0)

    kept_inputs: dict[Any, int] = {}  # kept numbers of the inputs of trained matrices, by input
    blocks = {name: (f"{name}.".split(".")[0], f"{name}.".split(".")[1]) for name in linear}  # block and matrix of each
    last_parts = dict(blocks[name] for name, w in linear.items() if not w.trained)
    for name, weight in linear.items():
        block, part = blocks[name]
        input_is_shared = not mixed and stored_bytes == 4 and "lora_A" in name
        if weight.trained:
            kept_inputs[(block, part == last_parts.get(block)) if input_is_shared else name] = weight.inputs
    if gate is not None:
        gate_config = config.gate.sized(width)
        gate_weights = {f"gate.{name}": weight for name, weight in gate.items()}
        input_matrices = [name for name, w in gate_weights.items() if w.inputs == width]
        num_outputs = sum(gate_weights[name].outputs for name in input_matrices)
        saved += 16 * model.num_kv_heads + trained_bytes * num_outputs * (len(input_matrices) < len(gate_weights))
        if model.gates_attend:
            num_keys = length if gate_config.scope == "prompt" else _keys(length, gate_config.window)
            products += 4 * gate_config.num_heads * gate_config.head_dim * num_keys
        linear |= gate_weights
        # in float32 throughout a gate shares the input of the layer's attention
        shared = set() if mixed else {*input_matrices}
        kept_inputs |= {("self_attn", False) if n in shared else n: w.inputs for n, w in gate_weights.items()}
    trained = sum(w.count for w in linear.values() if w.trained)
    weights = sum(w.count for w in linear.values()) + layer.expert_count
    return _Layer(
        saved=saved + trained_bytes * sum(kept_inputs.values()),
        inner=inner + layer.expert_count / 3 / width,
        copies=product_bytes * mixed * (trained if stored_bytes == product_bytes else weights),
        forward=2 * weights + products,
        recomputed=2 * (weights - (down_weight.count if output_is_dropped else 0)) + products,
        backward=2 * (weights + trained) + 2.5 * products,
    )


def _regressed_layer(
    config: Config, model: Outline, length: float, layer: LayerOutline, gate: Mapping[str, Matrix] | None
) -> _Layer:
    """Count a layer whose gate has a graph of its own: the backward pass ends at the gate's input."""
    gated, ungated = _layer(config, model, length, layer, gate), _layer(config, model, length, layer, None)
    return gated._replace(
        saved=gated.saved - ungated.saved,
        copies=gated.copies - ungated.copies,
        backward=gated.backward - ungated.backward,
    )


def _keys(length: float, window: int | None) -> float:
    """Return the mean number of keys that a query sees. A window of None or 0: no window."""
    num_keys = min(window or length, length)
    return num_keys - num_keys * num_keys / (2 * length)


def _product_bytes(config: Config) -> int:
    """Return the bytes of a number in matrix products."""
    return ITEM_BYTES[AUTOCAST.get(config.trainer.precision, config.model.dtype)]


def _full_row(config: Config, context: int) -> tuple[int, float]:
    """Return the tokens of the longest row, and the number of a batch's tokens with loss."""
    data = config.data
    length = min(data.max_length, context)
    if isinstance(data, SplitConfig):
        length = min(length, data.prompt_max + data.continuation)
        return length, data.batch_size * data.continuation
    if isinstance(data, WorkedConfig):
        return length, data.batch_size * min(length, data.solution_max)
    return length, data.batch_size * length


def _measured_tflops(config: Config) -> float:
    """Multiply matrices for half a second here, in the precision of the run; returns 10^12 operations a second."""
    import torch
    from torch.utils.benchmark import Timer

    device = "cpu" if config.trainer.accelerator == "cpu" or not torch.cuda.is_available() else "cuda"
    size = 512 if device == "cpu" else 8192
    dtype: torch.dtype = getattr(torch, AUTOCAST.get(config.trainer.precision, config.model.dtype))
    matrix = torch.randn(size, size, device=device).to(dtype)
    timer = Timer("matrix @ matrix", globals={"matrix": matrix}, num_threads=torch.get_num_threads())
    seconds: float = timer.blocked_autorange(min_run_time=0.5).median
    return 2 * size**3 / seconds / 1e12

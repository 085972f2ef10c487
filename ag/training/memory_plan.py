"""Memory and time of a training step, computed without weights or a GPU: ``python -m ag.fit recipe=NAME plan=true``.

The step of :class:`ag.training.module.GatedLM` runs on fake tensors, which have shapes, types and lifetimes but no
contents, on a model with the first one and two layers of each kind; what a layer adds is multiplied by the number of
layers.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.benchmark import Timer
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from ag.config import Config
from ag.gates.gate import AttentionGates
from ag.gates.gating import Dense, Gating
from ag.kernels.gated_attention import chunked
from ag.model import base as models
from ag.model import random_base
from ag.model.hooks import decoder_of, instrument

GIB = 1 << 30
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)  # a nibble, an 8-bit maximum per 64, a float32 per 256 of those
AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


KNOWN, ATEN = flop_counter.flop_registry, torch.ops.aten
FLOPS: dict[Any, Any] = KNOWN | {  # PyTorch knows the attention of GPUs only, which does the same work
    ATEN._scaled_dot_product_flash_attention_for_cpu: KNOWN[ATEN._scaled_dot_product_flash_attention],
    ATEN._scaled_dot_product_flash_attention_for_cpu_backward: KNOWN[ATEN._scaled_dot_product_flash_attention_backward],
}


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one GPU by part, and the work of one step.

    Attributes:
        parameters: numbers of parameters: ``base``, ``gates``, ``lora``.
        memory: bytes by part, under the settings of the configuration; their sum is the peak of a step.
        activations: bytes kept for the backward pass, without and with ``model.gradient_checkpointing``.
        kv_cache: bytes of a full KV cache of one row, for inference.
        flops: operations of one optimiser step on one GPU.
        tokens: tokens of one optimiser step on all GPUs.
    """

    parameters: dict[str, int]
    memory: dict[str, float]
    activations: tuple[float, float]
    kv_cache: int
    flops: float
    tokens: int

    @property
    def total(self) -> float:
        """Bytes of the peak of a step."""
        return sum(self.memory.values())


@dataclass(frozen=True)
class Step:
    """One batch through all layers: bytes kept for the backward pass, further bytes at its peak, operations."""

    saved: float
    temporary: float
    flops: float


def steps(config: Config) -> tuple[Step, Step]:
    """Measure a batch on fake tensors, without and with checkpointing of activations; the loss is not in it."""
    geometry = model_config(config)
    length, _ = _row(config, geometry)
    plain, kept = (_whole_step(config, geometry, length, checkpointing) for checkpointing in (False, True))
    return plain, kept


def plan(config: Config, measured: tuple[Step, Step] | None = None) -> MemoryPlan:
    """Compute the memory and the work of a training step.

    The rows are taken to be full: ``data.batch_size`` of the longest length that the data settings allow.

    Args:
        config: a whole configuration; ``model.name`` may also be the path of a JSON file with a model's configuration.
        measured: the result of :func:`steps`, which does not depend on ``trainer.devices`` and ``trainer.strategy``.

    Raises:
        ModelError: the model's configuration cannot be read.
    """
    geometry = model_config(config)
    length, loss_tokens = _row(config, geometry)
    base, adapted, gates = _build(config, geometry)
    counts, sizes = _weights(config, base, adapted, gates)
    plain, kept = measured or steps(config)
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
    chunk = min(config.loss.chunk_tokens, loss_tokens)
    vocabulary = geometry.get_text_config().vocab_size
    logits = chunk * vocabulary * _logit_bytes(config)
    head_flops = 2 * loss_tokens * vocabulary * geometry.get_text_config().hidden_size
    passes = 2 if loss_tokens <= chunk else 3  # forward, backward to the states; each chunk is computed again
    text = gates.fingerprint if gates is not None else AttentionGates(geometry, config.gate).fingerprint
    row = 2 * text["num_layers"] * text["num_kv_heads"] * text["head_dim"] * length
    element = torch.finfo(AUTOCAST.get(config.trainer.precision, getattr(torch, config.model.dtype))).bits // 8
    return MemoryPlan(
        parameters=counts,
        memory=sizes | states | {"activations": step.saved, "logits or temporary": max(logits, step.temporary)},
        activations=(plain.saved, kept.saved),
        kv_cache=row * element,
        flops=config.trainer.accumulate * (step.flops + passes * head_flops),
        tokens=world * config.trainer.accumulate * config.data.batch_size * length,
    )


def report(config: Config) -> str:
    """Write the plan as a table; the throughput is ``tflops``, or measured on matrix products here."""
    found = plan(config)
    measured = config.tflops is None
    tflops = _measured_tflops(config) if config.tflops is None else config.tflops
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
    source = "measured on matrix products here: a lower bound" if measured else "given"
    lines += [
        f"one step: {found.tokens:,} tokens, {found.flops / 1e12:,.3g} tera-operations per device",
        f"at {tflops:.3g} tera-operations a second ({source}): {seconds:.3g} s a step, "
        f"{found.tokens / seconds:,.0f} tokens a second on all devices",
    ]
    return "\n".join(lines)


def model_config(config: Config) -> PretrainedConfig:
    """Read the configuration of ``model.name``: a JSON file, a folder, a hub id or the alias.

    Raises:
        ModelError: when there is none.
    """
    name = config.model.name.removeprefix(random_base.PREFIX)
    path = name if name.endswith(".json") and Path(name).is_file() else models.resolve(name, config.model.revision)
    try:
        found: PretrainedConfig = AutoConfig.from_pretrained(
            path, revision=config.model.revision, trust_remote_code=config.model.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise models.ModelError(
            f"model.name={name!r} has no configuration to plan with ({str(error).splitlines()[0]}): give a hub id "
            "that can be reached, a folder or a config.json"
        ) from error
    return found


class _Live(TorchDispatchMode):
    """Counts operations, and the bytes of live storages without those of ``owners``.

    PyTorch's own counter of operations takes longer than the step, and its hooks on modules hold gradients, so that the
    peak is too high.
    """

    def __init__(self, owners: list[nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = self.flops = 0
        self.exact = False  # whether a new peak is made sure of, which takes time
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        for owner in owners:
            for tensor in (*owner.parameters(), *owner.buffers()):
                self._known.add(tensor.untyped_storage())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        formula = FLOPS.get(func._overloadpacket)
        if formula is not None:
            self.flops += int(formula(*args, **kwargs, out_val=out))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor):
                self._count(tensor)
        return out

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage not in self._known:
            self._known.add(storage)
            self.now += storage.nbytes()
            weakref.finalize(storage, self._free, storage.nbytes())
            if self.now > self.peak and self.exact:
                gc.collect()  # recomputation leaves cycles, which hold tensors until Python's collector runs
            self.peak = max(self.peak, self.now)

    def settle(self) -> int:
        """Return the bytes that are live, and count the peak from here on, exactly."""
        gc.collect()
        self.peak, self.exact = self.now, True
        return self.now

    def _free(self, size: int) -> None:
        self.now -= size


class _Full(Gating):
    """Gates over rows that are whole prompts, made without reading values, which fake tensors do not have."""

    def __init__(self, gates: AttentionGates, batch: int, length: int) -> None:
        self.gates, self.hard, self.left_padded = gates, False, False
        self.valid = self.first = self._seen = self._dense_until = None
        self.prompt = torch.ones(batch, length, dtype=torch.bool)
        self._end, self._shift = length, 0.0
        self.logits, self._keep = {}, {}


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


def _build(config: Config, geometry: PretrainedConfig) -> tuple[Any, Any, AttentionGates | None]:
    dtype = getattr(torch, config.model.dtype)
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(
            geometry, dtype=dtype, attn_implementation="sdpa", trust_remote_code=config.model.trust_remote_code
        )
        base.requires_grad_(False)
        gates = None if config.train == "lora" else AttentionGates(geometry, config.gate)
        return base, base if config.train == "gates" else models.add_lora(base, config.lora), gates


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


def _whole_step(config: Config, geometry: PretrainedConfig, length: int, checkpointing: bool) -> Step:
    """Measure two small models and extend them to all layers."""
    layers = geometry.get_text_config().num_hidden_layers
    period = _period(geometry)
    few, more = config.gate.first_layer + period, config.gate.first_layer + 2 * period
    if more >= layers:
        return _step(config, geometry, length, checkpointing, layers)
    small, large = (_step(config, geometry, length, checkpointing, size) for size in (few, more))
    times = (layers - more) / period
    return Step(
        saved=large.saved + times * (large.saved - small.saved),
        temporary=large.temporary,
        flops=large.flops + times * (large.flops - small.flops),
    )


def _period(geometry: PretrainedConfig) -> int:
    """Return the number of layers after which the pattern of their kinds repeats."""
    kinds = getattr(geometry.get_text_config(), "layer_types", None) or []
    return next((p for p in range(1, len(kinds)) if kinds[p:] == kinds[:-p]), 1)


@contextmanager
def _tiles_of_a_gpu() -> Iterator[None]:
    """Let attention under gates work in the larger tiles that it uses on a GPU, though fake tensors are on the CPU."""
    before = chunked.BLOCK, dict(chunked.TILE)
    chunked.BLOCK, chunked.TILE["cpu"] = 4 * chunked.BLOCK, chunked.TILE["cuda"]
    try:
        yield
    finally:
        chunked.BLOCK = before[0]
        chunked.TILE.update(before[1])


def _step(config: Config, geometry: PretrainedConfig, length: int, checkpointing: bool, layers: int) -> Step:
    """Run the decoder forward and backward on fake tensors, with the first ``layers`` layers."""
    few = AutoConfig.for_model(**geometry.to_dict())
    text = few.get_text_config()
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    batch = config.data.batch_size
    base, adapted, gates = _build(config, few)
    # of the CPU, where attention takes its fused path; PEFT cannot build fake tensors, but on the meta device
    with FakeTensorMode(allow_non_fake_inputs=True), _tiles_of_a_gpu():
        for module in (adapted, gates):
            if module is not None:
                module.to_empty(device="cpu")
        base.tie_weights()
        if checkpointing:
            base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        adapted.train()
        instrument(adapted)
        gating = Dense() if gates is None else _Full(gates, batch, length)
        ids = torch.zeros(batch, length, dtype=torch.long)
        trained = [p for m in (adapted, gates) if m is not None for p in m.parameters() if p.requires_grad]
        owners = [adapted] if gates is None else [adapted, gates]
        with _collected(), _Live(owners) as live:
            with _autocast(config):
                states = decoder_of(adapted)(input_ids=ids, use_cache=False, gating=gating).last_hidden_state
                means = [x.sigmoid().mean() for x in gating.logits.values()] if isinstance(gating, Gating) else []
            forward = live.flops
            saved = live.settle()
            torch.autograd.backward([states, *means], [torch.ones_like(states), *map(torch.ones_like, means)])
            gradients = sum(p.nbytes for p in trained if p.grad is not None)
        teacher = config.loss.objective == "kl" or config.loss.draws_share
        total = live.flops + (forward if teacher else 0)
        return Step(float(saved), float(max(live.peak - saved - gradients, 0)), float(total))


@contextmanager
def _collected() -> Iterator[None]:
    """Keep what there is out of the way of Python's collector, so that it has little to look at."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _autocast(config: Config) -> torch.autocast:
    dtype = AUTOCAST.get(config.trainer.precision)
    return torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None)


def _logit_bytes(config: Config) -> int:
    """Return the bytes of one logit in the loss: its own type and float32, log-softmax, and their gradients."""
    element = torch.finfo(AUTOCAST.get(config.trainer.precision, getattr(torch, config.model.dtype))).bits // 8
    copies = 0 if element == 4 else 2 * element
    teacher = element + (4 if element != 4 else 0) + 8 if config.loss.objective == "kl" else 0
    return copies + 12 + teacher


def _measured_tflops(config: Config) -> float:
    """Multiply matrices for half a second in the precision of the run."""
    device = "cpu" if config.trainer.accelerator == "cpu" or not torch.cuda.is_available() else "cuda"
    dtype = AUTOCAST.get(config.trainer.precision, getattr(torch, config.model.dtype))
    size = 512 if device == "cpu" else 8192
    matrix = torch.randn(size, size, device=device).to(dtype)
    timer = Timer("matrix @ matrix", globals={"matrix": matrix}, num_threads=torch.get_num_threads())
    seconds: float = timer.blocked_autorange(min_run_time=0.5).median
    return 2 * size**3 / seconds / 1e12

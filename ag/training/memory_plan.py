"""Memory and time of a training step, computed without weights or a GPU: ``python -m ag.plan recipe=NAME``.

What a step keeps and computes is measured by :mod:`ag.training.fake_step`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.benchmark import Timer

from ag.config import Config
from ag.gates.gate import AttentionGates
from ag.model.hooks import decoder_of
from ag.training import fake_step

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


def plan(config: Config, measured: tuple[fake_step.Step, fake_step.Step] | None = None) -> MemoryPlan:
    """Compute the memory and the work of a training step.

    The rows are taken to be full: ``data.batch_size`` of the longest length that the data settings allow.

    Args:
        config: a whole configuration; ``model.name`` may also be the path of a JSON file with a model's configuration.
        measured: the result of :func:`ag.training.fake_step.steps`, which does not depend on ``trainer.devices`` and
            ``trainer.strategy``.

    Raises:
        ModelError: the model's configuration cannot be read.
    """
    geometry = fake_step.model_config(config)
    length, loss_tokens = fake_step.row(config, geometry)
    base, adapted, gates = fake_step.build(config, geometry)
    counts, sizes = _weights(config, base, adapted, gates)
    plain, kept = measured or fake_step.steps(config)
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
        kv_cache=row * fake_step.dtype(config).itemsize,
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
    element = fake_step.dtype(config).itemsize
    copies = 0 if element == 4 else 2 * element
    teacher = element + (4 if element != 4 else 0) + 8 if config.loss.objective == "kl" else 0
    return copies + 12 + teacher


def _measured_tflops(config: Config) -> float:
    """Multiply matrices for half a second in the precision of the run."""
    device = "cpu" if config.trainer.accelerator == "cpu" or not torch.cuda.is_available() else "cuda"
    size = 512 if device == "cpu" else 8192
    matrix = torch.randn(size, size, device=device).to(fake_step.dtype(config))
    timer = Timer("matrix @ matrix", globals={"matrix": matrix}, num_threads=torch.get_num_threads())
    seconds: float = timer.blocked_autorange(min_run_time=0.5).median
    return 2 * size**3 / seconds / 1e12

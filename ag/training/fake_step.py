"""A training step on fake tensors, which have shapes, types and lifetimes but no contents: what it keeps and computes.

The step of :class:`ag.training.module.GatedLM` runs on a model with the first one and two layers of each kind; what a
layer adds is multiplied by the number of layers.
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
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from ag.config import Config
from ag.errors import first_line
from ag.gates.gate import AttentionGates
from ag.gates.gating import Dense, Gating
from ag.kernels.gated_attention import chunked
from ag.model import base as models
from ag.model import random_base
from ag.model.hooks import decoder_of, instrument

AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
KNOWN, ATEN = flop_counter.flop_registry, torch.ops.aten
FLOPS: dict[Any, Any] = KNOWN | {  # PyTorch knows the attention of GPUs only, which does the same work
    ATEN._scaled_dot_product_flash_attention_for_cpu: KNOWN[ATEN._scaled_dot_product_flash_attention],
    ATEN._scaled_dot_product_flash_attention_for_cpu_backward: KNOWN[ATEN._scaled_dot_product_flash_attention_backward],
}


@dataclass(frozen=True)
class Step:
    """One batch through all layers: bytes kept for the backward pass, further bytes at its peak, operations."""

    saved: float
    temporary: float
    flops: float


def steps(config: Config) -> tuple[Step, Step]:
    """Measure a batch on fake tensors, without and with checkpointing of activations; the loss is not in it."""
    geometry = model_config(config)
    length, _ = row(config, geometry)
    plain, kept = (_whole_step(config, geometry, length, checkpointing) for checkpointing in (False, True))
    return plain, kept


def model_config(config: Config) -> PretrainedConfig:
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


def row(config: Config, geometry: PretrainedConfig) -> tuple[int, int]:
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


def dtype(config: Config) -> torch.dtype:
    """Return the type that matrices are multiplied in."""
    found: torch.dtype = AUTOCAST.get(config.trainer.precision, getattr(torch, config.model.dtype))
    return found


def build(config: Config, geometry: PretrainedConfig) -> tuple[Any, Any, AttentionGates | None]:
    """Make a model without contents, the same with LoRA where that is trained, and its gates, or None."""
    stored, trusted = getattr(torch, config.model.dtype), config.model.trust_remote_code
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(
            geometry, dtype=stored, attn_implementation="sdpa", trust_remote_code=trusted
        )
        base.requires_grad_(False)
        gates = None if config.train == "lora" else AttentionGates(geometry, config.gate)
        return base, base if config.train == "gates" else models.add_lora(base, config.lora), gates


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
    base, adapted, gates = build(config, few)
    # made of real tensors, whose values it reads: rows are whole prompts
    rows, prompts = torch.ones(batch, length, dtype=torch.bool), torch.full((batch,), length)
    gating = Dense() if gates is None else Gating(gates, rows, prompts)
    # of the CPU, where attention takes its fused path; PEFT cannot build fake tensors, but on the meta device
    with FakeTensorMode(allow_non_fake_inputs=True), _tiles_of_a_gpu():
        for module in (adapted, gates):
            if module is not None:
                module.to_empty(device="cpu")
        base.tie_weights()
        if checkpointing:
            models.checkpoint_layers(base)
        adapted.train()
        instrument(adapted)
        ids = torch.zeros(batch, length, dtype=torch.long)
        trained = [p for m in (adapted, gates) if m is not None for p in m.parameters() if p.requires_grad]
        owners = [adapted] if gates is None else [adapted, gates]
        with _collected(), Live(owners) as live:
            mixed = AUTOCAST.get(config.trainer.precision)
            with torch.autocast("cpu", mixed, enabled=mixed is not None):
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


class Live(TorchDispatchMode):
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

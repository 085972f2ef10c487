"""Time and memory of a training step with gates, over LoRA alone."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ag.bench import worker
from ag.bench.contestants import Row
from ag.bench.measure import forget_peak, held_bytes, paired, peak_bytes, seconds_of, spread
from ag.bench.models import gates_for, load
from ag.commands.bench import BenchConfig
from ag.config import Config
from ag.model.base import add_lora
from ag.training.module import GatedLM

PLANS = ("lora", "gates", "gates+lora")


def prepare(config: BenchConfig) -> BenchConfig:
    """Return the configuration; models are loaded for each case."""
    return config


def measure(config: BenchConfig, context: int, batch: int) -> list[Row]:
    """Return a row for what is trained; steps take turns, peaks come from fresh processes."""
    seconds: dict[str, list[float]] = {plan: [] for plan in PLANS}
    base = load(config)
    steps = {plan: training_step(config, plan, context, batch, _twin(base))[0] for plan in PLANS}
    for turn in range(config.warmup + config.rounds):
        for plan, step in steps.items():
            (time,) = seconds_of(torch.device(config.device), step)
            if turn >= config.warmup:
                seconds[plan].append(time)
    del base, steps, step
    peaks = {plan: worker.call(measure_one, config, context, batch, plan) for plan in PLANS}
    return [
        {
            "contestant": plan,
            "trained of base": peaks[plan]["trained of base"],
            **spread("seconds", seconds[plan]),
            "time over lora": paired(seconds[plan], seconds["lora"]),
            "peak bytes": peaks[plan]["peak bytes"],
            "peak over lora": peaks[plan]["peak bytes"] / peaks["lora"]["peak bytes"],
            "peak over held": max(0, peaks[plan]["peak bytes"] - peaks[plan]["held"]),
        }
        for plan in PLANS
    ]


def measure_one(config: BenchConfig, context: int, batch: int, plan: str) -> Row:
    """Take two steps in this process (the optimiser's state comes with the first) and return their peak."""
    device = torch.device(config.device)
    step, share = training_step(config, plan, context, batch)
    forget_peak(device)
    step()
    step()
    return {"peak bytes": peak_bytes(device), "held": held_bytes(device), "trained of base": share}


def _twin(base: PreTrainedModel) -> PreTrainedModel:
    """Copy a model's modules, which LoRA replaces, but not its weights."""
    return copy.deepcopy(base, {id(x): x for x in (*base.parameters(), *base.buffers())})


def training_step(
    config: BenchConfig, plan: str, context: int, batch: int, base: PreTrainedModel | None = None
) -> tuple[Callable[[], None], float]:
    """Return a step of :class:`ag.training.module.GatedLM` with AdamW, and the trained share of the base's parameters.

    The rows are packed text, gates are causal and act within them: the dearest of the settings.
    """
    base = load(config) if base is None else base
    parameters = sum(parameter.numel() for parameter in base.parameters())
    torch.manual_seed(config.seed)
    gates = gates_for(base).to(config.device, torch.float32) if "gates" in plan else None
    recipe = Config()
    recipe.warmup.regress_steps = 0
    model: nn.Module = add_lora(base, recipe.lora) if "lora" in plan else base
    module = GatedLM(recipe, model.train(), gates)
    trained = [parameter for group in module.trainable().values() for parameter in group]
    optimizer = torch.optim.AdamW(trained, lr=1e-5)
    make = torch.Generator().manual_seed(config.seed)
    ids = torch.randint(0, base.config.get_text_config().vocab_size, (batch, context), generator=make)
    rows: dict[str, Tensor] = {"input_ids": ids, "attention_mask": torch.ones_like(ids).bool(), "labels": ids}
    rows = {name: x.to(config.device) for name, x in rows.items()}

    def step() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # there is no trainer to log to
            with torch.autocast(base.device.type, getattr(torch, config.dtype), enabled=config.dtype != "float32"):
                loss = module.training_step(rows, 0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, sum(parameter.numel() for parameter in trained) / parameters

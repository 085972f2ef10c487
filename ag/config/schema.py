"""The schema of training recipes: keys with type, default and meaning.

:mod:`ag.config.recipes` resolves a YAML file and overrides to one :class:`Config`, and :mod:`ag.config.validate`
refuses invalid combinations. ``python -m ag.fit --help`` prints the schema.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ag.cluster import CLUSTER
from ag.config.gate import GateConfig
from ag.config.sections import (
    CheckpointConfig,
    DataConfig,
    ExportConfig,
    LoraConfig,
    LossConfig,
    ModelConfig,
    OptimConfig,
    TrainerConfig,
    WandbConfig,
    WarmupConfig,
    key,
)
from ag.config.validate import validate
from ag.plugins import load


@dataclass
class Config:
    """A whole run."""

    recipe: str = key("fit", "name of a shipped recipe, or path of a YAML file, with the values to start from")
    train: Literal["gates", "gates+lora", "lora"] = key(
        "gates+lora", "the trained parts; lora is the baseline without gates"
    )
    seed: int = key(0, "seed of weights, data order and noise", low=0, high=2**32 - 1)
    output: str = key("runs", "folder of the run folders", holds="output")
    resume: str | None = key(None, "run folder to continue", holds="output")
    init: str | None = key(None, "export to start from, whose gates have the sizes of this run", holds="export")
    plugins: list[str] = key([], "modules to import first, which add your own kinds of gates and data, losses, ...")
    cluster: str | None = key(None, f"for the ranks of a run, or the runs of a sweep (-m): {CLUSTER}")
    failures: int = key(
        3, "with cluster=: the number of times that a run which loses a process continues from its checkpoint", low=0
    )
    logger: list[Literal["csv", "tensorboard", "wandb"]] = key(
        ["csv"], "where metrics and pictures are logged; metrics.csv is always written"
    )
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    data: DataConfig = field(default_factory=DataConfig)
    gate: GateConfig = field(default_factory=GateConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    export: ExportConfig = field(default_factory=ExportConfig)

    def __post_init__(self) -> None:
        load(self.plugins)
        validate(self)

"""The schema of training recipes: keys with type, default and meaning, and the values that do not go together.

A section checks its own values; :class:`Config` checks values of several sections. ``python -m ag.fit --help`` prints
the schema.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from ag.cluster import CLUSTER
from ag.config.data import Data, FactsConfig, PackedConfig, RepeatedConfig
from ag.config.gate import GateConfig
from ag.config.keys import ConfigError, refuse
from ag.config.loss import REGRESS, Loss, MeanGateConfig, ReplayConfig
from ag.config.sections import (
    CheckpointConfig,
    ExportConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    TrainerConfig,
    WandbConfig,
    WarmupConfig,
    key,
)
from ag.plugins import load


@dataclass
class Config:
    """A whole run."""

    recipe: str = key("fit", "name of a shipped recipe, or path of a YAML file, with the values to start from")
    train: Literal["gates", "gates+lora", "lora"] = key(
        "gates+lora", "the trained parts; lora is the baseline without gates"
    )
    seed: int = key(0, "seed of weights, data order and noise", ge=0, le=2**32 - 1)
    output: str = key("runs", "folder of the run folders", holds="output")
    resume: str | None = key(None, "run folder to continue", holds="output")
    init: str | None = key(None, "export to start from, whose gates have the sizes of this run", holds="export")
    plugins: list[str] = key([], "modules to import first, which add your own kinds of gates and data, losses, ...")
    cluster: str | None = key(None, f"for the ranks of a run, or the runs of a sweep (-m): {CLUSTER}")
    failures: int = key(
        3, "with cluster=: the number of times that a run which loses a process continues from its checkpoint", ge=0
    )
    logger: list[Literal["csv", "tensorboard", "wandb"]] = key(
        ["csv"], "where metrics and pictures are logged; metrics.csv is always written"
    )
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    data: Data = field(default_factory=FactsConfig)
    gate: GateConfig = field(default_factory=GateConfig)
    loss: Loss = field(default_factory=MeanGateConfig)
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    export: ExportConfig = field(default_factory=ExportConfig)

    def __post_init__(self) -> None:
        load(self.plugins)
        if re.fullmatch(r"\w[\w.-]*", self.recipe) is None:
            raise ConfigError(
                f"recipe={self.recipe!r}: the run folder has this name too; use letters, digits, '.', '_' and '-'"
            )
        _check_trained_parts(self)
        check_steps(self, self.trainer.max_steps, "trainer.max_steps")
        _check_regression(self)
        if isinstance(self.loss, ReplayConfig):
            _check_replay(self)
        if self.train != "lora":
            _check_rows(self)
        _check_devices(self)


def _check_trained_parts(config: Config) -> None:
    """Refuse settings of parts that are not trained."""
    if config.train == "lora":
        if config.loss.objective in ("kl", REGRESS):
            refuse(config, "loss.objective train", "there are no gates to train; use loss.objective=lm")
        if config.warmup.regress_steps:
            refuse(config, "warmup.regress_steps train", "there are no gates to warm up; set it to 0")
        if config.loss.draws_share:
            refuse(config, "loss.share_high train", "there are no gates to keep a share; set loss.share_high=0")
        if config.export.push_to_hub is not None:
            refuse(config, "export.push_to_hub train", "only gates are uploaded; leave it out")
        if config.init is not None and config.resume is None:
            refuse(config, "init train", "there are no gates that start from an export; leave init out")
    if config.train == "gates":
        if config.export.merge:
            refuse(config, "export.merge train", "there is no adapter to merge; use export.merge=false")
    elif not config.lora.targets:
        refuse(config, "lora.targets train", "nothing is adapted; name linear layers, or use train=gates")


def check_steps(config: Config, num_steps: float, limit: str) -> None:
    """Refuse schedules that take longer than the run.

    Args:
        config: of the run.
        num_steps: optimiser steps of the run; below 0: not known yet.
        limit: the key that sets them, ``trainer.max_steps`` or ``trainer.max_epochs``.
    """
    warm = config.warmup.regress_steps
    if num_steps < 0:
        return
    steps = "" if limit == "trainer.max_steps" else f" in {num_steps} steps"
    if warm > num_steps:
        refuse(config, f"warmup.regress_steps {limit}", f"the main objective never starts{steps}; raise {limit}")
    if config.warmup.rounds and warm == num_steps:
        reason = f"costs are measured after the regression, and no step is left{steps}; raise {limit}"
        refuse(config, f"warmup.rounds warmup.regress_steps {limit}", reason)
    anneal_steps = config.loss.anneal_steps if isinstance(config.loss, MeanGateConfig) else 0
    if config.train != "lora" and anneal_steps + warm > num_steps:
        reason = f"the mean gate never gets to loss.beta{steps}; lower loss.anneal_steps, or raise {limit}"
        refuse(config, f"loss.anneal_steps warmup.regress_steps {limit}", reason)
    if config.optim.warmup_steps > num_steps:
        reason = f"the learning rate never reaches its peak{steps}; lower optim.warmup_steps"
        refuse(config, f"optim.warmup_steps {limit}", reason)
    if warm < num_steps < warm + config.optim.warmup_steps:  # regression alone needs no later rate
        reason = f"the learning rate never reaches its peak{steps}; lower optim.warmup_steps, or raise {limit}"
        refuse(config, f"optim.warmup_steps warmup.regress_steps {limit}", reason)


def _check_regression(config: Config) -> None:
    """Refuse regression, in all steps or in a warm start, that cannot be done."""
    regresses, warm = config.loss.objective == REGRESS, config.warmup
    if regresses and config.train != "gates":
        refuse(config, "loss.objective train", "no gradient reaches the adapters; use train=gates")
    if regresses and warm.regress_steps:
        reason = "every step is a regression step already; set it to 0"
        refuse(config, "warmup.regress_steps loss.objective", reason)
    if isinstance(config.data, PackedConfig):
        if not config.data.cross_documents and (regresses or warm.regress_steps):
            reason = "regression does not know where documents end; use data.cross_documents=true, or train without it"
            other = "loss.objective" if regresses else "warmup.regress_steps"
            refuse(config, f"data.cross_documents {other}", reason)
        if warm.target == "kvzip":
            reason = (
                "it is the attention of a response, and packed rows have none; use data.packing=repeated, or "
                "warmup.target=attention"
            )
            refuse(config, "warmup.target data.packing", reason)
    if warm.target == "reread" and not isinstance(config.loss, ReplayConfig):
        reason = "the contexts of replay are repeated; use warmup.target=kvzip or attention, or set loss.replay=true"
        refuse(config, "warmup.target loss.replay", reason)
    if warm.rounds and not isinstance(config.loss, ReplayConfig):
        reason = "costs are measured on responses after a prompt; set loss.replay=true"
        refuse(config, "warmup.rounds loss.replay", reason)
    if warm.rounds and config.gate.kind not in ("mlp", "affine"):
        reason = "the last layer of these gates has no bias for each head; use gate.kind=mlp, or warmup.rounds=0"
        refuse(config, "warmup.rounds gate.kind", reason)


def _check_replay(config: Config) -> None:
    """Refuse settings under which prompts cannot be read once and evicted."""
    if config.train != "gates":
        reason = "a prompt is read once, so that the model must not change; use train=gates"
        refuse(config, "loss.replay train", reason)
    if config.gate.estimator != "ste":
        refuse(config, "loss.replay gate.estimator", "flags are ranked, without noise; use gate.estimator=ste")
    if isinstance(config.data, PackedConfig | RepeatedConfig):
        reason = "these rows have no response after a prompt; use data.packing=responses or split"
        refuse(config, "loss.replay data.packing", reason)
    if config.trainer.strategy == "fsdp2":
        refuse(config, "loss.replay trainer.strategy", "prompts are read by a whole model; use trainer.strategy=ddp")
    if config.warmup.regress_steps and config.warmup.target != "reread":
        reason = "a context is read once for all its responses; use warmup.target=reread, which repeats it"
        refuse(config, "warmup.target loss.replay", reason)


def _check_rows(config: Config) -> None:
    """Refuse gates that the rows cannot train."""
    if config.gate.scope != "causal" and isinstance(config.data, PackedConfig | RepeatedConfig):
        reason = "a gate that sees later tokens leaks them into the loss; use gate.scope=causal"
        refuse(config, "gate.scope data.packing", reason)
    if config.gate.prefill != "sparse" and isinstance(config.data, PackedConfig):
        reason = "no response reads the prompt after eviction; use gate.prefill=sparse or data.packing=split"
        refuse(config, "gate.prefill data.packing", reason)


def _check_devices(config: Config) -> None:
    """Refuse data types and exports that the devices and the strategy do not allow."""
    model, trainer = config.model, config.trainer
    if (model.dtype, trainer.precision) in (("bfloat16", "16-mixed"), ("float16", "bf16-mixed")):
        fix = "bf16-mixed" if model.dtype == "bfloat16" else "16-mixed"
        refuse(config, "model.dtype trainer.precision", f"two 16-bit formats; use trainer.precision={fix}")
    if model.quantization == "nf4":
        if model.dtype == "float32" and trainer.precision != "32-true":
            reason = (
                "4-bit layers compute in model.dtype; use model.dtype=bfloat16 with bf16-mixed, float16 with 16-mixed"
            )
            refuse(config, "model.quantization model.dtype trainer.precision", reason)
        if trainer.strategy == "fsdp2":
            reason = (
                "sharded 4-bit weights are silently corrupted; use trainer.strategy=ddp, or model.quantization=none"
            )
            refuse(config, "model.quantization trainer.strategy", reason)
        if config.export.merge:
            reason = "4-bit weights are too coarse to take the adapter in; use export.merge=false"
            refuse(config, "export.merge model.quantization", reason)
    if config.export.merge and trainer.strategy == "fsdp2":
        refuse(config, "export.merge trainer.strategy", "no GPU holds the whole base; use export.merge=false")
    if model.attn_implementation == "flash_attention_2":
        if trainer.accelerator == "cpu":
            refuse(config, "model.attn_implementation trainer.accelerator", "it needs a GPU; use sdpa")
        if model.dtype == "float32":
            reason = "it computes in 16 bits only; use model.dtype=bfloat16"
            refuse(config, "model.attn_implementation model.dtype", reason)

"""The sections of a recipe, each with its keys."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from ag.config.keys import refuse

MODEL = (
    "hub id, local folder, alias (smollm2, qwen2.5-coder-0.5b, qwen2.5-coder-1.5b, gemma3-270m), or random:llama-8b "
    "(random:PATH.json) for random weights"
)
BUDGET = "tokens (an int of at least 1) or a share (a float in (0, 1])"  # values of a budget


def key(default: Any, doc: str, **fields: Any) -> Any:
    """Declare a configuration key: its default, its description, further fields of :class:`ag.config.keys.Key`."""
    metadata = {"doc": doc, **fields}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def mapping(doc: str, **fields: Any) -> Any:
    """Declare a key whose entries are set one by one, as ``key.ENTRY=value``.

    ``of`` is the key that lists the entries. If a command line removes an entry from that list, the recipe's values of
    the entry are dropped too.
    """
    return field(default_factory=dict, metadata={"doc": doc, **fields})


#: Types of a model's weights.
WeightType = Literal["float32", "bfloat16", "float16"]


@dataclass
class DtypeConfig:
    """The data type of a base model, which every command with a model takes."""

    dtype: WeightType = key("float32", "data type of the model's frozen weights")


@dataclass
class RevisionConfig(DtypeConfig):
    """The version of a base model."""

    revision: str | None = key(None, "git revision of a hub model")


@dataclass
class LoadingConfig(RevisionConfig):
    """How a base model is loaded."""

    quantization: Literal["none", "nf4"] = key("none", "nf4: 4-bit weights through bitsandbytes")
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = key(
        "sdpa", "the model's own attention; sdpa means eager for a class of models that has no sdpa (Gemma 2, gpt-oss)"
    )
    trust_remote_code: bool = key(False, "run code from the model's repository; only for repositories you trust")

    @property
    def attention_for_transformers(self) -> str | None:
        """The argument of transformers. None: sdpa if the class of the model has it, else eager."""
        return None if self.attn_implementation == "sdpa" else self.attn_implementation


@dataclass
class ModelConfig(LoadingConfig):
    """The frozen base model."""

    name: str = key("smollm2", MODEL)
    gradient_checkpointing: bool = key(False, "recompute activations in the backward pass (non-reentrant)")


def base_model(command: DtypeConfig, name: str) -> ModelConfig:
    """Return the base model of this name under the keys of a command; other keys have their defaults."""
    given_names = {x.name: getattr(command, x.name) for x in fields(LoadingConfig) if hasattr(command, x.name)}
    return ModelConfig(name=name, **given_names)


@dataclass
class LoraConfig:
    """The low-rank adapters on the base model."""

    rank: int = key(8, "rank r of every adapter", ge=1)
    alpha: float = key(16.0, "scale: the update is alpha / rank * B A", ge=0)
    dropout: float = key(0.0, "dropout on the adapter's input", ge=0, le=1)
    targets: list[str] = key(
        ["q_proj", "k_proj", "v_proj", "o_proj"],
        "names of the linear layers to adapt; all-linear means all but the output layer, with the experts that PEFT "
        "supports",
    )


@dataclass
class WarmupConfig:
    """A warm start of the gates: regression on attention statistics, then biases by measured costs."""

    regress_steps: int = key(0, "first steps that train the gates by regression; 0 means none", ge=0)
    lr: float = key(3e-3, "peak learning rate of these steps: one cycle, which is 0 in the last step", ge=0)
    target: Literal["attention", "kvzip", "reread"] = key(
        "attention",
        "target of the gates for a key. attention: the attention of later queries to it; kvzip: the largest attention "
        "of a response token, times ||v|| (for data.packing=repeated); reread: the largest attention while the engine "
        "repeats each context of loss.replay, chunk by chunk",
    )
    rounds: int = key(
        0,
        "rounds of costs after the regression, with loss.replay: each head's last bias is set by the cost of evicting "
        "at each threshold; a later round measures under the flags of the previous round; 0 means none",
        ge=0,
    )
    rows: int = key(64, "training rows that a round of costs measures", ge=1)
    scale: Literal["head", "global"] = key(
        "head",
        "head: targets are standardised in each head; global: over all layers and heads, so that heads are comparable",
    )
    keep: float = key(0.5, "share of the tokens that flags keep after the warm start", ge=0.01, le=0.99)


@dataclass
class OptimConfig:
    """AdamW with one group for the gates and one for the adapters."""

    gate_lr: float = key(5e-5, "peak learning rate of the gates", ge=0)
    lora_lr: float = key(5e-5, "peak learning rate of the adapters", ge=0)
    weight_decay: float = key(0.0, "decoupled weight decay", ge=0)
    beta1: float = key(0.9, "decay of the first moment", ge=0, le=0.9999)
    beta2: float = key(0.999, "decay of the second moment", ge=0, le=0.9999)
    schedule: Literal["cosine", "constant"] = key("cosine", "shape of the learning rate after its warm-up")
    warmup_steps: int = key(0, "optimiser steps of linear warm-up", ge=0)


@dataclass
class TrainerConfig:
    """Arguments of lightning.Trainer."""

    accelerator: Literal["auto", "cpu", "gpu"] = key(
        "auto", "device type to train on; auto takes CUDA if there is a GPU", holds="device"
    )
    devices: int = key(1, "devices per node", ge=1)
    num_nodes: int = key(1, "machines", ge=1)
    strategy: str = key(
        "auto",
        "auto, ddp, ...: a Lightning strategy that does not fork or spawn; fsdp2: the base divided among the GPUs",
    )
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = key(
        "32-true", "precision of the computation; trainable weights stay float32"
    )
    max_epochs: int = key(1, "passes over the training data; not used with max_steps", ge=1)
    max_steps: int = key(-1, "optimiser steps; -1 means until max_epochs", ge=-1)
    accumulate: int = key(1, "batches per optimiser step", ge=1)
    clip: float = key(1.0, "largest gradient norm; 0 means no clipping", ge=0)
    val_every: int = key(0, "optimiser steps between validations; 0 means once an epoch", ge=0)
    val_batches: int | None = key(None, "validate on the first N batches only", ge=1)
    log_every: int = key(1, "optimiser steps between log lines", ge=1)
    collapse_batches: int = key(
        200,
        "warn about a layer whose gates were all open or all shut for this many batches in a row; 0 means never",
        ge=0,
    )
    deterministic: bool = key(False, "use deterministic kernels, which are slower")
    progress: bool = key(True, "show the progress bar on a terminal; false: print lines of text")

    def __post_init__(self) -> None:
        if self.max_steps == 0:
            refuse(self, "max_steps", "nothing is trained; give at least 1, or -1 for no limit", "trainer.")
        if self.precision == "16-mixed" and self.strategy == "fsdp2":
            refuse(self, "precision strategy", "sharded gradients cannot be scaled; use bf16-mixed", "trainer.")
        if self.precision == "16-mixed" and self.accelerator == "cpu":
            refuse(self, "precision accelerator", "float16 needs a GPU; use bf16-mixed", "trainer.")

    @property
    def world_size(self) -> int:
        """Number of processes that train, on all machines."""
        return self.devices * self.num_nodes


@dataclass
class CheckpointConfig:
    """Checkpoints while training, of trainable weights only."""

    every_steps: int = key(0, "optimiser steps between checkpoints; 0 means at each validation only", ge=0)
    keep_last: int = key(2, "number of newest checkpoints to keep", ge=1)
    monitor: Literal["val/loss", "val/lm_loss", "val/perplexity"] = key(
        "val/loss", "metric that chooses the best checkpoint (lower is better)"
    )
    patience: int = key(0, "stop after this many validations without improvement; 0 means never", ge=0)


@dataclass
class WandbConfig:
    """The Weights & Biases logger."""

    project: str = key("ag", "W&B project")
    offline: bool = key(False, "W&B: write to the run folder only")


@dataclass
class ExportConfig:
    """The export at the end of a run."""

    weights: Literal["float32", "int8"] = key("float32", "data type of the gates' matrices in the export")
    merge: bool = key(False, "also write a full copy of the base model with the adapter merged into it (merged/)")
    push_to_hub: str | None = key(None, "upload the finished export, with its model card, to this hub repository")

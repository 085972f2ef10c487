"""The sections of a recipe, each with its keys."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

BUDGET = "tokens (an int of at least 1) or a share (a float in (0, 1])"  # what keys of budgets take


def key(default: Any, doc: str, **more: Any) -> Any:
    """Declare a configuration key: its default, one line about it, more fields of :class:`ag.config.keys.Key`."""
    metadata = {"doc": doc, **more}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def mapping(doc: str, **more: Any) -> Any:
    """Declare a key whose entries are set one by one, as ``key.ENTRY=value``.

    ``of`` names the key that lists the entries: one that a recipe lists and a command line does not takes along what
    the recipe says of it.
    """
    return field(default_factory=dict, metadata={"doc": doc, **more})


@dataclass
class ModelConfig:
    """The frozen base model."""

    name: str = key("smollm2", "hub id, folder, alias (smollm2, gemma3-270m), or random:llama-8b: random weights")
    revision: str | None = key(None, "git revision of a hub model")
    dtype: Literal["float32", "bfloat16", "float16"] = key("float32", "data type of the frozen weights")
    quantization: Literal["none", "nf4"] = key("none", "nf4: 4-bit weights through bitsandbytes")
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = key("sdpa", "the model's own attention")
    gradient_checkpointing: bool = key(False, "recompute activations in the backward pass (non-reentrant)")
    trust_remote_code: bool = key(False, "run code from the model's repository; only for repositories you trust")


@dataclass
class LoraConfig:
    """The low-rank adapters on the base model."""

    rank: int = key(8, "rank r of every adapter", low=1)
    alpha: float = key(16.0, "scale: the update is alpha / rank * B A", low=0)
    dropout: float = key(0.0, "dropout on the adapter's input", low=0, high=1)
    targets: list[str] = key(
        ["q_proj", "k_proj", "v_proj", "o_proj"],
        "names of the linear layers to adapt; all-linear: all but the output layer, and experts that PEFT knows",
    )


@dataclass
class DataConfig:
    """What the model is trained and validated on."""

    kind: str = key(
        "facts",
        "sft: prompt and response; text: plain documents; generated: facts of the quickstart, worked problems; or one "
        "of plugins",
        words="sft | text | facts | worked | a kind of your own",
    )
    name: str = key(
        "facts",
        "task of the sft table (piqa, boolq, ...); folder or hub id (sft, text); worked, or a kind of it, as addition",
    )
    subset: str | None = key(None, "configuration name of a hub dataset (text, own sft)")
    revision: str | None = key(None, "git revision of a hub dataset (text, own sft)")
    root: str | None = key(
        None,
        "local folder (SPLIT.jsonl, .json, .parquet, .csv, .txt, shards SPLIT-*.jsonl, or of save_to_disk), instead of "
        "the hub; a folder data.name in it goes first",
        holds="folder",
    )
    text_field: str = key("text", "the field that holds a document (text)")
    prompt_field: str = key("prompt", "the field that holds a prompt (own sft)")
    response_field: str = key(
        "response", "the field that holds its response, joined as it is; completion counts as well (own sft)"
    )
    messages_field: str = key(
        "messages",
        "the field that holds a chat instead, as objects with role and content; conversations counts as well (own sft)",
    )
    question: Literal["before", "after"] = key(
        "before",
        "before: the prompt holds the question; after: the prompt, on which gates act, is the text before it (facts; "
        "boolq, rte)",
    )
    eos: bool | None = key(None, "a response ends with EOS (sft); null: yes in rows of prompt and response of your own")
    max_length: int = key(1024, "longest row in tokens; a longer prompt loses its left part, and is counted", low=2)
    packing: Literal["packed", "split", "repeated"] = key(
        "split",
        "text; packed: rows of max_length tokens; split: prompt and continuation; repeated: a passage and its copy",
    )
    cross_documents: bool = key(
        True, "text, packed: attention runs on across the documents of a row; false: it stays inside each"
    )
    prompt_min: int = key(192, "shortest prompt in tokens (text, split; facts: roughly)", low=1)
    prompt_max: int = key(512, "longest prompt in tokens (text, split; facts: roughly)", low=1)
    continuation: int = key(64, "tokens after the prompt that carry the loss (text, split)", low=1)
    copy_max: int = key(
        0, "of a longer passage a chunk of so many tokens is repeated, drawn for each; 0: all (text, repeated)", low=0
    )
    solution_min: int = key(200, "shortest solution in tokens (worked; roughly)", low=20)
    solution_max: int = key(400, "longest solution in tokens (worked)", low=60)
    cache: str | None = key(None, "folder that keeps tokenised rows for the next run and for all processes (text)")
    train_samples: int | None = key(None, "use the first N training rows only", low=1)
    val_samples: int | None = key(None, "use the first N validation rows only", low=1)
    batch_size: int = key(4, "rows per device and step", low=1)
    val_batch_size: int = key(8, "rows per device in validation (multiple choice: questions)", low=1)
    num_workers: int = key(0, "data loading processes per device", low=0)


@dataclass
class LossConfig:
    """What is minimised: objective + alpha * |mean gate - beta|; the objective alone where shares are drawn."""

    objective: str = key(
        "lm",
        "lm: cross-entropy; kl: to the model with open gates and no adapter; regress: no backward; or one of plugins",
        words="lm | kl | regress | a loss of your own",
    )
    alpha: float = key(1.0, "weight of the eviction loss", low=0)
    beta: float = key(0.28, "target of the mean gate", low=0, high=1)
    share_low: float = key(0.1, "with share_high: the smallest share that is drawn", low=0.01, high=1)
    share_high: float = key(
        0.0,
        "above 0: gates for any share; each batch draws one from share_low to this, and the gates keep so much of it "
        "(no alpha, no beta)",
        low=0,
        high=1,
    )
    anneal_steps: int = key(0, "steps after the warm start in which beta falls linearly from 1 to its value", low=0)
    mean: Literal["soft", "hard"] = key("soft", "mean over sigmoids, or over flags")
    sampled_tokens: int = key(
        0,
        "tokens of a batch that the loss is measured on, drawn for each step; 0: all (where the vocabulary is large, "
        "its logits take longer than the model)",
        low=0,
    )
    chunk_tokens: int = key(1024, "tokens whose logits exist at once in the loss", low=1)

    @property
    def draws_share(self) -> bool:
        """Whether each batch draws the share that the gates keep."""
        return self.share_high > 0


@dataclass
class WarmupConfig:
    """A warm start of the gates: regression on attention statistics, no backward through the model."""

    regress_steps: int = key(0, "first steps that train the gates by regression; 0: none", low=0)
    lr: float = key(3e-3, "peak learning rate of those steps (one cycle)", low=0)
    target: Literal["attention", "kvzip", "reread"] = key(
        "attention",
        "what gates predict of a key, from later queries: their attention on it; kvzip: the "
        "largest attention that a token of the response pays, times ||v|| (meant for data.packing=repeated); reread: "
        "the largest attention while the engine repeats the whole row, chunk by chunk (for data.packing=packed)",
    )
    scale: Literal["head", "global"] = key(
        "head", "targets are standardised in each head by itself, or over all layers and heads, so that heads compare"
    )
    keep: float = key(0.5, "share of the tokens that the flags keep after the warm start", low=0.01, high=0.99)


@dataclass
class OptimConfig:
    """AdamW with one group for the gates and one for the adapters."""

    gate_lr: float = key(5e-5, "peak learning rate of the gates", low=0)
    lora_lr: float = key(5e-5, "peak learning rate of the adapters", low=0)
    weight_decay: float = key(0.0, "decoupled weight decay", low=0)
    beta1: float = key(0.9, "decay of the first moment", low=0, high=0.9999)
    beta2: float = key(0.999, "decay of the second moment", low=0, high=0.9999)
    schedule: Literal["cosine", "constant"] = key("cosine", "shape of the learning rate after its warm-up")
    warmup_steps: int = key(0, "optimiser steps of linear warm-up", low=0)


@dataclass
class TrainerConfig:
    """Handed to lightning.Trainer."""

    accelerator: Literal["auto", "cpu", "gpu", "mps"] = key("auto", "what to train on")
    devices: int = key(1, "devices per node", low=1)
    num_nodes: int = key(1, "machines", low=1)
    strategy: str = key(
        "auto", "auto, ddp, ...: a Lightning strategy, none that forks or spawns; fsdp2: the base divided over the GPUs"
    )
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = key(
        "32-true", "precision of the computation; trainable weights stay float32"
    )
    max_epochs: int = key(1, "passes over the training data", low=1)
    max_steps: int = key(-1, "optimiser steps; -1: as many as max_epochs gives", low=-1)
    accumulate: int = key(1, "batches per optimiser step", low=1)
    clip: float = key(1.0, "largest gradient norm; 0: no clipping", low=0)
    val_every: int = key(0, "optimiser steps between validations; 0: once an epoch", low=0)
    val_batches: int | None = key(None, "validate on the first N batches only", low=1)
    log_every: int = key(1, "optimiser steps between log lines", low=1)
    collapse_batches: int = key(
        200, "warn of a layer whose gates were all open or all shut for so many batches in a row; 0: never", low=0
    )
    deterministic: bool = key(False, "deterministic kernels, slower")
    progress: bool = key(True, "show the progress bar on a terminal; false: lines of text, as elsewhere")


@dataclass
class CheckpointConfig:
    """What is saved while training: trainable weights only."""

    every_steps: int = key(0, "optimiser steps between checkpoints; 0: at each validation only", low=0)
    keep_last: int = key(2, "how many of the newest checkpoints stay", low=1)
    monitor: Literal["val/loss", "val/lm_loss", "val/perplexity"] = key(
        "val/loss", "metric that chooses the best checkpoint (lower is better)"
    )
    patience: int = key(0, "stop after so many validations without improvement; 0: never", low=0)


@dataclass
class WandbConfig:
    """The Weights & Biases logger."""

    project: str = key("ag", "W&B project")
    offline: bool = key(False, "W&B: write to the run folder only")


@dataclass
class ExportConfig:
    """What is written at the end of a run."""

    weights: Literal["float32", "int8"] = key("float32", "data type of the gates' matrices in the export")
    merge: bool = key(False, "write a full copy of the base model with the adapter merged into it as well (merged/)")
    push_to_hub: str | None = key(None, "upload the finished export, with its model card, to this hub repository")

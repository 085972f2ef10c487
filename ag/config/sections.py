"""The sections of a recipe, each with its keys."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

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


@dataclass
class ModelConfig:
    """The frozen base model."""

    name: str = key(
        "smollm2",
        "hub id, folder, alias (smollm2, qwen2.5-coder-0.5b, qwen2.5-coder-1.5b, gemma3-270m), or random:llama-8b for "
        "random weights",
    )
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
        "names of the linear layers to adapt; all-linear means all but the output layer, with the experts that PEFT "
        "supports",
    )


@dataclass
class DataConfig:
    """The training and validation data."""

    kind: str = key(
        "facts",
        "sft: prompt and response; text: plain documents; facts (of the quickstart) and worked problems are "
        "generated; or a kind of a plugin",
        words="sft | text | facts | worked | a kind of your own",
    )
    name: str = key(
        "facts",
        "a task of the sft table (piqa, boolq, ...); a folder or hub id (sft, text); worked or one of its kinds, such "
        "as addition",
    )
    subset: str | None = key(None, "configuration name of a hub dataset (text, own sft)")
    revision: str | None = key(None, "git revision of a hub dataset (text, own sft)")
    root: str | None = key(
        None,
        "local folder instead of the hub: SPLIT.jsonl, .json, .parquet, .csv, .txt, shards SPLIT-*.jsonl, or the "
        "output of save_to_disk; a subfolder called data.name goes first",
        holds="folder",
    )
    text_field: str = key("text", "field that holds a document (text)")
    prompt_field: str = key("prompt", "field that holds a prompt (own sft)")
    response_field: str = key(
        "response", "field that holds its response, appended as it is; completion is read as well (own sft)"
    )
    messages_field: str = key(
        "messages",
        "field that holds a chat instead, as objects with role and content; conversations is read as well (own sft)",
    )
    question: Literal["before", "after"] = key(
        "before",
        "before: the prompt contains the question; after: the prompt, on which gates act, is the text before the "
        "question (facts, boolq, rte)",
    )
    eos: bool | None = key(
        None,
        "whether a response ends with EOS (sft); null means yes in your own rows of prompt and response, no elsewhere",
    )
    max_length: int = key(1024, "longest row in tokens; a longer prompt is counted and loses its left part", low=2)
    packing: Literal["packed", "split", "repeated", "responses"] = key(
        "split",
        "text; packed: rows of max_length tokens; split: prompt and continuation; repeated: a passage and its copy; "
        "responses: a context and a response of each kind of data.responses",
    )
    cross_documents: bool = key(
        True, "text, packed: tokens attend to earlier documents of their row; false: only to their own document"
    )
    prompt_min: int = key(192, "shortest prompt in tokens (text, split; facts: roughly)", low=1)
    prompt_max: int = key(512, "longest prompt in tokens (text, split; facts: roughly)", low=1)
    continuation: int = key(64, "tokens after the prompt that carry the loss (text, split)", low=1)
    contexts: list[int] = key([512, 1024, 2048], "tokens of a context, sampled from this list (text, responses)")
    responses: list[str] = key(
        ["again", "next", "question"],
        "the responses to a context, a row for each. again: a chunk of it once more; next: the text after it; "
        "question: the answer to a question about one of eight facts that are put into it, or an answer that follows "
        "a rule of a system prompt before it (text, responses)",
    )
    copy_max: int = key(
        0,
        "a random chunk of this many tokens of a longer passage is repeated; 0 means the whole passage (text, "
        "repeated)",
        low=0,
    )
    solution_min: int = key(200, "shortest solution in tokens (worked; roughly)", low=20)
    solution_max: int = key(400, "longest solution in tokens (worked)", low=60)
    cache: str | None = key(
        None, "folder of tokenised rows, shared by later runs and all processes (text)", holds="output"
    )
    train_samples: int | None = key(None, "use the first N training rows only", low=1)
    val_samples: int | None = key(None, "use the first N validation rows only", low=1)
    batch_size: int = key(4, "rows per device and step", low=1)
    val_batch_size: int = key(8, "rows per device in validation (multiple choice: questions)", low=1)
    num_workers: int = key(0, "data loading processes per device", low=0)


@dataclass
class LossConfig:
    """The loss: objective + alpha * |mean gate - beta|; with share_high > 0 the objective alone."""

    objective: str = key(
        "lm",
        "lm: cross-entropy; kl: divergence from the model with open gates and no adapter; regress: regression without "
        "a backward pass through the model; or a loss of a plugin",
        words="lm | kl | regress | a loss of your own",
    )
    alpha: float = key(1.0, "weight of the eviction loss", low=0)
    beta: float = key(0.28, "target of the mean gate", low=0, high=1)
    share_low: float = key(0.1, "with share_high: the smallest share that is sampled", low=0.01, high=1)
    share_high: float = key(
        0.0,
        "above 0: gates for any share. A share from share_low to this value is sampled for each batch, and the gates "
        "keep it (alpha and beta are not used)",
        low=0,
        high=1,
    )
    anneal_steps: int = key(0, "steps after the warm start while beta falls linearly from 1 to its value", low=0)
    mean: Literal["soft", "hard"] = key("soft", "mean over sigmoids, or over flags")
    sampled_tokens: int = key(
        0,
        "tokens of a batch on which the loss is measured, sampled for each step; 0 means all (for a large vocabulary, "
        "whose logits take longer than the model)",
        low=0,
    )
    chunk_tokens: int = key(1024, "tokens whose logits are in memory at once in the loss", low=1)

    replay: bool = key(
        False,
        "read each prompt once, evict it to a sampled share as the engine does, and train on the response alone; two "
        "shares for each response (with objective=kl and share_high)",
    )
    contexts: str | None = key(
        None,
        "folder of cached prompts, shared by later runs and all processes; null: kept until the run ends",
        holds="output",
    )

    @property
    def draws_share(self) -> bool:
        """Whether the share that the gates keep is sampled for each batch."""
        return self.share_high > 0


@dataclass
class WarmupConfig:
    """A warm start of the gates: regression on attention statistics, then biases by measured costs."""

    regress_steps: int = key(0, "first steps that train the gates by regression; 0 means none", low=0)
    lr: float = key(3e-3, "peak learning rate of these steps (one cycle)", low=0)
    target: Literal["attention", "kvzip", "reread"] = key(
        "attention",
        "target of the gates for a key. attention: the attention of later queries to it; kvzip: the largest attention "
        "of a response token, times ||v|| (for data.packing=repeated); reread: the largest attention while the engine "
        "repeats the whole row, chunk by chunk (for data.packing=packed), or with loss.replay each context",
    )
    rounds: int = key(
        0,
        "rounds of costs after the regression, with loss.replay: each head's last bias is set by the cost of evicting "
        "at each threshold; a later round measures under the flags of the previous round; 0 means none",
        low=0,
    )
    rows: int = key(64, "training rows that a round of costs measures", low=1)
    scale: Literal["head", "global"] = key(
        "head",
        "head: targets are standardised in each head; global: over all layers and heads, so that heads are comparable",
    )
    keep: float = key(0.5, "share of the tokens that flags keep after the warm start", low=0.01, high=0.99)


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
    """Arguments of lightning.Trainer."""

    accelerator: Literal["auto", "cpu", "gpu"] = key(
        "auto", "device type to train on; auto takes CUDA if there is a GPU", holds="device"
    )
    devices: int = key(1, "devices per node", low=1)
    num_nodes: int = key(1, "machines", low=1)
    strategy: str = key(
        "auto",
        "auto, ddp, ...: a Lightning strategy that does not fork or spawn; fsdp2: the base divided among the GPUs",
    )
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = key(
        "32-true", "precision of the computation; trainable weights stay float32"
    )
    max_epochs: int = key(1, "passes over the training data", low=1)
    max_steps: int = key(-1, "optimiser steps; -1 means until max_epochs", low=-1)
    accumulate: int = key(1, "batches per optimiser step", low=1)
    clip: float = key(1.0, "largest gradient norm; 0 means no clipping", low=0)
    val_every: int = key(0, "optimiser steps between validations; 0 means once an epoch", low=0)
    val_batches: int | None = key(None, "validate on the first N batches only", low=1)
    log_every: int = key(1, "optimiser steps between log lines", low=1)
    collapse_batches: int = key(
        200,
        "warn about a layer whose gates were all open or all shut for this many batches in a row; 0 means never",
        low=0,
    )
    deterministic: bool = key(False, "use deterministic kernels, which are slower")
    progress: bool = key(True, "show the progress bar on a terminal; false: print lines of text")


@dataclass
class CheckpointConfig:
    """Checkpoints while training, of trainable weights only."""

    every_steps: int = key(0, "optimiser steps between checkpoints; 0 means at each validation only", low=0)
    keep_last: int = key(2, "number of newest checkpoints to keep", low=1)
    monitor: Literal["val/loss", "val/lm_loss", "val/perplexity"] = key(
        "val/loss", "metric that chooses the best checkpoint (lower is better)"
    )
    patience: int = key(0, "stop after this many validations without improvement; 0 means never", low=0)


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

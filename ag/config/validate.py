"""Combinations of keys that make no sense together, each with its reason and its fix.

Types, choices and bounds of single keys are checked where values are read (``ag.config.keys``), those of the gate in
:class:`ag.config.gate.GateConfig`.
"""

from __future__ import annotations

import re
import warnings
from typing import Literal, Protocol

from ag.config import sections
from ag.config.gate import GateConfig
from ag.config.keys import ConfigWarning


class Run(Protocol):
    """What is read of a whole run, :class:`ag.config.schema.Config`."""

    recipe: str
    train: Literal["gates", "gates+lora", "lora"]
    model: sections.ModelConfig
    lora: sections.LoraConfig
    data: sections.DataConfig
    gate: GateConfig
    loss: sections.LossConfig
    warmup: sections.WarmupConfig
    optim: sections.OptimConfig
    trainer: sections.TrainerConfig
    export: sections.ExportConfig


def validate(config: Run) -> None:
    """Refuse combinations of keys that make no sense, and warn of one that rarely does."""
    _refuse(
        re.fullmatch(r"\w[\w.-]*", config.recipe) is None,
        f"recipe={config.recipe!r}: the name is also that of a folder; use letters, digits, '.', '_' and '-'",
    )
    _objective(config)
    _data(config)
    _hardware(config)
    loss, gated = config.loss, config.train != "lora" and config.loss.objective != "regress"
    aimed = gated and loss.alpha > 0 and not loss.draws_share and loss.mean == "soft"
    if aimed and loss.beta > config.gate.threshold:
        warnings.warn(
            f"loss.beta={loss.beta} is above gate.threshold={config.gate.threshold}: gates with that "
            "mean keep nearly every token; choose a smaller loss.beta, or loss.mean=hard",
            ConfigWarning,
            stacklevel=2,
        )


def _refuse(clash: bool, message: str) -> None:
    if clash:
        raise ValueError(message)


def _objective(config: Run) -> None:
    train, objective = config.train, config.loss.objective
    regress_steps, max_steps = config.warmup.regress_steps, config.trainer.max_steps
    _refuse(
        train == "lora" and objective in ("kl", "regress"),
        f"loss.objective={objective} with train=lora: there are no gates to train; use loss.objective=lm",
    )
    _refuse(
        train == "lora" and regress_steps > 0,
        f"warmup.regress_steps={regress_steps} with train=lora: there are no gates to warm up; set it to 0",
    )
    _refuse(
        objective == "regress" and train != "gates",
        f"loss.objective=regress with train={train}: no gradient reaches the adapters; use train=gates",
    )
    _refuse(
        objective == "regress" and regress_steps > 0,
        f"warmup.regress_steps={regress_steps} with loss.objective=regress: every step is one; set it to 0",
    )
    _refuse(max_steps == 0, "trainer.max_steps=0: nothing is trained; give at least 1, or -1 for no limit")
    _refuse(
        0 < max_steps < regress_steps,
        f"warmup.regress_steps={regress_steps} is more than trainer.max_steps={max_steps}: "
        "the main objective never starts; raise trainer.max_steps",
    )
    _refuse(
        objective == "regress" and config.loss.anneal_steps > 0,
        f"loss.anneal_steps={config.loss.anneal_steps} with loss.objective=regress: regression has no target of the "
        "mean gate; set it to 0",
    )
    _shares(config)
    _refuse(
        config.warmup.target == "kvzip"
        and (objective == "regress" or regress_steps > 0)
        and config.data.packing == "packed",
        "warmup.target=kvzip with data.packing=packed: it is the attention of a response, and packed "
        "rows have none; use data.packing=repeated, or warmup.target=attention",
    )
    _refuse(
        config.warmup.target == "reread"
        and (objective == "regress" or regress_steps > 0)
        and config.data.packing != "packed",
        f"warmup.target=reread with data.packing={config.data.packing}: the rows themselves are repeated, and have no "
        "response; use data.kind=text with data.packing=packed, or warmup.target=kvzip",
    )
    _refuse(
        train != "lora" and 0 < max_steps - regress_steps < config.loss.anneal_steps,
        f"loss.anneal_steps={config.loss.anneal_steps} is more than the {max_steps - regress_steps} steps of "
        f"trainer.max_steps={max_steps} after warmup.regress_steps={regress_steps}: the mean gate never gets to "
        "loss.beta; lower loss.anneal_steps, or raise trainer.max_steps",
    )
    _refuse(
        0 < max_steps < config.optim.warmup_steps,
        f"optim.warmup_steps={config.optim.warmup_steps} is more than trainer.max_steps={max_steps}: "
        "the learning rate never reaches its peak; lower optim.warmup_steps",
    )
    _refuse(
        train != "gates" and not config.lora.targets,
        f"lora.targets=[] with train={train}: nothing is adapted; name linear layers, or use train=gates",
    )
    _refuse(
        config.export.push_to_hub is not None and train == "lora",
        "export.push_to_hub with train=lora: only gates are uploaded; leave it out",
    )
    _refuse(
        config.export.merge and train == "gates",
        "export.merge=true with train=gates: there is no adapter to merge; use export.merge=false",
    )


def _shares(config: Run) -> None:
    loss = config.loss
    _refuse(
        not loss.draws_share and loss.share_low != type(loss).share_low,
        f"loss.share_low={loss.share_low} without loss.share_high: no share is drawn; set loss.share_high too",
    )
    for clash, other, why in (
        (loss.share_low > loss.share_high, f"loss.share_low={loss.share_low}", "no share lies between; swap them"),
        (config.train == "lora", "train=lora", "there are no gates to keep a share; set loss.share_high=0"),
        (loss.objective == "regress", "loss.objective=regress", "nothing is evicted; set loss.share_high=0"),
        (
            loss.anneal_steps > 0,
            f"loss.anneal_steps={loss.anneal_steps}",
            "drawn shares take the place of loss.beta, so nothing falls to it; set one of the two to 0",
        ),
    ):
        _refuse(loss.draws_share and clash, f"loss.share_high={loss.share_high} with {other}: {why}")


def _data(config: Run) -> None:
    data, gate = config.data, config.gate
    plain = data.kind == "text" and data.packing != "split"
    _refuse(
        data.kind == "facts" and data.name != "facts",
        f"data.name={data.name} with data.kind=facts: use data.kind=sft for a task, text for documents, worked "
        "for worked problems",
    )
    _refuse(
        data.kind in ("sft", "text") and data.name == "facts" and data.root is None,
        f"data.name=facts with data.kind={data.kind}: give data.root=FOLDER, data.name=ORG/NAME of the "
        "hub, or data.kind=facts",
    )
    _refuse(
        data.eos is not None and data.kind != "sft",
        f"data.eos={str(data.eos).lower()} with data.kind={data.kind}: only responses of data.kind=sft take it; leave "
        "it out",
    )
    _refuse(
        data.question == "after" and data.kind in ("text", "worked"),
        f"data.question=after with data.kind={data.kind}: its rows have no text before a question; leave it out",
    )
    _refuse(
        data.copy_max > 0 and (data.kind != "text" or data.packing != "repeated"),
        f"data.copy_max={data.copy_max} without data.packing=repeated: nothing is repeated; leave it out",
    )
    if data.kind == "worked":
        _refuse(
            data.solution_min > data.solution_max,
            f"data.solution_min={data.solution_min} is more than data.solution_max={data.solution_max}: swap them",
        )
        _refuse(
            data.solution_max >= data.max_length,
            f"data.max_length={data.max_length} has no room for a prompt and a solution of {data.solution_max} tokens: "
            "raise it, or lower data.solution_max",
        )
    _refuse(
        data.kind in ("facts", "worked") and data.root is not None,
        f"data.root={data.root} with data.kind={data.kind}: that data is generated; use data.kind=sft or text",
    )
    _refuse(
        data.kind != "text" and data.packing != "split",
        f"data.packing={data.packing} with data.kind={data.kind}: only plain text is {data.packing}; use "
        "data.packing=split",
    )
    _refuse(
        not data.cross_documents and (data.kind != "text" or data.packing != "packed"),
        f"data.cross_documents=false with data.kind={data.kind}, data.packing={data.packing}: only packed rows hold "
        "several documents; use data.packing=packed, or leave it out",
    )
    _refuse(
        not data.cross_documents and (config.loss.objective == "regress" or config.warmup.regress_steps > 0),
        f"data.cross_documents=false with loss.objective={config.loss.objective}, "
        f"warmup.regress_steps={config.warmup.regress_steps}: regression does not know where documents end; use "
        "data.cross_documents=true, or train without it",
    )
    _refuse(
        plain and config.train != "lora" and gate.scope != "causal",
        f"gate.scope={gate.scope} with data.packing={data.packing}: a gate that sees later tokens leaks them into "
        "the loss; use gate.scope=causal",
    )
    _refuse(
        plain and data.packing == "packed" and config.train != "lora" and gate.prefill != "sparse",
        f"gate.prefill={gate.prefill} with data.packing=packed: there is no response to see what was "
        "evicted; use gate.prefill=sparse or data.packing=split",
    )
    _refuse(
        data.streaming and data.kind != "text",
        f"data.streaming=true with data.kind={data.kind}: only plain text streams; use data.streaming=false",
    )
    _refuse(
        data.cache is not None and (data.kind != "text" or data.streaming),
        f"data.cache={data.cache} with data.kind={data.kind}, data.streaming={str(data.streaming).lower()}: only plain "
        "text that is read before training is kept; leave data.cache out",
    )
    _refuse(
        data.streaming and config.trainer.max_steps < 0,
        "data.streaming=true with trainer.max_steps=-1: a stream has no end; give trainer.max_steps",
    )
    if data.kind == "facts" or (data.kind == "text" and data.packing == "split"):
        longest = data.prompt_max + (data.continuation if data.kind == "text" else 0)
        _refuse(
            data.prompt_min > data.prompt_max,
            f"data.prompt_min={data.prompt_min} is more than data.prompt_max={data.prompt_max}: swap them",
        )
        _refuse(
            longest > data.max_length,
            f"data.max_length={data.max_length} is less than the longest row of {longest} tokens: raise it, "
            "or lower data.prompt_max",
        )


def _hardware(config: Run) -> None:
    model, precision = config.model, config.trainer.precision
    on_cpu, flash = config.trainer.accelerator == "cpu", model.attn_implementation == "flash_attention_2"
    nf4 = model.quantization == "nf4"
    _refuse(
        (model.dtype, precision) in {("bfloat16", "16-mixed"), ("float16", "bf16-mixed")},
        f"model.dtype={model.dtype} with trainer.precision={precision}: two different 16-bit formats; "
        f"use trainer.precision={'bf16-mixed' if model.dtype == 'bfloat16' else '16-mixed'}",
    )
    _refuse(
        nf4 and model.dtype == "float32" and precision != "32-true",
        f"model.quantization=nf4 with model.dtype=float32 and trainer.precision={precision}: 4-bit layers "
        f"compute in model.dtype; use model.dtype={'bfloat16' if precision == 'bf16-mixed' else 'float16'}",
    )
    _refuse(
        nf4 and config.trainer.strategy == "fsdp2",
        "model.quantization=nf4 with trainer.strategy=fsdp2: sharded 4-bit weights are silently corrupted; use "
        "trainer.strategy=ddp, or model.quantization=none",
    )
    _refuse(
        config.trainer.strategy == "fsdp2" and precision == "16-mixed",
        "trainer.precision=16-mixed with trainer.strategy=fsdp2: sharded gradients cannot be scaled; use bf16-mixed",
    )
    _refuse(
        config.trainer.strategy == "fsdp2" and config.export.merge,
        "export.merge=true with trainer.strategy=fsdp2: no GPU holds the whole base; use export.merge=false",
    )
    _refuse(
        nf4 and config.export.merge,
        "export.merge=true with model.quantization=nf4: 4-bit weights are too coarse to take the adapter in; "
        "use export.merge=false",
    )
    _refuse(
        on_cpu and precision == "16-mixed",
        "trainer.precision=16-mixed with trainer.accelerator=cpu: float16 needs a GPU; use bf16-mixed",
    )
    _refuse(
        flash and on_cpu,
        "model.attn_implementation=flash_attention_2 with trainer.accelerator=cpu: it needs a GPU; use sdpa",
    )
    _refuse(
        flash and model.dtype == "float32",
        "model.attn_implementation=flash_attention_2 with model.dtype=float32: it computes in 16 bits only; "
        "use model.dtype=bfloat16",
    )

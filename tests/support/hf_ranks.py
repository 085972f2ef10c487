"""A Trainer of one process or two, in a module that every process imports."""

from __future__ import annotations

from typing import Any

import datasets
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import ag
import ag.hf
from ag.config import Config, OptimConfig
from ag.config.loss import MeanGateConfig


class Gated(ag.hf.GatedTrainer, Trainer):
    pass


def train(folder: str, rows_per_process: int) -> None:
    """Evaluate on five of twelve rows, take three steps on all, and write an export to ``folder``."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    base = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=2, initializer_range=0.15, **sizes))
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    ids = torch.randint(3, 64, (12, 16), generator=torch.Generator().manual_seed(1)).tolist()
    rows = [{"input_ids": x, "attention_mask": [1] * 16, "labels": [-100] * 7 + x[7:]} for x in ids]
    config = Config(
        gate=ag.GateConfig(num_heads=2, head_dim=8, bias=0.0),
        loss=MeanGateConfig(beta=0.4),
        optim=OptimConfig(gate_lr=0.1),
    )
    arguments = TrainingArguments(
        f"{folder}-run",
        max_steps=3,
        per_device_train_batch_size=rows_per_process,
        per_device_eval_batch_size=rows_per_process,
        eval_on_start=True,
        optim="sgd",  # AdamW's first steps divide rounding by itself where gradients are nearly zero
        learning_rate=0.1,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    data, some = datasets.Dataset.from_list(rows), datasets.Dataset.from_list(rows[:5])
    callbacks = [ag.hf.GateCallback(config, folder)]
    Gated(model, arguments, train_dataset=data, eval_dataset=some, callbacks=callbacks).train()

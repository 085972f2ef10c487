"""Kernels in Triton alone, a card that must not be waited for, and a tiny run of `python -m ag.fit`."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.gpu.cases import REHEARSAL


@pytest.fixture(scope="module", autouse=REHEARSAL)
def undrawn(no_figures: None) -> None:
    """In a rehearsal nothing is drawn: pictures take half the time of a tiny run."""


@pytest.fixture(autouse=True)
def freed() -> Iterator[None]:
    """Hand torch's spare memory back after each test: processes beside this one test on the same card."""
    yield
    if not REHEARSAL:
        torch.cuda.empty_cache()


@pytest.fixture
def card() -> None:
    """Skip what a rehearsal without a card cannot show."""
    if REHEARSAL:
        pytest.skip("needs a card: a CPU has no such thing to measure")


@pytest.fixture
def triton_only(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("AG_KERNELS", "triton")


RECIPE = """\
train: gates+lora
model: {{name: {model}, dtype: {dtype}, gradient_checkpointing: true}}
data: {{kind: text, name: words, root: {data}, packing: packed, max_length: 64, val_samples: 4, batch_size: 2}}
gate: {{num_heads: 2, head_dim: 8, scope: causal, bias: 0.0}}
loss: {{beta: 0.4}}
optim: {{gate_lr: 1e-2, lora_lr: 1e-2}}
trainer: {{accelerator: {device}, precision: {precision}, max_steps: 4, progress: false}}
checkpoint: {{every_steps: 2}}
"""


@pytest.fixture(scope="session")
def recipe(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_llama: Callable[..., PreTrainedModel],
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> Path:
    """Gates and LoRA on a tiny Llama and words, 4 steps, a checkpoint after 2: in bfloat16 on a card."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_llama(num_hidden_layers=2).save_pretrained(folder / "base")
    tiny_tokenizer.save_pretrained(folder / "base")
    generator = random.Random(0)
    (folder / "words").mkdir()
    for split in ("train", "validation"):
        words = [" ".join(generator.choices(["ash", "birch", "elm", "oak", "yew"], k=40)) for _ in range(16)]
        (folder / "words" / f"{split}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in words))
    path = folder / "tiny.yaml"
    exact = {"dtype": "float32", "precision": "32-true", "device": "cpu"}
    half = {"dtype": "bfloat16", "precision": "bf16-mixed", "device": "gpu"}
    path.write_text(RECIPE.format(model=folder / "base", data=folder, **(exact if REHEARSAL else half)))
    return path

"""A tiny model, tiny data and a recipe for them, for tests that run `python -m ag.fit`."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerFast

RECIPE = """\
train: gates
model:
  name: {model}
data:
  kind: sft
  name: boolq
  root: {data}
  batch_size: 2
  val_batch_size: 2
  val_samples: 4
gate:
  num_heads: 2
  head_dim: 8
  scope: prompt
  bias: 0.0
loss:
  beta: 0.4
optim:
  gate_lr: 1e-2
  lora_lr: 1e-2
trainer:
  accelerator: cpu
"""


@pytest.fixture(scope="module", autouse=True)
def undrawn(no_figures: None) -> None:
    """Runs in this process draw nothing."""


@pytest.fixture(scope="session")
def tiny_base(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_llama: Callable[..., PreTrainedModel],
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> Path:
    """Folder of a Llama of 2 layers, 4 query and 2 KV heads of 8, and of its tokenizer (one token a character)."""
    folder = tmp_path_factory.mktemp("base")
    tiny_llama(num_hidden_layers=2, hidden_size=32, intermediate_size=64, head_dim=8).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def moved_base(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Path:
    """That base with each weight moved up or down by a rounding: what runs from it differ by is carried rounding."""
    folder = shutil.copytree(tiny_base, tmp_path_factory.mktemp("moved") / "base")
    draw, eps = torch.Generator().manual_seed(0), torch.finfo(torch.float32).eps
    state = load_file(tiny_base / "model.safetensors")
    moved = {name: x * (1 + eps * (2 * torch.randint(0, 2, x.shape, generator=draw) - 1)) for name, x in state.items()}
    save_file(moved, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data.root: boolq with prompts of 40 to 140 characters, and words, documents of plain text."""
    folder = tmp_path_factory.mktemp("data")
    rng = random.Random(0)

    def words(shortest: int, longest: int) -> str:
        return " ".join(rng.choices(["ash", "birch", "elm", "oak", "yew"], k=rng.randint(shortest, longest)))

    def question() -> dict[str, object]:
        return {"passage": words(1, 24), "question": f"is it {words(1, 2)}", "answer": rng.random() < 0.5}

    sizes = {"train": 24, "validation": 8}
    for split, size in sizes.items():
        write_rows(folder / "boolq" / f"{split}.jsonl", [question() for _ in range(size)])
        write_rows(folder / "words" / f"{split}.jsonl", [{"text": words(30, 60)} for _ in range(size)])
    return folder


@pytest.fixture(scope="session")
def recipe(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path, tiny_data: Path) -> Path:
    """A recipe of 12 steps: gates only, on boolq, 2 rows a step."""
    path = tmp_path_factory.mktemp("recipe") / "tiny.yaml"
    path.write_text(RECIPE.format(model=tiny_base, data=tiny_data))
    return path


def write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

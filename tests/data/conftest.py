"""A tiny tokenizer, a recipe and local folders for the data tests."""

import gzip
import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

import ag.data
from ag.config import Config
from ag.config.data import DATA, OwnDataConfig, choose_data
from ag.data import facts
from ag.data.module import DataModule

SENTENCES = [
    "The quick brown fox jumps over the lazy dog. Question: does it rain? Answer: yes no",
    "A small boat waits near the old bridge, because the river is high today, so nobody leaves.",
    *(facts.generate(0, "train", i, 100, 200).prompt for i in range(20)),
]


def byte_level(bos: bool = False) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Like SmolLM2's: byte-level, no BOS, no padding token."""
    return byte_level()


@pytest.fixture(scope="session")
def bos_tokenizer() -> PreTrainedTokenizerFast:
    return byte_level(bos=True)


@pytest.fixture
def make_config() -> Callable[..., Config]:
    """`make(**data)`: a configuration with these keys of the data, without those of other kinds."""

    def make(**data: Any) -> Config:
        config, kind = Config(), DATA[choose_data(data)]
        assert data.keys() <= {field.name for field in fields(OwnDataConfig)}
        own = {field.name for field in fields(kind)}
        config.data = kind(**{name: value for name, value in data.items() if name in own})
        return config

    return make


@pytest.fixture
def module(
    make_config: Callable[..., Config],
    tokenizer: PreTrainedTokenizerFast,
    write: Callable[..., Path],
    tmp_path: Path,
) -> Callable[..., DataModule]:
    """`module(rows, chat, **data)`: the data module of rows in a folder, of which one is held out."""
    own = tokenizer

    def make(
        rows: list[dict[str, Any]],
        chat: str | None = None,
        tokenizer: PreTrainedTokenizerFast = own,
        context: int = 10_000,
        **data: Any,
    ) -> DataModule:
        write(tmp_path / "mine", "train", rows)
        told = {"kind": "sft", "name": str(tmp_path / "mine"), "val_samples": 1, "batch_size": 1}
        tokenizer.chat_template = chat
        try:
            config = make_config(**told | data)
            return ag.data.build(config.data, config.seed, tokenizer, context)
        finally:
            tokenizer.chat_template = None

    return make


@pytest.fixture
def write() -> Callable[..., Path]:
    def write(folder: Path, split: str, rows: list[dict[str, Any]], zipped: bool = False) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(row) + "\n" for row in rows)
        file = folder / f"{split}.jsonl{'.gz' if zipped else ''}"
        file.write_bytes(gzip.compress(text.encode()) if zipped else text.encode())
        return file

    return write

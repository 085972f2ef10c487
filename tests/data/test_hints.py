"""What errors tell to change is what the kind of data reads."""

import re
from dataclasses import dataclass, fields

import pytest

import ag.data
from ag.config import Config, DataConfig
from ag.data.sources import DataError

READ: set[str] = set()


@dataclass
class Recorded(DataConfig):
    """Says which keys are read."""

    def __getattribute__(self, name):
        READ.add(name)
        return super().__getattribute__(name)


PAIR, SHORT = {"prompt": "does it rain?", "response": " yes"}, {"text": "short"}


@pytest.mark.parametrize(
    ("told", "row"),
    [
        ({"val_samples": 3}, PAIR),
        ({}, SHORT),
        ({"kind": "text"}, SHORT),
        ({"kind": "text", "prompt_max": 2000}, SHORT),
        ({"kind": "text", "packing": "repeated"}, SHORT),
        ({"kind": "text", "packing": "repeated", "max_length": 100}, SHORT),
        ({"kind": "facts", "train_samples": 2, "val_samples": 2, "max_length": 3}, SHORT),
        ({"kind": "worked", "name": "worked", "train_samples": 2, "val_samples": 2, "max_length": 90}, SHORT),
    ],
)
def test_keys_that_are_named_are_read(told, row, tokenizer, write, tmp_path):
    write(tmp_path / "mine", "train", [row] * 3)
    config = Config()
    config.data = Recorded(**{"kind": "sft", "val_samples": 1, "name": str(tmp_path / "mine")} | told)
    READ.clear()
    with pytest.raises(DataError) as caught:
        ag.data.build(config, tokenizer, 10_000)
    named = set(re.findall(r"data\.([a-z_]+)", str(caught.value)))
    assert named and named <= READ & {field.name for field in fields(DataConfig)}, str(caught.value)

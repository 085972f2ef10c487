"""What errors tell to change is what the kind of data reads."""

import re
from dataclasses import fields

import pytest

import ag.data
from ag.config import Config, DataConfig
from ag.data.sources import DataError

READ: set[str] = set()
CHOSEN = {"kind", "packing"}  # their values chose the class that is read


def read(data, name):
    """Return an attribute, and remember its name."""
    READ.add(name)
    return object.__getattribute__(data, name)


FEW = {"train_samples": 2, "val_samples": 2}
PAIR, SHORT = {"prompt": "does it rain?", "response": " yes"}, {"text": "short"}


@pytest.mark.parametrize(
    ("told", "row"),
    [
        ({"val_samples": 3}, PAIR),
        ({}, SHORT),
        ({"kind": "text"}, SHORT),
        ({"kind": "text", "prompt_max": 20_000, "max_length": 30_000}, SHORT),
        ({"kind": "text", "packing": "repeated"}, SHORT),
        ({"kind": "text", "packing": "repeated", "max_length": 100}, SHORT),
        (
            {"kind": "facts", "train_samples": 2, "val_samples": 2, "prompt_min": 1, "prompt_max": 3, "max_length": 3},
            SHORT,
        ),
        (
            {
                "kind": "worked",
                "name": "worked",
                "train_samples": 2,
                "val_samples": 2,
                "solution_min": 89,
                "solution_max": 89,
                "max_length": 90,
            },
            SHORT,
        ),
    ],
)
def test_keys_that_are_named_are_read(told, row, tokenizer, write, tmp_path, monkeypatch):
    write(tmp_path / "mine", "train", [row] * 3)
    config = Config()
    own = {"name": str(tmp_path / "mine")} if told.get("kind") != "facts" else {}
    config.data = DataConfig(**{"kind": "sft", "val_samples": 1} | own | told)
    monkeypatch.setattr(DataConfig, "__getattribute__", read, raising=False)
    READ.clear()
    READ.update(CHOSEN)
    with pytest.raises(DataError) as caught:
        ag.data.build(config.data, config.seed, tokenizer, 10_000)
    named = set(re.findall(r"data\.([a-z_]+)", str(caught.value)))
    assert named and named <= READ & {field.name for field in fields(config.data)}, str(caught.value)

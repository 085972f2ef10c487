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


PAIR = {"prompt": "does it rain?", "response": " yes"}
CHAT = {"messages": [{"role": "user", "content": "does it rain?"}, {"role": "assistant", "content": "yes"}]}
TEXT = {"text": "A small boat waits near the old bridge. " * 100}
#: A kind of data and rows that are good, and a change of its keys, or other rows, with which nothing is left.
CASES = {
    "pairs": ({"kind": "sft"}, PAIR, {"max_length": 3}),
    "chats": ({"kind": "sft"}, CHAT, {"max_length": 3}),
    "no prompt": ({"kind": "sft"}, PAIR, PAIR | {"prompt": ""}),
    "documents": ({"kind": "sft"}, TEXT, {"text": "short"}),
    "split": ({"kind": "text"}, TEXT, {"text": "short"}),
    "split, no field": ({"kind": "text"}, TEXT, PAIR),
    "split, long": ({"kind": "text"}, TEXT, {"prompt_max": 2000}),
    "repeated": ({"kind": "text", "packing": "repeated"}, TEXT, {"text": "short"}),
    "repeated, short rows": ({"kind": "text", "packing": "repeated"}, TEXT, {"max_length": 100}),
    "packed": ({"kind": "text", "packing": "packed"}, TEXT, PAIR),
    "held out": ({"kind": "sft"}, PAIR, {"val_samples": 3}),
    "facts": ({"kind": "facts", "train_samples": 2, "val_samples": 2}, None, {"max_length": 3}),
    "worked": ({"kind": "worked", "name": "worked", "train_samples": 2, "val_samples": 2}, None, {"max_length": 90}),
}


@pytest.mark.parametrize("case", CASES)
def test_keys_that_are_named_are_read(case, tokenizer, write, tmp_path, monkeypatch):
    told, row, change = CASES[case]
    monkeypatch.setattr(
        tokenizer, "chat_template", "{% for m in messages %}{{ m.role + ':' + m.content + '.' }}{% endfor %}"
    )
    told = {"val_samples": 1, "name": str(tmp_path / "mine")} | told

    def build(one, **more):
        if one is not None:
            write(tmp_path / "mine", "train", [one] * 3)
        config = Config()
        config.data = Recorded(**told | more)
        READ.clear()
        ag.data.build(config, tokenizer, 10_000)

    build(row)
    read = READ & {field.name for field in fields(DataConfig)}
    with pytest.raises(DataError) as caught:
        build(row, **change) if change.keys() <= read else build(change)
    named = set(re.findall(r"data\.([a-z_]+)", str(caught.value)))
    assert named <= read and (named or "no field text" in str(caught.value)), str(caught.value)

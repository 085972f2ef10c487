"""Lengths of the rows of a plan: those that the run's data module has, where data and tokenizer are on this machine."""

import json
import subprocess
import sys

import pytest
from datasets.naming import camelcase_to_snakecase
from huggingface_hub import constants

from ag.config import Config, DataConfig, ModelConfig
from ag.data import lengths
from ag.data.lengths import RowSample, sample_rows
from ag.data.module import build
from ag.data.sources import Source

CONTEXT = 512
PIQA = {"goal": "w1 w2", "sol1": "w3 w4 w5", "sol2": "w6", "label": 0}


@pytest.fixture
def model(tmp_path, tiny_tokenizer):
    """A folder with a tokenizer, which has no weights."""
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    return ModelConfig(name=str(tmp_path / "model"))


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    texts = [" ".join(f"w{i % 90}" for i in range(number)) for number in (30, 50, 200, 90)]
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


TEXTS = [{"text": f"The old boat {i} waits near the river. " * (i + 9)} for i in range(24)]
PAIRS = [{"prompt": f"Word {i}:", "response": " the old bridge" * (i + 1)} for i in range(9)]
CHATS = [
    {"messages": [{"role": role, "content": f"{role} {i} " * (i + 3)} for role in ("system", "user", "assistant")]}
    for i in range(9)
]
TASK = [
    {"goal": f"cross river {i}", "sol1": "by boat" * (i + 1), "sol2": "by bridge", "label": i % 2} for i in range(9)
]
TEMPLATE = "{% for m in messages %}<s>{{ m.role }} {{ m.content }}</s>{% endfor %}"


@pytest.mark.parametrize(
    ("rows", "data"),
    [
        (TASK, {"kind": "sft", "name": "piqa"}),
        (TASK, {"kind": "sft", "name": "piqa", "eos": True, "max_length": 40}),
        (PAIRS, {"kind": "sft", "name": "own"}),
        (CHATS, {"kind": "sft", "name": "own"}),
        (TEXTS, {"kind": "sft", "name": "own", "prompt_min": 10, "prompt_max": 60, "continuation": 8}),
        (TEXTS, {"kind": "text", "name": "own", "prompt_min": 10, "prompt_max": 60, "continuation": 8}),
        (TEXTS, {"kind": "text", "name": "own", "packing": "packed", "max_length": 150}),
        (TEXTS, {"kind": "text", "name": "own", "packing": "repeated", "max_length": 256}),
        (TEXTS, {"kind": "text", "name": "own", "packing": "responses", "contexts": [192, 256], "responses": ["next"]}),
    ],
    ids=["task", "cut_task", "pairs", "chats", "documents", "split", "packed", "repeated", "responses"],
)
def test_lengths_are_those_of_the_batches_that_the_run_reads(rows, data, write, tokenizer, tmp_path):
    tokenizer.chat_template = TEMPLATE
    try:
        tokenizer.save_pretrained(tmp_path / "model")
        for split in ("train", "validation"):
            write(tmp_path / "rows", split, rows)
        parts = {"data": DataConfig(root=str(tmp_path / "rows"), batch_size=2, **data)}
        config = Config(model=ModelConfig(name=str(tmp_path / "model")), **parts)
        found, module = sample_rows(config, CONTEXT), build(config.data, config.seed, tokenizer, CONTEXT)
    finally:
        tokenizer.chat_template = None
    batches = [module.collator([row]) for row in module.train_rows]
    sizes = [batch["input_ids"].shape[1] for batch in batches]
    assert isinstance(found, RowSample), found
    assert (found.count, found.longest) == (len(sizes), max(sizes))
    assert found.mean == pytest.approx(sum(sizes) / len(sizes), rel=1e-12)
    assert found.mean <= found.mean_batch_length <= found.longest
    with_loss = sum(int((batch["labels"] >= 0).sum()) for batch in batches)
    assert found.with_loss == pytest.approx(with_loss / len(sizes), rel=1e-12)
    assert sample_rows(config, CONTEXT, count=2).count == 2


def test_rows_are_read_without_torch(model, root):
    """In a new Python: a plan that reads rows takes a second or two."""
    code = """
import sys
from ag.config import Config, DataConfig, ModelConfig
from ag.data.lengths import sample_rows
data = DataConfig(kind="text", name="own", root=sys.argv[2], packing="packed", max_length=64, val_samples=1)
print(sample_rows(Config(model=ModelConfig(name=sys.argv[1]), data=data), 512).count, *sys.modules)
"""
    words = [sys.executable, "-W", "ignore", "-c", code, model.name, str(root)]
    count, *modules = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    assert int(count) > 0 and not {"torch", "lightning", "datasets"} & set(modules)


def test_a_padded_batch_has_the_length_of_its_longest_row(model, root):
    """With one batch of all rows the padded length is the longest; with batches of one it is the mean."""
    data = {"kind": "text", "name": "own", "root": str(root), "packing": "packed", "max_length": 150, "val_samples": 1}
    for size, attribute in ((1, "mean"), (50, "longest")):
        found = sample_rows(Config(model=model, data=DataConfig(**data, batch_size=size)), CONTEXT)
        assert found.mean_batch_length == getattr(found, attribute)


def test_a_hub_dataset_is_read_where_its_cache_is(model, tmp_path, monkeypatch):
    """And without a request to the hub, whatever the setting of this process."""
    offline = []

    def load(source, split):
        offline.append(constants.is_offline_mode())
        return [PIQA] * 3

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(Source, "_load_hub", load)
    config = Config(model=model, data=DataConfig(kind="sft", name="piqa"))
    assert sample_rows(config, CONTEXT).startswith("piqa is not on this machine")
    (tmp_path / "cache" / "ybisk___piqa").mkdir(parents=True)
    assert sample_rows(config, CONTEXT).count == 3
    assert offline and all(offline) and not constants.is_offline_mode()


def test_another_subset_in_the_cache_is_not_the_data(model, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    (tmp_path / "aps___super_glue" / "rte").mkdir(parents=True)
    for name, here in (("copa", False), ("rte", True)):
        told = sample_rows(Config(model=model, data=DataConfig(kind="sft", name=name)), CONTEXT)
        assert told.startswith(f"{name} cannot be read" if here else f"{name} is not on this machine")


@pytest.mark.parametrize(
    "hub_id", ["glue", "ybisk/piqa", "togethercomputer/RedPajama-Data-1T-Sample", "HuggingFaceTB/smolTalk2Go", "a/B_CD"]
)
def test_the_cache_is_looked_for_where_datasets_has_it(hub_id):
    *owner, name = hub_id.split("/")
    assert lengths._cache_name(hub_id) == "___".join([*owner, camelcase_to_snakecase(name)])


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"kind": "facts"}, "those of data.kind=facts are generated"),
        ({"kind": "text", "name": "owner/name"}, "owner/name is not on this machine (data.root=FOLDER names a copy)"),
        ({"kind": "text", "name": "own", "root": "/nowhere"}, "own in /nowhere cannot be read (data.root=/nowhere"),
    ],
    ids=["generated", "hub", "missing"],
)
def test_rows_that_cannot_be_read_have_a_reason(given, reason, model, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    assert sample_rows(Config(model=model, data=DataConfig(**given)), CONTEXT).startswith(reason)


def test_a_tokenizer_is_found_in_a_folder_and_in_the_cache_of_the_hub(root, tmp_path, monkeypatch, tiny_tokenizer):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    config = Config(model=ModelConfig(name="owner/name"), data=DataConfig(kind="text", name="own", root=str(root)))
    assert sample_rows(config, CONTEXT) == "the tokenizer of owner/name is not on this machine"
    snapshots = tmp_path / "hub" / "models--owner--name"
    tiny_tokenizer.save_pretrained(snapshots / "snapshots" / "abc")
    (snapshots / "refs").mkdir()
    (snapshots / "refs" / "main").write_text("abc")
    assert lengths._tokenizer_folder("owner/name", None) == snapshots / "snapshots" / "abc"

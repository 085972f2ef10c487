"""Tokenised rows on disk."""

import json
import pickle
import subprocess

import numpy as np
import pytest

import ag.data
from ag.data import text as text_module
from ag.data.cache import CachedRows, cached
from ag.data.collate import Row
from ag.data.sources import DataError
from tests.support.refused import refuses
from tests.support.warm import started

SMALL = {"prompt_min": 8, "prompt_max": 40, "continuation": 4, "max_length": 60}
DOCUMENTS = [{"text": f"{i} " + "the river is high today " * (i % 7)} for i in range(30)]


@pytest.fixture
def corpus(tmp_path, write):
    write(tmp_path / "data" / "corpus", "train", DOCUMENTS)
    write(tmp_path / "data" / "corpus", "validation", DOCUMENTS[:9])
    return tmp_path / "data"


def build(make_config, tokenizer, corpus, context=10_000, seed=0, **data):
    settings = {"kind": "text", "name": "corpus", "root": str(corpus), "batch_size": 2, **SMALL} | data
    config = make_config(**settings)
    config.seed = seed
    return ag.data.build(config, tokenizer, context)


def contents(module):
    rows = [*module.train_rows, *(row for (row,) in module.val_rows)]
    return [(row.tokens.tolist(), row.prompt_length, row.copied) for row in rows], module.counts.skipped


@pytest.mark.parametrize(("packing", "copy_max"), [("packed", 0), ("split", 0), ("repeated", 0), ("repeated", 30)])
def test_second_run_reads_what_the_first_one_made(
    make_config, tokenizer, corpus, tmp_path, monkeypatch, packing, copy_max, write
):
    if packing == "repeated":
        for split, most in (("train", 5), ("validation", 3)):
            texts = [f"{i} " + "the river is high today " * (30 * i) for i in range(most)]
            write(corpus / "corpus", split, [{"text": text} for text in texts])
    options = {"packing": packing, "max_length": 200 if packing == "repeated" else 60, "copy_max": copy_max}
    first = build(make_config, tokenizer, corpus, **options)
    fresh, batches = contents(first), [*first.train_dataloader()]
    options["cache"] = str(tmp_path / "cache")
    assert contents(build(make_config, tokenizer, corpus, **options)) == fresh
    real = text_module.tokenize

    def joint_only(tokenizer, texts):  # what stands between a passage and its copy
        return real(tokenizer, texts) if texts == [text_module.AGAIN] else pytest.fail("tokenised again")

    monkeypatch.setattr(text_module, "tokenize", joint_only)
    again = build(make_config, tokenizer, corpus, **options)
    assert contents(again) == fresh
    assert fresh[1] > 0 or packing == "packed"
    assert contents(pickle.loads(pickle.dumps(again))) == fresh
    for batch, same in zip(again.train_dataloader(), batches, strict=True):
        assert {name: x.tolist() for name, x in batch.items()} == {name: x.tolist() for name, x in same.items()}


def test_anything_that_changes_the_rows_makes_another_cache(make_config, tokenizer, bos_tokenizer, corpus, tmp_path):
    folder = tmp_path / "cache"
    options = {"cache": str(folder)}

    def made():
        return {path.name for path in folder.iterdir() if path.is_dir()}

    build(make_config, tokenizer, corpus, **options)
    before = made()
    assert len(before) == 2  # training and validation
    changes = [
        {"tokenizer": bos_tokenizer},
        {"packing": "packed"},
        {"max_length": 61},
        {"continuation": 5},
        {"train_samples": 3},
        {"seed": 1},
        {"context": 59},
    ]
    for change in changes:
        module = build(**{"make_config": make_config, "tokenizer": tokenizer, "corpus": corpus} | options | change)
        now = made()
        assert now > before, change
        before = now
        plain = {name: value for name, value in change.items() if name != "tokenizer"}
        used = change.get("tokenizer", tokenizer)
        assert contents(module) == contents(build(make_config, used, corpus, **plain))
    file = corpus / "corpus" / "train.jsonl"
    file.write_text(file.read_text().replace("river", "lake"))
    changed = build(make_config, tokenizer, corpus, **options)
    assert contents(changed) == contents(build(make_config, tokenizer, corpus))
    assert len(made()) == len(before) + 1  # validation is as it was


@pytest.mark.parametrize("damage", ["truncated", "manifest", "leftover"])
def test_damage_is_repaired(tmp_path, damage):
    rows = [Row(np.arange(5, dtype=np.int32)), Row(np.arange(3, dtype=np.int32), 2)]
    calls = []

    def make():
        calls.append(1)
        return rows

    def read():
        found, measured = cached(tmp_path / "cache", {"a": 1}, make, lambda: {"skipped": 7})
        assert measured == {"skipped": 7}
        assert [(row.tokens.tolist(), row.prompt_length) for row in found] == [([0, 1, 2, 3, 4], None), ([0, 1, 2], 2)]
        return found

    folder = read().folder
    if damage == "truncated":
        (folder / "tokens.bin").write_bytes(b"1234")
    elif damage == "manifest":
        (folder / "manifest.json").write_text(json.dumps({"identity": 5}))
    else:
        folder.rename(folder.with_name(f"{folder.name}.partial"))
    read()
    read()
    assert len(calls) == 2
    assert isinstance(read(), CachedRows) and [row.prompt_length for row in read()[-2:]] == [None, 2]


def test_a_failure_leaves_nothing_behind(tmp_path):
    def broken():
        yield Row(np.arange(5, dtype=np.int32))
        raise RuntimeError("the source broke off")

    with pytest.raises(RuntimeError, match="broke off"):
        cached(tmp_path, {"a": 1}, broken, dict)
    assert [path.suffix for path in tmp_path.iterdir()] in ([], [".lock"])


def test_folder_that_cannot_be_written(make_config, tokenizer, corpus, tmp_path):
    (tmp_path / "file").write_text("")
    with refuses(DataError, f"data.cache={tmp_path / 'file'}"):
        build(make_config, tokenizer, corpus, cache=str(tmp_path / "file"))


RACE = """
import sys, time
from pathlib import Path
import numpy as np
from ag.data.cache import cached
from ag.data.collate import Row
def make():
    print("made", flush=True)
    for i in range(20):
        time.sleep(0.05)
        yield Row(np.full(4, i, dtype=np.int32))
rows, _ = cached(Path(sys.argv[1]), {"a": 1}, make, dict)
print("sum", sum(int(row.tokens.sum()) for row in rows))
"""


@pytest.mark.slow
def test_two_processes_make_it_once(tmp_path):
    processes = [
        subprocess.Popen([started(), "-c", RACE, str(tmp_path)], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    printed = [process.communicate(timeout=120)[0] for process in processes]
    assert sum(text.count("made") for text in printed) == 1
    assert all(f"sum {4 * 190}" in text for text in printed)

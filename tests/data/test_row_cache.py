"""Tokenised rows that ``datasets`` keeps on disk."""

import hashlib
import pickle
from copy import deepcopy
from dataclasses import asdict

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import ag.data
from ag.data import text as text_module
from ag.data.sources import DataError
from tests.support.refused import refuses

SMALL = {"prompt_min": 8, "prompt_max": 40, "continuation": 4, "max_length": 60}
DOCUMENTS = [{"text": f"{i} " + "the river is high today " * (i % 7)} for i in range(30)]


@pytest.fixture
def corpus(tmp_path, write):
    write(tmp_path / "data" / "corpus", "train", DOCUMENTS)
    write(tmp_path / "data" / "corpus", "validation", DOCUMENTS[:9])
    return tmp_path / "data"


@pytest.fixture
def build(make_config, tokenizer, corpus):
    own = tokenizer

    def build(context=10_000, seed=0, tokenizer=own, **data):
        config = make_config(**{"kind": "text", "name": "corpus", "root": str(corpus), "batch_size": 2, **SMALL} | data)
        config.seed = seed
        return ag.data.build(config.data, config.seed, tokenizer, context)

    return build


def contents(module):
    rows = [*module.train_rows, *(row for (row,) in module.val_rows)]
    found = [
        (row.tokens.tolist(), row.prompt_length, row.context_length, row.response_start, row.response_end, row.copied)
        for row in rows
    ]
    return found, asdict(module.splits.counts)


@pytest.mark.parametrize(("packing", "copy_max"), [("split", 0), ("repeated", 30), ("responses", 0)])
def test_second_run_reads_what_the_first_one_made(build, corpus, tmp_path, monkeypatch, packing, copy_max, write):
    if packing != "split":
        for split, most in (("train", 5), ("validation", 3)):
            texts = [f"{i} " + "the river is high today " * (30 * i) for i in range(most)]
            write(corpus / "corpus", split, [{"text": text} for text in texts])
    length = {"split": 60, "repeated": 200, "responses": 600}[packing]
    options = {"packing": packing, "max_length": length, "copy_max": copy_max, "contexts": [256]}
    first = build(**options)
    fresh, batches = contents(first), [*first.train_dataloader()]
    assert fresh[1]["train"]["skipped"] > 0 < fresh[1]["train"]["lost_tokens"]
    options["cache"] = str(tmp_path / "cache")
    assert contents(build(**options)) == fresh
    assert build(**options)._hash == first._hash  # a run is resumed with and without a cache
    real = text_module.tokenize

    def joint_only(tokenizer, texts):  # what stands between a passage and its copy
        return real(tokenizer, texts) if texts == [text_module.REPEAT_PROMPT] else pytest.fail("tokenised again")

    monkeypatch.setattr(text_module, "tokenize", joint_only)
    again = build(**options)
    assert contents(again) == contents(pickle.loads(pickle.dumps(again))) == fresh
    for batch, same in zip(again.train_dataloader(), batches, strict=True):
        assert {name: x.tolist() for name, x in batch.items()} == {name: x.tolist() for name, x in same.items()}


def test_anything_that_changes_the_rows_makes_another_cache(build, bos_tokenizer, corpus, tmp_path):
    folder = tmp_path / "cache"

    def made(**change):
        module = build(cache=str(folder), **change)
        assert contents(module) == contents(build(**change))
        return {path.name for path in (folder / "generator").iterdir()}

    before = made()
    assert len(before) == 2  # training and validation
    changes = ("packing", "packed"), ("train_samples", 3), ("seed", 1), ("context", 59)
    spoken = deepcopy(bos_tokenizer)
    spoken.chat_template = "{{ messages[0]['content'] }}"  # rules of a system prompt are written with it
    for name, value in (*changes, ("tokenizer", bos_tokenizer), ("tokenizer", spoken)):
        now = made(**{name: value})
        assert now > before, name
        before = now
    file = corpus / "corpus" / "train.jsonl"
    file.write_text(file.read_text().replace("river", "lake"))
    assert len(made()) == len(before) + 1  # validation is as it was


def test_what_cannot_be_used_is_named(build, corpus, tmp_path, write):
    """A folder that is none, damage, and rows that are refused while they are made; nothing of these is kept."""
    (tmp_path / "file").write_text("")
    with refuses(DataError, f"data.cache={tmp_path / 'file'}"):
        build(cache=str(tmp_path / "file"))
    folder = tmp_path / "cache"
    write(corpus / "corpus", "train", [*DOCUMENTS, {"texts": "x"}])
    for _ in range(2):
        with refuses(DataError, "train.jsonl row 31", "texts"):
            build(cache=str(folder))
    write(corpus / "corpus", "train", DOCUMENTS)
    fresh = contents(build(cache=str(folder)))
    for file in folder.rglob("*.arrow"):
        file.write_bytes(b"1234")
    with refuses(DataError, f"data.cache={folder}", "delete"):
        build(cache=str(folder))
    assert fresh == contents(build())


def test_a_format_names_its_rows(build, corpus, write):
    """Where rows become others, raise FORMAT, so that caches of the rows before are not read, and change the sums."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE({letter: place for place, letter in enumerate(alphabet)}, []))
    bytewise.pre_tokenizer, bytewise.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token=alphabet[0])
    for split in ("train", "validation"):
        write(corpus / "corpus", split, [{"text": f"{i} " + "The river is high. " * 130 * i} for i in range(1, 5)])
    sums = {}
    for packing in ("packed", "split", "repeated", "responses"):
        module = build(tokenizer=tokenizer, packing=packing, max_length=1500, contexts=[1100], copy_max=200)
        digest = hashlib.md5(repr(contents(module)[0]).encode(), usedforsecurity=False)
        sums[packing] = digest.hexdigest()[:8]
    right = {"packed": "ac9ebb2f", "split": "c0b91daa", "repeated": "577ac851", "responses": "ff3e73e3"}
    assert (text_module.FORMAT, sums) == (9, right)

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import ag.data
from ag.data import encode
from ag.data.sources import DataError
from ag.data.templates import Example
from ag.training.replay import check_rows
from tests.data.conftest import SENTENCES
from tests.support.refused import refuses
from tests.support.spaced import spaced

BOOLQ = [
    {"question": f"is {word} a fox", "passage": f"The quick {word} fox jumps over the dog.", "answer": word == "red"}
    for word in ("red", "blue", "green", "white", "black")
]


@pytest.fixture
def boolq(tmp_path, write):
    write(tmp_path / "boolq", "train", BOOLQ, zipped=True)
    write(tmp_path / "boolq", "validation", BOOLQ[:3])
    return str(tmp_path)


def build(make_config, tokenizer, root, context=10_000, **data):
    config = make_config(**({"kind": "sft", "name": "boolq", "root": root, "batch_size": 2} | data))
    return ag.data.build(config.data, config.seed, tokenizer, context)


def test_training_batch(make_config, boolq, tokenizer):
    module = build(make_config, tokenizer, boolq, batch_size=5)
    (batch,) = module.train_dataloader()
    assert set(batch) == {"input_ids", "attention_mask", "labels", "prompt_length"}
    seen = set()
    for ids, mask, labels, prompt in zip(
        *(batch[k] for k in ("input_ids", "attention_mask", "labels")), batch["prompt_length"], strict=True
    ):
        length = int(mask.sum())
        assert mask[:length].all() and not mask[length:].any()
        assert (ids[length:] == tokenizer.eos_token_id).all()  # no padding token: EOS pads
        assert labels.tolist() == [-100] * prompt + ids[prompt:length].tolist() + [-100] * (len(ids) - length)
        seen.add((tokenizer.decode(ids[:prompt]), tokenizer.decode(ids[prompt:length])))
    assert seen == {
        (f"{row['passage']}\nQuestion: {row['question']}?\nAnswer:", " yes" if row["answer"] else " no")
        for row in BOOLQ
    }


def test_validation_batches_hold_whole_questions(make_config, boolq, tokenizer):
    module = build(make_config, tokenizer, boolq, val_batch_size=2)
    first, second = module.val_dataloader()
    assert first["question"].tolist() == [0, 0, 1, 1] and second["question"].tolist() == [2, 2]
    assert first["choice"].tolist() == [0, 1, 0, 1]
    assert first["target"].tolist() == [1, 1, 0, 0]  # the first answer is yes, choice 1
    right = first["choice"] == first["target"]
    answers = [
        tokenizer.decode(ids[labels != -100])
        for ids, labels in zip(first["input_ids"][right], first["labels"][right], strict=True)
    ]
    assert answers == [" yes", " no"]


def test_prompt_tokens_are_those_of_the_prompt_alone(make_config, boolq, tokenizer, bos_tokenizer):
    for tok in (tokenizer, bos_tokenizer, spaced("always", "\n".join(SENTENCES))):
        module = build(make_config, tok, boolq)
        for row, raw in zip(module.train_rows, BOOLQ, strict=True):
            prompt = f"{raw['passage']}\nQuestion: {raw['question']}?\nAnswer:"
            answer = " yes" if raw["answer"] else " no"
            assert row.tokens[: row.prompt_length].tolist() == tok(prompt)["input_ids"]
            assert row.tokens.tolist() == tok(prompt + answer)["input_ids"]  # no second space with Metaspace
    assert build(make_config, bos_tokenizer, boolq).train_rows[0].tokens[0] == bos_tokenizer.bos_token_id


def test_texts_that_merge_over_the_border():
    """A response is tokenised alone, and a text before a question ends where the tokens of both differ."""
    vocabulary = {"a": 0, "b": 1, " ": 2, "a b": 3, "a ": 4, "</s>": 5}
    merges = [("a", " "), ("a ", "b")]
    tok = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocabulary, merges)), eos_token="</s>")
    assert tok("a b")["input_ids"] == [3]
    (group,) = encode.encode(tok, [Example("a", ["b"], 0)])
    assert group[0].tokens.tolist() == [0, 2, 1] and group[0].prompt_length == 1
    (group,) = encode.encode(tok, [Example("b a b", ["b"], 0, "b a")], question="after")
    assert group[0].tokens.tolist() == [1, 2, 3, 2, 1] and (group[0].prompt_length, group[0].response_start) == (2, 3)


def test_long_prompt_loses_its_left_part(make_config, boolq, bos_tokenizer):
    whole = build(make_config, bos_tokenizer, boolq)
    module = build(make_config, bos_tokenizer, boolq, context=12)
    lost = 0
    for row, full in zip(module.train_rows, whole.train_rows, strict=True):
        response = len(full.tokens) - full.prompt_length
        assert len(row.tokens) == 12 and row.prompt_length == 12 - response
        assert row.tokens.tolist() == [0, *full.tokens[-11:].tolist()]
        lost += len(full.tokens) - 12
    assert (module.splits.counts.train.cut, module.splits.counts.train.lost_tokens) == (5, lost)
    lost = sum(len(row.tokens) - 12 for group in whole.val_rows for row in group)
    assert (module.splits.counts.validation.cut, module.splits.counts.validation.lost_tokens) == (3 * 2, lost)
    assert len(module.splits.report()[1]) == 2 and whole.splits.report() == (
        ["training: 5 rows", "validation: 3 rows"],
        [],
    )


def test_question_behind_the_prompt(make_config, boolq, tokenizer, bos_tokenizer):
    """The tokens are the same; the prompt is the text alone, and only answers carry loss."""
    facts = {"kind": "facts", "name": "facts", "train_samples": 4, "val_samples": 2}
    for tok, name in ((tokenizer, {}), (bos_tokenizer, facts)):
        before, after = (build(make_config, tok, boolq, **name, question=when) for when in ("before", "after"))
        rows = zip(before.train_rows, after.train_rows, strict=True)
        for number, (old, new) in enumerate(rows):
            assert old.tokens.tolist() == new.tokens.tolist()
            assert new.response_start == old.response_start == old.prompt_length
            assert new.loss.tolist() == [i >= old.prompt_length for i in range(len(old.tokens))]
            read, asked = (tok.decode(part) for part in np.split(new.tokens[: new.response_start], [new.prompt_length]))
            assert asked.strip().startswith("Question:") and asked.endswith("Answer:")
            assert name or BOOLQ[number]["passage"][:-1] in read
        batches = zip(before.val_dataloader(), after.val_dataloader(), strict=True)
        for old, new in batches:
            assert (old["labels"] == new["labels"]).all() and (old["input_ids"] == new["input_ids"]).all()
            assert (new["prompt_length"] < old["prompt_length"]).all()


def test_long_text_before_a_question_loses_its_left_part(make_config, boolq, bos_tokenizer):
    whole = build(make_config, bos_tokenizer, boolq, question="after")
    for limit in (20, 8):
        module = build(make_config, bos_tokenizer, boolq, question="after", max_length=limit)
        for row, full in zip(module.train_rows, whole.train_rows, strict=True):
            lost = max(0, len(full.tokens) - limit)
            assert row.tokens.tolist() == [0, *full.tokens[1 + lost :].tolist()]
            assert row.prompt_length == max(1, full.prompt_length - lost)
            assert row.response_start == full.response_start - lost


def test_tasks_without_a_text_before_the_question_are_refused(make_config):
    for name in ("piqa", "./folder/of/mine"):
        with refuses(DataError, "data.question=after", name, "boolq", "rte", "leave it out"):
            ag.data.check(make_config(kind="sft", name=name, question="after").data)
        ag.data.check(make_config(kind="sft", name=name, question="before").data)
    ag.data.check(make_config(kind="sft", name="rte", question="after").data)


@pytest.mark.parametrize("key", [{"revision": "abc"}, {"prompt_max": 64}, {"prompt_field": "question"}])
def test_a_task_of_the_table_refuses_the_keys_of_own_rows(make_config, boolq, key):
    [(name, value)] = key.items()
    with refuses(DataError, f"data.{name}={value}", "data.name=piqa", "leave it out"):
        ag.data.check(make_config(kind="sft", name="piqa", **key).data)
    ag.data.check(make_config(kind="sft", name="own", root=f"{boolq}/boolq", **key).data)


def test_response_that_does_not_fit_is_named(make_config, tmp_path, write, tokenizer):
    good = {"goal": "g", "sol1": "a", "sol2": "b", "label": 0}
    write(tmp_path, "train", [good, good | {"sol1": "the quick brown fox jumps " * 9}])
    write(tmp_path, "validation", [good])
    with refuses(DataError, "train row 2", "16"):
        build(make_config, tokenizer, str(tmp_path), name="piqa", max_length=16)


def test_first_rows_only_and_an_end_where_asked(make_config, boolq, tokenizer):
    whole = build(make_config, tokenizer, boolq)
    for eos, end in ((None, []), (False, []), (True, [tokenizer.eos_token_id])):
        module = build(make_config, tokenizer, boolq, train_samples=3, val_samples=1, eos=eos)
        assert len(module.train_rows) == 3 and len(module.val_rows) == 1
        found, expected = ([*one.train_rows[:3], *one.val_rows[0]] for one in (module, whole))
        assert [row.tokens.tolist() for row in found] == [row.tokens.tolist() + end for row in expected]


def test_tokenizer_without_padding_and_end(make_config, boolq):
    tok = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"[UNK]": 0}, "[UNK]")))
    with refuses(DataError, "padding", "end-of-sequence"):
        build(make_config, tok, boolq)


def test_hub_is_asked_for_the_table_s_revision(make_config, tokenizer, monkeypatch):
    calls = []

    def load_dataset(name, subset, *, split, revision):
        calls.append((name, subset, split, revision))
        return [{"goal": "g", "sol1": "a", "sol2": "b", "label": 0}] * 2

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    build(make_config, tokenizer, None, name="piqa")
    assert calls == [("ybisk/piqa", None, split, "refs/convert/parquet") for split in ("train", "validation")]


def test_filler_rows_on_the_rank_that_runs_out(make_config, boolq, tokenizer):
    module = build(make_config, tokenizer, boolq)
    filler = module.collator.filler(module.val_rows[0][0])
    batch = module.collator([filler])
    assert batch["question"].tolist() == [-1] and batch["target"].tolist() == [-1] and batch["choice"].tolist() == [0]
    assert batch["attention_mask"].tolist() == [[True]] and batch["labels"].tolist() == [[-100]]


def test_replay_needs_a_second_token_with_loss(make_config, tmp_path, write, tokenizer):
    for split in ("train", "validation"):
        write(tmp_path / "own", split, [{"prompt": "Is the river high?", "response": "y"}] * 3)
    config = make_config(kind="sft", name="own", root=str(tmp_path), batch_size=1)
    check_rows(ag.data.read(config.data, 0, tokenizer, 10_000).train)  # EOS is the second
    config.data.eos = False
    with refuses(DataError, "loss.replay=true", "second token"):
        check_rows(ag.data.read(config.data, 0, tokenizer, 10_000).train)

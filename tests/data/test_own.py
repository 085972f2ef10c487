"""Supervised rows of one's own: prompt and response, or messages."""

import gzip
import json

import pyarrow
import pytest
from pyarrow import parquet

import ag.data
from ag.config import DataConfig
from ag.data.sources import DataError, MissingSplitError, Source
from ag.data.templates import is_own
from ag.evaluate.tasks.responses import of_rows
from tests.support.refused import refuses

ROWS = [{"prompt": f"Word {i}:", "response": f" the old bridge {i}"} for i in range(7)]
LINE = json.dumps(ROWS[0]).encode() + b"\n"
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "does it rain?"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "and the river?"},
    {"role": "assistant", "content": "it is high"},
]
OPEN = "{% for m in messages %}[{{ m.role }}]\n"
CLOSE = "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}[assistant]\n{% endif %}"
PLAIN = OPEN + "{{ m.content }}</s>" + CLOSE
MARKED = OPEN + (
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>{% endgeneration %}"
    "{% else %}{{ m.content }}</s>{% endif %}" + CLOSE
)
#: it opens a turn with more than it leaves there, as templates do that write empty thoughts
THOUGHTS = PLAIN.replace("[assistant]\n{% endif", "[assistant]\n<think></think>{% endif")
#: it rewrites earlier turns
FORGETFUL = OPEN + "{{ m.content if loop.last or m.role != 'assistant' else '...' }}</s>" + CLOSE


def answered(module, tokenizer):
    """Of each training row the text of its prompt, and the text that carries loss."""
    found = []
    for row in module.train_rows:
        batch = module.collator([row])
        labels = batch["labels"][0]
        prompt = tokenizer.decode(batch["input_ids"][0, : batch["prompt_length"][0]])
        found.append((prompt, tokenizer.decode(labels[labels != -100])))
    return found


@pytest.mark.parametrize(("eos", "end"), [(None, "</s>"), (True, "</s>"), (False, "")])
def test_prompt_and_response_are_joined_as_they_are(module, tokenizer, eos, end):
    made = module(ROWS, eos=eos)
    assert answered(made, tokenizer) == [(row["prompt"], row["response"] + end) for row in ROWS[1:]]
    ids = made.val_rows[0][0].tokens.tolist()
    assert ids == tokenizer(ROWS[0]["prompt"] + ROWS[0]["response"] + end)["input_ids"]


def test_fields_of_other_names(module, tokenizer):
    rows = [{"q": row["prompt"], "a": row["response"]} for row in ROWS]
    found = answered(module(rows, prompt_field="q", response_field="a"), tokenizer)
    assert found[0] == (ROWS[1]["prompt"], ROWS[1]["response"] + "</s>")
    chats = [{"turns": CHAT}] * 2
    assert answered(module(chats, PLAIN, messages_field="turns"), tokenizer)[0][1] == "yes</s>\nit is high</s>\n"


@pytest.mark.parametrize(
    ("template", "loss"),
    [(PLAIN, "yes</s>\nit is high</s>\n"), (THOUGHTS, "yes</s>\nit is high</s>\n"), (MARKED, "yes</s>it is high</s>")],
)
def test_the_assistants_turns_carry_loss(module, tokenizer, template, loss):
    made = module([{"messages": CHAT}] * 2, template)
    prompt = "[system]\nBe brief.</s>\n[user]\ndoes it rain?</s>\n[assistant]\n"
    assert answered(made, tokenizer) == [(prompt, loss)]
    [row] = made.train_rows
    assert tokenizer.decode(row.tokens).count("[user]") == 2
    first = "yes</s>\n" if template != MARKED else "yes</s>"
    assert tokenizer.decode(of_rows("0", [row]).answers[0]) == first


def test_a_chat_may_end_with_eos_too(module, tokenizer):
    [(_, text)] = answered(module([{"messages": CHAT}] * 2, MARKED, eos=True), tokenizer)
    assert text == "yes</s>it is high</s></s>"


def test_named_tasks_end_with_eos_where_asked(make_config, tokenizer, write, tmp_path):
    rows = [{"question": "is it red", "passage": "A red fox.", "answer": True}] * 2
    for split in ("train", "validation"):
        write(tmp_path / "boolq", split, rows)
    for eos, end in ((None, ""), (False, ""), (True, "</s>")):
        config = make_config(kind="sft", name="boolq", root=str(tmp_path), eos=eos)
        made = ag.data.build(config, tokenizer, 10_000)
        assert {text for _, text in answered(made, tokenizer)} == {f" yes{end}"}
        assert [tokenizer.decode(row.tokens[row.prompt_length :]) for row in made.val_rows[0]] == [
            f" no{end}",
            f" yes{end}",
        ]


@pytest.mark.parametrize("chat", [False, True])
def test_rows_that_do_not_fit(module, bos_tokenizer, chat):
    """A prompt loses what follows its first token; a row whose response does not fit is left out."""
    long, short = "a small boat waits near the old bridge " * 3, "yes"
    pairs = [("ok", "ok"), (long, short), (short, long)]
    rows = [{"prompt": a, "response": b} for a, b in pairs]
    template = "<s>" + PLAIN if chat else None
    if chat:
        rows = [{"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]} for a, b in pairs]
    made = module(rows, template, bos_tokenizer, max_length=30)
    [row] = made.train_rows
    whole = len(module(rows, template, bos_tokenizer).train_rows[0].tokens)
    assert (len(row.tokens), row.tokens[0]) == (30, bos_tokenizer.bos_token_id)
    assert (made.counts.truncated, made.counts.truncated_tokens, made.counts.skipped) == (1, whole - 30, 1)
    _, text = answered(made, bos_tokenizer)[0]
    assert text == ("yes</s>\n" if chat else "yes</s>")


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "json", "lines.json", "parquet"])
def test_files_of_every_kind(module, make_config, tokenizer, write, tmp_path, ending):
    expected = [row.tokens.tolist() for row in module(ROWS).train_rows]
    folder = tmp_path / "mine"
    (folder / "train.jsonl").unlink()
    if ending.startswith("jsonl"):
        write(folder, "train", ROWS, zipped=ending.endswith("gz"))
    elif ending == "parquet":
        for shard, rows in enumerate((ROWS[:3], ROWS[3:])):
            parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"train-0000{shard}.parquet")
    else:
        text = json.dumps(ROWS, indent=1) if ending == "json" else "".join(json.dumps(row) + "\n" for row in ROWS)
        (folder / "train.json").write_text(text)
    config = make_config(kind="sft", name="mine", root=str(tmp_path), val_samples=1)
    assert [row.tokens.tolist() for row in ag.data.build(config, tokenizer, 10_000).train_rows] == expected


def test_a_validation_split_is_used_where_there_is_one(module, write, tmp_path, tokenizer):
    write(tmp_path / "mine", "validation", ROWS[:2])
    made = module(ROWS, val_samples=None)
    assert (len(made.train_rows), len(made.val_rows)) == (7, 2)
    assert len(module(ROWS, train_samples=3).train_rows) == 3


@pytest.mark.parametrize(
    ("rows", "template", "parts"),
    [
        ([{"question": "a", "response": "b"}], None, "question response prompt messages data.prompt_field=NAME"),
        ([{"q": "a", "a": "b"}], None, "q a data.prompt_field=NAME data.response_field=NAME data.messages_field=NAME"),
        ([ROWS[0], {"prompt": "a", "response": "  "}], None, "row 2 response"),
        ([ROWS[0], {"prompt": "a", "response": 3}], None, "row 2 response int str"),
        ([ROWS[0], {"prompt": "a"}], None, "row 2 response prompt"),
        ([{"messages": CHAT}], None, "row 2 messages chat template prompt response"),
        ([{"messages": CHAT[:2]}], PLAIN, "row 2 role=assistant"),
        ([{"messages": [*CHAT[:2], {"role": "assistant", "content": ""}]}], PLAIN, "row 2 empty assistant"),
        ([{"messages": ["hello"]}], PLAIN, "row 2 role content 'hello'"),
        ([{"messages": "hello"}], PLAIN, "row 2 messages str list"),
        ([{"messages": CHAT}], FORGETFUL, "row 2 turn 3 generation"),
        (
            [{"messages": [{"role": "assistant", "content": ["a"]}]}],
            "{{ 'x' + messages[0].content }}",
            "row 2 template",
        ),
        ([{"messages": CHAT}], "{{ raise_exception('no system') }}", "row 2 template no system"),
        ([{"messages": CHAT}], "{% generation %}{% endgeneration %}x", "row 2 template turn 3 generation"),
        ([{"messages": CHAT}], "{% generation %}{% endgeneration %}" + PLAIN, "row 2 template turn 3 generation"),
        ([{"messages": CHAT}], "{% generation %}" + PLAIN + "{% endgeneration %}", "row 2 template turn 1 generation"),
    ],
)
def test_rows_that_cannot_be_used(module, rows, template, parts):
    with refuses(DataError, *parts.split()):
        module(rows * 2, template)


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("train.json", b"[1, 2]", "train.json row 1 int"),
        ("train.json", b"[{", "train.json JSON"),
        ("train.parquet", b"no parquet", "train.parquet"),
        ("train.jsonl", LINE + b"{broken\n", "train.jsonl line 2 JSON"),
        ("train.jsonl", LINE + b"[1]\n", "train.jsonl line 2 list JSON object"),
        ("train.jsonl", b'{"text": "\xff"}\n', "train.jsonl line 0"),
        ("train.jsonl.gz", gzip.compress(LINE * 1000)[:-9], "train.jsonl.gz line"),
        ("train.jsonl", LINE + b'\n{"prompt": "a", "response": "\\ud83d"}\n', "train.jsonl line 3 surrogates"),
        ("train.json", b'[{"prompt": "a", "response": ["\\uDE00"]}]', "train.json row 1 surrogates"),
        ("train.jsonl", LINE + b'{"prompt": ' + b"1" * 5000 + b"}", "train.jsonl line 2 digits"),
        ("train.json", b'[{"prompt": ' + b"1" * 5000 + b"}]", "train.json digits"),
        ("train.jsonl", LINE + b'{"a": ' + b"[" * 5000 + b"]" * 5000 + b"}", "train.jsonl line 2 recursion"),
        ("train.json", b"[" * 5000 + b"]" * 5000, "train.json recursion"),
        ("train.csv", b"prompt,completion\na\n", "train.csv line 2 cells prompt, completion"),
        ("train.csv", b"prompt,completion\na,b\na,b,c\n", "train.csv line 3 cells"),
        ("train.csv", b"\xef\xbb\xbf\n\nprompt,completion\n\na,b\na,b,c\n", "train.csv line 6 cells"),
        ("train.csv", b'prompt,completion\na,"b\n', "train.csv CSV line 1"),
    ],
)
def test_files_that_are_damaged(make_config, tokenizer, tmp_path, name, content, parts):
    (tmp_path / name).write_bytes(content)
    with refuses(DataError, *parts.split()):
        ag.data.build(make_config(kind="sft", name=str(tmp_path), val_samples=1), tokenizer, 100)


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "txt"])
def test_blank_lines_and_a_mark_of_the_order_of_bytes_hold_nothing(tmp_path, ending):
    """Table programs write the mark before a table's header, where nobody sees it."""
    rows = [{"prompt": "a", "response": "b"}, {"prompt": "c", "response": "d"}]
    lines = [json.dumps(row) for row in rows]
    if ending == "csv":
        lines = ["prompt,response", *(",".join(row.values()) for row in rows)]
    elif ending == "txt":
        lines, rows = ["a\n\nb"], [{"text": "\n \na\n\nb\n\n"}]
    text = "\n \n" + "\n\n".join(lines) + "\n\n"
    for mark in ("", "\ufeff"):
        (tmp_path / f"train.{ending}").write_text(mark + text)
        assert list(Source("x", folder=tmp_path).read("train")) == rows


def test_files_beside_each_other_are_not_left_out_silently(tmp_path, write):
    write(tmp_path, "train", ROWS[:2])
    for other in ("train-00001.jsonl", "train.csv"):
        (tmp_path / other).write_text("prompt,response\na,b\n")
        with refuses(DataError, str(tmp_path), "train.jsonl", other):
            Source("x", folder=tmp_path).read("train")
        (tmp_path / other).unlink()
    (tmp_path / "trainings.csv").write_text("a,b\n")
    assert list(Source("x", folder=tmp_path).read("train")) == ROWS[:2]


def test_objects_too_deep_to_be_written_as_a_chat(module):
    deep = "x"
    for _ in range(900):
        deep = [deep]
    with refuses(DataError, "row 2"):
        module([{"messages": CHAT}, {"messages": [*CHAT, {"role": "user", "content": deep}]}], PLAIN)


def test_the_hub(make_config, tokenizer, monkeypatch):
    """Only the boundary is a stand-in: what `datasets` returns."""
    import datasets

    def load(name, subset, *, split, revision, streaming):
        assert (name, subset, revision, streaming) == ("org/chats", "short", "v1", False)
        if split == "validation":
            raise ValueError("Unknown split 'validation'")
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load)
    config = make_config(kind="sft", name="org/chats", subset="short", revision="v1", val_samples=2)
    assert len(ag.data.build(config, tokenizer, 10_000).train_rows) == 5


@pytest.mark.parametrize(
    "error, kind",
    [
        (ValueError("Unknown split \"validation\". Should be one of ['train']."), MissingSplitError),
        (ValueError("Bad split: validation. Available splits: ['train']"), MissingSplitError),
        (ConnectionError("Couldn't reach the Hub"), DataError),
        (RuntimeError("Dataset scripts are no longer supported, but found x.py"), DataError),
    ],
)
def test_hub_errors_are_one_sentence(monkeypatch, error, kind):
    def load_dataset(*_, **__):
        raise error

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    with refuses(kind, "some/set", str(error)) as caught:
        Source("some/set").read("validation")
    assert str(error) in str(caught.value)


def test_a_name_that_is_neither_task_nor_folder(make_config, tokenizer):
    with refuses(DataError, "data.name=./nowhere", "folder"):
        ag.data.build(make_config(kind="sft", name="./nowhere"), tokenizer, 100)
    assert not is_own(DataConfig(kind="sft", name="boolq")) and is_own(DataConfig(kind="sft", name="a/b"))


def test_a_folder_of_rows_as_root_needs_no_name(make_config, tokenizer, write, tmp_path, module):
    """Nor does another name that is no task's; the folder as data.name gives the same rows."""
    named = module(ROWS, name=str(tmp_path / "mine"))
    for name in ("facts", "own"):
        found = module(ROWS, name=name, root=str(tmp_path / "mine"))
        assert [row.tokens.tolist() for row in found.train_rows] == [row.tokens.tolist() for row in named.train_rows]
    with refuses(DataError, "piqaa", "piqa"):  # of a folder of tasks the name has to be one
        ag.data.check(make_config(kind="sft", name="piqaa", root=str(tmp_path)).data)

"""Rows as trl and others have them, by the names of their columns; the examples are those of docs/training.md."""

import csv
import gzip
import io
import json
import re

import datasets
import pyarrow
import pytest
from pyarrow import parquet

import ag.data
from ag.data.own import recognise
from ag.data.sources import DataError, MissingSplitError, Source
from tests.data.test_own import MARKED, PLAIN, answered
from tests.support import ROOT
from tests.support.refused import names, refuses

PAGE = (ROOT / "docs" / "training.md").read_text()
EXAMPLES = [[json.loads(line) for line in block.splitlines()] for block in re.findall(r"```json\n(.*?)```", PAGE, re.S)]
[TABLE] = re.findall(r"```csv\n(.*?)```", PAGE, re.S)
SHAREGPT = {"human": "user", "gpt": "assistant"}


def example(*columns):
    """The rows of the page with these columns, the one of texts first."""
    return next(rows for rows in EXAMPLES if tuple(rows[0]) == columns)


def rendered(turns):
    """What the templates of these tests write of turns (role, content)."""
    return "".join(f"[{role}]\n{content}</s>\n" for role, content in turns)


def test_prompt_and_completion_are_texts(module, tokenizer):
    rows = example("prompt", "completion")
    made = module(rows)
    assert answered(made, tokenizer) == [(row["prompt"], row["completion"] + "</s>") for row in rows[1:]]
    names(made.about, "prompt", "completion", "loss on completion")


def test_a_completion_that_ends_with_eos_gets_no_second_one(module, tokenizer):
    rows = [{"prompt": "a", "completion": "the bridge</s>"}] * 2
    assert answered(module(rows), tokenizer) == [("a", "the bridge</s>")]
    assert answered(module(rows, eos=False), tokenizer) == [("a", "the bridge</s>")]


@pytest.mark.parametrize(("template", "end", "how"), [(MARKED, "</s>", "marks"), (PLAIN, "</s>\n", "rendering")])
def test_messages_in_prompt_and_completion(module, tokenizer, template, end, how):
    """Only the completion's turns of the assistant carry loss; all that comes before is the prompt."""
    rows = EXAMPLES[1]
    before = [("user", "q"), ("assistant", "an earlier answer"), ("user", "and then?")]
    asked = [("assistant", "yes"), ("user", "why?"), ("assistant", "it is high")]
    longer = {
        name: [{"role": role, "content": content} for role, content in turns]
        for name, turns in (("prompt", before), ("completion", asked))
    }
    made = module([*rows[:2], longer], template)
    opened = rendered([("user", "And snow?")]) + "[assistant]\n"
    history = rendered(before) + "[assistant]\n"
    assert answered(made, tokenizer) == [(opened, f"No.{end}"), (history, f"yes{end}it is high{end}")]
    names(made.about, "prompt", "completion", how)


@pytest.mark.parametrize(("template", "end"), [(MARKED, "</s>"), (PLAIN, "</s>\n")])
@pytest.mark.parametrize(
    ("column", "who", "what"), [("messages", "role", "content"), ("conversations", "from", "value")]
)
def test_chats(module, tokenizer, template, end, column, who, what):
    rows = example(column)
    made = module(rows, template)
    turns = [[(SHAREGPT.get(turn[who], turn[who]), turn[what]) for turn in row[column]] for row in rows]
    expected = [(rendered(chat[:1]) + "[assistant]\n", chat[1][1] + end) for chat in turns[1:]]
    assert answered(made, tokenizer) == expected
    names(made.about, column, "assistant")


def test_other_roles_of_sharegpt(module, tokenizer):
    """A system message, what a tool said, a role of one's own, and a turn that a table filled up with None."""
    chat = [("system", "Be brief."), ("human", "Rain?"), ("observation", "3 mm"), ("judge", "hm"), ("gpt", "Yes.")]
    rows = [{"conversations": [{"from": who, "value": what, "weight": None} for who, what in chat]}] * 2
    [(prompt, loss)] = answered(module(rows, PLAIN), tokenizer)
    assert prompt == rendered([("system", "Be brief."), ("user", "Rain?"), ("tool", "3 mm"), ("judge", "hm")]) + (
        "[assistant]\n"
    )
    assert loss == "Yes.</s>\n"


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_a_column_with_the_system_message(module, tokenizer, template):
    """It comes first, once; in rows of prompt and completion it belongs to the prompt."""
    turns = [{"from": "human", "value": "Rain?"}, {"from": "gpt", "value": "Yes."}]
    told = {"from": "system", "value": "Be brief."}
    chat = [{"role": "user", "content": "Rain?"}, {"role": "assistant", "content": "Yes."}]
    expected = rendered([("system", "Be brief."), ("user", "Rain?")]) + "[assistant]\n"
    for row in (
        {"conversations": turns, "system": "Be brief."},
        {"conversations": [told, *turns], "system": "Be brief."},
        {"conversations": [told, *turns], "system": ""},
        {"conversations": [told, *turns], "system": None},
        {"messages": chat, "system": "Be brief."},
        {"prompt": chat[:1], "completion": chat[1:], "system": "Be brief."},
    ):
        [(prompt, loss)] = answered(module([row] * 2, template), tokenizer)
        assert (prompt, loss.strip()) == (expected, "Yes.</s>")
    for system, parts in (("Be long.", "row 2 system"), (["Be brief."], "row 2 system list")):
        with refuses(DataError, *parts.split()):
            module([{"conversations": [told, *turns], "system": system}] * 2, template)


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_messages_of_weight_0_carry_no_loss(module, tokenizer, template):
    """As OpenAI has them; the prompt ends where the first answer begins that carries loss."""
    roles = ["user", "assistant"] * 3

    def row(*weights):
        turns = zip(roles, "abcdef", [None, weights[0], None, weights[1], None, weights[2]], strict=True)
        return {"messages": [{"role": role, "content": said, "weight": weight} for role, said, weight in turns]}

    for weights, prompt, loss in (
        ((0, 1, None), "abc", "df"),
        ((1, 0, 1), "a", "bf"),
        ((0, 0, 1), "abcde", "f"),
        ((None, 1, 0), "a", "bd"),
    ):
        [(before, carries)] = answered(module([row(*weights)] * 2, template), tokenizer)
        assert before == rendered(zip(roles, prompt, strict=False)) + "[assistant]\n"
        assert carries.replace("\n", "") == "".join(f"{one}</s>" for one in loss)
    with refuses(DataError, "row 2", "weight=0.5", "0", "1"):
        module([row(1, 0.5, 1)] * 2, template)
    with refuses(DataError, "row 2", "role=assistant", "loss"):
        module([row(0, 0, 0)] * 2, template)


def test_tools_and_options_of_the_template(module, tokenizer):
    template = "{{ tools[0].name }}{{ mood }}|" + PLAIN
    tools = [{"name": "rain", "parameters": {}}]
    row = example("messages")[0] | {"tools": tools, "chat_template_kwargs": {"mood": "!"}}
    [(prompt, _)] = answered(module([row] * 2, template), tokenizer)
    assert prompt.startswith("rain!|[user]")
    assert answered(module([row | {"tools": json.dumps(tools)}] * 2, template), tokenizer)[0][0] == prompt
    with refuses(DataError, "row 2", "tools", "chat_template_kwargs"):
        module([row, row | {"tools": "{rain"}], template)


def test_text_is_cut_as_documents_are(module, make_config, tokenizer, tmp_path):
    sizes = {"prompt_min": 4, "prompt_max": 8, "continuation": 4, "max_length": 20}
    made = module(example("text"), **sizes)
    config = make_config(kind="text", name=str(tmp_path / "mine"), val_samples=1, **sizes)
    expected = ag.data.build(config, tokenizer, 10_000)
    assert [row.tokens.tolist() for row in made.train_rows] == [row.tokens.tolist() for row in expected.train_rows]
    assert {row.prompt_length for row in made.train_rows} == {row.prompt_length for row in expected.train_rows}
    names(made.about, "text", "continuation", "data.kind=text", "data.packing=packed")
    assert expected.about == ""


ALL = {"messages": [], "conversations": [], "prompt": "a", "response": "b", "completion": "c", "text": "d", "q": "e"}


@pytest.mark.parametrize(
    ("lacking", "keys", "found"),
    [
        ("", {}, ["messages"]),
        ("messages", {}, ["conversations"]),
        ("messages conversations", {}, ["prompt", "response"]),
        ("messages conversations response", {}, ["prompt", "completion"]),
        ("messages conversations prompt", {}, ["text"]),
        ("", {"prompt_field": "q"}, ["q", "response"]),
        ("response", {"prompt_field": "q"}, ["q", "completion"]),
        ("", {"response_field": "completion"}, ["prompt", "completion"]),
        ("", {"messages_field": "conversations"}, ["conversations"]),
        ("", {"text_field": "q"}, ["q"]),
    ],
)
def test_which_columns_count(make_config, lacking, keys, found):
    row = {name: value for name, value in ALL.items() if name not in lacking.split()}
    form = recognise(row, make_config(**keys).data, "here")
    assert form.columns == found and form.chat == isinstance(ALL[found[-1]], list)


@pytest.mark.parametrize(
    ("row", "keys", "parts"),
    [
        (None, {}, "here no rows"),
        ({"q": "a", "a": "b"}, {}, "here q a prompt response completion messages conversations text"),
        ({"messages": []}, {"prompt_field": "q"}, "here messages q response data.prompt_field=NAME"),
        ({"prompt": "a", "answer": "b"}, {"response_field": "other"}, "here prompt answer other"),
    ],
)
def test_rows_that_are_not_recognised(make_config, row, keys, parts):
    with refuses(DataError, *parts.split()):
        recognise(row, make_config(**keys).data, "here")


def test_two_columns_are_of_one_kind(module):
    rows = [EXAMPLES[1][0], {"prompt": "a text", "completion": EXAMPLES[1][0]["completion"]}]
    with refuses(DataError, "row 2", "prompt", "str", "list"):
        module(rows, PLAIN)


def test_csv(make_config, tokenizer, tmp_path):
    """The table of the page; zipped, cells with commas, quotes, line ends and 200,000 characters stay as they are."""
    (tmp_path / "train.csv").write_text(TABLE)
    made = ag.data.build(make_config(kind="sft", name=str(tmp_path), val_samples=1), tokenizer, 10_000)
    assert answered(made, tokenizer) == [
        ("Translate: la pluie >", "the rain</s>"),
        ("Translate: oui, le bateau >", "yes, the boat</s>"),
    ]
    rows = [{"prompt": 'a "b"\nc,\r\nd', "completion": "x" * 200_000}, {"prompt": "", "completion": "é"}]
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, ["prompt", "completion"])
    table.writeheader()
    table.writerows(rows)
    (tmp_path / "validation.csv.gz").write_bytes(gzip.compress(text.getvalue().encode()))
    assert list(Source("x", folder=tmp_path).read("validation")) == rows


def test_folders_that_save_to_disk_wrote(make_config, tokenizer, tmp_path):
    """A dataset of splits, and a single one, which is the training split; their rows are those of JSON lines."""
    rows = example("prompt", "completion")
    whole = datasets.Dataset.from_list(rows)
    datasets.DatasetDict({"train": whole, "validation": whole.select([0])}).save_to_disk(str(tmp_path / "splits"))
    whole.save_to_disk(str(tmp_path / "one"))
    for name, count in (("splits", 3), ("one", 2)):
        config = make_config(kind="sft", name=str(tmp_path / name), val_samples=1)
        made = ag.data.build(config, tokenizer, 10_000)
        expected = [(row["prompt"], row["completion"] + "</s>") for row in rows]
        assert (answered(made, tokenizer), len(made.val_rows)) == (expected[-count:], 1)
    source = Source("x", folder=tmp_path / "splits")
    assert source.where("train") == str(tmp_path / "splits" / "train")
    assert source.identity("train") == Source("x", folder=tmp_path / "splits").identity("train")
    assert source.identity("train") != source.identity("validation")
    with refuses(MissingSplitError, "test", "save_to_disk"):
        source.read("test")
    (tmp_path / "one" / "data-00000-of-00001.arrow").write_bytes(b"no arrow")
    with refuses(DataError, str(tmp_path / "one"), "save_to_disk"):
        list(Source("x", folder=tmp_path / "one").read("train"))


def test_messages_in_parquet_and_arrow(make_config, tokenizer, tmp_path, monkeypatch):
    """Tables fill up what one message has and others lack; templates see it as absent."""
    template = PLAIN.replace("{{ m.content }}", "{% if m.name is defined %}{{ m.name }}: {% endif %}{{ m.content }}")
    monkeypatch.setattr(tokenizer, "chat_template", template)
    chat = [{"role": "user", "content": "Rain?", "name": "Ann"}, {"role": "assistant", "content": "Yes."}]
    parquet.write_table(pyarrow.Table.from_pylist([{"messages": chat}] * 2), tmp_path / "train.parquet")
    datasets.Dataset.from_list([{"messages": chat}] * 2).save_to_disk(str(tmp_path / "saved"))
    for folder in (tmp_path, tmp_path / "saved"):
        made = ag.data.build(make_config(kind="sft", name=str(folder), val_samples=1), tokenizer, 10_000)
        assert answered(made, tokenizer) == [("[user]\nAnn: Rain?</s>\n[assistant]\n", "Yes.</s>\n")]

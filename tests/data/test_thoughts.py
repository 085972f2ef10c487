"""Chats with thoughts and calls of tools: what is written of them, and which of it carries loss."""

import json

import datasets
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

import ag.data
from ag.data.chats import encode
from tests.data.test_own import answered
from tests.support.reasoning import CHAT, TEMPLATE, TOOLS, TURNS, UNMARKED, call

TEMPLATES = pytest.mark.parametrize("template", [TEMPLATE, UNMARKED], ids=["marked", "unmarked"])


@pytest.fixture
def said(tokenizer, monkeypatch):
    """`said(template, messages)`: the text of a row, and its parts that carry loss."""

    def parts(template, messages, given=0, **options):
        monkeypatch.setattr(tokenizer, "chat_template", template)
        row = encode(tokenizer, messages, "row 1", given=given, end=[], options=options)
        edges = np.flatnonzero(np.diff([0, *row.loss.astype(int), 0])).reshape(-1, 2)
        return tokenizer.decode(row.tokens), [tokenizer.decode(row.tokens[first:last]) for first, last in edges]

    return parts


@TEMPLATES
def test_turns_carry_loss_as_they_are_written(said, template):
    """Thoughts before the last message of the user are not written, and carry none."""
    text, loss = said(template, CHAT, tools=TOOLS)
    assert text == (
        "tool: rain\nsystem: Be brief.\nuser: Does it rain?\nbot:\n"
        + TURNS[0][1]
        + "\ntool: 3 mm\nbot:\nYes.</s>\nuser: And snow?\nbot:\n<think>Too warm.</think>No.</s>\n"
    )
    ends = "" if template == TEMPLATE else "\n"  # what closes a turn belongs to it where nothing is marked
    assert loss == [TURNS[0][1] + ends, TURNS[1][1] + ends, "".join(TURNS[2]) + ends]


@TEMPLATES
def test_thoughts_between_calls_are_kept(said, template):
    _, loss = said(template, CHAT[:5])
    assert [turn.rstrip() for turn in loss] == ["".join(turn) for turn in TURNS[:2]]


@TEMPLATES
def test_a_row_for_each_answer_has_its_thoughts(said, template):
    _, loss = said(template, CHAT[:5], given=4)
    assert [turn.rstrip() for turn in loss] == ["".join(TURNS[1])]
    _, loss = said(template, CHAT, given=6)
    assert [turn.rstrip() for turn in loss] == ["".join(TURNS[2])]


@TEMPLATES
@pytest.mark.parametrize("arguments", ['{"town": "Oslo"}', {"town": "Oslo"}, {"town": "Oslo", "country": None}])
def test_arguments_are_objects_however_they_are_stored(said, template, arguments):
    chat = [*CHAT[:2], CHAT[2] | {"tool_calls": call(arguments), "content": None}, *CHAT[3:]]
    assert said(template, chat) == said(template, CHAT)


def test_a_null_stays_in_arguments_that_are_json(said):
    chat = [*CHAT[:2], {"role": "assistant", "tool_calls": call('{"town": null}')}]
    assert said(TEMPLATE, chat)[1] == ['<call>rain {"town": null}</call></s>']
    chat[2]["tool_calls"] = call("not JSON")
    assert said(TEMPLATE, chat)[1] == ['<call>rain "not JSON"</call></s>']


@TEMPLATES
def test_tables_fill_up_what_other_rows_have(make_config, tokenizer, tmp_path, monkeypatch, template):
    """Of calls, of their arguments and of tools; as of JSON lines."""
    monkeypatch.setattr(tokenizer, "chat_template", template)
    other = [*CHAT[:2], {"role": "assistant", "tool_calls": call({"country": "Norway"})}]
    rows = [{"messages": CHAT, "tools": TOOLS}, {"messages": other, "tools": [{"name": "x", **TOOLS[0]}]}] * 2
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "table").mkdir()
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "table" / "train.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    made = [
        answered(
            ag.data.build(make_config(kind="sft", name=str(tmp_path / name), val_samples=1), tokenizer, 10_000),
            tokenizer,
        )
        for name in ("lines", "table", "saved")
    ]
    assert made[0] == made[1] == made[2] and made[0][0][1].startswith('<call>rain {"country": "Norway"}</call></s>')


def test_thoughts_inside_the_text_of_a_turn(said):
    """As templates have them that cut the content where the thoughts end."""
    cut = "{{ m.content if loop.last else m.content.split('</think>')[-1] }}"
    template = UNMARKED.replace("{{ m.content or '' }}", cut)
    chat = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "<think>hm</think>a"},
        {"role": "user", "content": "r"},
        {"role": "assistant", "content": "<think>so</think>a"},
    ]
    last = "<think>so</think>a</s>\n"
    assert said(template, chat) == (f"user: q\nbot:\na</s>\nuser: r\nbot:\n{last}", ["a</s>\n", last])

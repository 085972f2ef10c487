"""Where the parts of a chat lie: the tokens of one character show which they are."""

import json

import pytest

from ag.errors import UserError
from ag.model import chat
from tests.support.reasoning import CHAT, TEMPLATE, TOOLS
from tests.support.refused import refuses

MESSAGES = [
    {"role": "system", "content": " Be short.\n"},
    {"role": "user", "content": "user: short"},
    {"role": "assistant", "content": "Yes"},
    {"role": "user", "content": "short"},
]
TURNS = (
    "{% for m in messages %}{{ '<' + m.role + '> ' + m.content | trim + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def said(tiny_tokenizer, monkeypatch):
    """`said(part, ...)`: the texts of parts of a chat; a token is a character."""

    def texts(*parts, messages=MESSAGES, template=TURNS, **variables):
        monkeypatch.setattr(tiny_tokenizer, "chat_template", template)
        asked = chat.Chat(messages, variables)
        ids = tiny_tokenizer(asked.text(tiny_tokenizer), add_special_tokens=False)["input_ids"]
        places = chat.spans(tiny_tokenizer, asked, parts)
        return [tiny_tokenizer.decode(ids[first:behind]) for first, behind in places]

    return texts


def test_a_file_is_read_as_the_server_reads_a_request(tmp_path, tiny_tokenizer, monkeypatch):
    """Parts of text are joined, and a developer is the system."""
    monkeypatch.setattr(tiny_tokenizer, "chat_template", TURNS)
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "you"}]
    messages = [{"role": "developer", "content": "Be short."}, {"role": "user", "content": parts}, MESSAGES[2]]
    (tmp_path / "chat.json").write_text(json.dumps(messages))
    read = chat.Chat.read(tmp_path / "chat.json")
    assert read.text(tiny_tokenizer) == "<system> Be short. <user> Hi\nyou <assistant> Yes <assistant>"
    protocol = pytest.importorskip("ag.serve.protocol", reason="pip install 'ag[serve]'")
    assert read.messages == [protocol.Message.model_validate(message).for_template() for message in messages]


def test_each_part_is_found_where_it_lies(said):
    """Words of a message that the template has too are no part of the template."""
    assert said("system") == ["Be short."]
    assert said("template") == ["<system> ", " <user> ", " <assistant> ", " <user> ", " <assistant>"]
    assert said("system", "template")[0] == "<system> Be short. <user> "
    user = {"role": "user", "content": "user"}
    assert said("template", messages=[user]) == ["<user> ", " <assistant>"]


def test_what_cannot_be_told(said, tiny_tokenizer, monkeypatch):
    with refuses(UserError, "protect=tools", "template", "system", "0-40"):
        said("tools")
    for role, part in (("system", "system"), ("assistant", "template")):
        with refuses(UserError, "changes", "turn 1", "0-40"):
            said(part, messages=[{"role": role, "content": "No"}], template="{{ messages[0].content[:1] }}")
    monkeypatch.setattr(type(tiny_tokenizer), "is_fast", False)
    with pytest.raises(UserError, match="does not say where"):
        said("system")


def test_thoughts_calls_and_tools_lie_in_the_template(said):
    """What templates leave out of earlier turns is not looked for; a message may have nothing but a call."""
    assert said("system", messages=CHAT, template=TEMPLATE, tools=TOOLS) == ["Be brief."]
    template = [
        "tool: rain\nsystem: ",
        "\nuser: ",
        '\nbot:\n<call>rain {"town": "Oslo"}</call></s>\ntool: ',
        "\nbot:\n",
        "</s>\nuser: ",
        "\nbot:\n<think>",
        "</think>",
        "</s>\nbot:\n",
    ]
    assert said("template", messages=CHAT, template=TEMPLATE, tools=TOOLS) == template


@pytest.mark.parametrize(
    ("told", "parts"),
    [
        ("{", "JSON messages role"),
        ("[]", "messages role"),
        ('{"messages": []}\n\n{"messages": []}\n', "lines 2 one"),
        ('[{"role": "user", "content": "x"}]\n[]\n[]\n', "lines 3 one"),
        ('{"messages": []}\nnot JSON\n', "JSONDecodeError messages"),
        ('{"messages": [{"role": "user", "content": "x"}], "tools": "{"}', "tools"),
        ('[{"role": "user", "content": "\\ud83d"}]', "surrogates messages"),
        ('[{"role": "user", "content": ' + "[" * 5000 + "]" * 5000 + "}]", "messages"),
    ],
)
def test_files_that_hold_no_chat(tmp_path, told, parts):
    path = tmp_path / "chat.json"
    path.write_text(told)
    with refuses(UserError, str(path), *parts.split()):
        chat.Chat.read(path)


def test_variables_of_a_template(tiny_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_tokenizer, "chat_template", TEMPLATE)
    path = tmp_path / "chat.json"
    path.write_text(json.dumps({"messages": CHAT[:2], "chat_template_kwargs": {"enable_thinking": False}}))
    asked = chat.Chat.read(path)
    assert asked.text(tiny_tokenizer).endswith("bot:\n<think></think>")
    path.write_text(json.dumps(CHAT[:2]))
    assert chat.Chat.read(path).text(tiny_tokenizer).endswith("Does it rain?\nbot:\n")
    with refuses(UserError, "tokenize", "enable_thinking"):
        chat.Chat(CHAT, {"tokenize": True}).text(tiny_tokenizer)
    with refuses(UserError, "refuses"):
        chat.Chat([{"role": "user", "content": 3}]).text(tiny_tokenizer)
    monkeypatch.setattr(tiny_tokenizer, "chat_template", None)
    with refuses(UserError, "chat template", "instruct"):
        chat.Chat(CHAT).text(tiny_tokenizer)

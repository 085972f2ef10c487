"""Where the parts of a chat lie: the tokens of one character show which they are."""

import pytest

from ag.errors import UserError
from ag.model import chat
from tests.support.refused import refuses

MESSAGES = [
    {"role": "system", "content": " Be short.\n"},
    {"role": "user", "content": "user: short"},
    {"role": "assistant", "content": "Yes"},
    {"role": "user", "content": "short"},
]
TEXT = "<system> Be short. <user> user: short <assistant> Yes <user> short <assistant>"


def said(tokenizer, *parts):
    return [TEXT[first:behind] for first, behind in chat.spans(tokenizer, TEXT, MESSAGES, parts)]


def test_each_part_is_found_where_it_lies(tiny_tokenizer):
    assert said(tiny_tokenizer, "system") == ["Be short."]
    template = ["<system> ", " <user> ", " <assistant> ", " <user> ", " <assistant>"]
    assert said(tiny_tokenizer, "template") == template
    assert said(tiny_tokenizer, "system", "template")[0] == "<system> Be short. <user> "


def test_what_cannot_be_told(tiny_tokenizer, monkeypatch):
    with refuses(UserError, "protect=tools", "template", "system", "0-40"):
        said(tiny_tokenizer, "tools")
    with refuses(UserError, "protect=system", "assistant", "changes"):
        chat.spans(tiny_tokenizer, TEXT, [{"role": "assistant", "content": "No"}], ["system"])
    monkeypatch.setattr(type(tiny_tokenizer), "is_fast", False)
    with pytest.raises(UserError, match="does not say where"):
        said(tiny_tokenizer, "system")

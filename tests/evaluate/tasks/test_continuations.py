"""Contexts, questions and right answers decode to one text, with each kind of tokenizer."""

import string

import pytest

from ag.evaluate.tasks import make
from ag.evaluate.tasks.instructions import RULE_KINDS
from tests.evaluate.tasks.conftest import BOOK
from tests.support.spaced import KINDS, spaced

TEXT = f"{BOOK}\n{string.printable} The secret number of the boat is 12345. VAR ABC = VAR DEF\n" * 2
LONGBENCH = {"input": "Who?", "context": "A boat.", "answers": ["the crew", "two"], "length": 3, "all_classes": None}
OPTIONS = {"needle_text": {"lengths": [1500], "repeats": 1}, "qasper": {}}


@pytest.fixture(params=KINDS)
def read(request):
    """The tokenizer, and how its tokens read."""
    tokenizer = spaced(request.param, TEXT)
    return tokenizer, lambda ids: tokenizer.decode(ids, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("name", OPTIONS)
def test_right_answers_follow_their_questions(name, read, root, write):
    tokenizer, text = read
    write("longbench/qasper", [LONGBENCH])
    [sample, *_] = make(name, root, **OPTIONS[name]).load(tokenizer, None, 10_000).samples
    before = sample.prompt + sample.question
    for answer, said in zip(sample.answers, sample.references, strict=True):
        assert text(before + answer) == text(before) + " " + said


def test_turns_follow_each_other(read, root):
    tokenizer, text = read
    [sample] = make("turns", root, lengths=[2000], repeats=1).load(tokenizer, None, 10_000).samples
    whole = text(sample.prompt + sample.question)
    assert whole.count(".\n\nQuestion: What is") + whole.count(".\n\nFrom now on") == 6
    for turn in sample.parts:
        assert f"{text(sample.prompt + turn.question)[len(text(sample.prompt)) :]} " in whole


def test_answers_that_follow_instructions(read, root):
    tokenizer, text = read
    [sample] = make("instructions_8", root, lengths=[2000], repeats=1).load(tokenizer, None, 10_000).samples
    before, choices = (
        sample.prompt + sample.question,
        [x for one in sample.parts for x in (one.chosen, one.alternative)],
    )
    for number, (answer, choice) in enumerate(zip(sample.answers, choices, strict=True)):
        lead = RULE_KINDS[sample.parts[number // 2].kind].lead
        assert text(before + answer) == text(before) + lead + choice.answer_text

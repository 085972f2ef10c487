"""Your own rows: the tokens of each form, and scores against plain forward passes and against a mask of evictions."""

import copy
import json

import pytest
import torch

import ag
from ag.data.sources import DataError
from ag.errors import UserError
from ag.evaluate.tasks import make
from tests.support import by_hand
from tests.support.bounds import hold, of_nats
from tests.support.gates_for import gates_for
from tests.support.reasoning import CHAT, UNMARKED
from tests.support.refused import refuses

CONTEXT = "The harbour is blue and the bakery on the square is red."
QUESTIONS = [{"question": "Harbour?", "answer": "blue"}, {"question": "And the bakery?", "answer": "red it is"}]


@pytest.fixture
def rows(tmp_path):
    """`rows(name, *records)`: a file of JSON lines."""

    def write(name, *records):
        (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in records))
        return str(tmp_path / name)

    return write


def loaded(tokenizer, root, max_tokens=500, **options):
    return make("own", root, **options).load(tokenizer, None, max_tokens)


def text_of(tokenizer, ids):
    return "".join(tokenizer.convert_ids_to_tokens(ids))


def nats(model, ids, number):
    """Mean negative log-likelihood of the last tokens, by one forward pass without a cache."""
    logits = model(torch.tensor([ids])).logits[0, -number - 1 : -1]
    return -float(logits.log_softmax(-1).gather(1, torch.tensor(ids[-number:])[:, None]).mean())


def test_each_question_is_asked_alone_after_the_context(rows, tiny_llama, tiny_tokenizer):
    model, tokenizer = tiny_llama(), tiny_tokenizer
    [sample] = loaded(tokenizer, rows("a.jsonl", {"context": CONTEXT, "questions": QUESTIONS})).samples
    assert text_of(tokenizer, sample.prompt) == CONTEXT and sample.id == "a.jsonl/1"
    assert [text_of(tokenizer, part.question) for part in sample.parts] == ["\n\nHarbour?\n", "\n\nAnd the bakery?\n"]
    [(_, outcome)] = make("own", "x").run(model, tokenizer, [ag.policy("full")], [sample])
    expected = [nats(model, [*sample.prompt, *part.question, *part.answer], len(part.answer)) for part in sample.parts]
    assert [text_of(tokenizer, part.answer).strip() for part in sample.parts] == ["blue", "red it is"]
    hold(outcome.score, sum(expected) / 2, of_nats(model))


def test_only_the_context_is_evicted_and_before_the_question_is_read(rows, tiny_llama, tiny_tokenizer):
    model = tiny_llama()
    gates = gates_for(model)
    ag.attach(model, gates)
    row = {"context": CONTEXT, **QUESTIONS[0]}
    [sample] = loaded(tiny_tokenizer, rows("a.jsonl", row)).samples
    [part] = sample.parts
    [(_, outcome)] = make("own", "x").run(model, tiny_tokenizer, [ag.policy("gates")], [sample])
    tokens = torch.tensor([*sample.prompt, *part.question, *part.answer])
    logits, _ = by_hand.forward(model, gates, tokens, len(sample.prompt))
    number = len(part.answer)
    likely = logits[-number - 1 : -1].log_softmax(-1).gather(1, tokens[-number:, None])
    hold(outcome.score, -float(likely.mean()), of_nats(model))
    assert outcome.tokens == len(sample.prompt) and outcome.kept < 0.95
    [before] = loaded(tiny_tokenizer, rows("a.jsonl", row), question="before").samples
    assert (before.prompt, before.parts) == ([*sample.prompt, *part.question], ())
    assert before.answers == [part.answer]


def test_texts_chats_and_pairs(rows, tmp_path, tiny_tokenizer, tiny_llama):
    (tmp_path / "folder").mkdir()
    rows("folder/texts.jsonl", {"text": "0123456789abcdefghij"}, {"text": "0123"})
    rows("folder/pairs.jsonl", {"prompt": "Two and two? ", "response": "Four."})
    (tmp_path / "folder" / "one.txt").write_text("A plain text.\nOf two lines.")
    found = loaded(tiny_tokenizer, str(tmp_path / "folder"), continuation=6)
    assert (len(found.samples), found.too_short, found.too_long) == (3, 1, 0)
    texts = {x.id: (text_of(tiny_tokenizer, x.prompt), text_of(tiny_tokenizer, x.target_tokens)) for x in found.samples}
    assert texts == {
        "one.txt/1": ("A plain text.\nOf two ", "lines."),
        "pairs.jsonl/1": ("Two and two? ", "Four.</s>"),
        "texts.jsonl/1": ("0123456789abcd", "efghij"),
    }
    model = tiny_llama()
    for sample, (_, outcome) in zip(
        found.samples,
        make("own", "x").run(model, tiny_tokenizer, [ag.policy("full")], found.samples),
        strict=True,
    ):
        expected = nats(model, [*sample.prompt, *sample.target_tokens], len(sample.target_tokens))
        hold(outcome.score, expected, of_nats(model), sample.id)


def test_the_last_turn_of_a_chat_is_the_answer(rows, tiny_tokenizer):
    tokenizer = copy.deepcopy(tiny_tokenizer)
    file = rows("chats.jsonl", {"messages": [*CHAT[:1], *CHAT[5:6], {"role": "assistant", "content": "No."}]})
    with refuses(DataError, "chats.jsonl", "chat template"):
        loaded(tokenizer, file)
    tokenizer.chat_template = UNMARKED
    [sample] = loaded(tokenizer, file).samples
    assert text_of(tokenizer, sample.prompt).endswith("user: And snow?\nbot:\n")
    assert text_of(tokenizer, sample.target_tokens).startswith("No.")


def test_what_does_not_fit_is_counted_and_texts_lose_their_end(rows, tiny_tokenizer):
    long = rows("a.jsonl", *({"context": CONTEXT * number, **QUESTIONS[0]} for number in (1, 3, 1)))
    found = loaded(tiny_tokenizer, long, max_tokens=100)
    assert (len(found.samples), found.too_long) == (2, 1)
    [text] = loaded(tiny_tokenizer, rows("b.jsonl", {"text": CONTEXT}), max_tokens=30, continuation=8).samples
    assert (len(text.prompt), len(text.target_tokens)) == (22, 8)


def test_an_answer_of_one_token_is_a_row(rows, tiny_tokenizer):
    """With a prompt in blocks a policy can change it; a question after the context is read after the eviction."""
    file = rows("a.jsonl", {"context": CONTEXT, "question": "Blue?", "answer": "y"})
    for question, reads_on in (("before", False), ("after", True)):
        found = loaded(tiny_tokenizer, file, question=question)
        [sample] = found.samples
        assert make("own", question=question).reads_on(sample) == reads_on and found.too_short == 0


@pytest.mark.parametrize(
    ("record", "options", "words"),
    [
        ({"context": "x"}, {}, ["question"]),
        ({"context": "x", "questions": []}, {}, ["row 1", "questions"]),
        ({"context": "x", "question": "y", "answer": " "}, {}, ["row 1", "empty"]),
        ({"context": "x", "questions": QUESTIONS}, {"question": "before"}, ["row 1", "2 questions"]),
        ({"body": "x"}, {}, ["body", "text"]),
    ],
)
def test_damaged_rows_are_named(record, options, words, rows, tiny_tokenizer):
    with refuses(DataError, "a.jsonl", *words):
        loaded(tiny_tokenizer, rows("a.jsonl", record), **options)


def test_no_data_is_refused(tmp_path, tiny_tokenizer):
    with refuses(UserError, "own", "data=FILE"):
        loaded(tiny_tokenizer, None)
    with refuses(DataError, str(tmp_path), ".jsonl"):
        loaded(tiny_tokenizer, str(tmp_path))
    (tmp_path / "rows.doc").touch()
    with refuses(DataError, "rows.doc", ".jsonl"):
        loaded(tiny_tokenizer, str(tmp_path / "rows.doc"))

"""A response's tokens are those of a text that goes on, whatever a tokenizer puts before a text of its own."""

import random

import pytest

import ag.data
from ag.data.collate import tokenize, tokenize_after
from tests.data.conftest import SENTENCES
from tests.support.spaced import KINDS, of_sentencepiece, spaced

TEXT = "\n".join([*SENTENCES, "a  b\tc\n\n- d (e) 'f' \"g\" 1,234.5 <h>"])


@pytest.fixture(params=[*KINDS, "sentencepiece"])
def spacing(request, tmp_path):
    if request.param != "sentencepiece":
        return spaced(request.param, TEXT)
    pytest.importorskip("sentencepiece")
    return of_sentencepiece(tmp_path, TEXT)


def read(tokenizer, ids):
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def test_prompt_and_response_read_as_their_texts(spacing):
    rng = random.Random(0)
    cuts = [rng.randrange(1, len(TEXT)) for _ in range(200)]
    pairs = [(TEXT[max(0, cut - 30) : cut].lstrip() or "x", TEXT[cut : cut + rng.randrange(1, 30)]) for cut in cuts]
    prompts, responses = (list(texts) for texts in zip(*pairs, strict=True))
    found = tokenize_after(spacing, responses)
    for (prompt, response), first, then in zip(pairs, tokenize(spacing, prompts), found, strict=True):
        assert read(spacing, first + then) == prompt + response
    if spacing is spaced("bytes", TEXT):
        assert found == tokenize(spacing, responses)
    assert tokenize_after(spacing, ["", "a"])[0] == []


@pytest.mark.parametrize("form", ["pairs", "task", "repeated"])
def test_rows_have_no_space_that_the_data_have_not(spacing, make_config, write, tmp_path, form):
    pairs = [("Translate: le pont\n", "the old bridge"), ("a", " boat"), ("is it (", "yes)"), ("one\n\n", "\n two")]
    expected = [prompt + response for prompt, response in pairs]
    config = make_config(kind="sft", name=str(tmp_path / "mine"), val_samples=1, eos=False)
    rows = [{"prompt": prompt, "response": response} for prompt, response in pairs]
    if form == "task":
        config = make_config(kind="sft", name="boolq", root=str(tmp_path))
        rows = [{"question": "does it rain", "passage": "A boat waits.", "answer": True}] * 2
        expected = ["A boat waits.\nQuestion: does it rain?\nAnswer: yes"] * 3
    elif form == "repeated":
        config = make_config(kind="text", name=str(tmp_path / "mine"), packing="repeated", max_length=400)
        rows, expected = [{"text": "a" + " b" * 1000}], []
    for split in ("train", "validation"):
        write(tmp_path / ("boolq" if form == "task" else "mine"), split, rows)
    made = ag.data.build(config, spacing, 10_000)
    found = [read(spacing, row.tokens) for row in [made.val_rows[0][-1], *made.train_rows]]
    if form == "pairs":
        assert found == [expected[0], *expected]
    elif form == "task":
        assert found == expected
    else:
        assert all("b\n\nThe same text once more, word for word:\n\n" in text for text in found)

"""The tokens of a response continue the prompt, also where a tokenizer puts a space before each text."""

import random

import pytest

from ag.data.tokens import tokenize, tokenize_after
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

"""Text out of tokens: whole characters, and nothing of a stop text."""

import random

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from ag.errors import UserError
from ag.serve.detokenizer import Detokenizer
from tests.support.http_server import byte_tokenizer
from tests.support.refused import refuses

TOKENIZER = byte_tokenizer()


def ids(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def given(text, *stops):
    """The pieces of a text whose tokens are bytes."""
    made = Detokenizer(TOKENIZER, stops)
    pieces = []
    for token in ids(text):
        pieces.append(made.add(token))
        if made.stopped:
            return pieces, True
    return [*pieces, made.rest()], False


def test_characters_are_whole():
    assert given("aä€😀b") == (["a", "", "ä", "", "", "€", "", "", "", "😀", "b", ""], False)
    assert "".join(given("aä€😀b")[0]) == "aä€😀b"
    half = Detokenizer(TOKENIZER)
    assert [half.add(token) for token in ids("a😀")[:-1]] + [half.rest()] == ["a", "", "", "", ""]


@pytest.mark.parametrize(
    ("text", "stops", "pieces", "stopped"),
    [
        ("one END two", ("END",), ["o", "n", "e", " ", "", "", ""], True),
        ("an ENTry", ("END",), ["a", "n", " ", "", "", "ENT", "r", "y", ""], False),
        ("aab", ("ab",), ["", "a", ""], True),
        ("abcd", ("cd", "bx"), ["a", "", "b", ""], True),  # a longer beginning ends, another one goes on
        ("xEN", ("END",), ["x", "", "", "EN"], False),  # at the end it was none
        ("5€6", ("€",), ["5", "", "", ""], True),
    ],
)
def test_no_part_of_a_stop_text_is_given(text, stops, pieces, stopped):
    assert given(text, *stops) == (pieces, stopped)


def test_random_bytes_become_the_text_of_all_of_them():
    draw = random.Random(0)
    for _ in range(50):
        tokens = [draw.randrange(3, 259) for _ in range(60)]
        made = Detokenizer(TOKENIZER)
        text = "".join([made.add(token) for token in tokens] + [made.rest()])
        whole = TOKENIZER.decode(tokens)
        assert whole.startswith(text) and set(whole[len(text) :]) <= {"\ufffd"}
        assert made.given == made.length == len(text)


def test_a_continuation_begins_with_its_space():
    """SentencePiece's tokenizers drop the space of a text's first word, but this word is not the first."""
    backend = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1, "<unk>": 2}, unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert Detokenizer(tokenizer).add(1) == "b"
    assert Detokenizer(tokenizer, before=[0]).add(1) == " b"


def test_a_slow_tokenizer_is_refused():
    with refuses(UserError, "Tensor", "fast"):
        Detokenizer(torch.zeros(1))

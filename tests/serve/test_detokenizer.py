"""From tokens to text: whole characters, and no part of a stop text."""

import codecs
import random

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from ag.errors import UserError
from ag.serve import Request
from ag.serve.stream import Detokenizer, Vocabulary
from tests.support.byte_fallback import PIECES, SPECIAL, bytes_as_tokens, bytes_of, fallback_tokenizer
from tests.support.http_server import byte_tokenizer
from tests.support.refused import refuses

#: Bytes of the tokens of a byte-level tokenizer, some with parts of characters.
LEVEL = [*(bytes([byte]) for byte in range(256)), b" the", b"\xc3\xa9\xe4", b"\xb8\xad!", b"\xe4\xb8"]
PLAIN = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes with their own letter in byte-level tokenizers


def level_tokenizer():
    """A byte-level tokenizer, as of GPT-2."""
    others = [byte for byte in range(256) if byte not in PLAIN]
    letters = {byte: chr(byte) for byte in PLAIN} | {byte: chr(256 + number) for number, byte in enumerate(others)}
    vocabulary = [*SPECIAL, *("".join(letters[byte] for byte in token) for token in LEVEL)]
    backend = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(vocabulary)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


#: Tokenizers, and the bytes of their tokens.
KINDS = {
    "byte fallback": (fallback_tokenizer(), bytes_of),
    "byte fallback, keeps spaces": (fallback_tokenizer(strips=False), bytes_of),
    "byte level": (level_tokenizer(), lambda x: LEVEL[x - len(SPECIAL)] if x >= len(SPECIAL) else b""),
}


def reader(vocabulary, stop=(), **fields):
    fields = {"prompt_text_goes_on": False} | fields
    return Detokenizer(vocabulary, Request(tokens=[7], stop=tuple(stop), **fields))


def given(text, *stops):
    """The pieces of a text whose tokens are bytes."""
    tokenizer = byte_tokenizer()
    made, pieces = reader(Vocabulary(tokenizer), stops), []
    for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
        pieces.append(made.add(token))
        if made.stopped:
            return pieces, True
    return [*pieces, made.flush()], False


@pytest.mark.parametrize(
    ("text", "stops", "pieces", "stopped"),
    [
        ("aä€😀b", (), ["a", "", "ä", "", "", "€", "", "", "", "😀", "b", ""], False),
        ("one END two", ("END",), ["o", "n", "e", " ", "", "", ""], True),
        ("an ENTry", ("END",), ["a", "n", " ", "", "", "ENT", "r", "y", ""], False),
        ("abcd", ("cd", "bx"), ["a", "", "b", ""], True),  # the beginning of one text ends, that of another goes on
        ("xEN", ("END",), ["x", "", "", "EN"], False),  # at the end it was none
        ("5€6", ("€",), ["5", "", "", ""], True),
    ],
)
def test_characters_are_whole_and_no_part_of_a_stop_text_is_given(text, stops, pieces, stopped):
    assert given(text, *stops) == (pieces, stopped)


def drawn(draw):
    """Tokens of an answer: characters, halves of them, pieces of text, and special tokens."""
    chosen = []
    while len(chosen) < 24:
        some = draw.choice(["é", "中", "😀", "x"]).encode()
        some = some[: draw.randint(1, 4)] if draw.random() < 0.3 else some
        one = draw.choice([range(len(SPECIAL)), range(len(SPECIAL), 256), range(260, 264)])
        chosen += draw.choice([bytes_as_tokens(some), [draw.choice(one)]])
    return chosen


@pytest.mark.parametrize("kind", KINDS)
def test_any_tokens_become_the_text_of_their_bytes(kind):
    """After each token: every complete character, and U+FFFD for bytes that cannot become one."""
    tokenizer, says = KINDS[kind]
    vocabulary, draw = Vocabulary(tokenizer), random.Random(0)
    for _ in range(40):
        tokens = drawn(draw)
        made, text, said = reader(vocabulary, prompt_text_goes_on=True), "", b""
        for token in tokens:
            text, said = text + made.add(token), said + says(token)
            assert text == codecs.getincrementaldecoder("utf-8")("replace").decode(said), tokens
        text += made.flush()
        assert text == said.decode("utf-8", "replace") and made.num_released == made.length == len(text)
        assert made.flush() == ""


@pytest.mark.parametrize("kind", KINDS)
def test_half_a_character_before_the_end(kind):
    """It is U+FFFD before a stop text that is a special token, and no part of what comes after another one."""
    vocabulary, half = Vocabulary(KINDS[kind][0]), bytes_as_tokens(b"a\xe4\xb8")
    end = SPECIAL.index("<end>")
    for include, text in ((False, "a\ufffd"), (True, "a\ufffd<end>")):
        made = reader(vocabulary, ["<end>"], include_stop_str_in_output=include)
        assert "".join(map(made.add, [*half, end])) + made.flush() == text and made.stopped
        made = reader(vocabulary, ["a", "x"], include_stop_str_in_output=include)
        assert "".join(map(made.add, half)) + made.flush() == "a" * include and made.stopped
    made = reader(vocabulary, ["\ufffd"])
    assert ("".join(map(made.add, half)) + made.flush(), made.stopped) == ("a", True)
    made = reader(vocabulary, ["<end>", "\ufffd"], include_stop_str_in_output=True)
    assert "".join(map(made.add, [*half, end])) + made.flush() == "a\ufffd"


def test_a_token_may_end_a_stop_text_and_begin_a_character():
    made = reader(Vocabulary(level_tokenizer()), ["\u00e9"])
    token = len(SPECIAL) + LEVEL.index(b"\xc3\xa9\xe4")
    assert (made.add(token), made.flush(), made.stopped) == ("", "", True)


def test_a_continuation_begins_with_its_space():
    """SentencePiece drops the space before the first word of a text, but not before the first of a continuation."""
    backend = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1, "<unk>": 2}, unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()
    vocabulary = Vocabulary(PreTrainedTokenizerFast(tokenizer_object=backend))
    begins, goes_on = reader(vocabulary), reader(vocabulary, prompt_text_goes_on=True)
    assert [begins.add(1), begins.add(0), goes_on.add(1)] == ["b", " a", " b"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_text_that_is_a_special_token_ends_an_answer(kind):
    """Text that was held back before it is returned; the same characters as text end an answer too."""
    vocabulary = Vocabulary(KINDS[kind][0])
    made = reader(vocabulary, ["<end>", "xyz"])
    assert [made.add(token) for token in bytes_as_tokens(b"ax")] == ["a", ""]
    assert (made.add(SPECIAL.index("<end>")), made.stopped, made.num_released) == ("x", True, 2)
    made = reader(vocabulary, ["xyz"])
    assert (made.add(SPECIAL.index("<end>")), made.stopped) == ("", False)
    made = reader(vocabulary, ["<end>"])
    assert "".join(map(made.add, bytes_as_tokens(b"a<end>"))) == "a" and made.stopped


def test_tokens_are_spelled_as_in_the_middle_of_a_text():
    spelled, first = Vocabulary(fallback_tokenizer()).text, len(SPECIAL) + 256
    assert [spelled(first + number) for number in range(len(PIECES))] == [piece.replace("▁", " ") for piece in PIECES]
    assert [spelled(token) for token in bytes_as_tokens(b"A \xe4")] == ["A", " ", "\ufffd"]
    assert [spelled(number) for number in range(len(SPECIAL))] == SPECIAL
    spelled = Vocabulary(level_tokenizer()).text
    assert [spelled(first + number) for number in range(3)] == [" the", "é\ufffd", "\ufffd\ufffd!"]


def test_a_slow_tokenizer_is_refused():
    with refuses(UserError, "Tensor", "fast"):
        Vocabulary(torch.zeros(1))

"""Text out of tokens: whole characters, and nothing of a stop text."""

import codecs
import random

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from ag.errors import UserError
from ag.serve.detokenizer import Detokenizer, Spelling
from tests.support.byte_fallback import PIECES, SPECIAL, bytes_as_tokens, bytes_of, fallback_tokenizer
from tests.support.http_server import byte_tokenizer
from tests.support.refused import refuses

TOKENIZER = byte_tokenizer()
#: What the tokens of a tokenizer of bytes say, some of which hold halves of characters.
LEVEL = [*(bytes([byte]) for byte in range(256)), b" the", b"\xc3\xa9\xe4", b"\xb8\xad!", b"\xe4\xb8"]
PLAIN = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that such tokenizers write as themselves


def level_tokenizer():
    """A tokenizer of bytes, as GPT-2's."""
    others = [byte for byte in range(256) if byte not in PLAIN]
    letters = {byte: chr(byte) for byte in PLAIN} | {byte: chr(256 + number) for number, byte in enumerate(others)}
    vocabulary = [*SPECIAL, *("".join(letters[byte] for byte in token) for token in LEVEL)]
    backend = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(vocabulary)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def level_bytes(token):
    return LEVEL[token - len(SPECIAL)] if token >= len(SPECIAL) else b""


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


def decoded(said, each_byte):
    """The text of bytes, without half a character at its end; each byte of none is U+FFFD, or those of one begun are.

    Of tokens that are bytes each, a wrong one is known as soon as it comes; of others it might still be a half.
    """
    text = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode(b"".join(said))
    if each_byte:
        return "".join("\ufffd" if "\udc80" <= letter <= "\udcff" else letter for letter in text)
    return b"".join(said).decode("utf-8", "replace").removesuffix("\ufffd")


def drawn(draw, kind):
    """Tokens of an answer: characters, halves of them, pieces of text, and special tokens."""
    chosen = []
    while len(chosen) < 24:
        some = draw.choice(["é", "中", "😀", "x"]).encode()
        some = some[: draw.randint(1, 4)] if draw.random() < 0.3 else some
        whole = kind != "byte level"
        others = range(256, 256 + len(PIECES if whole else LEVEL[256:]))
        chosen += draw.choice(
            [
                bytes_as_tokens(some),
                [draw.randrange(len(SPECIAL), len(SPECIAL) + 256)],
                [len(SPECIAL) + draw.choice(others)],
                [draw.randrange(len(SPECIAL))],
            ]
        )
    return chosen


#: Texts that an answer goes on from.
PROMPTS = {
    "text": [*bytes_as_tokens(b"x"), len(SPECIAL) + 256, *bytes_as_tokens(b"y")],
    "three bytes a character": bytes_as_tokens("語語語語".encode()),
    "half a character": bytes_as_tokens("the 語語".encode())[:-1],
    "a byte of none": bytes_as_tokens(b"some words \xff"),
    "special": [*bytes_as_tokens(b"words"), 2, 1],
}


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("kind", ["byte fallback", "byte fallback, keeps spaces", "byte level"])
def test_any_tokens_become_the_text_of_their_bytes(kind, prompt):
    """After each token all that is certain was given, and nothing of the prompt."""
    tokenizer = level_tokenizer() if kind == "byte level" else fallback_tokenizer(strips=kind == "byte fallback")
    says, draw = level_bytes if kind == "byte level" else bytes_of, random.Random(0)
    for _ in range(40):
        tokens = drawn(draw, kind)
        made, text = Detokenizer(tokenizer, before=PROMPTS[prompt]), ""
        for count, token in enumerate(tokens, 1):
            text += made.add(token)
            assert text == decoded([says(x) for x in tokens[:count]], kind != "byte level"), tokens[:count]
        assert made.rest() == "" and made.given == made.length == len(text)


@pytest.mark.parametrize("kind", ["byte fallback", "byte level"])
def test_whole_characters_are_as_the_tokenizer_reads_them(kind):
    """An answer that begins a text of its own, in which nothing is cut: the text is that of its tokens at once."""
    tokenizer = level_tokenizer() if kind == "byte level" else fallback_tokenizer()
    draw = random.Random(1)
    words = [[len(SPECIAL) + 256], *(bytes_as_tokens(letter.encode()) for letter in "中é😀")]
    for _ in range(40):
        tokens = [token for word in draw.choices(words, k=5) for token in word]
        made = Detokenizer(tokenizer)
        assert "".join(map(made.add, tokens)) == tokenizer.backend_tokenizer.decode(tokens)


def test_a_continuation_begins_with_its_space():
    """SentencePiece's tokenizers drop the space of a text's first word, but this word is not the first."""
    backend = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1, "<unk>": 2}, unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert Detokenizer(tokenizer).add(1) == "b"
    assert Detokenizer(tokenizer, before=[0]).add(1) == " b"


def test_a_tokenizer_that_changes_what_it_said():
    """WordPiece's decoder moves marks to the word before: what was given stays, and the rest begins anew."""
    backend = Tokenizer(models.WordLevel({"do": 0, "n't": 1, "it": 2, "<unk>": 3}, unk_token="<unk>"))
    backend.decoder = decoders.WordPiece(cleanup=True)
    made = Detokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert [made.add(token) for token in (0, 1, 2, 0)] == ["do", "n't", " it", " do"]


@pytest.mark.parametrize("kind", ["byte fallback", "byte level"])
def test_a_stop_text_that_is_a_special_token_ends_an_answer(kind):
    """What was held back in front of it is given; as a text that is spelled like it, it never comes."""
    tokenizer = level_tokenizer() if kind == "byte level" else fallback_tokenizer()
    made = Detokenizer(tokenizer, ["<end>", "xyz"])
    assert [made.add(token) for token in bytes_as_tokens(b"ax")] == ["a", ""]
    assert (made.add(SPECIAL.index("<end>")), made.stopped, made.given) == ("x", True, 2)
    made = Detokenizer(tokenizer, ["xyz"])
    assert (made.add(SPECIAL.index("<end>")), made.stopped) == ("", False)
    made = Detokenizer(tokenizer, ["<end>"])
    assert "".join(map(made.add, bytes_as_tokens(b"a<end>"))) == "a" and made.stopped


def test_tokens_are_spelled_as_in_the_middle_of_a_text():
    spelled = Spelling(fallback_tokenizer())
    first = len(SPECIAL) + 256
    assert [spelled(first + number) for number in range(len(PIECES))] == [piece.replace("▁", " ") for piece in PIECES]
    assert [spelled(token) for token in bytes_as_tokens(b"A \xe4")] == ["A", " ", "\ufffd"]
    assert [spelled(number) for number in range(len(SPECIAL))] == SPECIAL
    spelled = Spelling(level_tokenizer())
    assert [spelled(first + number) for number in range(3)] == [" the", "é\ufffd", "\ufffd\ufffd!"]


def test_a_slow_tokenizer_is_refused():
    with refuses(UserError, "Tensor", "fast"):
        Detokenizer(torch.zeros(1))

"""Texts of the published results are not in the training data of the shipped gates."""

import itertools
import re
import zlib

import numpy as np
import pytest

from ag.data.sources import Source
from tests.support import datasets

pytestmark = datasets.needed
NUM_WORDS = 13  # of a passage, as where contamination is usually looked for
#: Share of a text's passages that others may have too: pages of one site repeat a licence, and problems of GSM8K an
#: opening. A text that was trained on would share all.
REPEATED = 0.2
PROBLEMS = 160  # of GSM8K's training rows, whose solutions the gates for reasoning were trained on


def texts(name, split, last=None):
    """The texts of rows: all their fields that are texts."""
    for row in itertools.islice(Source(name, folder=datasets.ROOT / name).read(split), last):
        yield " ".join(value for value in row.values() if isinstance(value, str))


def passages(text):
    """A hash of each run of words."""
    words = np.array([zlib.crc32(word.encode()) for word in re.findall(r"\w+", text.lower())], dtype=np.uint64)
    hashes = np.zeros(max(len(words) - NUM_WORDS + 1, 0), dtype=np.uint64)
    for first in range(NUM_WORDS):
        hashes = hashes * np.uint64(1099511628211) + words[first : first + len(hashes)]
    return hashes


@pytest.fixture(scope="module")
def trained():
    """The passages of the training data, sorted."""
    rows = itertools.chain(texts("corpus", "train"), texts("gsm8k", "train", PROBLEMS))
    return np.unique(np.concatenate([passages(text) for text in rows]))


def shared_share(text, trained):
    """The share of a text's passages that are in the training data."""
    own = passages(text)
    return float((trained[np.searchsorted(trained, own).clip(max=len(trained) - 1)] == own).mean()) if len(own) else 0.0


@pytest.mark.parametrize(
    ("name", "split", "least"),
    [
        ("pg19_style", "test", 10),  # books around hidden numbers, and continuations of whole books
        ("corpus", "validation", 100),  # continuations
        ("gsm8k", "test", 1000),
        ("math500", "test", 500),
        ("hellaswag", "validation", 1000),
        ("wikitext2", "test", 50),
    ],
)
def test_measured_texts_are_not_in_the_training_data(trained, name, split, least):
    shares = [shared_share(text, trained) for text in texts(name, split)]
    assert len(shares) >= least
    assert max(shares) <= REPEATED, f"{name}/{split} row {int(np.argmax(shares))} shares {max(shares):.0%}"


def test_a_trained_text_would_be_found(trained):
    assert shared_share(next(texts("corpus", "train")), trained) == 1.0

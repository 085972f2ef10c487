"""Fixtures of several files of this folder."""

import pytest

from tests.support.http_server import VOCABULARY


@pytest.fixture(scope="module")
def tiny(tiny_llama):
    """A tiny model with room for long answers."""
    return tiny_llama(vocab_size=VOCABULARY, max_position_embeddings=8192)

"""Fixtures of several files of this folder."""

import pytest

import ag
from tests.support.gates_for import gates_for


@pytest.fixture(scope="module")
def llama(tiny_llama):
    """A tiny model with gates, for policies of every kind."""
    model = tiny_llama()
    ag.attach(model, gates_for(model))
    return model

"""Names of data are refused before anything is loaded."""

import pytest

from ag import data
from ag.config.sections import DataConfig
from tests.support.refused import refuses


@pytest.mark.parametrize(
    ("kind", "name", "named"),
    [("sft", "bolq", ("data.name=bolq", "boolq?")), ("worked", "facts", ("data.name=facts", "worked", "addition"))],
)
def test_names_that_nothing_knows(kind, name, named):
    with refuses(data.DataError, *named):
        data.check(DataConfig(kind=kind, name=name))


@pytest.mark.parametrize(("kind", "name"), [("sft", "boolq"), ("worked", "worked"), ("worked", "sorting")])
def test_names_that_are_known(kind, name):
    config = DataConfig(kind=kind, name=name)
    assert (data.check(config), config.name) == (None, name)

"""Which module of ag.evaluate imports which, for types too: tasks know no comparison, and nothing goes round."""

import pytest

from tests.support.imports import ROOT, graph

COMMANDS = {f"ag.{path.stem}" for path in ROOT.glob("*.py") if "__main__" in path.read_text()}
MODULES = graph("evaluate")


@pytest.mark.parametrize("name", MODULES)
def test_arrows_point_down(name):
    assert {"ag.compare", "ag.explain", "ag.fit", "ag.generate"} <= COMMANDS
    assert not MODULES[name] & {*COMMANDS, "ag.evaluate.__main__"}
    if name.startswith("ag.evaluate.tasks"):
        assert not {other for other in MODULES[name] if other.startswith("ag.evaluate.comparison")}

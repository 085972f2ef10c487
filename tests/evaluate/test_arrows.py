"""Which module of ag.evaluate imports which, for types too: tasks know no comparison, and nothing goes round."""

import ast
import graphlib
from pathlib import Path

import pytest

import ag

ROOT = Path(ag.__file__).parent
COMMANDS = {f"ag.{path.stem}" for path in ROOT.glob("*.py") if "def main(" in path.read_text()}


def imports(path):
    """The modules of ag that a file imports, wherever in it; a package's own names count as the package."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            submodules = {name for name in names if is_module(name)}
            found |= submodules | ({node.module} if submodules != names else set())
    return {name for name in found if name.startswith("ag.")}


def is_module(name):
    path = ROOT.parent.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def graph():
    found = {}
    for path in sorted((ROOT / "evaluate").rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = imports(path)
    return found


MODULES = graph()


def test_nothing_goes_round():
    inside = {name: {other for other in others if other in MODULES} for name, others in MODULES.items()}
    assert inside["ag.evaluate.comparison.work"] >= {"ag.evaluate.comparison.config", "ag.evaluate.tasks"}
    assert len(list(graphlib.TopologicalSorter(inside).static_order())) == len(MODULES) > 25


@pytest.mark.parametrize("name", MODULES)
def test_arrows_point_down(name):
    assert {"ag.compare", "ag.explain", "ag.fit", "ag.generate"} <= COMMANDS
    assert not MODULES[name] & {*COMMANDS, "ag.evaluate.__main__"}
    if name.startswith("ag.evaluate.tasks"):
        assert not {other for other in MODULES[name] if other.startswith("ag.evaluate.comparison")}

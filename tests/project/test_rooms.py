"""Imports point down: a room of the library never loads one above it."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

import ag

ROOT = Path(ag.__file__).parent
LOW = "errors files retention stateful versions cluster kernels plugins config wheels model"
#: From the bottom: what each room may load beside itself.
BELOW = {
    "errors": "",
    "files": "errors",
    "retention": "",
    "stateful": "",
    "versions": "",
    "hardware": "",
    "wheels": "errors files",
    "kernels": "errors files retention",
    "plugins": "errors",
    "cluster": "errors versions",
    "config": "errors files plugins cluster versions",
    "commands": "errors plugins config cluster hardware model data",  # model and data in functions alone
    "model": "errors files kernels plugins config cluster versions wheels",
    "gates": LOW,
    "data": "errors files plugins config model cluster versions wheels",
    "engine": f"{LOW} gates",
    "asking": f"{LOW} gates engine",
    "loading": f"{LOW} gates engine",
    "continuation": f"{LOW} gates engine data commands loading",
    "serve": f"{LOW} gates engine data commands continuation loading",
    "vllm": f"{LOW} gates engine",
    "training": f"{LOW} gates data engine hardware",
    "callbacks": f"{LOW} gates data engine training",
    "evaluate": f"{LOW} gates data training engine commands hardware",
}


def imports(path):
    """The modules of ag that a file imports, in functions and for types too; a package's names count as the package."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            submodules = {name for name in names if is_module(name)}
            found |= submodules | ({node.module} if submodules != names else set())
    return {name for name in found if name.startswith("ag.")}


def is_module(name):
    path = ROOT.parent.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


@pytest.fixture(scope="module")
def modules():
    """From each module of the library to those that it imports."""
    found = {}
    for path in sorted(
        path for folder in ("", "data", "callbacks", "kernels") for path in (ROOT / folder).rglob("*.py")
    ):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = imports(path)
    return found


@pytest.mark.parametrize("room", BELOW)
def test_a_room_imports_nothing_above_it(room, modules):
    found = {other.split(".")[1] for name in modules if name.split(".")[1:2] == [room] for other in modules[name]}
    assert found - {room} <= set(BELOW[room].split())


def test_no_import_goes_round(modules):
    inside = {name: {other for other in others if other in modules} - {"ag"} for name, others in modules.items()}
    assert inside["ag.run"] >= {"ag.training.module", "ag.gates.gate"}
    assert len(list(graphlib.TopologicalSorter(inside).static_order())) == len(modules) > 100
    tasks = {name: others for name, others in modules.items() if name.startswith("ag.evaluate.tasks.")}
    assert tasks  # which know no comparison
    assert not [name for name, others in tasks.items() if any("evaluate.comparison" in other for other in others)]


def test_no_class_is_spread_over_files():
    """A class that stands beneath one other class alone, in another file, and is never used itself, is a part of it."""
    trees = {path: ast.parse(path.read_text()) for path in ROOT.rglob("*.py")}
    home, children, used = {}, {}, set()
    for path, tree in trees.items():
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        home |= {node.name: path for node in classes}
        for node in classes:
            for base in node.bases:
                children.setdefault(ast.unparse(base).partition("[")[0], set()).add(path)
        as_base = {id(name) for node in classes for base in node.bases for name in ast.walk(base)}
        used |= {(node.id, path) for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in as_base}
    assert len(home) > 150 and "Scorer" in children
    alone = {name for name, paths in children.items() if len(paths) == 1 and name in home and home[name] not in paths}
    assert alone - {name for name, path in used if path != home.get(name)} == set()


def test_the_package_itself_loads_nothing():
    """`import ag` costs what Python costs: its public names are loaded when they are used."""
    code = "import sys, ag; print(*[name for name in sys.modules if name.startswith('ag.') or name == 'torch'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
    assert all(getattr(ag, name) for name in ag._PUBLIC)
    with pytest.raises(AttributeError, match="'polisy'"):
        _ = ag.polisy

"""Imports point down: a room of the library never loads one above it."""

import graphlib
import subprocess
import sys

import pytest

from tests.support.imports import graph
from tests.support.warm import started

LOW = "errors files stateful versions cluster kernels plugins config wheels model"
#: From the bottom: what each room may load beside itself.
BELOW = {
    "errors": "",
    "files": "errors",
    "stateful": "",
    "wheels": "errors files",
    "kernels": "errors files",
    "plugins": "errors",
    "cluster": "errors versions",
    "config": "errors files plugins cluster versions",
    "commands": "errors files plugins config cluster versions",
    "model": "errors files kernels plugins config cluster versions wheels",
    "gates": LOW,
    "data": "errors files plugins config model cluster versions wheels",
    "engine": f"{LOW} gates",
    "serve": f"{LOW} gates engine commands continuation",
    "training": f"{LOW} gates data engine",
    "callbacks": f"{LOW} gates data engine training",
    "evaluate": f"{LOW} gates data training engine commands hardware",
}
LOADED = """
import importlib, os, pkgutil, sys
import torch, transformers, lightning.pytorch, peft, datasets  # once for all rooms

skipped = ("triton", "tiles", "__main__", "lm_eval")  # need what may not be there, or are commands


def load(name):
    room = importlib.import_module("ag." + name)
    for module in pkgutil.walk_packages(getattr(room, "__path__", []), room.__name__ + "."):
        if module.name.rpartition(".")[2] not in skipped:
            importlib.import_module(module.name)
    print(*sorted({name.split(".")[1] for name in sys.modules if name.startswith("ag.")}), flush=True)


assert not any(name.startswith("ag.") for name in sys.modules)
for name in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        load(name)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(name)
"""


@pytest.mark.slow
def test_a_room_loads_nothing_above_it():
    """Each in a process of its own."""
    done = subprocess.run([started(), "-c", LOADED, *BELOW], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    for (room, below), loaded in zip(BELOW.items(), done.stdout.splitlines(), strict=True):
        assert room in loaded.split()
        assert set(loaded.split()) - {room} <= set(below.split()), room


def test_no_import_goes_round():
    """Also not in a function, or for types."""
    modules = graph("", "data", "callbacks", "kernels")
    inside = {name: {other for other in others if other in modules} - {"ag"} for name, others in modules.items()}
    assert inside["ag.run"] >= {"ag.training.module", "ag.gates.gate"}
    assert len(list(graphlib.TopologicalSorter(inside).static_order())) == len(modules) > 150
    tasks = {name: others for name, others in modules.items() if name.startswith("ag.evaluate.tasks.")}
    assert len(tasks) > 10  # which know no comparison
    assert not [name for name, others in tasks.items() if any("evaluate.comparison" in other for other in others)]


def test_the_package_itself_loads_nothing():
    """`import ag` costs what Python costs: its public names are loaded when they are used."""
    code = "import sys, ag; print(*[name for name in sys.modules if name.startswith('ag.') or name == 'torch'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_public_names():
    import ag

    for name in (
        "GateConfig",
        "AttentionGates",
        "attach",
        "detach",
        "policy",
        "EvictionCache",
        "Policy",
        "Pool",
        "load_base",
    ):
        assert getattr(ag, name).__name__ == name
    with pytest.raises(AttributeError, match="'polisy'"):
        _ = ag.polisy

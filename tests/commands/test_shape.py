"""Every command has one shape: a file with its keys, of which shared ones are declared once, and what it calls."""

import ast
from dataclasses import fields
from importlib import import_module
from typing import get_type_hints

import pytest

from ag.__main__ import COMMANDS
from ag.commands.shared import Shared, SharedDtype, SharedModel
from ag.config import Config
from ag.config.command_line import Invocation
from tests.support import ROOT


def declared(name):
    """The keys class of a command, and the module and function that it calls, as its file says."""
    tree = ast.parse((ROOT / "ag" / "commands" / f"{name}.py").read_text())
    last = tree.body[-1]
    assert isinstance(last, ast.Assign) and last.targets[0].id == "main" and last.value.func.id == "keyed"
    program, schema, runs, *_ = last.value.args
    assert program.value == f"ag.{name}"
    return getattr(import_module(f"ag.commands.{name}"), schema.id), runs.value.split(":")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_file_opens_with_keys_and_ends_with_what_it_calls(name):
    schema, (module, function) = declared(name)
    called = getattr(import_module(module), function)
    assert get_type_hints(called) == {"asked": Invocation[schema], "return": int}


def test_shared_keys_are_declared_once():
    """But for a model that is another one where nobody names it."""
    shared = {field.name for kind in (Shared, SharedDtype, SharedModel) for field in fields(kind)}
    again = {}
    for name in COMMANDS:
        schema, _ = declared(name)
        if schema is not Config and issubclass(schema, Shared):
            again[name] = shared & set(schema.__annotations__)
    assert again.keys() == {"generate", "serve", "compare", "evaluate", "explain", "bench"}
    assert set().union(*again.values()) == {"model"}

"""The faults of scripts/mutants.toml still fit the code and its tests."""

import ast
import importlib.util

import pytest

from tests.support import ROOT

spec = importlib.util.spec_from_file_location("mutants", ROOT / "scripts" / "mutants.py")
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)


@pytest.mark.parametrize("name", script.MUTANTS)
def test_a_mutant_fits_the_code_and_its_tests(name):
    mutant = script.MUTANTS[name]
    text, changed = (ROOT / mutant["file"]).read_text(), script.applied(name)
    if mutant["file"].endswith(".py"):
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text))
    path, _, test = mutant["tests"].partition("::")
    assert f"\ndef {test.partition('[')[0]}" in (ROOT / path).read_text() and changed != text

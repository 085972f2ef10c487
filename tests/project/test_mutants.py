"""The faults of scripts/mutants.toml still fit the code and its tests."""

import ast
import importlib.util

from tests.support import ROOT

spec = importlib.util.spec_from_file_location("mutants", ROOT / "scripts" / "mutants.py")
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)


def test_every_mutant_fits_the_code_and_its_tests():
    wrong = {}
    for name, mutant in script.MUTANTS.items():
        path, _, test = mutant["tests"].partition("::")
        try:
            changed = script.applied(name)
            if mutant["file"].endswith(".py"):
                ast.parse(changed)
            if f"\ndef {test.partition('[')[0]}" not in (ROOT / path).read_text():
                wrong[name] = f"no test {mutant['tests']}"
        except (OSError, SyntaxError, ValueError) as error:
            wrong[name] = str(error)
    assert wrong == {}

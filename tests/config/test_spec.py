"""What is known of the parts of a policy before the engine is loaded."""

import subprocess
import sys

import pytest

from ag.config.policies import SHIPPED, option_names, parts
from ag.plugins import discover
from tests.project.test_quiet import HEAVY


@pytest.mark.parametrize("group", SHIPPED)
def test_the_shipped_parts_are_those_of_the_engine(group):
    own = {name: kind for name, kind in discover(group).items() if kind.__module__.startswith("ag.")}
    assert own.keys() == SHIPPED[group].keys()
    for name, kind in own.items():
        shipped = SHIPPED[group][name]
        assert sorted(option_names(shipped)) == sorted(option_names(kind)), name
        for attribute in ("default_allocator", "reads_gates", "shorthands"):
            assert getattr(kind, attribute, getattr(shipped, attribute)) == getattr(shipped, attribute), name


def test_a_part_of_a_plugin_is_known_once_the_engine_is_loaded(monkeypatch):
    scorers = discover("ag.scorers")
    monkeypatch.setitem(scorers, "mine", scorers["h2o"])
    assert parts("ag.scorers")["mine"] is scorers["h2o"]


def test_a_policy_is_read_without_torch():
    code = """
import sys
from ag.config.spec import PolicySpec, check_policy
check_policy(PolicySpec.parse("snapkv+caote@pyramid"), 64, "every", {"window": 32, "beta": 20})
check_policy(PolicySpec.parse("flags:runs/a"), None, options={"share": 0.3})
print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not HEAVY & set(done.stdout.split())

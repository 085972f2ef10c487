"""Mistakes in the names of policies and files are said before torch is loaded."""

import sys

import pytest

from ag.commands.compare import CompareConfig
from ag.commands.generate import GenerateConfig
from ag.config import early
from ag.config.command_line import parse
from ag.config.exports import absence, here, on_hub
from ag.config.policies import check_names, shipped_parts
from ag.engine.allocators import ALLOCATORS
from ag.engine.scorers import SCORERS
from ag.engine.spec import named
from ag.engine.wrappers import WRAPPERS
from ag.errors import UserError
from tests.project.test_quiet import HEAVY, imported
from tests.support.refused import refuses


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ag.generate", "policy=snapkw", "prompt=x"], ["'snapkw'", "did you mean snapkv?"]),
        (["ag.generate", "policy=h2o", "file=GONE.txt"], ["file=GONE.txt", "no such file"]),
        (["ag.generate", "gates=GONE", "prompt=x"], ["GONE: no such folder", "gates.safetensors"]),
        (["ag.compare", "policies=[full,mine=snapkv+caot]"], ["'caot'", "did you mean caote?"]),
        (["ag.compare", "policies=[full,flags:GONE]"], ["GONE: no such folder"]),
        (["ag.compare", "root=GONE"], ["root=GONE", "no such folder"]),
        (["ag.compare", "tasks=[ppl]", "roots.ppl=GONE"], ["roots=GONE", "no such folder"]),
        (["ag.serve", "policy=snapkv@head"], ["'head'", "did you mean heads?"]),
        (["ag.explain", "gates=smollm3"], ["smollm3", "did you mean smollm2?"]),
        (["ag.evaluate", "run=GONE"], ["run=GONE"]),
        (["ag.fit", "init=./GONE", "recipe=quickstart"], ["GONE: no such folder"]),
        (["ag.fit", "recipe=smollm2_corpus", "data.root=GONE"], ["data.root=GONE"]),
    ],
    ids=lambda words: "-".join(words)[:40],
)
def test_a_mistake_is_said_without_loading_torch(words, said):
    modules, _, line = imported(*words, code=2)
    assert not HEAVY & modules
    assert all(one in line for one in said), line
    assert line.count("\n") == 1


@pytest.mark.parametrize(
    ("kind", "table"), [("scorers", SCORERS), ("wrappers", WRAPPERS), ("allocators", ALLOCATORS)], ids=str
)
def test_the_names_read_from_a_tables_source_are_its_keys(kind, table):
    """Beside those that a test or a plugin entered meanwhile."""
    assert shipped_parts(kind) == [name for name, part in table.items() if part.__module__.startswith("ag.engine.")]


@pytest.mark.parametrize(
    "text",
    ["full", "flags", "pyramidkv", "h2o+caote@preference", "mine=snapkv@heads", "gates:a@b+c/d", "gates:x@heads"],
)
def test_what_is_known_passes(text):
    check_names(text)
    assert list(named([text]))  # as the grammar says


def test_a_mistake_in_each_part_is_named():
    for text, name in {"h20": "h20", "h2o+caot": "caot", "h2o@headz": "headz"}.items():
        with refuses(UserError, repr(name), repr(text)):
            check_names(text)


def test_names_of_plugins_are_left_to_what_loads_them(monkeypatch):
    monkeypatch.delitem(sys.modules, "ag.engine.policy", raising=False)  # as in a command that begins
    config = parse(["policy=mine", "prompt=x", "plugins=[json]"], GenerateConfig, "ag.generate").config
    early.check(config)
    config.plugins = []
    with refuses(UserError, "'mine'"):
        early.check(config)


def test_paths_of_other_machines_are_left_to_those():
    config = parse(["root=GONE", "cluster=ray://head:10001"], CompareConfig, "ag.compare").config
    early.check(config)
    config.cluster = "local"
    with refuses(UserError, "root=GONE"):
        early.check(config)


def test_where_an_export_may_be(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = on_hub("org/name:v1")
    assert found is not None and (found["repository"], found["revision"]) == ("org/name", "v1")
    (tmp_path / "org").mkdir()
    assert on_hub("org/name:v1") is None  # a misspelt folder, not a download
    assert absence(here("smollm2")) is None and absence(here("smollm2/")) is None
    (tmp_path / "smollm2").mkdir()
    assert here("smollm2").resolve() == tmp_path / "smollm2"
    (tmp_path / ".gates.ag-old").mkdir()
    assert ".gates.ag-old" in str(absence(here("gates")))

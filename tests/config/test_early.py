"""Files, folders and exports that are not there are said before torch is loaded."""

import pytest

from ag.commands.compare import CompareConfig
from ag.config import early
from ag.config.command_line import parse
from ag.config.exports import absence, here, on_hub
from ag.errors import UserError
from tests.project.test_quiet import HEAVY, imported
from tests.support.refused import refuses


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ag.generate", "policy=h2o", "file=GONE.txt"], ["file=GONE.txt", "no such file"]),
        (["ag.explain", "gates=smollm3"], ["smollm3", "did you mean smollm2?"]),
        (["ag.compare", "tasks=[ppl]", "roots.ppl=GONE"], ["roots=GONE", "no such folder"]),
    ],
    ids=lambda words: words[0],
)
def test_a_mistake_is_said_without_loading_torch(words, said):
    modules, _, line = imported(*words, code=2)
    assert not HEAVY & modules
    assert all(one in line for one in said), line
    assert line.count("\n") == 1


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

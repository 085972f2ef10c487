"""Missing files, folders and exports are errors before torch is loaded."""

import subprocess
import sys

from ag.commands.compare import CompareConfig
from ag.commands.explain import ExplainConfig
from ag.config import early
from ag.config.command_line import parse
from ag.config.exports import absence, here, on_hub
from ag.errors import UserError
from tests.project.test_quiet import HEAVY
from tests.support.refused import refuses


def test_a_missing_file_is_an_error_without_loading_torch():
    words = [sys.executable, "-X", "importtime", "-m", "ag.generate", "policy=h2o", "file=GONE.txt"]
    done = subprocess.run(words, capture_output=True, text=True)
    lines = done.stderr.splitlines()
    [said] = [line for line in lines if not line.startswith("import time:")]
    assert done.returncode == 2 and "file=GONE.txt: no such file" in said
    assert not HEAVY & {line.rpartition("|")[2].strip() for line in lines}


def test_missing_folders_and_exports():
    """Unless machines of a cluster read them."""
    with refuses(UserError, "smollm3", "did you mean smollm2?"):
        early.check(ExplainConfig(gates="smollm3"))
    config = parse(["tasks=[ppl]", "roots.ppl=GONE", "cluster=ray://head:10001"], CompareConfig, "ag.compare").config
    early.check(config)
    config.cluster = "local"
    with refuses(UserError, "roots=GONE", "no such folder"):
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

"""``--dry-run`` of commands that load a model: they print what they would do, load nothing and write nothing."""

from importlib import import_module

import pytest

from ag.__main__ import COMMANDS
from tests.config.test_recipes import COMPARISONS

SAID = {
    "generate": (["policy=mine=h2o", "budget=8", "prompt=x", "compare=true"], "mine\nfull cache\n"),
    "serve": (["policy=h2o", "budget=0.3", "memory=1.5GiB", "port=80"], "h2o: 1610612736 bytes, 127.0.0.1:80\n"),
    "explain": (["policies=[h2o,tova+caote]", "root=."], "h2o\ntova+caote\n"),
    "bench": (["prefill", "context=[64,128]"], "prefill: context 64, batch 1\nprefill: context 128, batch 1\n"),
    "doctor": ([], "packages\nprocessor\nmemory\ngpus\nkernels\nfolder\nhub\n"),
    "models": (["gemma3-270m", "accept_license=gemma"], "gemma3-270m\n"),
    "compare": (["policies=[full,h2o]", "budgets=[8]", "root=."], "ppl: full\nppl: h2o 8\n"),
    "choose": (["policies=[h2o]", "shares=[0.5,0.3]", "data=/"], "own: full\nown: h2o 0.5\nown: h2o 0.3\n"),
    "evaluate": (["policies=[full,h2o]", "budgets=[8]", "root=."], "responses: full\nresponses: h2o 8\n"),
}
WRONG = {
    "generate": ["policy=h3o", "prompt=x"],
    "serve": ["policy=h2o"],
    "explain": ["policies=[flags]"],
    "bench": ["context=[0]"],
    "models": ["smollm2", "accept_license=gemma"],
    "compare": ["policies=[full,h2o]"],
    "choose": ["policies=[h2o]"],
    "evaluate": ["policies=[h3o]", "root=."],
}


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Run a command that must not write or load a model; returns its exit code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ag.model.base.load_base", lambda *_: pytest.fail("a model was loaded"))
    monkeypatch.setattr("ag.model.base.resolve", lambda *_: pytest.fail("a model was fetched"))

    def run(name, words):
        module = f"ag.{name}" if name not in ("bench", "evaluate", "serve") else f"ag.{name}.__main__"
        code = import_module(module).main([*words, "--dry-run"])
        assert list(tmp_path.iterdir()) == []
        return code

    return run


@pytest.mark.parametrize("name", SAID)
def test_what_would_be_done(name, command, capsys):
    elsewhere = {"fit", "plan", "report", "data", "completion"}
    assert SAID.keys() == WRONG.keys() | {"doctor"} == COMMANDS.keys() - elsewhere
    words, said = SAID[name]
    assert (command(name, words), capsys.readouterr().out) == (0, said)


@pytest.mark.parametrize("name", COMPARISONS)
def test_the_cells_of_a_recipe_would_be_computed(name, command, capsys):
    assert command("compare", [f"recipe={name}", "root=."]) == 0
    cells = [line for line in capsys.readouterr().out.splitlines() if ": " in line]
    assert len(cells) == COMPARISONS[name][0]


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong(name, command, capsys):
    assert command(name, WRONG[name]) == 2
    assert capsys.readouterr().err.startswith(f"ag.{name}: error: ")

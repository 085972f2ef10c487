"""``-m``: the product of several values."""

from typing import Any

import pytest

from ag.config.keys import parse_yaml
from tests.support.refused import names
from tests.support.schemas import fit


@pytest.fixture
def swept(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is handed to the sweep: runs, configurations, program and options."""
    asked: list[Any] = []
    monkeypatch.setattr("ag.config.command_line.sweep", lambda *given: asked.append(given) or 3)
    return asked


def test_a_sweep_runs_the_product(swept: list[Any]) -> None:
    """And each run is told what makes its configuration."""
    with pytest.raises(SystemExit, match="3"):
        fit("-m", "seed=1,2", """output="p,q",it's""", "logger=[csv,wandb]", "--dry-run")
    [(runs, configs, program, options)] = swept
    found = [(config.seed, config.output, config.logger) for config in configs]
    assert found == [(seed, output, ["csv", "wandb"]) for seed in (1, 2) for output in ("p,q", "it's")]
    assert [fit(*(f"{name}={text}" for name, text in run.items())) for run in runs] == configs
    assert (program, options) == ("ag.fit", ["--dry-run"])


def test_a_sweep_starts_nothing_when_one_combination_is_bad(error: Any, swept: list[Any]) -> None:
    names(error("-m", "seed=0,2,-1"), "seed=-1", "0")
    assert swept == []


def test_sweep_validates_every_recipe_first(error: Any) -> None:
    names(error("-m", "recipe=quickstart,nope"), "'nope'")
    names(error("-m", "loss.alpha=1,"), "loss.alpha= ")
    names(error("loss.alpha=1,2"), "loss.alpha='1,2'", "-m")
    many = ",".join(map(str, range(40)))
    names(error("-m", f"seed={many}", f"loss.alpha={many}"), "1600", "1000")


def test_print_of_a_sweep_shows_each_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        fit("-m", "--print", "loss.alpha=0.5,1", "seed=0,1,2")
    assert stopped.value.code == 0
    documents = [parse_yaml(text) for text in capsys.readouterr().out.split("---\n")]
    order = [(tree["loss"]["alpha"], tree["seed"]) for tree in documents]
    assert order == [(0.5, 0), (0.5, 1), (0.5, 2), (1.0, 0), (1.0, 1), (1.0, 2)]

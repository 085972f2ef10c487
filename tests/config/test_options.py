"""``--help``, ``--print``, ``--dry-run`` and ``-m``."""

from pathlib import Path
from typing import Any

import pytest

from ag.config import Config
from ag.config.command_line import Invocation, command, parse
from ag.config.keys import parse_yaml
from ag.config.recipes import load_config
from tests.support.refused import names
from tests.support.schemas import KEYS, fit, other


def test_help_lists_every_key_with_default_line_and_type(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        fit("--help")
    lines = capsys.readouterr().out.splitlines()
    for key in KEYS.values():
        [line] = [line for line in lines if line.startswith(f"  {key.name}=")]
        assert f"{key.doc} ({key.expected()})" in line
    for start in ("trainer.progress=true", "data.root=null", "loss.alpha=1.0", "logger=[csv]", "--multirun", "--print"):
        assert any(line.startswith(f"  {start} ") for line in lines), start
    assert any("(number, at least 0)" in line for line in lines)
    with pytest.raises(SystemExit, match="0"):
        other("-h")
    assert "\n  prompt= " in capsys.readouterr().out  # which is required


def test_print_shows_configurations_that_load_back(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    with pytest.raises(SystemExit, match="0"):
        fit("--print", "-m", "recipe=mistral_cpt", "loss.alpha=0.5,2", "seed=0,1")
    documents = capsys.readouterr().out.split("---\n")
    found = [(tree["loss"]["alpha"], tree["seed"]) for tree in map(parse_yaml, documents)]
    assert found == [(0.5, 0), (0.5, 1), (2.0, 0), (2.0, 1)]
    (tmp_path / "printed.yaml").write_text(documents[2])
    assert load_config(tmp_path / "printed.yaml", Config) == fit("recipe=mistral_cpt", "loss.alpha=2")


def test_an_error_of_the_disk_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    @command("ag.writes")
    def main(words: list[str]) -> int:
        (tmp_path / "file" / "folder").mkdir()
        return 0

    assert main([]) == 2
    told = capsys.readouterr().err
    assert told.startswith("ag.writes: error: ") and told.count("\n") == 1
    names(told, str(tmp_path / "file" / "folder"))


def test_dry_run_is_passed_on() -> None:
    assert parse(["recipe=quickstart", "--dry-run"], Config, "ag.fit").dry_run is True
    line = "python -m ag.fit recipe=quickstart"
    assert parse(["recipe=quickstart"], Config, "ag.fit") == Invocation(fit("recipe=quickstart"), False, line)


@pytest.fixture
def swept(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is handed to the sweep: runs, configurations, program and options."""
    asked: list[Any] = []
    monkeypatch.setattr("ag.config.command_line.sweep", lambda *given: asked.append(given) or 3)
    return asked


def test_a_sweep_runs_the_product(swept: list[Any]) -> None:
    """And the overrides of each run make its configuration."""
    with pytest.raises(SystemExit, match="3"):
        fit("-m", "seed=1,2", """output="p,q",it's""", "logger=[csv,wandb]", "--dry-run")
    [(runs, configs, program, options)] = swept
    found = [(config.seed, config.output, config.logger) for config in configs]
    assert found == [(seed, output, ["csv", "wandb"]) for seed in (1, 2) for output in ("p,q", "it's")]
    assert [fit(*(f"{name}={text}" for name, text in run.items())) for run in runs] == configs
    assert (program, options) == ("ag.fit", ["--dry-run"])


def test_a_sweep_starts_nothing_when_one_combination_is_bad(error: Any, swept: list[Any]) -> None:
    names(error("-m", "seed=0,2,-1"), "seed=-1", "0")
    names(error("-m", "seed=" + "[" * 2000), "seed", "whole number")
    names(error("-m", "recipe=quickstart,nope"), "'nope'")
    many = ",".join(map(str, range(40)))
    names(error("-m", f"seed={many}", f"loss.alpha={many}"), "1600", "1000")
    assert swept == []

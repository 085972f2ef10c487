"""What a command prints instead of running: help and configurations."""

from pathlib import Path

import pytest

from ag.config import Config
from ag.config.command_line import Invocation, parse
from ag.config.recipes import load_config
from tests.support.schemas import KEYS, fit, other


def test_help_lists_every_key_with_type_default_and_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        fit("--help")
    assert stopped.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    for key in KEYS.values():
        [line] = [line for line in lines if line.startswith(f"  {key.name}=")]
        assert f"{key.doc} ({key.expected()})" in line
    assert any(
        line.startswith("  loss.objective=lm ") and "(lm | kl | regress | a loss of your own)" in line for line in lines
    )
    assert any(line.startswith("  trainer.progress=true ") for line in lines)
    assert any(line.startswith("  data.root=null ") for line in lines)
    assert any(line.startswith("  loss.alpha=1.0 ") and "(number, at least 0)" in line for line in lines)
    assert any(line.startswith("  logger=[csv] ") for line in lines)
    for option in ("--help", "--recipes", "--print", "--dry-run", "--multirun"):
        assert any(line.startswith(f"  {option} ") for line in lines)


def test_help_of_a_required_key(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        other("-h")
    assert "\n  prompt= " in capsys.readouterr().out


def test_print_shows_a_configuration_that_loads_back(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    argv = ("recipe=mistral_cpt", "loss.alpha=2")
    with pytest.raises(SystemExit) as stopped:
        fit("--print", *argv)
    assert stopped.value.code == 0
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    assert load_config(tmp_path / "printed.yaml", Config) == fit(*argv)


def test_dry_run_is_passed_on() -> None:
    assert parse(["recipe=quickstart", "--dry-run"], Config, "ag.fit").dry_run is True
    line = "python -m ag.fit recipe=quickstart"
    assert parse(["recipe=quickstart"], Config, "ag.fit") == Invocation(fit("recipe=quickstart"), False, line)

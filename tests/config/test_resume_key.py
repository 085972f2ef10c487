"""``resume=FOLDER``: the values of the run, and those that may change."""

from pathlib import Path
from typing import Any

import pytest

from ag.commands.compare import CompareConfig
from ag.commands.plan import PlanConfig
from ag.config.command_line import parse
from ag.config.recipes import dump
from tests.support.refused import names
from tests.support.schemas import fit


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "quickstart" / "now"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump(fit("recipe=quickstart", "loss.alpha=3", "init=GONE")))
    return folder


def test_resume_takes_everything_from_the_run(run: Path) -> None:
    """But for keys that do not change its result."""
    config = fit(f"resume={run}", "trainer.max_steps=100", "output=x", "wandb.offline=true", "init=null")
    assert (config.recipe, config.loss.alpha, config.resume) == ("quickstart", 3.0, str(run))
    assert (config.trainer.max_steps, config.output, config.wandb.offline) == (100, "x", True)


@pytest.mark.parametrize(
    ("override", "name", "old", "new"),
    [
        ("gate.num_heads=2", "gate.num_heads", "4", "2"),
        ("loss.alpha=1", "loss.alpha", "3.0", "1"),
        ("train=lora warmup.regress_steps=0", "train", "'gates'", "'lora'"),
    ],
)
def test_resume_refuses_another_run(error: Any, run: Path, override: str, name: str, old: str, new: str) -> None:
    names(error(f"resume={run}", *override.split()), f"{name}={old}", f"not {new}")


def test_a_plan_of_a_resumed_run_has_its_number_of_devices(error: Any, run: Path) -> None:
    told = error(f"resume={run}", "gpu=4090x4", schema=PlanConfig)
    names(told, "gpu=4090x4", "trainer.devices=1", f"resume={run}", "gpu=4090x1", "gpu=4090")
    for gpu in ("4090x1", "4090"):
        assert parse([f"resume={run}", f"gpu={gpu}"], PlanConfig, "ag.plan").config.trainer.devices == 1


def test_resume_from_another_recipe_or_no_run(error: Any, run: Path, tmp_path: Path) -> None:
    names(error(f"resume={run}", "recipe=boolq_sft"), "recipe='quickstart'", "'boolq_sft'")
    names(error(f"resume={tmp_path}"), f"resume={tmp_path}", "config.yaml")


@pytest.mark.parametrize("name", ["../../elsewhere", ".."])
def test_name_of_a_recipe_cannot_leave_the_output_folder(error: Any, tmp_path: Path, name: str) -> None:
    path = tmp_path / "sly.yaml"
    path.write_text(f"recipe: '{name}'\n")
    names(error(f"recipe={path}"), f"recipe={name!r}")


def test_a_tilde_is_the_home_folder_in_every_path(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = fit("resume=~/runs/quickstart/now", "output=~/runs")
    assert (config.resume, config.output) == (str(run), str(tmp_path / "runs"))
    data = fit("recipe=smollm2_corpus", "data.root=~/rows", "data.cache=~/cache").data
    assert (data.root, data.cache) == (str(tmp_path / "rows"), str(tmp_path / "cache"))
    paths = parse(["tasks=[ppl]", "roots.ppl=~/rows", "output=~/runs"], CompareConfig, "ag.compare").config
    assert (paths.roots, paths.output) == ({"ppl": str(tmp_path / "rows")}, str(tmp_path / "runs"))

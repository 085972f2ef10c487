"""``resume=FOLDER``: what the run's configuration decides, and what may change."""

from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from ag.config.keys import ConfigError, parse_yaml
from ag.config.recipes import check_resume, dump
from tests.support.refused import names, refuses
from tests.support.schemas import fit


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "quickstart" / "now"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump(fit("recipe=quickstart", "loss.alpha=3")))
    return folder


def test_resume_takes_everything_from_the_run(run: Path) -> None:
    config = fit(f"resume={run}", "trainer.max_steps=100")
    assert (config.recipe, config.loss.alpha, config.resume) == ("quickstart", 3.0, str(run))
    assert config.trainer.max_steps == 100


@pytest.mark.parametrize(
    "override",
    [
        "output=x",
        "wandb.offline=true",
        "trainer.max_epochs=9",
    ],
)
def test_resume_may_change_what_does_not_touch_the_result(run: Path, override: str) -> None:
    name, _, value = override.partition("=")
    assert attrgetter(name)(fit(f"resume={run}", override)) == parse_yaml(value)


@pytest.mark.parametrize(
    ("override", "name", "old", "new"),
    [
        ("gate.num_heads=2", "gate.num_heads", "4", "2"),
        ("loss.alpha=1", "loss.alpha", "3.0", "1"),
        ("data.batch_size=1", "data.batch_size", "2", "1"),
        ("train=lora warmup.regress_steps=0", "train", "'gates'", "'lora'"),
    ],
)
def test_resume_refuses_another_run(error: Any, run: Path, override: str, name: str, old: str, new: str) -> None:
    names(error(f"resume={run}", *override.split()), f"{name}={old}", f"not {new}")


def test_resume_from_another_recipe(error: Any, run: Path) -> None:
    line = error(f"resume={run}", "recipe=boolq_sft")
    names(line, "recipe='quickstart'", "'boolq_sft'")
    with refuses(ConfigError, "recipe='quickstart'", "'boolq_sft'"):
        check_resume(fit("recipe=boolq_sft"), run)
    check_resume(fit("recipe=quickstart", "loss.alpha=3"), run)


def test_resume_from_no_run(error: Any, tmp_path: Path) -> None:
    for place in (tmp_path, "s3://bucket/run"):
        names(error(f"resume={place}"), f"resume={place}", "config.yaml")


@pytest.mark.parametrize("name", ["../../elsewhere", "a/b", "..", ""])
def test_name_of_a_recipe_cannot_leave_the_output_folder(error: Any, tmp_path: Path, name: str) -> None:
    path = tmp_path / "sly.yaml"
    path.write_text(f"recipe: '{name}'\n")
    names(error(f"recipe={path}"), f"recipe={name!r}")

"""A tiny model with documents to compare policies on."""

import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from ag.compare import CompareConfig
from ag.evaluate.comparison.compare import compare


@pytest.fixture(scope="session")
def tiny_folder(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_llama: Callable[..., PreTrainedModel],
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> Path:
    """A folder with a model, and the task ppl's documents in corpus/; one of them is too short, one hostile."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_llama().save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    rng = random.Random(0)
    texts = ["".join(rng.choices("abcdefgh ", k=60)) for _ in range(5)]
    texts.insert(1, "</script><script>alert(1)</script> <img src=x onerror=alert(2)> &amp; ]]> \\u003c ' \"")
    texts.append("short")
    (folder / "corpus").mkdir()
    (folder / "corpus" / "test.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


@pytest.fixture(scope="session")
def settings(tiny_folder: Path) -> Callable[..., CompareConfig]:
    """`settings(output, **changes)`: three policies at two budgets on one task, five cells."""

    def make(output: Path | str, **changes: Any) -> CompareConfig:
        values: dict[str, Any] = {
            "model": str(tiny_folder),
            "root": str(tiny_folder),
            "policies": ["full", "h2o", "tova"],
            "budgets": [0.5, 0.25],
            "tasks": ["ppl"],
            "task_options": {"ppl": {"prompt": 40, "continuation": 8}},
            "output": str(output),
        }
        return CompareConfig(**values | changes)

    return make


def words(config: CompareConfig) -> list[str]:
    """The words of the command for a comparison, without its policies and budgets."""
    options = config.task_options["ppl"].items()
    given = [f"{name}={getattr(config, name)}" for name in ("model", "root", "output")]
    return [*given, "tasks=[ppl]", *(f"task_options.ppl.{name}={value}" for name, value in options)]


@pytest.fixture
def config(settings: Callable[..., CompareConfig], tmp_path: Path) -> Callable[..., CompareConfig]:
    """`config(**changes)`: as ``settings``, with a folder for each test."""
    return lambda **changes: settings(**{"output": tmp_path / "out"} | changes)


def lines(output: Path | str) -> list[dict[str, Any]]:
    """The rows of results.jsonl without the fields that differ between runs."""
    rows = [json.loads(line) for line in (Path(output) / "results.jsonl").read_text().splitlines()]
    own = ("seconds", "date", "command")
    return [{name: value for name, value in row.items() if name not in own} for row in rows]


def without_charts(patch: pytest.MonkeyPatch) -> None:
    """Draw no charts: they take most of the time, and test_report draws them."""
    patch.setattr("ag.evaluate.comparison.figures.save", lambda comparison, charts: None)
    patch.setattr("ag.evaluate.comparison.figures.svg", lambda chart: "")


@pytest.fixture
def no_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparisons draw none of their charts."""
    without_charts(monkeypatch)


@pytest.fixture
def quiet() -> Console:
    """A console whose output is in ``file``."""
    return Console(file=io.StringIO(), width=200)


@pytest.fixture(scope="session")
def compared(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A finished comparison of two tasks, read only."""
    values = {"prompt": 40, "continuation": 8}
    config = CompareConfig(
        model=str(tiny_folder),
        root=str(tiny_folder),
        policies=["full", "h2o", "snapkv@pyramid"],
        policy_options={"snapkv@pyramid": {"window": 4, "kernel": 3}},
        budgets=[0.5, 0.25],
        tasks=["ppl", "needle_single"],
        task_options={"ppl": values, "needle_single": {"lengths": [300], "repeats": 2, "depths": [0.0, 1.0]}},
        output=str(tmp_path_factory.mktemp("compared")),
    )
    return compare(config, Console(file=io.StringIO(), width=200))

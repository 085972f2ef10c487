"""What rows say of how they were measured, and what pages make of it."""

import json
import shlex
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

from ag.compare import CompareConfig, main
from ag.evaluate.comparison.compare import compare
from ag.evaluate.comparison.folder import ROWS
from ag.evaluate.comparison.tables import measured, prompts
from ag.evaluate.comparison.work import called, conditions
from tests.support import made_up

LATER = ("dtype", "quantization", "prompt_mean", "prompt_min", "prompt_max", "task_options", "hardware", "threads")
LATER += ("date", "command", "untouched", "question", "nats", "hits", "floor", "over_budget")


pytestmark = pytest.mark.usefixtures("no_charts")


@pytest.fixture
def passages(tmp_path, tiny_folder):
    """Rows of BoolQ whose passages have 20, 35 and 62 characters, which are as many tokens."""
    (tmp_path / "boolq").mkdir()
    rows = [{"passage": "a" * n, "question": "why not", "answer": True} for n in (35, 20, 62)]
    (tmp_path / "boolq" / "validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def rows_of(folder):
    return [json.loads(line) for line in (Path(folder) / ROWS).read_text().splitlines()]


def cpu():
    """The name of the processor, read again."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(": ", 1)[1]
    raise AssertionError("no processor")


def test_a_row_says_how_it_was_measured(passages, tiny_folder):
    words = [f"model={tiny_folder}", f"root={passages}", "dtype=bfloat16", f"output={passages / 'an out'}"]
    words += ["policies=[full, h2o]", "budgets=[0.5]", "tasks=[boolq]"]
    before = datetime.now(UTC).replace(microsecond=0)
    assert main(words) == 0
    rows = rows_of(passages / "an out")
    assert len(rows) == 2
    for row in rows:
        assert (row["dtype"], row["quantization"]) == ("bfloat16", "none")
        assert (row["prompt_min"], row["prompt_max"], row["prompt_mean"]) == (20, 62, 39.0)
        assert row["task_options"] == {"question": "after"}
        assert (row["hardware"], row["threads"]) == (cpu(), torch.get_num_threads())
        assert before <= datetime.fromisoformat(row["date"]) <= datetime.now(UTC)
        assert shlex.split(row["command"]) == ["python", "-m", "ag.compare", *words]
    for page in ("table.md", "report.html"):
        text = (passages / "an out" / page).read_text()
        assert "How it was measured" in text
        assert "prompts: 39 tokens on average (20 to 62); options: question=after" in text
        for told in (f"{tiny_folder}, bfloat16", cpu(), rows[0]["date"], "ag.compare", "policies=[full, h2o]"):
            assert told in text, told


def test_a_comparison_from_python_says_the_call(config, quiet):
    asked = config(policies=["full"], task_options={"ppl": {"prompt": 40, "continuation": 8}})
    [result] = compare(asked, quiet).results
    again = eval(
        result.summary.command, {"compare": lambda config, _: config, "CompareConfig": CompareConfig, "console": 0}
    )
    assert again == asked
    assert result.summary.task_options == {"text_field": "text", "prompt": 40, "continuation": 8}
    assert called(CompareConfig()) == "compare(CompareConfig(), console)"


def test_a_gpu_is_named(monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: f"card {device.index}")
    assert conditions(CompareConfig(device="cuda:1"), "x")["hardware"] == "card 1"


def test_rows_of_earlier_versions_are_resumed_and_unknown(config, quiet, monkeypatch):
    """The same settings find them, whatever command asked and whenever: what was not recorded is no part of a key."""
    asked = config(policies=["full", "h2o"], budgets=[0.5])
    compare(asked, quiet)
    path = Path(asked.output) / ROWS
    rows = rows_of(asked.output)
    path.write_text("".join(json.dumps({k: v for k, v in row.items() if k not in LATER}) + "\n" for row in rows))
    old = path.read_bytes()
    monkeypatch.setattr("ag.model.base.load_base", None)
    comparison = compare(replace(asked, batch_policies=1), quiet, "another command")
    assert path.read_bytes() == old and [result.summary.mean for result in comparison.results] == [
        row["mean"] for row in rows
    ]
    text = (comparison.folder / "table.md").read_text()
    for line in ("dtype unknown", "- hardware: unknown", "- date: unknown", "- command: `unknown`", "options: unknown"):
        assert line in text


def test_what_differs_between_rows_is_counted():
    row = made_up.result("ppl", "h2o", 0.5, 0.0, 1).summary
    here = {"dtype": "float32", "quantization": "nf4", "hardware": "a card", "threads": 1, "command": "python x"}
    rows = [replace(row, **here, date=f"2026-01-0{day}T00:00:00+00:00") for day in (3, 1)]
    period = "2026-01-01T00:00:00+00:00 to 2026-01-03T00:00:00+00:00"
    assert measured(rows) == [
        ("model", "smollm2, float32, nf4"),
        ("versions", "ag 0.1.0"),
        ("hardware", "a card, 1 thread"),
        ("date", period),
        ("command", "python x"),
    ]
    told = measured([*rows, replace(rows[0], command="python y"), row])
    assert told[:2] == [
        ("model", "smollm2, float32, nf4 (3 of 4 rows)"),
        ("model", "smollm2, dtype unknown (1 of 4 rows)"),
    ]
    assert told[3:5] == [("hardware", "a card, 1 thread (3 of 4 rows)"), ("hardware", "unknown (1 of 4 rows)")]
    assert told[5:7] == [("date", f"{period} (3 of 4 rows)"), ("date", "unknown (1 of 4 rows)")]
    assert [text for what, text in told if what == "command"] == [
        "python x (2 of 4 rows)",
        "python y (1 of 4 rows)",
        "unknown (1 of 4 rows)",
    ]
    lengths = replace(
        row, prompt_mean=512.0, prompt_min=512, prompt_max=512, task_options={"lengths": [1, 2], "a": "b"}
    )
    assert prompts([row, lengths]) == "prompts: 512 tokens; options: lengths=[1,2], a=b"

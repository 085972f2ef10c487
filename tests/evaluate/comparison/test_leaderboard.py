"""Results as the leaderboard of kvpress reads them."""

import json
from dataclasses import replace
from pathlib import Path

from omegaconf import OmegaConf

from ag.engine.spec import PolicySpec
from ag.evaluate.comparison import leaderboard
from ag.evaluate.comparison.result import Comparison, Result
from tests.support.made_up import SUMMARY


def result(label, budget, task, mean, lengths=(4096,), question="after"):
    options = {"task_options": {"lengths": list(lengths)}, "question": question, "model": "org/model"}
    summary = replace(SUMMARY, label=label, budget=budget, task=task, mean=mean, n=7, **options)
    return Result(summary, [], [], PolicySpec(label))


def test_a_folder_for_each_policy_and_ratio(tmp_path):
    results = [
        result("full", None, "vt", 0.9),
        result("snapkv", 0.125, "vt", 0.51239),
        result("snapkv", 0.125, "qa_1", 1.0),
        result("snapkv", 0.125, "ppl", 2.0),
        result("snapkv", 0.125, "cwe", None),
        result("h2o", 0.5, "vt", 0.25, question="before"),
        result("tova", 0.5, "vt", 0.25, lengths=(1024, 4096)),
        result("knorm", 0.5, "ppl", 0.25),
    ]
    leaderboard.save(Comparison(tmp_path, "full", results))
    folders = {path.name for path in (tmp_path / "leaderboard").iterdir()}
    assert folders == {
        "ruler__4096__org--model__no_press__0.00",
        "ruler__4096__org--model__snapkv__0.88",
        "ruler__4096__org--model__h2o__0.50__query_aware",
    }
    folder = tmp_path / "leaderboard" / "ruler__4096__org--model__snapkv__0.88"
    scores = json.loads((folder / "metrics.json").read_text())
    assert scores == {"vt": {"string_match": 51.24}, "qa_1": {"string_match": 100.0}}
    said = OmegaConf.load(Path(folder) / "config.yaml")
    assert (said.dataset, said.data_dir, said.press_name, said.compression_ratio) == ("ruler", "4096", "snapkv", 0.875)
    assert said.query_aware is False and said.samples == {"vt": 7, "qa_1": 7}


def test_other_comparisons_write_nothing(tmp_path):
    leaderboard.save(Comparison(tmp_path, "full", [result("full", None, "ppl", 2.0)]))
    assert not list(tmp_path.iterdir())

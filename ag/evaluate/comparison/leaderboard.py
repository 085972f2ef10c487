"""Results on RULER as the leaderboard of kvpress reads them: a folder for each policy and budget.

In ``leaderboard/ruler__LENGTH__MODEL__POLICY__RATIO`` ``metrics.json`` has the score of each task in percent, and
``config.yaml`` what was run. The samples are this package's own, of the same thirteen kinds.
"""

from __future__ import annotations

import json

from omegaconf import OmegaConf

from ag.config.policies import FULL
from ag.evaluate.comparison.result import Comparison, Result
from ag.evaluate.tasks.registry import RULER

PLAIN = "no_press"  # kvpress' name of a full cache


def save(comparison: Comparison) -> None:
    """Write the results of a comparison whose samples have one length; those of other tasks are left out."""
    for found in comparison.named.values():
        scored = [result for result in found if result.summary.task in RULER and result.summary.mean is not None]
        lengths = {length for result in scored for length in (result.summary.task_options or {}).get("lengths", ())}
        if len(lengths) == 1:
            _write(comparison, scored, *lengths)


def _write(comparison: Comparison, results: list[Result], length: int) -> None:
    summary = results[0].summary
    press = PLAIN if summary.label == FULL else summary.label
    ratio = 0.0 if summary.budget is None else 1 - summary.budget if isinstance(summary.budget, float) else None
    config = {
        "dataset": "ruler",
        "data_dir": f"{length}",
        "model": summary.model,
        "press_name": press,
        "compression_ratio": ratio,
        "press_init_command": summary.policy,
        "query_aware": summary.question == "before",
        "fraction": 1.0,
        "samples": {result.summary.task: result.summary.n for result in results},
    }
    kept = f"{ratio:.2f}" if ratio is not None else f"{summary.budget}-tokens"
    parts = ["ruler", f"{length}", summary.model, press, kept, *(["query_aware"] if config["query_aware"] else [])]
    folder = comparison.folder / "leaderboard" / "__".join(parts).replace("/", "--").replace(" ", "_")
    folder.mkdir(parents=True, exist_ok=True)
    scores = {
        result.summary.task: {"string_match": round(100 * result.summary.mean, 2)}
        for result in results
        if result.summary.mean is not None
    }
    (folder / "metrics.json").write_text(json.dumps(scores, indent=4), encoding="utf-8")
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(config)), encoding="utf-8")

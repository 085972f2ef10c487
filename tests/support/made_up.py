"""A comparison of made-up scores: gates, whose lead over h2o is known, and policies that differ by noise alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ag.evaluate.comparison.folder import FinishedCell, Summary
from ag.evaluate.comparison.rows import Comparison
from ag.evaluate.tasks import Outcome
from ag.evaluate.tasks.base import Tags

SUMMARY = Summary(
    key="0123456789abcdef",
    policy="ag.policy('h2o', budget=0.5)",
    label="h2o",
    budget=0.5,
    kept=0.498,
    task="ppl",
    metric="nats per token",
    higher_is_better=False,
    mean=3.25,
    error=None,
    n=1,
    too_long=0,
    too_short=2,
    cut=0,
    seconds=1.5,
    kv_bytes=1024.0,
    prefill="dense",
    model="smollm2",
    versions={"ag": "0.1.0"},
)
COSTS = {"mine": 0.2, "h2o": 0.5, "h2o+caote@preference": 0.501, "tova": 0.9}  # nats over full, times what is evicted
BUDGETS = (0.5, 0.3, 0.2, 0.1)
POLICIES = {"mine": "gates:somewhere@heads", "gates": "gates:x", "flags": "flags:x", "fitting": "flags:x"}  # by label
N = 24
SPREAD = 0.02  # of a score's own noise
NOISE = 5 * SPREAD / N**0.5  # five deviations of its mean
TASKS: dict[str, dict[str, Any]] = {
    "needle_books": {"metric": "recall", "higher_is_better": True, "question": "after"},
    "ppl": {"metric": "nats per token", "higher_is_better": False, "question": None},
}


def result(task: str, label: str, budget: float | None, cost: float, seed: int) -> FinishedCell:
    """N samples of the same difficulty under every policy, with a little noise each."""
    hard = np.random.default_rng(0).normal(2.5, 0.4, N)
    nats = hard + cost + np.random.default_rng(seed).normal(0, SPREAD, N) * (cost > 0)
    asked = TASKS[task]["question"] is not None
    scores = (nats < 2.9).astype(float) if asked else nats
    kept = 1.0 if budget is None else budget
    tags: list[Tags] = [
        {"nats": float(x), "hits": float(s)} if asked else {} for x, s in zip(nats, scores, strict=True)
    ]
    outcomes = [Outcome(str(i), float(s), 512, kept, round(10_000 * kept), 0.1, tags[i]) for i, s in enumerate(scores)]
    summary = replace(
        SUMMARY,
        key=f"{task}{label}{budget}",
        policy=f"ag.policy('{POLICIES.get(label, label)}', budget={budget})",
        label=label,
        budget=budget,
        kept=kept,
        kv_bytes=10_000 * kept,
        task=task,
        mean=float(scores.mean()),
        error=float(scores.std(ddof=1) / N**0.5),
        n=N,
        nats=float(nats.mean()) if asked else None,
        floor=0.1 if asked else None,
        **TASKS[task],
    )
    return FinishedCell(summary, outcomes, [])


def comparison(folder: Path, **costs: float) -> Comparison:
    """`comparison(folder, h2o=0.2)`: full, and each policy at four budgets, on two tasks."""
    results = []
    for task in TASKS:
        results.append(result(task, "full", None, 0.0, 0))
        for number, (label, cost) in enumerate((COSTS | costs).items()):
            results += [result(task, label, one, cost * (1 - one), 10 * number + 1) for one in BUDGETS]
    return Comparison(results, folder)

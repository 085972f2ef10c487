"""``report.html``: one page without network and other files."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from numpy.typing import NDArray

from ag.evaluate.comparison import charts, tables
from ag.evaluate.comparison.charts import FILES, legend_mark, svg
from ag.evaluate.comparison.result import (
    NOT_COMPARED,
    Comparison,
    Result,
    at_budget,
    comparable,
    kept_shares_text,
    percent,
    uncompared_results,
)
from ag.evaluate.comparison.statistics import SIGNIFICANT, sign_flips
from ag.evaluate.comparison.verdict import find_verdicts, headlines
from ag.evaluate.inside import KeptTokens


def render(comparison: Comparison) -> str:
    """Return the page.

    All data is escaped: in HTML by the template, in the JSON of the viewer by writing <, > and & as their codes. The
    page's Content-Security-Policy allows only its own script, and no request.
    """
    verdicts = find_verdicts(comparison)
    first_verdicts = headlines(verdicts)
    charts_by_file = charts.all_charts(comparison)
    lead = charts_by_file.pop("lead", [])
    sentences = uncompared_results(comparison)
    environment = Environment(loader=FileSystemLoader(FILES), autoescape=True, undefined=StrictUndefined)
    script = (FILES / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template("page.html").render(
        style=Markup((FILES / "page.css").read_text(encoding="utf-8")),  # nosec B704  # a file of this package
        script=Markup(script),  # nosec B704  # a file of this package
        policy=f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'",
        data=embedded(viewer(comparison)),
        comparison=comparison,
        model=comparison.results[0].summary.model,
        versions=comparison.results[0].summary.versions,
        verdicts=first_verdicts,
        more_verdicts=[verdict for verdict in verdicts if verdict not in first_verdicts],
        measured=tables.measured([result.summary for result in comparison.results]),
        meanings=tables.meanings(comparison),
        lead=[(chart.title, svg(chart)) for chart in lead],
        charts=[(chart.title, svg(chart)) for file_charts in charts_by_file.values() for chart in file_charts],
        legend=[
            (legend_mark(style), _legend(comparison, label)) for label, style in charts.line_styles(comparison).items()
        ],
        leaderboard=tables.leaderboard(comparison),
        tasks=[tables.section(comparison, task, "seconds") for task in comparison.tasks],
        not_compared=f"{NOT_COMPARED} {'; '.join(sentences)}." if sentences else "",
        wins=[(budget, wins(comparison, budget)) for budget in comparison.budgets],
        layers=layers(comparison),
    )


def _legend(comparison: Comparison, label: str) -> str:
    """Return the name of a policy in the legend: its label and kept shares."""
    shares = kept_shares_text([result for result in comparison.results if result.summary.label == label])
    return f"{label} ({shares})" if shares else label


def viewer(comparison: Comparison) -> dict[str, Any]:
    """Return the data of the viewer: the token texts of prompts, and each policy's kept tokens as bits."""
    prompts = []
    for (task, sample, tokens), views in _viewed(comparison).items():
        policies = [{"name": x.name, "evicts": x.evicts, "kept": view.to_json()["kept"]} for x, view in views]
        token_texts = views[0][1].token_texts
        prompts.append({"name": f"{task}: {sample} ({tokens} tokens)", "pieces": token_texts, "policies": policies})
    return {"prompts": prompts}


def _viewed(comparison: Comparison) -> dict[tuple[str, str, int], list[tuple[Result, KeptTokens]]]:
    """Return views and results by task, sample and number of tokens. Commands may view prompts at other lengths."""
    views_by_prompt: dict[tuple[str, str, int], list[tuple[Result, KeptTokens]]] = {}
    for result in comparison.results:
        for view in result.views:
            views_by_prompt.setdefault((result.summary.task, view.sample, len(view.token_texts)), []).append(
                (result, view)
            )
    return views_by_prompt


def embedded(value: Any) -> Markup:
    """Return JSON for a script element, escaped: no text in it can end that element or open another."""
    text = json.dumps(value, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)  # nosec B704  # escaped above


def layers(comparison: Comparison) -> list[tuple[str, NDArray[np.float64]]]:
    """Return the kept share of the viewed prompts by layer, `[L]`, of each policy that evicts.

    If a prompt was viewed at several lengths, only the longest counts.
    """
    longest = {(task, sample): tokens for task, sample, tokens in sorted(_viewed(comparison))}
    kept_by_policy = []
    for name, results in comparison.named.items():
        evicting = [(result.summary.task, view) for result in results if result.evicts for view in result.views]
        views = [view for task, view in evicting if len(view.token_texts) == longest[task, view.sample]]
        if views:
            kept = sum(view.kept.sum((1, 2)) for view in views) / sum(view.kept[0].size for view in views)
            kept_by_policy.append((f"{name} ({percent(float(kept.mean()))})", kept))
    return kept_by_policy


class Wins(NamedTuple):
    """Pairwise comparisons of P policies with equal kept shares at a budget, and of each with the full cache."""

    names: list[str]  # with the kept shares
    share: NDArray[np.float64]  # `[P, P]` share of tasks that the row wins by its mean; a tie counts half
    certain: NDArray[np.int64]  # `[P, P]` number of won tasks with p below 0.05
    tasks: NDArray[np.int64]  # `[P, P]` number of tasks that compare both


def wins(comparison: Comparison, budget: str) -> Wins:
    """Compare all pairs of policies with equal kept shares at a budget, and the full cache with each policy."""
    comparable_ids = {id(result) for task in comparison.tasks for result in at_budget(comparison.of_task(task), budget)}
    results = [
        result
        for result in comparison.results
        if result.outcomes and (id(result) in comparable_ids or not result.evicts)
    ]
    names = list(dict.fromkeys(result.name for result in results))
    better, certain, tasks = (np.zeros((len(names), len(names))) for _ in range(3))
    for task in comparison.tasks:
        task_results = [result for result in results if result.summary.task == task]
        if not task_results:
            continue
        at = np.ix_(*[[names.index(result.name) for result in task_results]] * 2)
        gain, p = _gains(task_results)
        paired = np.array([[comparable(result, other) for other in task_results] for result in task_results])
        better[at] += paired * np.where(gain == 0, 0.5, gain > 0)
        certain[at] += paired & (gain > 0) & (p < SIGNIFICANT)
        tasks[at] += paired
    share = np.divide(better, tasks, out=np.full_like(better, np.nan), where=tasks > 0)
    names_with_share = [
        f"{name} ({kept_shares_text([result for result in results if result.name == name])})" for name in names
    ]
    return Wins(names_with_share, share, certain.astype(np.int64), tasks.astype(np.int64))


def _gains(results: list[Result]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the gain of each of P results of a task over each other result, and the p-values, ``[P, P]``."""
    scores_by_sample = [result.values() for result in results]
    shared = [sample for sample in scores_by_sample[0] if all(sample in scores for scores in scores_by_sample)]
    scores = np.array([[sample_scores[sample] for sample in shared] for sample_scores in scores_by_sample])
    scores = scores if results[0].summary.higher_is_better else -scores
    differences = scores[:, None] - scores[None]
    p = sign_flips(differences.reshape(-1, len(shared))).reshape(len(results), -1)
    return differences.mean(-1), p

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
from ag.evaluate.comparison.result import APART, Comparison, Result, apart, at_budget, held, may_pair, percent
from ag.evaluate.comparison.statistics import SIGNIFICANT, sign_flips
from ag.evaluate.comparison.verdict import headlines, verdicts
from ag.evaluate.inside import View


def render(comparison: Comparison) -> str:
    """Return the page.

    All data is escaped: in HTML by the template, in the JSON of the viewer by writing <, > and & as their codes. The
    page's Content-Security-Policy allows its own script alone, and no request.
    """
    judged = verdicts(comparison)
    first = headlines(judged)
    drawn = charts.every(comparison)
    lead = drawn.pop("lead", [])
    said = apart(comparison)
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
        verdicts=first,
        more_verdicts=[one for one in judged if one not in first],
        measured=tables.measured([result.summary for result in comparison.results]),
        meanings=tables.meanings(comparison),
        lead=[(one.title, svg(one)) for one in lead],
        charts=[(one.title, svg(one)) for found in drawn.values() for one in found],
        legend=[(legend_mark(look), _legend(comparison, label)) for label, look in charts.looks(comparison).items()],
        leaderboard=tables.leaderboard(comparison),
        tasks=[tables.section(comparison, task, "seconds") for task in comparison.tasks],
        apart=f"{APART} {'; '.join(said)}." if said else "",
        wins=[(budget, wins(comparison, budget)) for budget in comparison.budgets],
        layers=layers(comparison),
    )


def _legend(comparison: Comparison, label: str) -> str:
    """Return the name of a policy in the legend: its label and kept shares."""
    shares = held([result for result in comparison.results if result.summary.label == label])
    return f"{label} ({shares})" if shares else label


def viewer(comparison: Comparison) -> dict[str, Any]:
    """Return the data of the viewer: prompts as pieces of text, and for each policy the kept tokens as bits."""
    prompts = []
    for (task, sample, tokens), views in _viewed(comparison).items():
        policies = [{"name": x.name, "evicts": x.evicts, "kept": view.to_json()["kept"]} for x, view in views]
        pieces = views[0][1].pieces
        prompts.append({"name": f"{task}: {sample} ({tokens} tokens)", "pieces": pieces, "policies": policies})
    return {"prompts": prompts}


def _viewed(comparison: Comparison) -> dict[tuple[str, str, int], list[tuple[Result, View]]]:
    """Return the views with their results by task, sample and tokens: commands may view more or fewer of a sample."""
    found: dict[tuple[str, str, int], list[tuple[Result, View]]] = {}
    for result in comparison.results:
        for view in result.views:
            found.setdefault((result.summary.task, view.sample, len(view.pieces)), []).append((result, view))
    return found


def embedded(value: Any) -> Markup:
    """Return JSON for a script element, escaped so that no text in it can end that element or open another."""
    text = json.dumps(value, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)  # nosec B704  # escaped above


def layers(comparison: Comparison) -> list[tuple[str, NDArray[np.float64]]]:
    """Return the kept share of the viewed prompts by layer, `[L]`, of each policy that evicts.

    Where a prompt was viewed at several lengths, the longest counts alone.
    """
    longest = {(task, sample): tokens for task, sample, tokens in sorted(_viewed(comparison))}
    found = []
    for name, results in comparison.named.items():
        evicting = [(one.summary.task, view) for one in results if one.evicts for view in one.views]
        views = [view for task, view in evicting if len(view.pieces) == longest[task, view.sample]]
        if views:
            kept = sum(view.kept.sum((1, 2)) for view in views) / sum(view.kept[0].size for view in views)
            found.append((f"{name} ({percent(float(kept.mean()))})", kept))
    return found


class Wins(NamedTuple):
    """Pairwise comparisons of P policies that hold equally much at a budget, and of each with the full cache."""

    names: list[str]  # with the kept shares
    share: NDArray[np.float64]  # `[P, P]` of the tasks in which the row's mean is better; a tie counts half
    certain: NDArray[np.int64]  # `[P, P]` number of these tasks with p below 0.05
    tasks: NDArray[np.int64]  # `[P, P]` number of tasks in which both may be paired


def wins(comparison: Comparison, budget: str) -> Wins:
    """Compare every pair of policies that hold equally much at a budget, and the full cache with each of them."""
    part = {id(result) for task in comparison.tasks for result in at_budget(comparison.of_task(task), budget)}
    results = [one for one in comparison.results if one.outcomes and (id(one) in part or not one.evicts)]
    names = list(dict.fromkeys(result.name for result in results))
    better, certain, tasks = (np.zeros((len(names), len(names))) for _ in range(3))
    for task in comparison.tasks:
        mine = [result for result in results if result.summary.task == task]
        if not mine:
            continue
        at = np.ix_(*[[names.index(result.name) for result in mine]] * 2)
        gain, p = _gains(mine)
        paired = np.array([[may_pair(one, other) for other in mine] for one in mine])
        better[at] += paired * np.where(gain == 0, 0.5, gain > 0)
        certain[at] += paired & (gain > 0) & (p < SIGNIFICANT)
        tasks[at] += paired
    share = np.divide(better, tasks, out=np.full_like(better, np.nan), where=tasks > 0)
    shown = [f"{name} ({held([result for result in results if result.name == name])})" for name in names]
    return Wins(shown, share, certain.astype(np.int64), tasks.astype(np.int64))


def _gains(results: list[Result]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return how much better each of P results of a task is than each other, and the p-values, ``[P, P]``."""
    found = [result.values() for result in results]
    shared = [sample for sample in found[0] if all(sample in scores for scores in found)]
    scores = np.array([[one[sample] for sample in shared] for one in found])
    scores = scores if results[0].summary.higher_is_better else -scores
    differences = scores[:, None] - scores[None]
    p = sign_flips(differences.reshape(-1, len(shared))).reshape(len(results), -1)
    return differences.mean(-1), p

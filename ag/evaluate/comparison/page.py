"""``report.html``: one page that needs nothing else, neither network nor other files."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ag.evaluate.comparison import positions
from ag.evaluate.comparison.charts import Line, Point, chart, mark
from ag.evaluate.comparison.conditions import measured, prompts
from ag.evaluate.comparison.findings import OVER, OVER_NOTE, Comparison, Entry
from ag.evaluate.comparison.lead import lead, looks
from ag.evaluate.comparison.shares import APART
from ag.evaluate.comparison.statistics import mean_and_error
from ag.evaluate.comparison.verdict import headlines, verdicts

FILES = Path(__file__).parent / "page_files"
NOTES = {
    "kept": "share of the prompt's (token, layer, KV head) entries that was held; of all tokens where eviction goes on",
    OVER: OVER_NOTE,
    "score": "mean over samples, with its standard error",
    "difference": "to the baseline on the same samples, with a 95 % bootstrap interval",
    "p": "sign-flip test of that difference",
    "nats": "negative log-likelihood of the right answer, given token by token: the mean per token, with its error",
    "nats difference": "to the baseline on the same samples, with a 95 % bootstrap interval; lower is better",
    "hits": "share of the samples in which each token of the right answer is the likeliest",
    "left out": "samples too long for the model or too short for the task; how many were cut in the middle",
    "prefill": "what later tokens of a prompt see of earlier ones: all, what gates keep, what blocks left",
    "KV MB": "allocated for keys and values after a prompt, or at the end where eviction goes on, the mean",
}


def render(comparison: Comparison) -> str:
    """Return the page.

    Everything that came from data is escaped: in HTML by the template, in the JSON of the viewer by writing <, > and &
    as their codes. The page's own script is the only one that its Content-Security-Policy lets run, and no address
    can be fetched.
    """
    judged = verdicts(comparison)
    first = headlines(judged)
    environment = Environment(loader=FileSystemLoader(FILES), autoescape=True, undefined=StrictUndefined)
    script = (FILES / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template("page.html").render(
        style=Markup((FILES / "page.css").read_text(encoding="utf-8")),  # nosec B704  # a file of this package
        script=Markup(script),  # nosec B704  # a file of this package
        policy=f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'",
        data=embedded(viewer(comparison)),
        comparison=comparison,
        model=comparison.entries[0].row.model,
        versions=comparison.entries[0].row.versions,
        verdicts=first,
        more_verdicts=[one for one in judged if one not in first],
        measured=measured([entry.row for entry in comparison.entries]),
        prompts={task: prompts(entry.row for entry in comparison.of_task(task)) for task in comparison.tasks},
        lead=lead(comparison),
        leaders=comparison.leaders(),
        counts={task: max(entry.row.n for entry in comparison.of_task(task)) for task in comparison.tasks},
        metrics={task: comparison.of_task(task)[0].row for task in comparison.tasks},
        heads={task: (*comparison.columns(task), "seconds") for task in comparison.tasks},
        notes=NOTES,
        tables={
            task: [line(entry, comparison.columns(task)) for entry in comparison.of_task(task)]
            for task in comparison.tasks
        },
        charts=charts(comparison),
        along={task: along(comparison, task) for task in comparison.tasks if positions.table(comparison, task)},
        along_tables={task: positions.table(comparison, task) for task in comparison.tasks},
        along_note=positions.NOTE.format(comparison.baseline),
        uninformative={task: comparison.uninformative(task) for task in comparison.tasks},
        legend=[
            (mark(Line(number, label, [], gated)), comparison.shown(label))
            for label, (number, gated) in looks(comparison).items()
        ],
        apart=f"{APART} {'; '.join(apart)}." if (apart := comparison.apart()) else "",
        wins=[(budget, comparison.wins(budget)) for budget in comparison.budgets],
        layers=list(zip(*comparison.layers(), strict=True)),
    )


def embedded(value: Any) -> Markup:
    """Return JSON that can stand in a script element: no text in it can end that element or open another."""
    text = json.dumps(value, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)  # nosec B704  # escaped above


def line(entry: Entry, columns: Sequence[str]) -> list[tuple[str, str]]:
    """Return an entry's cells: the text, and what it is sorted by."""
    row, paired, paired_nats = entry.row, entry.paired, entry.paired_nats
    values: dict[str, Any] = {
        "policy": row.label,
        "budget": row.budget,
        "kept": row.kept,
        OVER: row.over_budget,
        "score": row.mean,
        "difference": None if paired is None else paired.difference,
        "p": None if paired is None else paired.p,
        "nats": row.nats,
        "nats difference": None if paired_nats is None else paired_nats.difference,
        "hits": row.hits,
        "n": row.n,
        "left out": row.too_long + row.too_short,
        "prefill": row.prefill,
        "KV MB": row.kv_bytes,
        "seconds": row.seconds,
    }
    texts = {**entry.cells(), "seconds": f"{row.seconds:.1f}"}
    sorted_by = {column: "" if value is None else str(value) for column, value in values.items()}
    return [(texts[column], sorted_by[column]) for column in (*columns, "seconds")]


def charts(comparison: Comparison) -> dict[str, Markup]:
    """Return the charts by title: the metric of each task and, where it was measured, the nats of the right answers."""
    found = {}
    for task in comparison.tasks:
        found[task] = curve(comparison, task)
        if "nats" in comparison.columns(task):
            found[f"{task}: nats of the right answer"] = curve(comparison, task, nats=True)
    return found


def curve(comparison: Comparison, task: str, nats: bool = False) -> Markup:
    """Draw the metric of a task, or the nats of its right answers, against the measured share."""
    lines = []
    for label, (number, gated) in looks(comparison).items():
        points, full = [], False
        for entry in comparison.of_task(task):
            measured = entry.measure(nats)
            if entry.row.label == label and measured is not None:
                kept, mean, _ = measured
                full = not entry.evicts
                points.append(Point(*measured, f"{label}: {mean:.4f} at {kept:.1%} kept"))
        if points:
            lines.append(Line(number, label, sorted(points, key=lambda point: point.x), gated, full))
    if not lines:
        return Markup("")
    texts = "; ".join(point.text for one in lines for point in one.points)
    metric = "nats per answer token" if nats else comparison.of_task(task)[0].row.metric
    return chart(f"{metric} of {task} by kept share. {texts}", "kept share of the prompt", metric, lines)


def along(comparison: Comparison, task: str) -> list[tuple[str, Markup]]:
    """Draw a task by position, a chart for each budget: differences to the baseline, or nats where it has no result.

    Policies without a budget are in each chart.
    """
    found, seen = [], looks(comparison)
    for budget in comparison.budgets or [""]:
        entries = [entry for entry in comparison.of_task(task) if entry.budget in ("", budget)]
        bases = [(entry, comparison.baseline_of(entry)) for entry in entries if entry.outcomes]
        compared = any(base is not None for _, base in bases)
        lines = []
        for entry, base in bases:
            if compared and base is None:
                continue
            nats = positions.curve(entry.outcomes)
            points = positions.difference(entry, base) if base else {x: mean_and_error(y) for x, y in nats.items()}
            (number, gated), form = seen[entry.row.label], "+.3f" if base else ".3f"
            lines.append(
                Line(
                    number,
                    entry.shown,
                    [Point(x, y, e or 0.0, f"{entry.shown}: {y:{form}} from {x:,}") for x, (y, e) in points.items()],
                    gated,
                )
            )
        if not lines:
            continue
        what = f"nats a token over {comparison.baseline}" if compared else "nats a token"
        name = f"{task} at budget {budget}" if budget else task
        texts = "; ".join(point.text for one in lines for point in one.points)
        found.append((name, chart(f"{name}: {what} by position. {texts}", "position", what, lines, shares=False)))
    return found


def viewer(comparison: Comparison) -> dict[str, Any]:
    """Return what the viewer shows: prompts as pieces of text, and for each policy the kept tokens as bits."""
    prompts: dict[tuple[str, str], dict[str, Any]] = {}
    for entry in comparison.entries:
        for view in entry.views:
            key = entry.row.task, view.sample
            prompt = prompts.setdefault(key, {"name": f"{key[0]}: {key[1]}", "pieces": view.pieces, "policies": []})
            prompt["policies"].append({"name": entry.name, "kept": view.to_json()["kept"]})
    return {"prompts": list(prompts.values())}

"""``report.html``: one page that needs nothing else, neither network nor other files."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ag.evaluate.comparison import by_position, charts
from ag.evaluate.comparison.conditions import measured, prompts
from ag.evaluate.comparison.drawing import FILES, legend_mark, svg
from ag.evaluate.comparison.findings import OVER, OVER_NOTE, Comparison, Entry
from ag.evaluate.comparison.shares import APART
from ag.evaluate.comparison.verdict import headlines, verdicts

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
        lead=[(one.title, svg(one)) for one in charts.leading(comparison)],
        leaders=comparison.leaders(),
        counts={task: max(entry.row.n for entry in comparison.of_task(task)) for task in comparison.tasks},
        metrics={task: comparison.of_task(task)[0].row for task in comparison.tasks},
        heads={task: (*comparison.columns(task), "seconds") for task in comparison.tasks},
        notes=NOTES,
        tables={
            task: [line(entry, comparison.columns(task)) for entry in comparison.of_task(task)]
            for task in comparison.tasks
        },
        charts=[(one.title, svg(one)) for one in every_chart(comparison)],
        along_tables={task: by_position.table(comparison, task) for task in comparison.tasks},
        along_note=by_position.NOTE.format(comparison.baseline),
        uninformative={task: comparison.uninformative(task) for task in comparison.tasks},
        legend=[(legend_mark(look), comparison.shown(label)) for label, look in charts.looks(comparison).items()],
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


def every_chart(comparison: Comparison) -> list[charts.Chart]:
    """Return the charts of all tasks: by kept share and, where it was measured, by position."""
    found = [
        charts.quality(comparison, task, nats)
        for task in comparison.tasks
        for nats in ((False, True) if "nats" in comparison.columns(task) else (False,))
    ]
    found += [one for task in comparison.tasks for one in charts.along(comparison, task)]
    return [one for one in found if one is not None]


def viewer(comparison: Comparison) -> dict[str, Any]:
    """Return what the viewer shows: prompts as pieces of text, and for each policy the kept tokens as bits."""
    prompts: dict[tuple[str, str], dict[str, Any]] = {}
    for entry in comparison.entries:
        for view in entry.views:
            key = entry.row.task, view.sample
            prompt = prompts.setdefault(key, {"name": f"{key[0]}: {key[1]}", "pieces": view.pieces, "policies": []})
            prompt["policies"].append({"name": entry.name, "evicts": entry.evicts, "kept": view.to_json()["kept"]})
    return {"prompts": list(prompts.values())}

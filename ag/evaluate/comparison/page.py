"""``report.html``: one page that needs nothing else, neither network nor other files."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ag.evaluate.comparison import charts, tables
from ag.evaluate.comparison.charts import FILES, legend_mark, svg
from ag.evaluate.comparison.conditions import measured, prompts
from ag.evaluate.comparison.findings import Comparison
from ag.evaluate.comparison.shares import APART
from ag.evaluate.comparison.verdict import headlines, verdicts


def render(comparison: Comparison) -> str:
    """Return the page.

    Everything that came from data is escaped: in HTML by the template, in the JSON of the viewer by writing <, > and &
    as their codes. The page's own script is the only one that its Content-Security-Policy lets run, and no address
    can be fetched.
    """
    judged = verdicts(comparison)
    first = headlines(judged)
    drawn = charts.every(comparison)
    lead = drawn.pop("lead", [])
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
        measured=measured([result.summary for result in comparison.results]),
        prompts={task: prompts(result.summary for result in comparison.of_task(task)) for task in comparison.tasks},
        lead=[(one.title, svg(one)) for one in lead],
        charts=[(one.title, svg(one)) for found in drawn.values() for one in found],
        legend=[(legend_mark(look), comparison.shown(label)) for label, look in charts.looks(comparison).items()],
        leaderboard=tables.leaderboard(comparison),
        tables={task: tables.of_task(comparison, task, "seconds") for task in comparison.tasks},
        along={task: tables.along(comparison, task) for task in comparison.tasks},
        along_note=tables.BY_POSITION.format(comparison.baseline),
        parts={task: tables.by_part(comparison, task) for task in comparison.tasks},
        part_notes={
            task: tables.BY_PART.format(comparison.baseline, comparison.of_task(task)[0].summary.metric)
            for task in comparison.tasks
        },
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


def viewer(comparison: Comparison) -> dict[str, Any]:
    """Return what the viewer shows: prompts as pieces of text, and for each policy the kept tokens as bits."""
    prompts: dict[tuple[str, str], dict[str, Any]] = {}
    for result in comparison.results:
        for view in result.views:
            key = result.summary.task, view.sample
            prompt = prompts.setdefault(key, {"name": f"{key[0]}: {key[1]}", "pieces": view.pieces, "policies": []})
            prompt["policies"].append({"name": result.name, "evicts": result.evicts, "kept": view.to_json()["kept"]})
    return {"prompts": list(prompts.values())}

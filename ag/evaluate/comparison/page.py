"""``report.html``: one page without network and other files: verdict, curves, tables, and a viewer of kept tokens."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

import pandas
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from pandas import DataFrame

from ag.evaluate.comparison import figures, tables
from ag.evaluate.comparison.figures import FILES, MARKERS, Chart
from ag.evaluate.comparison.rows import Comparison, uncompared_results
from ag.evaluate.comparison.verdict import find_verdicts, headlines


def render(comparison: Comparison, charts: dict[str, list[Chart]]) -> str:
    """Return the page.

    All data is escaped: in HTML by the template and by pandas, in the JSON of the viewer by writing <, > and & as
    their codes. The page's Content-Security-Policy allows only its own script, and no request.
    """
    verdicts = find_verdicts(comparison)
    first_verdicts = headlines(verdicts)
    environment = Environment(loader=FileSystemLoader(FILES), autoescape=True, undefined=StrictUndefined)
    environment.filters |= {"table": _html, "svg": figures.svg}
    style, script = ((FILES / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    shares = comparison.rows[comparison.rows.n > 0].sort_values("kept").groupby("label").kept
    return environment.get_template("page.html").render(
        comparison=comparison,
        tables=tables,
        style=Markup(style),  # nosec B704  # a file of this package
        script=Markup(script),  # nosec B704  # a file of this package
        policy=f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'",
        data=embedded(viewer(comparison)),
        verdicts=first_verdicts,
        more_verdicts=[verdict for verdict in verdicts if verdict not in first_verdicts],
        legend=[
            (look.colour, MARKERS[look.marker], f"{label} ({figures.kept_shares_text(shares.get_group(label))})")
            for label, look in figures.looks(comparison).items()
            if label in shares.groups
        ],
        lead=charts.get("lead", []),
        charts=[chart for name, drawn in charts.items() if name != "lead" for chart in drawn],
        not_compared=uncompared_results(comparison),
    )


def _html(table: DataFrame, kind: str = "") -> Markup:
    """Return a table as HTML, with all texts in full and escaped."""
    with pandas.option_context("display.max_colwidth", None):
        return Markup(table.to_html(index=False, border=0, classes=kind, escape=True))  # nosec B704  # escaped


def viewer(comparison: Comparison) -> dict[str, Any]:
    """Return the data of the viewer: the token texts of prompts, and each policy's kept tokens as bits.

    Commands may view prompts at other lengths: such prompts are apart.
    """
    prompts: dict[tuple[str, str, int], dict[str, Any]] = {}
    for row in comparison.results:
        for view in comparison.cells[row.key].views:
            prompt_key = row.task, view.sample, len(view.token_texts)
            empty = {"name": "{}: {} ({} tokens)".format(*prompt_key), "pieces": view.token_texts, "policies": []}
            policies = prompts.setdefault(prompt_key, empty)["policies"]
            policies.append({"name": row.name, "evicts": row.evicts, "kept": view.to_json()["kept"]})
    return {"prompts": list(prompts.values())}


def embedded(value: Any) -> Markup:
    """Return JSON for a script element, escaped: no text in it can end that element or open another."""
    text = json.dumps(value, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)  # nosec B704  # escaped above

"""The tables of a comparison as frames of text, the sentences about it, and the files ``table.md, .csv, .tex``."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from pandas import DataFrame
from rich import box
from rich.table import Table as Printed

from ag.evaluate.comparison.folder import comparable_samples, tag_values
from ag.evaluate.comparison.rows import NOT_COMPARED, Comparison, Row, part_values, percent, uncompared_results
from ag.evaluate.comparison.statistics import interval_text
from ag.evaluate.comparison.verdict import find_verdicts, headlines
from ag.evaluate.tasks import unit
from ag.evaluate.tasks.base import POSITION

OVER = "over budget"
OVER_NOTE = "samples with more protected tokens (sinks, recent, window) than the budget allows; these are kept"
#: What columns of a task's table mean.
NOTES = {
    "±": "standard error of the mean over samples",
    "[ ]": "95 % bootstrap interval of the difference to the baseline, paired by sample",
    "p": "two-sided sign-flip test of that difference, not corrected for the number of comparisons",
    "kept": "measured share of the prompt's (token, layer, KV head) entries; of all tokens if decoding evicts",
    OVER: OVER_NOTE,
    "nats": "mean negative log-likelihood of a token of the right answer, which is given; lower is better",
    "hits": "share of the samples with a right answer whose every token is the likeliest",
    "kl": "mean KL divergence from a full cache's next-token distribution, in nats, on the right answer's tokens",
    "same_top1": "share of these tokens where policy and full cache agree on the likeliest token",
    "left out": "samples too long for the model or too short for the task; how many were cut in the middle",
    "prefill": "earlier tokens that a prompt token sees: all, kept by gates, or kept after earlier blocks",
    "KV MB": "mean bytes allocated for keys and values after a prompt, or at the end if decoding evicts",
    "memory": "these bytes as a share of the full cache's on the same samples",
}
LEADERS = "Mean scores with the kept share, best first; of several tasks by the mean rank, and last without a score."
BY_PART = (
    "{1}Mean nats a token of each part: the nats of {0}, and the paired differences of all policies to it, named parts "
    "with a 95 % bootstrap interval. A number without a sign is the nats of a policy with another kept share."
)
UNKNOWN = "unknown"  # value that rows of earlier versions lack
END = "held@end"  # tag of a stream's outcome
LAST = ""  # the last column of a table by part: no part has an empty name
MAX_BLOCKS = 12  # columns of a table by position


class Section(NamedTuple):
    """The results of a task."""

    task: str
    notes: list[str]  # what was run, and how long the samples are
    remark: str  # why the task is not informative; empty if it is
    table: DataFrame
    more: list[tuple[str, str, DataFrame]]  # tables by position and by parts: title, note and table


def write(comparison: Comparison) -> None:
    """Write ``table.csv`` (all rows, in numbers), ``table.tex`` (the leaderboard) and ``table.md`` (all tables)."""
    comparison.rows.to_csv(comparison.folder / "table.csv", index=False)
    leaderboard(comparison).to_latex(comparison.folder / "table.tex", index=False, escape=True)
    (comparison.folder / "table.md").write_text(markdown(comparison), encoding="utf-8")


def markdown(comparison: Comparison) -> str:
    """Return title, date and data, verdicts, leaderboard, a table for each task, and how it was measured."""
    verdicts = find_verdicts(comparison)
    first = headlines(verdicts)
    parts = [f"# {title(comparison)}\n", f"{subtitle(comparison)}\n"]
    parts += [f"- {verdict}." for verdict in [*first, *(verdict for verdict in verdicts if verdict not in first)]]
    parts += ["\n## Leaderboard\n", f"{LEADERS}\n", _markdown(leaderboard(comparison))]
    parts += [f"- {name}: `{policy}`" for name, policy in meanings(comparison).items()]
    for task, notes, remark, table, more in sections(comparison):
        parts += [f"\n## {task}\n", *(f"{note}\n" for note in notes), *([f"**{remark}**\n"] if remark else [])]
        parts += [_markdown(table), *(f"### {name}\n\n{note}\n\n{_markdown(frame)}" for name, note, frame in more)]
    parts += ["\n## What the columns mean\n", *(f"- {name}: {note}" for name, note in NOTES.items()), ""]
    if sentences := uncompared_results(comparison):
        parts += [f"{NOT_COMPARED}\n", *(f"- {sentence}" for sentence in sentences), ""]
    parts.append("## How it was measured\n")
    parts += [
        f"- {name}: `{text}`" if name == "command" else f"- {name}: {text}" for name, text in measured(comparison)
    ]
    return "\n".join([*parts, ""])


def title(comparison: Comparison) -> str:
    """Return the number of policies, the models and the tasks."""
    tasks, policies = comparison.tasks, comparison.rows.label.nunique()
    named = ", ".join(tasks) if len(tasks) <= 3 else f"{len(tasks)} tasks"
    return f"{policies} policies on {', '.join(comparison.rows.model.unique())}: {named}"


def subtitle(comparison: Comparison) -> str:
    """Return the days of the rows, and the data."""
    days = _period(date[:10] for date in comparison.rows.date if date is not None)
    return f"{days or f'date {UNKNOWN}'}; data: {comparison.data}"


def _period(dates: Iterable[str]) -> str:
    """Return the first and the last date; empty without dates."""
    ordered = sorted(dates)
    return " to ".join(dict.fromkeys([*ordered[:1], *ordered[-1:]]))


def printed(comparison: Comparison) -> Printed:
    """Return the table that the command prints."""
    over = (comparison.rows.over_budget > 0).any()
    against = f"against {comparison.baseline}"
    columns = ["kept", "score", against, "p", *(["nats"] if comparison.rows.nats.notna().any() else [])]
    heads = [column.replace("against", "to") for column in columns]
    table = printed_table(["task", "policy"], heads, f"* {OVER}: there are {OVER_NOTE}" if over else None)
    for row in comparison.results:
        texts = _texts(row, comparison.baseline)
        # little room: table.md has errors and intervals, and the command prints why a cell failed
        cells = [texts[column] if column == "p" else re.split(" ± | \\[|:", texts[column])[0] for column in columns]
        table.add_row(row.task, row.name, "*" * (row.over_budget > 0) + cells[0], *cells[1:])
    return table


def printed_table(texts: Sequence[str], numbers: Sequence[str], caption: str | None) -> Printed:
    """Return a table for the terminal, with columns of texts and then of numbers."""
    table = Printed(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, caption=caption)
    for column in texts:
        table.add_column(column, overflow="fold")
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def leaderboard(comparison: Comparison) -> DataFrame:
    """Return the mean score of each policy by task, and averages over tasks with one metric, the best first."""
    rows, texts = comparison.rows, []
    tasks = rows.groupby("task", sort=False).agg({"metric": "first", "higher_is_better": "first", "n": "max"})
    for row in comparison.results:
        fewer = f", n = {row.n}" if row.n < tasks.n[row.task] else ""
        texts.append(f"{row.mean:.4f} ({percent(row.kept)}{fewer})" if row.n else "none")
    text, means = (rows.assign(text=texts).pivot(index="name", columns="task", values=x) for x in ("text", "mean"))
    signs = tasks.higher_is_better.map({True: -1, False: 1})
    unable = {task for task in tasks.index if comparison.uninformative(task)}
    ranked = [task for task in tasks.index if task not in unable] or list(tasks.index)
    ranks = (means * signs)[ranked].rank().mean(axis=1, skipna=False)  # NaN, and therefore last, without a score
    table = text[tasks.index].fillna("").loc[ranks[rows.name.unique()].sort_values(kind="stable").index]
    for metric, alike in tasks[tasks.higher_is_better].groupby("metric", sort=False):
        if len(alike) > 1:
            averages = means[alike.index].mean(axis=1, skipna=False)
            table[f"average {metric}"] = averages.map("{:.4f}".format).replace("nan", "none")
    heads = {
        task: f"{task} ({metric} {'↑' if higher else '↓'}, n = {n}{', not informative' * (task in unable)})"
        for task, metric, higher, n in tasks.itertuples()
    }
    return table.rename(columns=heads).rename_axis(index="policy", columns=None).reset_index()


def sections(comparison: Comparison) -> list[Section]:
    """Return the texts and tables of each task."""
    task_sections = []
    for task in comparison.tasks:
        rows = comparison.of_task(task)
        more = []
        for kind in comparison.part_kinds(task):
            worst = "lowest" if rows[0].higher_is_better else "highest"
            score = f"Before each comma the {rows[0].metric}; the worst part has the {worst}. " * (kind != POSITION)
            note = BY_PART.format(comparison.baseline, score)
            more.append((f"{task} by {kind}", note, by_part(comparison, task, kind)))
        which = "higher" if rows[0].higher_is_better else "lower"
        notes = [f"{rows[0].metric}, {which} is better; {counted(comparison, task)}", prompts(rows)]
        task_sections.append(Section(task, notes, comparison.uninformative(task), of_task(comparison, task), more))
    return task_sections


def of_task(comparison: Comparison, task: str) -> DataFrame:
    """Return all results of a task; columns without values are left out."""
    rows = comparison.of_task(task)
    table = DataFrame([_texts(row, comparison.baseline) for row in rows]).fillna("")
    empty = [column for column in table.columns[2:] if (table[column] == "").all()]  # after policy and budget
    return table.drop(columns=empty).rename(columns={"score": rows[0].metric})


def _texts(row: Row, baseline: str) -> dict[str, str]:
    """Return the line of a row by column."""
    cut, done = f" ({row.cut} cut)" if row.cut else "", bool(row.n)
    return {
        "policy": row.label,
        "budget": row.budget,
        "kept": f"{row.kept:.1%}" if done else "",
        OVER: f"{row.over_budget:.0f} of {row.n}" if row.over_budget > 0 else "",
        "score": _with_error(row.mean, row.error) if row.n else f"none: {row.problem}",
        f"against {baseline}": _interval(row, "difference"),
        "p": "< 0.001" if row.difference_p < 0.001 else _number(row.difference_p, ".3f"),
        "nats": _with_error(row.nats, row.nats_error),
        "nats difference": _interval(row, "nats_difference"),
        "hits": _number(row.hits, ".4f"),
        "kl": _number(row.kl, ".4f"),
        "same_top1": _number(row.same_top1, ".1%"),
        "n": str(row.n),
        "left out": _left_out(row) + cut,
        "prefill": row.prefill,
        "KV MB": f"{row.kv_bytes / 1e6:.2f}" if done else "",
        "memory": percent(row.memory) if row.memory > 0 else "",
        "seconds": f"{row.seconds:.1f}",
    }


def by_part(comparison: Comparison, task: str, kind: str) -> DataFrame:
    """Return a table of the parts of the samples: at most 12 positions, or all other parts and the worst of them."""
    lines: dict[str, dict[Any, str]] = {}
    for row in comparison.of_task(task):
        base, outcomes = comparison.baseline_of(row), comparison.outcomes(row)
        scores, sign = part_values(outcomes, kind, "score").mean(), "" if base is None else "+"
        line: dict[Any, str] = {}
        for part, mean in part_means(comparison, row, base, kind)["mean"].items():
            line[part] = f"{mean:{sign}.3f}"
            if kind != POSITION:
                paired = None if base is None else comparison.paired(row, base, f"nats@{kind} {part}")
                interval = "" if paired is None else interval_text(paired.low, paired.high, "+.3f")
                line[part] = f"{scores[part]:.2f}, {line[part]}{interval}"
        ends = tag_values(outcomes, END).values()
        line[LAST] = f"{fmean(ends):.1%}" if ends else ""
        if not ends and not scores.empty:
            worst = scores.idxmin() if row.higher_is_better else scores.idxmax()
            line[LAST] = f"{worst}: {scores[worst]:.2f}"
        lines |= {row.name: line} if outcomes else {}
    table = DataFrame.from_dict(lines, orient="index")
    parts = [column for column in table if column != LAST]
    heads: dict[Any, str] = {LAST: "kept at the end" if kind == POSITION else "worst"}
    if all(isinstance(part, int) for part in parts):
        parts.sort()
        heads |= {part: f"from {part:,}" if kind == POSITION else f"{kind} {part}" for part in parts}
    parts = parts[:: -(-len(parts) // MAX_BLOCKS)] if kind == POSITION else parts
    return table[[*parts, LAST]].fillna("").rename(columns=heads).reset_index(names="policy")


def part_means(comparison: Comparison, row: Row, base: Row | None, kind: str) -> DataFrame:
    """Return mean and standard error of the nats of each part (columns ``mean``, ``error``), less those of a base."""
    values = part_values(comparison.outcomes(row), kind)
    if base is not None:  # on the samples and parts that both have
        common = comparable_samples(comparison.outcomes(row), comparison.outcomes(base))
        base_values = part_values(comparison.outcomes(base), kind)
        values = (values[values.index.isin(common)] - base_values).dropna(axis=1, how="all")
    return DataFrame({"mean": values.mean(), "error": values.sem()})


def counted(comparison: Comparison, task: str) -> str:
    """Return how many samples were run, left out, and cannot be changed (see Cell.untouched), and when it asks."""
    rows = comparison.of_task(task)
    row = max(rows, key=lambda row: row.n)
    parts = [f"{row.n} {unit(task)}, left out: {_left_out(row)}"]
    if row.question is not None:
        parts.append(f"question {row.question} eviction")
    if untouched := max((int(row.untouched) for row in rows if row.n and row.untouched > 0), default=0):
        parts.append(f"{untouched} with answers of one token alone, which eviction after the prompt cannot change")
    return "; ".join(parts)


def prompts(rows: Sequence[Row]) -> str:
    """Return how long the samples of a task are, and the options of the task."""
    row = next((row for row in rows if not math.isnan(row.prompt_mean)), None)
    if row is None:
        return f"prompts: {UNKNOWN}; options: {UNKNOWN}"
    low, high = row.prompt_min, row.prompt_max
    spread = "" if low == high else f" on average ({low:g} to {high:g})"
    options = ", ".join(f"{name}={_plain(value)}" for name, value in (row.task_options or {}).items())
    return f"prompts: {row.prompt_mean:g} tokens{spread}; options: {options or 'none'}"


def meanings(comparison: Comparison) -> dict[str, str]:
    """Return the full policies of labels and shortened paths, by the name of the result."""
    return {row.name: row.policy for row in comparison.results if row.label != row.spec}


def measured(comparison: Comparison) -> list[tuple[str, str]]:
    """Return how a comparison was measured, as (subject, text). If rows differ, each text has its number of rows."""
    period = _period(date for date in comparison.rows.date if date is not None)
    lines = []
    for row in comparison.results:
        weights = [row.model, row.dtype or f"dtype {UNKNOWN}", row.quantization or "none"]
        threads = f", {row.threads:.0f} thread{'s' * (row.threads != 1)}" if row.threads > 0 else ""
        versions = ", ".join(f"{name} {version}" for name, version in row.versions.items())
        machine, date = (row.hardware or UNKNOWN) + threads, period if row.date else UNKNOWN
        lines.append((", ".join(weights).removesuffix(", none"), versions, machine, date, row.command or UNKNOWN))
    frame = DataFrame(lines, columns=["model", "versions", "hardware", "date", "command"])
    return [
        (name, text if count == len(lines) else f"{text} ({count} of {len(lines)} rows)")
        for name in frame
        for text, count in frame[name].value_counts(sort=False).items()
    ]


def _markdown(table: DataFrame) -> str:
    """Return a table in Markdown: pandas' own needs another package."""
    lines = [list(table), ["---", *["---:"] * (table.shape[1] - 1)], *table.values.tolist()]
    escaped = [[" ".join(cell.split()).replace("|", "\\|") for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in escaped)


def _plain(value: Any) -> str:
    return f"[{','.join(map(_plain, value))}]" if isinstance(value, list) else str(value)


def _left_out(row: Row) -> str:
    counts = ((row.too_long, "too long"), (row.too_short, "too short"))
    return ", ".join(f"{number} {reason}" for number, reason in counts if number) or "0"


def _with_error(mean: float, error: float) -> str:
    return _number(mean, ".4f") + ("" if math.isnan(error) else f" ± {error:.4f}")


def _number(value: float, form: str) -> str:
    return "" if math.isnan(value) else f"{value:{form}}"


def _interval(row: Row, name: str) -> str:
    value, low, high = (getattr(row, name + end) for end in ("", "_low", "_high"))
    return "" if math.isnan(value) else f"{value:+.4f}{interval_text(low, high, '+.4f')}"

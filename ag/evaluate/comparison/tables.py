"""The tables of a comparison and the sentences about it, for the page, ``table.md`` and the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any, NamedTuple

from rich import box
from rich.table import Table as Printed

from ag.evaluate.comparison.folder import Summary
from ag.evaluate.comparison.result import (
    NOT_COMPARED,
    Comparison,
    Result,
    by_position,
    paired_difference,
    part_names,
    uncompared_results,
)
from ag.evaluate.comparison.statistics import Paired
from ag.evaluate.comparison.verdict import find_verdicts, headlines
from ag.evaluate.tasks import unit

OVER = "over budget"
OVER_NOTE = "samples with more protected tokens (sinks, recent, window) than the budget allows; these are kept"
OPTIONAL = ("nats", "nats difference", "hits", "kl", "same_top1", OVER)  # columns that are left out without values
TEXTS = ("policy", "prefill")  # columns that hold no numbers
#: The columns of a task's table, each with a note on it.
COLUMNS = {
    "policy": "",
    "budget": "",
    "kept": "kept share of the prompt's (token, layer, KV head) entries; of all tokens if decoding evicts",
    OVER: OVER_NOTE,
    "score": "mean over samples, with its standard error",
    "difference": "paired difference to the baseline, with a 95 % bootstrap interval",
    "p": "sign-flip test of that difference",
    "nats": "mean negative log-likelihood of a token of the right answer, with its error; the answer is given",
    "nats difference": "paired difference to the baseline, with a 95 % bootstrap interval; lower is better",
    "hits": "share of the samples with a right answer whose every token is the likeliest",
    "kl": "mean KL divergence from a full cache's next-token distribution, in nats, on the right answer's tokens",
    "same_top1": "share of these tokens where policy and full cache agree on the likeliest token",
    "n": "",
    "left out": "samples too long for the model or too short for the task; how many were cut in the middle",
    "prefill": "earlier tokens that a prompt token sees: all, kept by gates, or kept after earlier blocks",
    "KV MB": "mean bytes allocated for keys and values after a prompt, or at the end if decoding evicts",
}
UNKNOWN = "unknown"  # value that rows of earlier versions lack
BY_POSITION = (
    "Nats a token in blocks that begin at these positions: the nats of {0}, and the differences of all policies to it. "
    "A number without a sign is the nats of a policy with another kept share."
)
BY_PART = (
    "Each cell has the {1} of one part of the samples, and the nats a token: the nats of {0}, and the paired "
    "differences of all policies to it, with a 95 % bootstrap interval. The worst part has the lowest {1}."
)
END = "held@end"  # tag of a stream's outcome
MAX_BLOCKS = 12  # columns of a table by position


class Head(NamedTuple):
    """The head of a column."""

    name: str
    note: str = ""
    small: str = ""  # text below the name, in small letters
    number: bool = True  # whether the column has numbers


class Cell(NamedTuple):
    """A cell of a table."""

    text: str
    value: float | str | None = None  # the sort key; None sorts last
    small: str = ""  # text after it, in small letters


class Table(NamedTuple):
    """A table. Its first column names the lines."""

    head: Sequence[Head]
    lines: Sequence[Sequence[Cell]]
    foot: Sequence[Cell] = ()  # a last line that is not sorted


def markdown(comparison: Comparison) -> str:
    """Return the comparison as Markdown: verdicts, the leaderboard, a table for each task, how it was measured."""
    verdicts = find_verdicts(comparison)
    first_verdicts = headlines(verdicts)
    parts = [
        f"- {verdict}."
        for verdict in [*first_verdicts, *(verdict for verdict in verdicts if verdict not in first_verdicts)]
    ]
    parts += ["", "## Scores\n"] if verdicts else []
    parts.append(_markdown(leaderboard(comparison)))
    if named := meanings(comparison):
        parts += [*(f"- {name}: `{policy}`" for name, policy in named.items()), ""]
    for task in comparison.tasks:
        task_section, summary = section(comparison, task), comparison.of_task(task)[0].summary
        which = "higher" if summary.higher_is_better else "lower"
        parts.append(
            f"## {task}\n\n{summary.metric}, {which} is better; {task_section['counted']}\n\n"
            f"{task_section['prompts']}\n"
        )
        parts += [f"**{task_section['uninformative']}**\n"] if task_section["uninformative"] else []
        parts.append(_markdown(task_section["table"]))
        if OVER in [column.name for column in task_section["table"].head]:
            parts.append(f"{OVER}: {OVER_NOTE}.\n")
        parts += [f"### {title}\n\n{note}\n\n{_markdown(table)}" for title, note, table in task_section["more"]]
    if sentences := uncompared_results(comparison):
        parts += [f"{NOT_COMPARED}\n", *(f"- {sentence}" for sentence in sentences), ""]
    parts.append("## How it was measured\n")
    for name, text in measured([result.summary for result in comparison.results]):
        parts.append(f"- {name}: `{text}`" if name == "command" else f"- {name}: {text}")
    return "\n".join([*parts, ""])


def printed(comparison: Comparison) -> Printed:
    """Return the table that the command prints."""
    over = any(result.summary.over_budget for result in comparison.results)
    caption = f"* {OVER}: there are {OVER_NOTE}" if over else None
    table = Printed(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, caption=caption)
    for column in ("task", "policy"):
        table.add_column(column, overflow="fold")
    columns = ["kept", "score", "difference", "p"]
    columns += ["nats"] if any(result.nats is not None for result in comparison.results) else []
    for column in columns:
        named = f"to {comparison.baseline}" if column == "difference" else column
        table.add_column(named, justify="right", no_wrap=True)
    for result in comparison.results:
        cells = line(result)
        # little room: table.md has errors and intervals, and the command prints why a cell failed
        texts = {column: cells[column].text.partition(" ")[0].rstrip(":") for column in columns}
        texts |= {"kept": f"{'*' if result.summary.over_budget else ''}{texts['kept']}", "p": cells["p"].text}
        table.add_row(result.summary.task, result.name, *texts.values())
    return table


def leaderboard(comparison: Comparison) -> Table:
    """Return the mean score of each policy and budget by task, and averages over tasks with one metric."""
    summaries = {task: [result.summary for result in comparison.of_task(task)] for task in comparison.tasks}
    num_samples = {task: max(summary.n for summary in task_summaries) for task, task_summaries in summaries.items()}
    metrics = Counter(
        task_summaries[0].metric for task_summaries in summaries.values() if task_summaries[0].higher_is_better
    )
    averaged = [metric for metric, tasks in metrics.items() if tasks > 1]
    head = [Head("policy", number=False)]
    for task, (summary, *_) in summaries.items():
        arrow = "↑" if summary.higher_is_better else "↓"
        head.append(Head(task, small=f"{summary.metric} {arrow}, n = {num_samples[task]}"))
    head += [Head(f"average {metric}", small="↑") for metric in averaged]
    lines = []
    for name, results in comparison.named.items():
        task_summaries = {result.summary.task: result.summary for result in results}
        cells = [Cell(name, name)]
        for task in summaries:
            own = task_summaries.get(task)
            if own is None or own.mean is None or own.kept is None:
                cells.append(Cell("" if own is None else "none"))
            else:
                fewer = "" if own.n == num_samples[task] else f", n = {own.n}"
                cells.append(Cell(f"{own.mean:.4f}", own.mean, f"{100 * own.kept:.0f} %{fewer}"))
        for metric in averaged:
            means = [summary.mean for summary in task_summaries.values() if summary.metric == metric]
            measured_means = [mean for mean in means if mean is not None]
            complete = len(measured_means) == metrics[metric]  # averages are over all tasks of the metric
            cells.append(Cell(f"{fmean(measured_means):.4f}", fmean(measured_means)) if complete else Cell("none"))
        lines.append(cells)
    remarks = [comparison.uninformative(task) for task in summaries]
    foot = [Cell(text) for text in ("full cache", *remarks, *("" for _ in averaged))] if any(remarks) else []
    return Table(head, lines, foot)


def section(comparison: Comparison, task: str, *columns: str) -> dict[str, Any]:
    """Return the texts and tables of a task.

    ``columns`` are added to its ``table``; ``more`` are tables by position and by parts, each with title and note.
    """
    summaries = [result.summary for result in comparison.of_task(task)]
    positions, note = table_by_position(comparison, task), BY_PART.format(comparison.baseline, summaries[0].metric)
    further_tables = [
        (f"{task} by {part_kind}", note, part) for part_kind, part in tables_by_part(comparison, task).items()
    ]
    if positions is not None:
        further_tables.insert(0, (f"{task} by position", BY_POSITION.format(comparison.baseline), positions))
    return {
        "task": task,
        "counted": counted(comparison, task),
        "prompts": prompts(summaries),
        "uninformative": comparison.uninformative(task),
        "table": of_task(comparison, task, *columns),
        "more": further_tables,
    }


def of_task(comparison: Comparison, task: str, *extra_columns: str) -> Table:
    """Return all results of a task, with ``extra_columns``. Optional columns without values are left out."""
    results = comparison.of_task(task)
    lines = [line(result) for result in results]
    absent = {column for column in OPTIONAL if not any(cells[column].text for cells in lines)}
    columns = [column for column in (*COLUMNS, *extra_columns) if column not in absent]
    names = {"score": results[0].summary.metric, "difference": f"against {comparison.baseline}"}
    head = [Head(names.get(name, name), COLUMNS.get(name, ""), number=name not in TEXTS) for name in columns]
    return Table(head, [[cells[column] for column in columns] for cells in lines])


def line(result: Result) -> dict[str, Cell]:
    """Return the line of a result by column."""
    summary, paired, nats = result.summary, result.paired, result.paired_nats
    cut = f" ({summary.cut} cut)" if summary.cut else ""
    cells = dict.fromkeys(COLUMNS, Cell("")) | {
        "policy": Cell(summary.label, summary.label),
        "budget": Cell(result.budget, summary.budget),
        "n": Cell(f"{summary.n}", summary.n),
        "left out": Cell(f"{summary.left_out}{cut}", summary.too_long + summary.too_short),
        "prefill": Cell(summary.prefill, summary.prefill),
        "seconds": Cell(f"{summary.seconds:.1f}", summary.seconds),
    }
    if summary.mean is None or summary.kept is None:
        return cells | {"score": Cell(f"none: {summary.problem}")}
    cells |= {
        "kept": Cell(f"{summary.kept:.1%}", summary.kept),
        OVER: Cell(f"{summary.over_budget} of {summary.n}" if summary.over_budget else "", summary.over_budget),
        "score": Cell(_mean(summary.mean, summary.error), summary.mean),
        "KV MB": Cell(f"{summary.kv_bytes / 1e6:.2f}", summary.kv_bytes),
    }
    if paired is not None:
        p = "< 0.001" if paired.p < 0.001 else f"{paired.p:.3f}"
        cells |= {"difference": Cell(_interval(paired), paired.difference), "p": Cell(p, paired.p)}
    if result.nats is not None:
        cells["nats"] = Cell(_mean(*result.nats), summary.nats)
    if nats is not None:
        cells["nats difference"] = Cell(_interval(nats), nats.difference)
    for name, form in (("hits", ".4f"), ("kl", ".4f"), ("same_top1", ".1%")):
        value = getattr(summary, name)
        cells[name] = Cell("" if value is None else f"{value:{form}}", value)
    return cells


def table_by_position(comparison: Comparison, task: str) -> Table | None:
    """Return a task by position, in at most 12 evenly spaced blocks. None: its outcomes have no blocks."""
    results = [result for result in comparison.of_task(task) if result.outcomes and result.outcomes[0].blocks]
    if not results:
        return None
    starts = sorted({start for result in results for outcome in result.outcomes for start in outcome.blocks})
    starts = starts[:: -(-len(starts) // MAX_BLOCKS)]
    lines = []
    for result in results:
        base = comparison.baseline_of(result)
        form = ".3f" if base is None else "+.3f"
        texts = {start: f"{mean:{form}}" for start, (mean, _) in by_position(result, base).items()}
        ends = result.values(END).values()
        end_share = f"{fmean(ends):.1%}" if ends else ""
        lines.append([Cell(result.name), Cell(end_share), *(Cell(texts.get(start, "")) for start in starts)])
    names = ["kept at the end", *(f"from {start:,}" for start in starts)]
    return Table([Head("policy", number=False), *map(Head, names)], lines)


def tables_by_part(comparison: Comparison, task: str) -> dict[str, Table]:
    """Return tables of the scores of the samples' parts, by kind of part; see :data:`BY_PART`."""
    results = [result for result in comparison.of_task(task) if result.outcomes]
    tables = {}
    for part_kind, names in part_names(results).items():
        lines = []
        for result in results:
            base, cells, means = comparison.baseline_of(result), list[Cell](), dict[str, float]()
            for name in names:
                scores = result.values(f"score@{part_kind} {name}")
                if not scores:
                    cells.append(Cell(""))
                    continue
                means[name] = fmean(scores.values())
                paired = None if base is None else paired_difference(result, base, f"nats@{part_kind} {name}")
                mean_nats = fmean(result.values(f"nats@{part_kind} {name}").values())
                nats = f"{mean_nats:.3f}" if paired is None else _interval(paired, 3)
                cells.append(Cell(f"{means[name]:.2f}, {nats}", means[name]))
            worst_part = min(means, key=lambda name: means[name])
            lines.append([Cell(result.name), *cells, Cell(f"{worst_part}: {means[worst_part]:.2f}", means[worst_part])])
        heads = [f"{part_kind} {name}" if name.isdigit() else name for name in names]
        tables[part_kind] = Table([Head("policy", number=False), *map(Head, heads), Head("worst")], lines)
    return tables


def counted(comparison: Comparison, task: str) -> str:
    """Return how many samples were run and left out, in the task's unit, and when the question is read.

    It also has the number of samples that no policy can change, see
    :meth:`ag.evaluate.comparison.cells.Cell.untouched`.
    """
    summaries = [result.summary for result in comparison.of_task(task)]
    summary = max(summaries, key=lambda summary: summary.n)
    parts = [f"{summary.n} {unit(task)}, left out: {summary.left_out}"]
    if summary.question is not None:
        parts.append(f"question {summary.question} eviction")
    if untouched := max((summary.untouched or 0 for summary in summaries if summary.n), default=0):
        parts.append(f"{untouched} with answers of one token alone, which eviction after the prompt cannot change")
    return "; ".join(parts)


def meanings(comparison: Comparison) -> dict[str, str]:
    """Return the full policies of labels and shortened paths, by the name of the result."""
    results = comparison.results
    return {result.name: result.summary.policy for result in results if result.summary.label != str(result.spec)}


def measured(summaries: Sequence[Summary]) -> list[tuple[str, str]]:
    """Return how a comparison was measured, as (subject, text). If rows differ, each text has its number of rows."""
    dates = sorted(summary.date for summary in summaries if summary.date is not None)
    period = " to ".join(dict.fromkeys([*dates[:1], *dates[-1:]]))
    counts_by_name: dict[str, Counter[str]] = {}
    for summary in summaries:
        weights = [summary.model, summary.dtype or f"dtype {UNKNOWN}", summary.quantization or "none"]
        threads = f", {summary.threads} thread{'s' * (summary.threads != 1)}" if summary.threads else ""
        for name, text in {
            "model": ", ".join(weights).removesuffix(", none"),
            "versions": ", ".join(f"{name} {version}" for name, version in summary.versions.items()),
            "hardware": (summary.hardware or UNKNOWN) + threads,
            "date": period if summary.date else UNKNOWN,
            "command": summary.command or UNKNOWN,
        }.items():
            counts_by_name.setdefault(name, Counter())[text] += 1
    return [
        (name, text if len(counts) == 1 else f"{text} ({count} of {len(summaries)} rows)")
        for name, counts in counts_by_name.items()
        for text, count in counts.items()
    ]


def prompts(summaries: Sequence[Summary]) -> str:
    """Return how long the samples of a task are, and the options of the task."""
    summary = next((summary for summary in summaries if summary.prompt_mean is not None), None)
    if summary is None:
        return f"prompts: {UNKNOWN}; options: {UNKNOWN}"
    low, high = summary.prompt_min, summary.prompt_max
    spread = "" if low == high else f" on average ({low} to {high})"
    options = ", ".join(f"{name}={_plain(value)}" for name, value in (summary.task_options or {}).items())
    return f"prompts: {summary.prompt_mean:g} tokens{spread}; options: {options or 'none'}"


def _markdown(table: Table) -> str:
    def markdown_line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |\n"

    rule = "|---|" + "---:|" * (len(table.head) - 1) + "\n"
    lines = [markdown_line([cell.text for cell in cells]) for cells in table.lines]
    return markdown_line([column.name for column in table.head]) + rule + "".join(lines)


def _plain(value: Any) -> str:
    return f"[{','.join(map(_plain, value))}]" if isinstance(value, list) else str(value)


def _mean(mean: float, error: float | None) -> str:
    return f"{mean:.4f}" + ("" if error is None else f" ± {error:.4f}")


def _interval(paired: Paired, digits: int = 4) -> str:
    return "{:+.{d}f} [{:+.{d}f}, {:+.{d}f}]".format(paired.difference, paired.low, paired.high, d=digits)

"""Draw the README's picture, quality against memory: ``python scripts/picture.py GATES FOLDER ...``.

Each folder is the output of an ``ag compare``, of questions after eviction or of continuations. ``GATES`` is the label
of the gates in them. The numbers go to ``docs/figures/quality.csv``, and without arguments the picture is drawn again
from this file.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
import pandas
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from pandas import DataFrame

from ag.evaluate.comparison.figures import COLOURS, MARKERS, STYLE, THEME
from ag.evaluate.comparison.folder import Folder
from ag.evaluate.comparison.rows import Comparison

FIGURES = Path(__file__).parents[1] / "docs" / "figures"
NUMBERS, PICTURE = FIGURES / "quality.csv", FIGURES / "quality.png"
GATES, FULL = "trained gates", "full"
ANSWERS, CONTINUATION = "answers", "continuation"
NOTES = {"kvzip": "kvzip, which reads the text twice"}
DIGITS = 6


def read(gates: str, folder: Path) -> DataFrame:
    """Return the numbers of a comparison, a row for each policy and budget, without other gates.

    ``quality`` is the share of right answers, or the nats per token over the full cache; the full cache's row has its
    own nats. ``low`` and ``high`` are the ends of the paired 95 % interval of a difference.
    """
    comparison = Comparison([*Folder(folder).read().values()], folder)
    rows = comparison.rows[~comparison.rows.gated | (comparison.rows.label == gates)]
    answers = rows.question == "after"
    continues = ~answers & rows.evicts
    return DataFrame(
        {
            "model": rows.model.map(lambda name: Path(name).name),
            "experiment": answers.map({True: ANSWERS, False: CONTINUATION}),
            "samples": rows.n,
            "policy": rows.label.where(~rows.gated, GATES),
            "budget": rows.budget,
            "memory": rows.memory,
            "quality": rows["mean"].where(~continues, rows.difference),
            "low": rows.difference_low.where(continues),
            "high": rows.difference_high.where(continues),
        }
    ).round(DIGITS)


@matplotlib.rc_context(STYLE | {"font.size": 11.0})
def draw(numbers: DataFrame) -> Figure:
    """Draw both experiments beside each other, with one legend."""
    figure = Figure((9.6, 4.1), dpi=180, layout="constrained", facecolor="white")
    axes = dict(zip((ANSWERS, CONTINUATION), figure.subplots(1, 2), strict=True))
    policies = [name for name in numbers.policy.unique() if name not in (FULL, GATES)]
    looks = dict(zip(policies, zip(COLOURS, list(MARKERS)[1:], strict=False), strict=False)) | {GATES: ("gates", "o")}
    handles = {}
    for experiment, rows in numbers.groupby("experiment"):
        panel = axes[str(experiment)]
        for policy in [*policies, GATES]:
            points = rows[rows.policy == policy].sort_values("memory")
            colour, marker = THEME[looks[policy][0]], looks[policy][1]
            width = 3 if policy == GATES else 1.5
            panel.vlines(points.memory, points.low, points.high, color=colour, alpha=0.4, linewidth=width)
            [line] = panel.plot(points.memory, points.quality, marker, linestyle="-", color=colour, linewidth=width)
            handles[NOTES.get(policy, policy)] = line
        _label(panel, str(experiment), int(rows.samples.max()))
    model = numbers.model.iloc[0]
    figure.suptitle(f"How much memory does the KV cache of {model} need?", fontsize=13)
    order = [GATES, *(name for name in handles if name != GATES)]
    figure.legend(
        [handles[name] for name in order], order, loc="outside lower center", ncols=3, frameon=False, fontsize=11
    )
    return figure


def _label(panel: Axes, experiment: str, samples: int) -> None:
    """Put the words of an experiment on its axes, and the level of the full cache into them."""
    percent = PercentFormatter(1, decimals=0, symbol=" %")
    answers = experiment == ANSWERS
    panel.axhline(1 if answers else 0, color=THEME["soft"], linestyle="--", linewidth=1)
    panel.annotate("full cache", (0, 1 if answers else 0), (3, 4), textcoords="offset points")
    panel.set_xlim(0, 0.6)
    panel.set_ylim(*((0, 1.1) if answers else (None, None)))
    panel.xaxis.set_major_formatter(percent)
    panel.set_xlabel("memory of the KV cache (full cache: 100 %)")
    panel.grid(axis="y")
    if answers:
        panel.yaxis.set_major_formatter(percent)
        panel.set_title(f"Questions asked after eviction: {samples}", fontsize=11)
        panel.set_ylabel("right answers (higher is better)")
    else:
        panel.set_title(f"Texts that continue after eviction: {samples}", fontsize=11)
        panel.set_ylabel("loss over the full cache's,\nnats per token (lower is better)")


def main(words: list[str]) -> None:
    """Read the folders that are given, and draw."""
    if len(words) == 1:
        raise SystemExit(f"picture.py {words[0]}: expected the folders of comparisons too: picture.py GATES FOLDER ...")
    if words:
        gates, *folders = words
        pandas.concat([read(gates, Path(folder)) for folder in folders]).to_csv(NUMBERS, index=False)
    draw(pandas.read_csv(NUMBERS, dtype={"budget": str}, keep_default_na=True)).savefig(PICTURE)
    print(f"{NUMBERS}\n{PICTURE}")


if __name__ == "__main__":
    main(sys.argv[1:])

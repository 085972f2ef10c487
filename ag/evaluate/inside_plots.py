"""Pictures of what goes on inside a model: arrays in, figures out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from ag.engine.spec import PolicySpec
from ag.evaluate.comparison.charts import COLOURS, short
from ag.evaluate.comparison.result import percent
from ag.gates.figures import DPI

Array = NDArray[np.floating]
DASHES = ("-", "--", ":", "-.")


def attention_maps(
    layers: Sequence[int], model: Sequence[Array], gates: Sequence[Array], flags: Sequence[NDArray[np.bool_]]
) -> Figure:
    """Draw the model's attention beside the gate's own, and what the gate keeps, as in Figure 4 of Attention-Gate.

    Args:
        layers: numbers of the layers, one row of the picture each.
        model: `[T, T]` each, the mean over the model's heads.
        gates: `[T, T]` each, the mean over the gate's heads.
        flags: `[Hkv, T]` each, True where a token is kept.
    """
    figure = Figure(figsize=(9, 0.8 + 2.9 * len(layers)), dpi=DPI, layout="constrained")
    grid = figure.subplots(len(layers), 3, squeeze=False, width_ratios=(1, 1, 1))
    for row, layer, ours, theirs, kept in zip(grid, layers, model, gates, flags, strict=True):
        for axes, weights, name in zip(row, (ours, theirs), ("model", "gate"), strict=False):
            seen = weights[weights > 0]
            scale = LogNorm(max(float(seen.max()) * 1e-4, float(seen.min())), float(seen.max()))
            axes.imshow(np.where(weights > 0, weights, np.nan), cmap="magma", norm=scale, interpolation="nearest")
            axes.set_title(f"layer {layer}: attention of the {name}", fontsize=9)
            axes.set_xlabel("key", fontsize=8)
            axes.set_ylabel("query", fontsize=8)
        row[2].imshow(kept, cmap="gray", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        row[2].set_title(f"kept: {kept.mean():.0%}", fontsize=9)
        row[2].set_xlabel("key", fontsize=8)
        row[2].set_ylabel("KV head", fontsize=8)
        row[2].set_yticks(range(len(kept)))
        for axes in row:
            axes.tick_params(labelsize=7)
    return figure


def entropy_and_variance(statistics: Sequence[Array]) -> Figure:
    """Draw CAKE's entropy and variance by layer, thin lines for each sample's `[L, 2]`, a thick one for the mean."""
    figure = Figure(figsize=(8, 4.6), dpi=DPI, layout="constrained")
    for number, (axes, name) in enumerate(
        zip(figure.subplots(2, 1, sharex=True), ("entropy", "variance"), strict=True)
    ):
        for one in statistics:
            axes.plot(one[:, number], color=COLOURS[number], linewidth=0.7, alpha=0.5)
        axes.plot(np.mean([one[:, number] for one in statistics], 0), "o-", color=COLOURS[number], markersize=3)
        axes.set_ylabel(f"{name} of attention")
        axes.set_yscale("log")
        _plain(axes)
    axes.set_xlabel("layer")
    return figure


def errors_by_layer(errors: Mapping[str, Array], kept: Mapping[str, float], specs: Mapping[str, PolicySpec]) -> Figure:
    """Draw `[L]` errors by policy; those that share a scorer share a colour, and differ in their dashes.

    Args:
        errors: by policy.
        kept: the share that each policy kept.
        specs: what each policy is made of.
    """
    figure = Figure(figsize=(8, 4.2), dpi=DPI, layout="constrained")
    axes = figure.subplots()
    drawn: dict[tuple[str, str | None], int] = {}  # by scorer, how many lines it has
    for name, values in errors.items():
        scorer = specs[name].scorer, specs[name].path
        drawn[scorer] = drawn.get(scorer, 0) + 1
        axes.plot(
            np.where(values > 0, values, np.nan),
            DASHES[(drawn[scorer] - 1) % len(DASHES)],
            color=COLOURS[list(drawn).index(scorer) % len(COLOURS)],
            linewidth=1.5,
            label=f"{short(name)} ({percent(kept[name])}): {np.mean(values):.3f}",
        )
    axes.set_yscale("log")
    axes.set_xlabel("layer")
    axes.set_ylabel("relative squared error of the output")
    _plain(axes)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize=8, title="policy (kept): mean")
    return figure


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))

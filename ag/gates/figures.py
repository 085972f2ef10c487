"""Pictures of gates: functions from arrays to a `matplotlib.figure.Figure`, without global state."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import NDArray

# Okabe and Ito's palette, which people with colour blindness can tell apart
BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#9A9A9A"
SHARE = "share of the tokens"
PANELS = (
    ("loss", (("lm_loss", "LM", BLUE), ("kl_loss", "KL", GREEN), ("regress_loss", "regression", PURPLE))),
    ("eviction loss", (("eviction_loss", "eviction", ORANGE),)),
    (
        SHARE,
        (
            ("gate_mean_soft", "mean gate, soft", GREEN),
            ("gate_mean_hard", "mean gate, hard", PURPLE),
            ("evicted", "evicted", BLUE),
        ),
    ),
)
DPI = 150
MOST_TOKEN_LABELS = 80
MOST_CELL_LABELS = 150


def evicted_heatmap(evicted: NDArray[np.floating], layers: Sequence[int]) -> Figure:
    """Draw the share of evicted tokens of every KV head.

    Args:
        evicted: `[L, Hkv]` shares in [0, 1]; NaN if nothing was gated.
        layers: the L layer numbers.
    """
    heads = evicted.shape[1]
    width = float(np.clip(1.8 + 0.32 * len(layers), 5, 14))
    figure = Figure(figsize=(width, float(np.clip(1.7 + 0.32 * heads, 2.4, 9))), dpi=DPI, layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(evicted.T, cmap="YlGnBu", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    _ticks_at(axes, "x", layers)
    _ticks_at(axes, "y", range(heads))
    axes.set_xlabel("layer")
    axes.set_ylabel("KV head")
    axes.set_title(f"Evicted share of the prompt: {np.nanmean(evicted):.1%} on average", fontsize=11)
    if evicted.size <= MOST_CELL_LABELS:
        for (layer, head), share in np.ndenumerate(evicted):
            colour = "white" if share > 0.55 else "black"
            axes.text(layer, head, f"{100 * share:.0f}", ha="center", va="center", fontsize=7, color=colour)
    bar = figure.colorbar(image, ax=axes, format=PercentFormatter(1, decimals=0), pad=0.02)
    bar.outline.set_visible(False)
    _bare(axes)
    return figure


def keep_pattern(
    flags: NDArray[np.bool_], tokens: Sequence[str] | None = None, layers: Sequence[int] | None = None
) -> Figure:
    """Draw which tokens of a prompt are kept, as in Figure 1 of the Attention-Gate paper: black is evicted.

    Args:
        flags: `[L, Hkv, T]`, True where a token is kept.
        tokens: the T tokens as text, written below the picture if there are at most 80.
        layers: the L layer numbers; default 0 ... L - 1.
    """
    count, heads, length = flags.shape
    labelled = tokens is not None and length <= MOST_TOKEN_LABELS
    width = float(np.clip(2 + 0.16 * length, 6, 14))
    height = float(np.clip(1.6 + 0.055 * count * heads, 2.8, 11)) + (0.7 if labelled else 0)
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    axes = figure.subplots()
    axes.imshow(flags.reshape(count * heads, length), cmap="gray", vmin=0, vmax=1, aspect="auto")
    for boundary in range(1, count):
        axes.axhline(boundary * heads - 0.5, color=BLUE, linewidth=0.5)
    _ticks_at(axes, "y", range(count) if layers is None else layers, step=heads)
    axes.set_ylabel("layer" if heads == 1 else f"layer ({heads} KV heads each)")
    if labelled and tokens is not None:
        axes.set_xticks(range(length), [token.replace("\n", "\\n") for token in tokens], rotation=90, fontsize=7)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        axes.set_xlabel("position in the prompt")
    axes.set_title(f"Evicted tokens (black): {1 - flags.mean():.1%} of a prompt of {length} tokens", fontsize=11)
    _bare(axes)
    return figure


def curves(rows: Sequence[dict[str, float]]) -> Figure:
    """Draw the losses and the gates' means over the optimiser steps of a run.

    Training metrics are lines (thin: each step, thick: running mean), validation metrics are dots.

    Args:
        rows: the result of `ag.files.read_metrics`; a panel without metrics is left out.
    """
    logged = {name.split("/")[-1] for row in rows for name in row}
    panel_metrics = {key for _, lines in PANELS for key, *_ in lines} | {"loss"}
    other_losses = [
        (key, key.removesuffix("_loss"), GREY) for key in sorted(logged - panel_metrics) if key.endswith("_loss")
    ]
    panels = [(label, [line for line in lines if line[0] in logged]) for label, lines in PANELS]
    panels[0][1].extend(other_losses)
    panels = [(label, lines) for label, lines in panels if lines]
    figure = Figure(figsize=(8, 1 + 2.1 * len(panels)), dpi=DPI, layout="constrained")
    grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (label, lines) in zip(grid, panels, strict=True):
        for key, name, colour in lines:
            _line(axes, *_column(rows, f"train/{key}"), name, colour)
            axes.plot(*_column(rows, f"val/{key}"), "o", color=colour, markeredgecolor="white")
        if any(f"val/{key}" in row for row in rows for key, *_ in lines):
            axes.plot([], [], "o", color=GREY, label="validation")
        axes.set_ylabel(label)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#E5E5E5", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize=8)
        if label == SHARE:
            axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
            axes.set_ylim(bottom=0)
    grid[-1].set_xlabel("optimiser step")
    grid[-1].xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    return figure


def _line(axes: Axes, steps: NDArray[np.float64], values: NDArray[np.float64], name: str, colour: str) -> None:
    """Draw a noisy metric under its running mean over a thirtieth of the run."""
    window = max(1, len(values) // 30)
    if window > 1:
        axes.plot(steps, values, color=colour, linewidth=0.8, alpha=0.3)
        box = np.ones(window)
        values = np.convolve(values, box, "same") / np.convolve(np.ones(len(values)), box, "same")
    axes.plot(steps, values, color=colour, linewidth=1.8, label=name)


def _column(rows: Sequence[dict[str, float]], key: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    pairs = [(row["step"], row[key]) for row in rows if key in row]
    return np.array([step for step, _ in pairs]), np.array([value for _, value in pairs])


def _ticks_at(axes: Axes, which: str, labels: Sequence[int], step: int = 1) -> None:
    """Label the centres of groups of `step` cells, at most 32 of them."""
    every = -(-len(labels) // 32)
    positions = [(index + 0.5) * step - 0.5 for index in range(0, len(labels), every)]
    texts = [str(label) for label in labels[::every]]
    (axes.set_xticks if which == "x" else axes.set_yticks)(positions, texts, fontsize=8)


def _bare(axes: Axes) -> None:
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)

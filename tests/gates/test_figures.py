"""Figures show the numbers they are given."""

from __future__ import annotations

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg

from ag.gates.figures import curves, evicted_heatmap, keep_pattern


def test_heat_map_has_layers_across_and_heads_down() -> None:
    evicted = np.linspace(0, 0.9, 12).reshape(4, 3)
    figure = evicted_heatmap(evicted, layers=[2, 3, 4, 5])
    axes = figure.axes[0]
    np.testing.assert_array_equal(axes.images[0].get_array(), evicted.T)
    assert axes.images[0].get_clim() == (0, 1)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["2", "3", "4", "5"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "1", "2"]
    assert "45.0%" in axes.get_title()
    written = {text.get_position(): text.get_text() for text in axes.texts}
    assert written[(3, 2)] == "90" and written[(0, 1)] == "8"
    assert not evicted_heatmap(np.zeros((80, 64)), range(80)).axes[0].texts  # of a large model


def test_keep_pattern_is_black_where_tokens_are_evicted() -> None:
    flags = np.ones((2, 3, 5), dtype=bool)
    flags[1, 0, 4] = False
    figure = keep_pattern(flags, tokens=["a", "b", "c", "d\n", "e"], layers=[7, 8])
    axes = figure.axes[0]
    renderer = FigureCanvasAgg(figure).get_renderer()
    drawn = axes.images[0].make_image(renderer, unsampled=True)[0]
    expected = np.full((6, 5), 255)
    expected[3, 4] = 0
    np.testing.assert_array_equal(drawn[:, :, 0], expected)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["7", "8"]
    assert list(axes.get_yticks()) == [1.0, 4.0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["a", "b", "c", "d\\n", "e"]
    assert "3.3%" in axes.get_title()


def test_curves_draw_every_logged_metric() -> None:
    rows: list[dict[str, float]] = [
        {"step": s, "train/lm_loss": 3 - s, "train/own_loss": 4.0, "train/evicted": 0.1} for s in (1, 2)
    ]
    rows[1]["val/lm_loss"] = 1.25
    rows += [{"step": s, "train/evicted": 0.1} for s in range(3, 200)]  # long curves are smoothed
    figure = curves(rows)
    losses, shares = figure.axes
    assert (losses.get_ylabel(), shares.get_ylabel()) == ("loss", "share of the tokens")
    train, validation = losses.lines[:2]
    np.testing.assert_array_equal(train.get_xydata(), [[1, 2], [2, 1]])
    np.testing.assert_array_equal(validation.get_xydata(), [[2, 1.25]])
    assert [text.get_text() for text in losses.get_legend().get_texts()] == ["LM", "own", "validation"]
    assert [text.get_text() for text in shares.get_legend().get_texts()] == ["evicted"]
    np.testing.assert_allclose(np.asarray(shares.lines[1].get_ydata()), 0.1)

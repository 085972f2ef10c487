"""The output of a comparison: tables, figures, and the page with its data."""

import html.parser
import json
import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import matplotlib.image
import numpy as np
import pandas
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ag.evaluate.comparison import figures, tables
from ag.evaluate.comparison.folder import FinishedCell
from ag.evaluate.comparison.page import embedded, viewer
from ag.evaluate.comparison.rows import Comparison
from ag.evaluate.comparison.tables import markdown
from ag.evaluate.inside import KeptTokens, token_texts
from ag.evaluate.tasks import Outcome
from ag.evaluate.tasks.base import POSITION, by_part
from tests.support import made_up
from tests.support.batches import columns, read
from tests.support.made_up import SUMMARY
from tests.support.refused import names

HALF = 0.5e-4 + 1e-12  # half a unit of the last printed digit


def result(label, budget, task, scores, higher=False, views=(), tags=None, **told):
    told = {"label": label, "budget": budget, "task": task, "higher_is_better": higher, "metric": "accuracy"} | told
    told |= {"n": len(scores), "mean": float(np.mean(scores)) if scores else None, "key": f"{task}{label}{budget}"}
    told |= {"policy": f"ag.policy('{label}', budget={budget})"}
    tagged = [{}] * len(scores) if tags is None else tags
    outcomes = [Outcome(str(i), s, 9, 0.5, 9, 0.1, t) for i, (s, t) in enumerate(zip(scores, tagged, strict=True))]
    return FinishedCell(replace(SUMMARY, **told), outcomes, list(views))


def compared_of(*results, folder=Path(), baseline="full"):
    return Comparison(results, folder, baseline)


class Page(html.parser.HTMLParser):
    """The elements of a page with their attributes, and the text of its scripts."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.scripts = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.elements and self.elements[-1][0] == "script":
            self.scripts[-1] += data

    def handle_endtag(self, tag):
        if tag == "script":
            self.elements.append(("/script", {}))


# ---- tables


@pytest.mark.slow
def test_tables_hold_the_rows(compared):
    """``table.csv`` in numbers, ``table.md`` as texts in the order of the cells."""
    text = (compared.folder / "table.md").read_text()
    assert text == markdown(compared)
    numbers = pandas.read_csv(compared.folder / "table.csv")
    shown = ["name", "task", "mean", "kept", "memory", "difference", "difference_low", "nats_difference_p"]
    pandas.testing.assert_frame_equal(numbers[shown], compared.rows[shown], check_dtype=False)
    lines = [re.split(r" ?\| ?", line)[1:-1] for line in text.splitlines() if line.startswith("|")]
    heads = [line for line in lines if line[:2] == ["policy", "budget"]]
    found = [dict(zip(head, line, strict=True)) for head in heads for line in lines if len(line) == len(head)]
    found = [line for line in found if line["policy"] not in ("policy", "---")]
    assert len(found) == len(compared.results) == 10
    for line, row in zip(found, compared.results, strict=True):
        assert line["policy"] == row.label
        assert float(line["kept"].rstrip("%")) == pytest.approx(100 * row.kept, abs=0.05 + 1e-9)
        mean, _, error = line[row.metric].partition(" ± ")
        assert (float(mean), float(error)) == pytest.approx((row.mean, row.error), abs=HALF)
        assert float(line["kl"]) == pytest.approx(row.kl, abs=HALF)
        assert ("nats" in line) == (row.task == "needle_single")
        if "nats" in line:
            nats, base = (
                fmean(x.tags["nats"] for x in compared.outcomes(y)) for y in (row, compared.of_task("needle_single")[0])
            )
            assert float(line["nats"].partition(" ")[0]) == pytest.approx(nats, abs=HALF)
            difference = line["nats difference"]
            assert difference == "" or float(difference.split()[0]) == pytest.approx(nats - base, abs=HALF)
        if row.label != "full":
            assert float(line["against full"].split()[0]) == pytest.approx(row.difference, abs=HALF)
    for file in ("report.html", "table.md"):
        said = (compared.folder / file).read_text()
        names(said, "4 haystacks, left out: 0; question after eviction", "standard error of the mean")
        names(said, tables.title(compared), tables.subtitle(compared), f"data: {compared.data}")
        assert "not informative for this model: exact match 0.0000 with the full cache" in said
    assert tables.title(compared) == f"3 policies on {compared.rows.model[0]}: ppl, needle_single"
    leaders = [line[0] for line in lines if line[0] in {*compared.rows.name} and len(line) == 3]
    ranked = compared.rows[compared.rows.task == "ppl"].sort_values("mean").name
    assert leaders == [*ranked]
    assert (compared.folder / "table.tex").read_text().count(" \\\\\n") == 1 + len(leaders)


def test_the_best_leads():
    """By the mean rank over tasks that the model can do; who lacks a task is last."""
    scores = {"a": {"x": [0.9], "y": [0.8], "z": [0.1]}, "b": {"x": [2.0], "y": [3.0], "z": [4.0]}, "c": {"y": [1.0]}}
    results = [result(label, None, "a", values, True) for label, values in scores["a"].items()]
    results += [result(label, None, "b", values, metric="nats") for label, values in scores["b"].items()]
    board = tables.leaderboard(compared_of(*results))
    assert [*board.columns] == ["policy", "a (accuracy ↑, n = 1)", "b (nats ↓, n = 1)"]
    assert [*board.policy] == ["x", "y", "z"]
    turned = tables.leaderboard(compared_of(*reversed(results)))
    assert [*turned.policy] == ["x", "y", "z"]
    lacking = compared_of(*results, result("y", None, "c", [1.0], True))
    assert [*tables.leaderboard(lacking).policy] == ["y", "x", "z"]
    full = result("full", None, "a", [0.1], True, floor=0.1)  # cannot do a; in b full is worst
    unable = compared_of(full, result("full", None, "b", [9.0], metric="nats"), *results)
    assert [*tables.leaderboard(unable).policy] == ["x", "y", "z", "full"]
    assert "a (accuracy ↑, n = 1, not informative)" in tables.leaderboard(unable)


def test_averages_are_over_tasks_with_the_same_metric():
    def averages(*results):
        return [*tables.leaderboard(compared_of(*results)).set_index("policy")["average accuracy"].items()]

    results = [result("x", None, "a", [0.5], True), result("x", None, "b", [1.0, 0.0, 1.0, 1.0], True)]
    others = [result("x", None, "c", [3.0], metric="nats"), result("x", None, "d", [0.25], True, metric="F1")]
    assert averages(*results, *others) == [("x", "0.6250")]
    assert tables.leaderboard(compared_of(results[0], *others)).shape == (1, 4)
    failed = result("x", None, "b", [], True, kept=None, problem="out of memory")
    assert averages(results[0], failed, result("y", None, "b", [1.0], True)) == [("x", "none"), ("y", "none")]
    assert averages(*results, result("y", None, "b", [1.0], True)) == [("x", "0.6250"), ("y", "none")]


def test_what_differs_between_rows_is_counted():
    here = {"dtype": "float32", "quantization": "nf4", "hardware": "a card", "threads": 1, "command": "python x"}
    row = made_up.result("ppl", "h2o", 0.5, 0.0, 1).summary
    rows = [replace(row, **here, date=f"2026-01-0{day}T00:00:00+00:00", key=f"{day}") for day in (3, 1)]
    rows += [replace(rows[0], command="python y", key="4"), row]
    comparison = compared_of(*(FinishedCell(one, [], []) for one in rows))
    period = "2026-01-01T00:00:00+00:00 to 2026-01-03T00:00:00+00:00"
    assert tables.measured(comparison) == [
        ("model", "smollm2, float32, nf4 (3 of 4 rows)"),
        ("model", "smollm2, dtype unknown (1 of 4 rows)"),
        ("versions", "ag 0.1.0"),
        ("hardware", "a card, 1 thread (3 of 4 rows)"),
        ("hardware", "unknown (1 of 4 rows)"),
        ("date", f"{period} (3 of 4 rows)"),
        ("date", "unknown (1 of 4 rows)"),
        ("command", "python x (2 of 4 rows)"),
        ("command", "python y (1 of 4 rows)"),
        ("command", "unknown (1 of 4 rows)"),
    ]
    assert tables.subtitle(comparison).startswith("2026-01-01 to 2026-01-03; data: ")
    lengths = replace(row, prompt_mean=512.0, prompt_min=512, prompt_max=512, task_options={"lengths": [1, 2]})
    both = compared_of(FinishedCell(row, [], []), FinishedCell(replace(lengths, key="5"), [], []))
    assert tables.prompts(both.results) == "prompts: 512 tokens; options: lengths=[1,2]"


# ---- by position and by part


@pytest.fixture
def streamed(tmp_path):
    """Two policies over two texts with blocks at 4 and 6, the last of 3 tokens."""
    nats = {"full": [(2.0, 4.0), (1.0, 2.0)], "tova": [(2.5, 5.0), (1.1, 2.0)], "h2o": [(2.0, 4.0), (1.0, 2.0)]}
    results = []
    for label, texts in nats.items():
        tags = [{"nats@4": a, "nats@6": b, "held@end": 0.25 + 0.5 * (label == "full")} for a, b in texts]
        scores = [(2 * a + 3 * b) / 5 for a, b in texts]
        results.append(result(label, None if label == "full" else 0.5, "ppl_stream", scores, tags=tags))
    return compared_of(*results, folder=tmp_path)


def test_differences_are_paired_by_text_and_block(streamed):
    tova = streamed.results[1]
    assert tova.difference == pytest.approx(np.mean([(2 * 0.5 + 3 * 1.0) / 5, 2 * 0.1 / 5]))
    # twice a text has the probability 1/4; then a block twice in both 1/16, and twice in one alone 1/4
    ends = tova.difference_low, tova.difference_high
    assert ends == pytest.approx((np.mean([0.0, 0.04]), np.mean([1.0, 0.8])))


@matplotlib.rc_context(figures.STYLE)
def drawn(chart):
    """The axes of a chart, after its layout."""
    figure = figures.panels([chart])
    figure.draw_without_rendering()
    return figure.axes[0]


def test_a_table_and_curves_by_position(streamed):
    table = tables.by_part(streamed, "ppl_stream", POSITION)
    assert [*table.columns] == ["policy", "from 4", "from 6", "kept at the end"]
    assert table.values.tolist() == [
        ["full", "1.500", "3.000", "75.0%"],
        ["tova 0.5", "+0.300", "+0.500", "25.0%"],
        ["h2o 0.5", "+0.000", "+0.000", "25.0%"],
    ]
    [chart] = figures.charts_by_part(streamed, "ppl_stream", POSITION)
    assert [*chart.points.name.unique()] == ["tova 0.5 (50 %)", "h2o 0.5 (50 %)"]
    assert [*chart.points.x[:2]] == [4, 6] and [*chart.points.y[:2]] == pytest.approx([0.3, 0.5])
    assert "tova 0.5 (50 %): +0.300 from 4; tova 0.5 (50 %): +0.500 from 6" in figures.svg(chart)
    assert figures.all_charts(streamed)["positions_ppl_stream"]
    level, *lines = drawn(chart).lines
    # the full cache lies over a line that it hides, which shows between its dashes
    assert list(level.get_ydata()) == [0, 0] and level.get_linestyle() == "--"
    assert level.get_zorder() > max(line.get_zorder() for line in lines)


@pytest.mark.filterwarnings("error")
def test_the_full_cache_alone_has_a_curve(streamed):
    alone = compared_of(*list(streamed.cells.values())[:1])
    [chart] = figures.charts_by_part(alone, "ppl_stream", POSITION)
    assert [*chart.points.name.unique()] == ["full (50 %)"] and [*chart.points.y] == [1.5, 3.0]
    axes = drawn(chart)
    assert axes.get_yscale() == "linear" and axes.get_ylabel() == "nats a token"


def test_tables_and_a_chart_by_part(tmp_path):
    """Two policies over three samples with turns and kinds; one sample has no turn 10."""
    nats = {"full": [(1.0, 2.0), (1.0, 3.0), (1.0, None)], "tova": [(1.5, 2.0), (1.25, 4.0), (1.0, None)]}
    results = []
    for label, samples in nats.items():
        tags = []
        for first, last in samples:
            parts = [(2, 1.0, first), (10, float(label == "full"), last)][: 1 + (last is not None)]
            kinds = [(("key", "late")[n > 2], s, x) for n, s, x in parts]
            tags.append(by_part("turn", parts) | by_part("kind", kinds))
        results.append(result(label, None if label == "full" else 0.5, "turns", [1.0] * 3, True, tags=tags))
    comparison = compared_of(*results, folder=tmp_path)
    [section] = tables.sections(comparison)
    found = {name: table for name, _, table in section.more}
    assert {name: [*table.columns] for name, table in found.items()} == {
        "turns by turn": ["policy", "turn 2", "turn 10", "worst"],
        "turns by kind": ["policy", "key", "late", "worst"],
    }
    # the differences are 0.5, 0.25 and 0 of turn 2, and 0 and 1 of turn 10
    assert found["turns by turn"].values.tolist() == [
        ["full", "1.00, 1.000", "1.00, 2.500", "2: 1.00"],
        ["tova 0.5", "1.00, +0.250 [+0.000, +0.500]", "0.00, +0.500 [+0.000, +1.000]", "10: 0.00"],
    ]
    assert "### turns by kind" in markdown(comparison) and "| late: 0.00 |" in markdown(comparison)
    charts = figures.all_charts(comparison)
    [chart] = charts["turns_turns"]
    assert [(x, y) for x, y in zip(chart.points.x, chart.points.y, strict=True)] == [(2, 0.25), (10, 0.5)]
    assert chart.x_label == "turn" and "kinds_turns" not in charts


def test_parts_of_any_name_and_the_worst_where_lower_is_better(tmp_path):
    """A part called ``last``, and a kind with a digit; samples with other contents are not subtracted."""
    tags = [by_part("level_2", [("first", 0.1, 1.0), ("last", 5.0, 2.0)])]
    full = result("full", None, "own", [1.0], False, tags=tags)
    tova = result("tova", 0.5, "own", [1.0], False, tags=tags)
    [(name, note, table)] = tables.sections(compared_of(full, tova, folder=tmp_path))[0].more
    assert name == "own by level_2" and "the worst part has the highest" in note
    assert [*table.columns] == ["policy", "first", "last", "worst"]
    assert table.values.tolist()[0] == ["full", "0.10, 1.000", "5.00, 2.000", "last: 5.00"]
    full, tova = (
        one._replace(outcomes=[replace(outcome, content_hash=content) for outcome in one.outcomes])
        for one, content in ((full, "a"), (tova, "b"))
    )
    [(*_, table)] = tables.sections(compared_of(full, tova, folder=tmp_path))[0].more
    assert "tova 0.5" not in table.policy.values or "+" not in "".join(table.values.tolist()[1])


def test_a_low_score_is_good_where_lower_is_better(tmp_path):
    """A full cache far below the mean of chance can do the task."""
    for score, remark in ((1.0, ""), (9.0, "not informative")):
        full = result("full", None, "own", [score] * 3, False)
        full = full._replace(summary=replace(full.summary, floor=8.0))
        assert compared_of(full, folder=tmp_path).uninformative("own")[:15] == remark


# ---- figures


def test_solutions_are_drawn_by_the_tokens_that_were_held(tmp_path):
    tags = {"full": [{"most_held": 90.0}, {"most_held": 110.0}], "tova": [{"most_held": 64.0}, {"most_held": 66.5}]}
    results = [
        result(label, None if label == "full" else 64, "math", [1.0, 0.0], True, tags=t) for label, t in tags.items()
    ]
    [chart] = figures.quality_charts(compared_of(*results, folder=tmp_path), "math")
    assert chart.x_label == figures.HELD
    assert dict(zip(chart.points.label, chart.points.x, strict=True)) == {"full": 100.0, "tova": 65.25}


def test_bars_end_within_the_axes(tmp_path):
    """Also where differences are below zero, and on scales that are logarithmic far from it."""
    comparison = made_up.comparison(tmp_path, mine=-0.4)
    charts = [chart for drawn in figures.all_charts(comparison).values() for chart in drawn]
    assert {chart.zero for chart in charts} == {"", "full"} and len(charts) == 5
    for chart in charts:
        bottom, top = drawn(chart).get_ylim()
        assert bottom < chart.points.low.min() and chart.points.high.max() < top, chart.title


# ---- the page


def test_views_of_several_lengths_are_texts_of_their_own():
    """As of a folder that was continued with another ``view_tokens``."""
    long = KeptTokens("0", list("abcd"), np.array([[[1, 0, 0, 1]]], dtype=bool))
    short = KeptTokens("0", list("ab"), np.array([[[1, 1]]], dtype=bool))
    seen = [("full", None, long), ("h2o", 0.5, long), ("tova", 0.5, short)]
    comparison = compared_of(*(result(*one, "a", [1.0], views=[view]) for *one, view in seen))
    prompts = viewer(comparison)["prompts"]
    assert [(one["name"], one["pieces"], [policy["name"] for policy in one["policies"]]) for one in prompts] == [
        ("a: 0 (4 tokens)", list("abcd"), ["full", "h2o 0.5"]),
        ("a: 0 (2 tokens)", list("ab"), ["tova 0.5"]),
    ]


@pytest.mark.slow
def test_views_are_what_a_cache_keeps(compared, tiny_folder):
    from ag.config import ModelConfig
    from ag.model.base import load_base

    model, tokenizer = load_base(ModelConfig(name=str(tiny_folder)))
    text = json.loads((tiny_folder / "corpus" / "test.jsonl").read_text().splitlines()[1])["text"]
    ids = tokenizer(text)["input_ids"][:40]
    for one in compared.of_task("ppl"):
        view = compared.cells[one.key].views[1]
        assert "".join(view.token_texts) == text[:40]
        options = {"window": 4, "kernel": 3} if one.label == "snapkv@pyramid" else {}
        held = columns(read(model, torch.tensor(ids), one.label, float(one.budget) if one.budget else None, **options))
        for layer, [heads] in enumerate(held):
            assert [flags.nonzero()[0].tolist() for flags in view.kept[layer]] == heads
        assert KeptTokens.from_json(json.loads(json.dumps(view.to_json()))).kept.tolist() == view.kept.tolist()


def test_pieces_are_the_text(smollm2):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    text = " Two  spaces,\n\ttabs, naïve café; 東京 and\u00a0ends"
    told = "".join(token_texts(tokenizer, tokenizer(text)["input_ids"])).replace("\ufffd", "")
    assert told in (text, text.replace("東", "").replace("京", ""))


@pytest.mark.slow
def test_plots_are_drawn(compared):
    expected = {"lead", "nats_needle_single", "quality_ppl", "quality_needle_single", "depths_needle_single"}
    for ending in ("png", "svg"):
        assert {path.stem for path in compared.folder.glob(f"*.{ending}")} == expected
    image = matplotlib.image.imread(compared.folder / "depths_needle_single.png")
    assert image.shape[0] > 200 and image[..., :3].min() < 0.5 < image[..., :3].max()
    assert ">nats per token (lower is better)<" in (compared.folder / "quality_ppl.svg").read_text()  # text as text
    name = figures.shorten("gates:runs/smollm2_corpus/2026-11-20T10-00-00/export 0.25")
    assert name.startswith("gates:run") and name.endswith("/export 0.25") and len(name) == 36


@pytest.mark.slow
def test_a_task_with_a_path_in_its_name_is_drawn(tmp_path):
    """Joined folders have such names, by the data or the model."""
    scores = ("full", None, [1.0, 2.0]), ("h2o", 0.5, [2.0, 2.5])
    rows = [result(label, budget, "ppl (data=/a/b)", values) for label, budget, values in scores]
    comparison = compared_of(*rows, folder=tmp_path)
    figures.save(comparison, figures.all_charts(comparison))
    assert "quality_ppl_data_a_b_.png" in {path.name for path in tmp_path.iterdir()}


def test_the_page_stands_alone_and_hostile_text_is_only_data(compared):
    text = (compared.folder / "report.html").read_text()
    page = Page(text)
    assert [attrs.get("type") for tag, attrs in page.elements if tag == "script"] == ["application/json", None]
    for tag, attrs in page.elements:
        assert tag not in ("iframe", "object", "embed", "base")
        assert not any(name.startswith("on") for name in attrs), (tag, attrs)
        for name in ("src", "href", "xlink:href", "action", "data"):
            assert attrs.get(name, "data:").startswith(("data:", "#")), (tag, attrs)
    assert "url(" not in text.replace("url(#", "") and "@import" not in text
    found = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
    assert len(set(found)) == len(found)
    policy = next(attrs["content"] for tag, attrs in page.elements if attrs.get("http-equiv"))
    assert policy.startswith("default-src 'none'") and "script-src 'sha256-" in policy
    shown = json.loads(page.scripts[0])
    assert shown == viewer(compared)
    prompts = ["".join(prompt["pieces"]) for prompt in shown["prompts"] if prompt["name"].startswith("ppl")]
    assert prompts[1] == "</script><script>alert(1)</script> <img "
    assert [one["name"] for one in shown["prompts"][0]["policies"]] == [*compared.rows.name.unique()]


TEXT = st.text('<>&/"\\\u2028a')


@settings(max_examples=50)
@given(st.recursive(TEXT, lambda inner: st.dictionaries(TEXT, inner) | st.lists(inner), max_leaves=4))
def test_embedded_json_is_inert_and_whole(value):
    text = embedded(value)
    assert not set(text) & set("<>&\u2028\u2029")
    assert json.loads(text) == value

"""The output of a comparison: tables, matrices, plots, and the page with its data."""

import html.parser
import json
import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.image import imread

from ag.config.spec import PolicySpec
from ag.evaluate.comparison import charts, tables
from ag.evaluate.comparison.page import embedded, layers, viewer, wins
from ag.evaluate.comparison.result import Comparison, Result
from ag.evaluate.comparison.tables import markdown
from ag.evaluate.inside import KeptTokens, token_texts
from ag.evaluate.tasks import Outcome
from ag.evaluate.tasks.base import by_part
from tests.support import made_up
from tests.support.batches import columns, read
from tests.support.made_up import SUMMARY
from tests.support.refused import names

HALF = 0.5e-4 + 1e-12  # half a unit of the last printed digit


def result(label, budget, task, scores, higher=False, views=(), tags=None, **told):
    told = {"label": label, "budget": budget, "task": task, "higher_is_better": higher, "metric": "accuracy"} | told
    told |= {"n": len(scores), "mean": float(np.mean(scores)), "key": f"{task}{label}{budget}"}
    tagged = [{}] * len(scores) if tags is None else tags
    outcomes = [Outcome(str(i), s, 9, 0.5, 9, 0.1, t) for i, (s, t) in enumerate(zip(scores, tagged, strict=True))]
    return Result(replace(SUMMARY, **told), outcomes, list(views), PolicySpec(label))


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
def test_table_md_holds_the_rows_in_cell_order(compared):
    text = (compared.folder / "table.md").read_text()
    assert text == markdown(compared)
    lines = [re.split(r" ?\| ?", line)[1:-1] for line in text.splitlines() if line.startswith("|")]
    found = [line for line in lines if len(line) in (12, 15) and line[0] not in ("policy", "---")]
    assert len(found) == len(compared.results) == 10
    for line, one in zip(found, compared.results, strict=True):
        assert line[0] == one.summary.label
        assert float(line[2].rstrip("%")) == pytest.approx(100 * one.summary.kept, abs=0.05 + 1e-9)
        mean, _, error = line[3].partition(" ± ")
        assert (float(mean), float(error)) == pytest.approx((one.summary.mean, one.summary.error), abs=HALF)
        assert float(line[-6]) == pytest.approx(one.summary.kl, abs=HALF)
        assert (len(line) == 15) == (one.summary.task == "needle_single")
        if len(line) == 15:
            nats, base = (
                fmean(x.tags["nats"] for x in y.outcomes) for y in (one, compared.of_task("needle_single")[0])
            )
            assert float(line[6].partition(" ")[0]) == pytest.approx(nats, abs=HALF)
            assert line[7] == "" or float(line[7].split()[0]) == pytest.approx(nats - base, abs=HALF)
        if one.paired:
            assert float(line[4].split()[0]) == pytest.approx(one.paired.difference, abs=HALF)
    for file in ("report.html", "table.md"):
        said = (compared.folder / file).read_text()
        names(said, "4 haystacks, left out: 0; question after eviction")
        assert "not informative for this model: exact match 0.0000 with the full cache" in said
    leaders = [line for line in lines if len(line) == 3 and line[0] not in ("policy", "---")]
    assert [line[0] for line in leaders] == [*compared.named]


def test_averages_are_over_tasks_with_the_same_metric():
    results = [result("x", None, "a", [0.5], True), result("x", None, "b", [1.0, 0.0, 1.0, 1.0], True)]
    others = [result("x", None, "c", [3.0], metric="nats"), result("x", None, "d", [0.25], True, metric="F1")]
    table = tables.leaderboard(Comparison(Path(), "x", [*results, *others]))
    assert [one.name for one in table.head] == ["policy", "a", "b", "c", "d", "average accuracy"]
    assert table.lines[0][-1] == ("0.6250", 0.625, "")
    assert len(tables.leaderboard(Comparison(Path(), "x", [results[0], *others])).head) == 4
    failed = replace(results[1].summary, mean=None, problem="out of memory")
    one_failed = Comparison(Path(), "x", [results[0], replace(results[1], summary=failed, outcomes=[])])
    assert tables.leaderboard(one_failed).lines[0][-1] == ("none", None, "")
    some = Comparison(Path(), "x", [*results, result("y", None, "b", [1.0], True)])  # y has no row of the task a
    assert [line[-1].text for line in tables.leaderboard(some).lines] == ["0.6250", "none"]


def test_what_differs_between_rows_is_counted():
    here = {"dtype": "float32", "quantization": "nf4", "hardware": "a card", "threads": 1, "command": "python x"}
    row = made_up.result("ppl", "h2o", 0.5, 0.0, 1).summary
    rows = [replace(row, **here, date=f"2026-01-0{day}T00:00:00+00:00") for day in (3, 1)]
    period = "2026-01-01T00:00:00+00:00 to 2026-01-03T00:00:00+00:00"
    told = tables.measured([*rows, replace(rows[0], command="python y"), row])
    assert told == [
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
    lengths = replace(row, prompt_mean=512.0, prompt_min=512, prompt_max=512, task_options={"lengths": [1, 2]})
    assert tables.prompts([row, lengths]) == "prompts: 512 tokens; options: lengths=[1,2]"


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
    return Comparison.tested(tmp_path, "full", results)


def test_differences_are_paired_by_text_and_block(streamed):
    tova = streamed.results[1].paired
    assert tova.difference == pytest.approx(np.mean([(2 * 0.5 + 3 * 1.0) / 5, 2 * 0.1 / 5]))
    # twice a text has the probability 1/4; then a block twice in both 1/16, and twice in one alone 1/4
    assert (tova.low, tova.high) == pytest.approx((np.mean([0.0, 0.04]), np.mean([1.0, 0.8])))


def test_a_table_and_curves_by_position(streamed):
    head, lines, _ = tables.table_by_position(streamed, "ppl_stream")
    assert [one.name for one in head] == ["policy", "kept at the end", "from 4", "from 6"]
    assert [[cell.text for cell in cells] for cells in lines] == [
        ["full", "75.0%", "1.500", "3.000"],
        ["tova 0.5", "25.0%", "+0.300", "+0.500"],
        ["h2o 0.5", "25.0%", "+0.000", "+0.000"],
    ]
    [chart] = charts.charts_by_position(streamed, "ppl_stream")
    assert [line.name for line in chart.lines] == ["tova 0.5 (50 %)", "h2o 0.5 (50 %)"]
    assert [point.x for point in chart.lines[0].points] == [4, 6]
    assert [point.y for point in chart.lines[0].points] == pytest.approx([0.3, 0.5])
    assert "tova 0.5 (50 %): +0.300 from 4; tova 0.5 (50 %): +0.500 from 6" in charts.svg(chart)
    figures = charts.draw(streamed)
    level, *lines = figures["positions_ppl_stream"].axes[0].lines
    # the full cache lies over a line that it hides, which shows between its dashes
    assert list(level.get_ydata()) == [0, 0] and level.get_linestyle() == "--"
    assert level.get_zorder() > max(line.get_zorder() for line in lines)


@pytest.mark.filterwarnings("error")
def test_the_full_cache_alone_has_a_curve(streamed):
    alone = replace(streamed, results=streamed.results[:1])
    [chart] = charts.charts_by_position(alone, "ppl_stream")
    [line] = chart.lines
    assert (line.name, [point.y for point in line.points]) == ("full (50 %)", [1.5, 3.0])
    (axes,) = charts.draw(alone)["positions_ppl_stream"].axes
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
    comparison = Comparison.tested(tmp_path, "full", results)
    found = tables.tables_by_part(comparison, "turns")
    assert {what: [one.name for one in table.head] for what, table in found.items()} == {
        "turn": ["policy", "turn 2", "turn 10", "worst"],
        "kind": ["policy", "key", "late", "worst"],
    }
    # the differences are 0.5, 0.25 and 0 of turn 2, and 0 and 1 of turn 10
    assert [[cell.text for cell in cells] for cells in found["turn"].lines] == [
        ["full", "1.00, 1.000", "1.00, 2.500", "2: 1.00"],
        ["tova 0.5", "1.00, +0.250 [+0.000, +0.500]", "0.00, +0.500 [+0.000, +1.000]", "10: 0.00"],
    ]
    assert "### turns by kind" in markdown(comparison) and "| late: 0.00 |" in markdown(comparison)
    drawn = charts.all_charts(comparison)
    [chart] = drawn["turns_turns"]
    assert [(point.x, point.y) for point in chart.lines[0].points] == [(2, 0.25), (10, 0.5)]
    assert chart.x_label == "turn" and "kinds_turns" not in drawn


# ---- the page


def test_wins_by_hand():
    """Task a (lower is better): x beats y on all 8 samples; task b (higher is better): they tie."""
    results = [
        result("x", 0.5, "a", [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]),
        result("y", 0.5, "a", [1.1, 2.2, 3.1, 4.3, 5.1, 6.1, 7.5, 8.1]),
        result("z", 0.25, "a", [0.0] * 8),
        result("x", 0.5, "b", [1.0, 0.0], higher=True),
        result("y", 0.5, "b", [0.0, 1.0], higher=True),
    ]
    pairs = wins(Comparison(Path(), "x", results), "0.5")
    assert pairs.names == ["x 0.5 (50 %)", "y 0.5 (50 %)"]
    assert pairs.share[0, 1] == 0.75 and pairs.share[1, 0] == 0.25  # a win and a half of two
    assert pairs.certain.tolist() == [[0, 1], [0, 0]]  # 2 of 256 patterns reach it
    assert pairs.tasks.tolist() == [[2, 2], [2, 2]]


def test_layers_by_hand():
    kept = np.array([[[1, 1, 0, 0], [1, 0, 0, 0]], [[1, 1, 1, 1], [1, 1, 1, 1]]], dtype=bool)
    views = [KeptTokens("0", list("abcd"), kept), KeptTokens("1", list("ab"), kept[..., :2])]
    results = [result(label, budget, "a", [1.0], views=views) for label, budget in (("full", None), ("h2o", 0.5))]
    [(name, shares)] = layers(Comparison(Path(), "full", results))
    assert name == "h2o 0.5 (75 %)"  # 18 of 24
    assert shares.tolist() == [6 / 12, 1]


def test_views_of_several_lengths_are_texts_of_their_own():
    """As of a folder that was continued with another ``view_tokens``; layers are those of the longest."""
    long = KeptTokens("0", list("abcd"), np.array([[[1, 0, 0, 1]]], dtype=bool))
    short = KeptTokens("0", list("ab"), np.array([[[1, 1]]], dtype=bool))
    seen = [("full", None, long), ("h2o", 0.5, long), ("tova", 0.5, short)]
    comparison = Comparison(Path(), "full", [result(*one, "a", [1.0], views=[view]) for *one, view in seen])
    prompts = viewer(comparison)["prompts"]
    assert [(one["name"], one["pieces"], [policy["name"] for policy in one["policies"]]) for one in prompts] == [
        ("a: 0 (4 tokens)", list("abcd"), ["full", "h2o 0.5"]),
        ("a: 0 (2 tokens)", list("ab"), ["tova 0.5"]),
    ]
    assert [(name, shares.tolist()) for name, shares in layers(comparison)] == [("h2o 0.5 (50 %)", [0.5])]


@pytest.mark.slow
def test_views_are_what_a_cache_keeps(compared, tiny_folder):
    from ag.config import ModelConfig
    from ag.model.base import load_base

    model, tokenizer = load_base(ModelConfig(name=str(tiny_folder)))
    text = json.loads((tiny_folder / "corpus" / "test.jsonl").read_text().splitlines()[1])["text"]
    ids = tokenizer(text)["input_ids"][:40]
    for one in compared.of_task("ppl"):
        view = one.views[1]
        assert "".join(view.token_texts) == text[:40]
        options = {"window": 4, "kernel": 3} if one.summary.label == "snapkv@pyramid" else {}
        held = columns(read(model, torch.tensor(ids), one.summary.label, one.summary.budget, **options))
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
    assert {path.stem for path in compared.folder.glob("*.png")} == expected
    image = imread(compared.folder / "depths_needle_single.png")
    assert image.shape[0] > 200 and image[..., :3].min() < 0.5 < image[..., :3].max()
    name = charts.shorten("gates:runs/smollm2_corpus/2026-11-20T10-00-00/export 0.25")
    assert name.startswith("gates:run") and name.endswith("/export 0.25") and len(name) == 36


@pytest.mark.slow
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
    assert [one["name"] for one in shown["prompts"][0]["policies"]] == [*compared.named]


TEXT = st.text('<>&/"\\\u2028a')


@settings(max_examples=50)
@given(st.recursive(TEXT, lambda inner: st.dictionaries(TEXT, inner) | st.lists(inner), max_leaves=4))
def test_embedded_json_is_inert_and_whole(value):
    text = embedded(value)
    assert not set(text) & set("<>&\u2028\u2029")
    assert json.loads(text) == value

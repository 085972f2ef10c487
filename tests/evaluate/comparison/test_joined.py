"""Several folders as one comparison: which rows are one row, and which only look so."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from ag.config.recipes import dump
from ag.evaluate.comparison.folder import ROWS, Folder
from ag.evaluate.comparison.join import join
from ag.evaluate.comparison.rows import Comparison
from ag.evaluate.comparison.verdict import find_verdicts
from ag.report import main
from tests.support import made_up
from tests.support.refused import names

pytestmark = pytest.mark.usefixtures("no_charts")


def cell(label, budget=0.5, cost=0.5, n=made_up.N, **changes):
    """A cell of the task ppl with the first n samples."""
    made = made_up.result("ppl", label, budget, cost, len(label))
    mean, changes = sum(outcome.score for outcome in made.outcomes[:n]) / n, {"key": f"{label}{n}"} | changes
    return made._replace(summary=replace(made.summary, n=n, mean=mean, **changes), outcomes=made.outcomes[:n])


@pytest.fixture
def folder(tmp_path):
    """`folder(name, *cells)`: the path of a folder with these cells."""

    def make(name, *cells):
        for one in cells:
            Folder(tmp_path / name).append(one)
        return tmp_path / name

    return make


FULL = cell("full", None, 0.0)


def shown(*paths):
    return [(one.summary.task, one.summary.name, one.summary.n) for one in join(paths)[0]]


def test_policies_of_two_folders_are_paired_with_one_full_cache(folder):
    """The rows of the second folder are of an earlier version, which recorded less."""
    paths = folder("a", FULL, cell("h2o")), folder("b", FULL, cell("tova", cost=0.9))
    rows = [json.loads(line) for line in (paths[1] / ROWS).read_text().splitlines()]
    later = ("dtype", "task_options", "date", "command", "threads", "hardware", "quantization", "over_budget")
    lines = [json.dumps({name: row[name] for name in row if name not in later}) for row in rows]
    (paths[1] / ROWS).write_text("\n".join(lines))
    comparison = Comparison(join(paths)[0], paths[0])
    assert [row.name for row in comparison.results] == ["full", "h2o 0.5", "tova 0.5"]
    together = made_up.comparison(paths[0], h2o=1.0, tova=1.8).of_task("ppl")  # half is evicted
    costs = {row.label: row.mean - together[0].mean for row in together if row.budget == "0.5"}
    assert comparison.results[2].difference == pytest.approx(costs["tova"], abs=2 * made_up.NOISE)
    assert comparison.results[2].difference_p < 0.001


def test_a_task_that_was_measured_in_two_ways_is_two_tasks(folder):
    """By what differs: here an option and the model; the data is written in the settings of the command."""
    ways = [{"prompt": 512, "continuation": 64}, {"prompt": 256, "continuation": 64}]
    one, other = (cell("h2o", key=f"k{i}", task_options=way, model=f"m{i}") for i, way in enumerate(ways))
    assert shown(folder("a", one), folder("b", other)) == [
        ("ppl (model=m0, prompt=512)", "h2o 0.5", 24),
        ("ppl (model=m1, prompt=256)", "h2o 0.5", 24),
    ]


def test_data_of_two_places_is_apart(folder, config):
    paths = folder("a", cell("h2o", key="k0")), folder("b", cell("tova", key="k1"))
    for path, root in zip(paths, ("here", None), strict=True):
        (path / "config.yaml").write_text(dump(config(root=root, roots={} if root else {"ppl": "there"})))
    cells, data = join(paths)
    here, hub = Path("here").resolve(), f"the Hugging Face hub; ppl: {Path('there').resolve()}"
    assert [one.summary.task for one in cells] == [f"ppl (data={here})", f"ppl (data={hub})"]
    assert data == f"{here}; {hub}"


def test_what_a_row_was_measured_on_is_in_the_row(folder, config):
    """Two commands wrote into one folder; its settings are those of the second."""
    pair = cell("h2o", key="k0", data="here"), cell("tova", key="k1", data="there")
    path = folder("a", *pair, cell("snapkv", key="k2", data="there", adapter="EXPORT (0123abcd)"))
    (path / "config.yaml").write_text(dump(config(root="there")))
    assert [task for task, *_ in shown(path)] == [
        "ppl (adapter=None, data=here)",
        "ppl (adapter=None, data=there)",
        "ppl (adapter=EXPORT (0123abcd), data=there)",
    ]


def test_samples_with_other_contents_are_not_paired(folder, tmp_path):
    """The contents of earlier versions' samples are unknown: these are paired by their ids."""
    hashes = {"full": "a", "h2o": "a", "tova": "b", "snapkv": ""}
    cells = [cell(label, None if label == "full" else 0.5) for label in hashes]
    cells = [
        one._replace(outcomes=[replace(outcome, content_hash=hashes[one.summary.label]) for outcome in one.outcomes])
        for one in cells
    ]
    full, h2o, tova, snapkv = Comparison(cells, tmp_path).results
    assert math.isnan(tova.difference) and not math.isnan(h2o.difference) and not math.isnan(snapkv.difference)


def test_a_label_with_two_meanings_has_the_name_of_its_folder(folder):
    first, second = (f"ag.policy('gates:{name}', budget=0.5)" for name in "xy")
    paths = folder("a", cell("g", policy=first, key="1")), folder("b", cell("g", policy=second, key="2"), cell("tova"))
    assert [name for _, name, _ in shown(*paths)] == ["g (a) 0.5", "g (b) 0.5", "tova 0.5"]


def test_full_caches_whose_options_change_nothing_are_one(folder):
    slots = cell("full", None, 0.0, policy="ag.policy('full', budget=None, positions='slot')", key="1")
    assert shown(folder("a", FULL, cell("h2o")), folder("b", slots))[0] == ("ppl", "full", made_up.N)


def test_a_label_with_two_meanings_at_two_budgets_or_tasks_too(folder):
    first, second = ("ag.policy('gates:x', budget=0.5)", "ag.policy('gates:y', budget=0.3)")
    one, other = cell("g", policy=first, key="1"), cell("g", 0.3, policy=second, key="2")
    elsewhere = cell("g", policy=first.replace("x", "y"), key="3", task="own")
    assert [name for _, name, _ in shown(folder("a", one), folder("b", other))] == ["g (a) 0.5", "g (b) 0.3"]
    assert [name for _, name, _ in shown(folder("a", one), folder("c", elsewhere))] == ["g (a) 0.5", "g (c) 0.5"]


def test_gates_and_a_model_that_were_written_anew_are_other_ones(folder):
    gates = [cell("g", policy="ag.policy('gates:x', budget=0.5)", key=key, gates_checksum=key) for key in ("1a", "2b")]
    assert [name for _, name, _ in shown(folder("a", *gates))] == ["g (a) 0.5", "g (a, 2) 0.5"]
    models = [cell(label, key=label, model_checksum=sha) for label, sha in (("h2o", "1a"), ("tova", "2b"))]
    assert [task for task, *_ in shown(folder("b", *models))] == ["ppl (model_checksum=1a)", "ppl (model_checksum=2b)"]


def with_contents(made, *hashes):
    """A cell whose first samples have these contents."""
    pairs = zip(made.outcomes, [*hashes, *[""] * len(made.outcomes)], strict=False)
    return made._replace(outcomes=[replace(outcome, content_hash=content) for outcome, content in pairs])


def test_samples_of_one_place_with_other_contents_are_another_task(folder):
    """The first sample is equal, as where only long ones are cut; the last cell knows no contents."""
    cells = [with_contents(cell("h2o", key="1"), "a", "b"), with_contents(cell("tova", key="2"), "a", "c")]
    cells += [with_contents(cell("snapkv", key="3"), "a", "b"), cell("cake", key="4")]
    assert [task for task, *_ in shown(folder("a", *cells))] == [f"ppl (contents={n})" for n in (1, 2, 1, 1)]


def test_an_option_may_have_the_name_of_a_condition(folder):
    options = {"data": "books"}
    paths = [folder(x, cell("h2o", key=x, data=f"/{x}", task_options=options)) for x in ("one", "two")]
    assert [task for task, *_ in shown(*paths)] == ["ppl (data=/one)", "ppl (data=/two)"]


def test_memory_is_a_share_of_the_full_cache_in_the_model_s_type(folder):
    """In whatever order the folders are given."""
    codes = cell("full int8", None, 0.0, key="8", policy="ag.policy('full', kv_dtype='int8')")
    codes = codes._replace(outcomes=[replace(outcome, kv_bytes=outcome.kv_bytes // 2) for outcome in codes.outcomes])
    paths = folder("a", codes), folder("b", FULL, cell("h2o"))
    for order in (paths, paths[::-1]):
        rows = Comparison(join(order)[0], paths[0]).results
        assert {row.label: row.memory for row in rows} == pytest.approx({"full int8": 0.5, "full": 1.0, "h2o": 0.5})


def test_a_label_with_two_meanings_in_one_folder_is_numbered(folder):
    """As when a second command names other gates `g`; budgets of one policy keep one label."""
    texts = [f"ag.policy('gates:{name}', budget={budget})" for name, budget in (("x", 0.5), ("y", 0.5), ("y", 0.3))]
    made = [cell("g", float(text[-4:-1]), policy=text, key=f"k{i}") for i, text in enumerate(texts)]
    assert [name for _, name, _ in shown(folder("a", *made))] == ["g (a) 0.5", "g (a, 2) 0.5", "g (a, 2) 0.3"]


def test_options_that_an_earlier_version_did_not_record_are_unknown(folder):
    one, other = cell("h2o", key="k0"), cell("h2o", key="k1", task_options={"prompt": 512})
    paths = folder("a", one._replace(summary=replace(one.summary, task_options=None))), folder("b", other)
    assert [task for task, *_ in shown(*paths)] == ["ppl (prompt=unknown)", "ppl (prompt=512)"]


def test_folders_with_one_name_are_told_apart_by_those_above_them(folder):
    """As of `ag evaluate`, which writes RUN/evaluation; a folder that is named twice is one folder."""
    first, second = (f"ag.policy('gates:{name}', budget=0.5)" for name in "xy")
    made = folder("a/evaluation", cell("g", policy=first, key="1")), folder("b/evaluation", cell("g", policy=second))
    paths = *made, made[0] / ".." / "evaluation"
    assert [name for _, name, _ in shown(*paths)] == ["g (a/evaluation) 0.5", "g (b/evaluation) 0.5"]


def test_equal_first_samples_are_equal_data(folder):
    """Earlier versions wrote a folder or the hub also for generated samples."""
    one, other = cell("h2o", key="k0", data="the hub"), cell("tova", key="k1", data="generated samples")
    hashed = [replace(one.outcomes[0], content_hash="a"), *one.outcomes[1:]]
    paths = [folder(name, each._replace(outcomes=hashed)) for name, each in (("a", one), ("b", other))]
    cells, data = join(paths)
    assert [each.summary.task for each in cells] == ["ppl", "ppl"] and data == "generated samples"


def test_budgets_are_those_of_a_task(folder):
    """One task has flags without a budget, the other a policy at a budget: each has a verdict."""
    own = replace(cell("full", None, 0.0).summary, task="own", key="own")
    flags = [cell("g50", None, 0.5, key="f", task="own", kept=0.5, policy="ag.policy('flags:x', share=0.5)")]
    paths = folder("a", FULL._replace(summary=own), *flags), folder("b", FULL, cell("h2o"))
    comparison = Comparison(join(paths)[0], paths[0])
    assert [(one.task, one.budget, one.best.label) for one in find_verdicts(comparison)] == [
        ("own", "", "g50"),
        ("ppl", "0.5", "h2o"),
    ]


def test_of_one_policy_the_row_with_the_most_samples_counts(folder):
    few, many = cell("h2o", n=5, key="few"), cell("h2o", key="many")
    failed = cell("tova", key="t")
    failed = failed._replace(summary=replace(failed.summary, n=0, mean=None, kept=None, problem="x"), outcomes=[])
    paths = folder("a", many, failed), folder("b", few, cell("tova", key="t"))
    assert shown(*paths) == [("ppl", "h2o 0.5", 24), ("ppl", "tova 0.5", 24)]


def test_the_command(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    paths = [str(folder("a", FULL, cell("h2o"))), str(folder("b", cell("tova", cost=0.9)))]
    coded = str(folder("coded", cell("full", None, 0.0, policy="ag.policy('full', kv_dtype='int8')", key="1")))
    assert main([*paths, f"output={tmp_path}/all", "mine=h2o"]) == 0
    names(capsys.readouterr().out, "ppl", "h2o 0.5", "tova 0.5", f"{tmp_path}/all/report.html")
    text = (tmp_path / "all" / "table.md").read_text()
    names(text, "3 policies on smollm2: ppl", "data: unknown", "ppl: h2o, ")
    assert main([paths[0], "--dry-run", paths[1]]) == 0
    assert capsys.readouterr().out.splitlines() == ["ppl: full", "ppl: h2o 0.5", "ppl: tova 0.5"]
    for words, parts in (
        ([str(tmp_path)], (str(tmp_path), ROWS, "ag.compare")),
        (["output=x"], ("folders=[]", "ag.compare")),
        ([*paths, "baseline=h2"], ("baseline 'h2'", "h2o?")),
        ([*paths, "mine=tov"], ("mine 'tov'", "tova?")),
        ([*paths, coded], ("baseline=full", "baseline='full (a)'", "full (coded)")),
    ):
        assert main(words) == 2
        names(capsys.readouterr().err, "ag.report: error: ", *parts)

"""The comparison as a whole: cells by hand, which cells run again, the contents of rows, bad input."""

import copy
import io
import json
import math
import random
import re
import shlex
import shutil
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from rich.console import Console

import ag
from ag.compare import CompareConfig, main
from ag.errors import UserError
from ag.evaluate import tasks
from ag.evaluate.comparison import figures, work
from ag.evaluate.comparison.cells import list_cells
from ag.evaluate.comparison.compare import compare
from ag.evaluate.comparison.folder import ROWS
from ag.evaluate.comparison.join import join
from ag.evaluate.comparison.tables import printed
from ag.evaluate.comparison.work import ComparisonProgress
from ag.evaluate.tasks.base import GENERATED
from ag.gates import export
from ag.gates.calibration import Calibration
from tests.evaluate.conftest import lines, without_charts, words
from tests.support import by_hand_cells
from tests.support.bounds import hold, of_nats
from tests.support.gates_for import gates_for
from tests.support.refused import names, refuses

pytestmark = pytest.mark.usefixtures("no_charts")
NEEDLES = {"needle_single": {"lengths": [300], "repeats": 2, "depths": [0.5]}}
LATER = {"dtype", "quantization", "prompt_mean", "prompt_min", "prompt_max", "task_options", "hardware", "threads"}
LATER |= {
    "date",
    "command",
    "untouched",
    "question",
    "nats",
    "hits",
    "floor",
    "over_budget",
    "data",
    "revision",
    "adapter",
}


@pytest.fixture(scope="module")
def finished(settings, tmp_path_factory):
    """The comparison of the five cells, read only."""
    with pytest.MonkeyPatch.context() as patch:
        without_charts(patch)
        return compare(settings(tmp_path_factory.mktemp("finished")), Console(file=io.StringIO(), width=200))


@pytest.fixture
def done(config, finished):
    """A copy of its folder, where the next run of ``config()`` finds it."""
    return Path(shutil.copytree(finished.folder, config().output))


# ---- contents of cells


def test_cells_hold_what_a_plain_computation_gives(finished, tiny_folder, tiny_llama):
    named = [("full", ""), ("h2o", "0.5"), ("h2o", "0.25"), ("tova", "0.5"), ("tova", "0.25")]
    assert [(result.label, result.budget) for result in finished.results] == named
    for result in finished.results:
        budget = float(result.budget) if result.budget else None
        losses, kept = by_hand_cells.continuations(tiny_folder, result.label, budget, 40, 8)
        bound = of_nats(tiny_llama())
        assert [outcome.score for outcome in finished.outcomes(result)] == pytest.approx(losses, abs=bound)
        assert (result.n, result.too_short, result.too_long) == (6, 1, 0)
        hold(result.mean, sum(losses) / 6, bound)
        assert result.kept == pytest.approx(kept)
        assert result.prefill == "dense"
    full, h2o = finished.results[:2]
    assert math.isnan(full.difference) and full.memory == 1
    assert h2o.difference == pytest.approx(h2o.mean - full.mean)
    assert h2o.memory == h2o.kv_bytes / full.kv_bytes
    assert h2o.policy == "ag.policy('h2o', budget=0.5)"


def test_kvzip_reads_the_models_own_tokens(config, quiet, tiny_folder, tiny_llama, tiny_tokenizer):
    """Beside another policy, which shares the prompt's pass."""
    comparison = compare(config(policies=["full", "kvzip"], budgets=[0.5], samples=2), quiet)
    policy = ag.policy("kvzip", 0.5).with_tokenizer(tiny_tokenizer)
    losses, _ = by_hand_cells.continuations(tiny_folder, policy, None, 40, 8)
    scores = [outcome.score for outcome in comparison.outcomes(comparison.results[1])]
    assert scores == pytest.approx(losses[:2], abs=of_nats(tiny_llama()))


@pytest.mark.slow
def test_codes_are_lines_of_their_own(config, quiet):
    """The other cells stay the same, and a chart shows quality by bytes."""
    longer = {"ppl": {"prompt": 66, "continuation": 8}}  # of which half is fewer blocks, also with a spare one
    given = config(policies=["full", "tova"], budgets=[0.5], kv_dtypes=["float", "int8"], task_options=longer)
    cells = {cell.label: cell for cell in list_cells(given)}
    assert [*cells] == ["full", "full int8", "tova", "tova int8"]
    assert {cells["full"].key, cells["tova"].key} <= {cell.key for cell in list_cells(config(task_options=longer))}
    comparison = compare(given, quiet)
    found = {result.label: result for result in comparison.results}
    assert found["tova int8"].policy == "ag.policy('tova', budget=0.5, kv_dtype='int8')"
    for name in ("full", "tova"):
        plain, coded = found[name], found[f"{name} int8"]
        assert coded.kept == plain.kept and coded.kv_bytes < 0.5 * plain.kv_bytes
    assert found["full"].kl == 0 < found["full int8"].kl < found["tova"].kl and found["full"].same_top1 == 1
    [chart] = figures.quality_charts(comparison, "ppl")
    assert chart.x_label == figures.MEMORY
    expected = {(x.label, x.kv_bytes / found["full"].kv_bytes, x.mean) for x in comparison.results}
    assert {*zip(chart.points.label, chart.points.x, chart.points.y, strict=True)} == expected


def test_codes_alone_are_compared_with_a_full_cache_of_codes(config, quiet):
    given = config(policies=["full", "tova"], budgets=[0.5], kv_dtypes=["int8"])
    full, tova = compare(given, quiet).results
    assert tova.difference == pytest.approx(tova.mean - full.mean) and math.isnan(full.difference)
    given.kv_dtypes = ["int8", "float"]
    both = compare(given, quiet)
    assert (both.baseline, both.mine) == ("full", "tova")
    assert [*both.rows.label] == ["full", "full int8", "tova", "tova int8"]


def test_rows_count_the_samples_that_protect_more_than_the_budget(config, quiet, capsys):
    """Of 40 tokens snapkv's window has 32, and 0.1 are 4."""
    named = config(policies=["full", "snapkv", "h2o+vatp"], policy_options={"h2o+vatp": {"sinks": 2}}, budgets=[0.1])
    comparison = compare(named, quiet)
    assert [result.over_budget for result in comparison.results] == [0, 6, 0]  # of h2o+vatp 2 + 2 stay
    assert comparison.results[1].kept == pytest.approx(32 / 40)
    table = (comparison.folder / "table.md").read_text()
    [row] = [line for line in table.splitlines() if line.startswith("| snapkv | 0.1 |")]
    assert row.split(" | ")[2:4] == ["80.0%", "6 of 6"] and "\n- over budget: samples with" in table
    quiet.print(printed(comparison))
    assert "*80.0%" in quiet.file.getvalue() and "* over budget: there are" in quiet.file.getvalue()
    assert "warning" not in quiet.file.getvalue() and capsys.readouterr().err == ""


# ---- which cells run again


def test_a_second_run_computes_nothing_and_changes_nothing(config, quiet, done, monkeypatch):
    monkeypatch.setattr("ag.model.base.load_base", None)
    compare(config(), quiet)
    before = {path.name: path.read_bytes() for path in done.iterdir() if path.is_file()}
    compare(config(), quiet)
    assert {path.name: path.read_bytes() for path in done.iterdir() if path.is_file()} == before
    fewer = compare(config(policies=["full", "h2o"], budgets=[0.5]), quiet)
    assert sorted(fewer.hidden) == ["ppl: h2o 0.25", "ppl: tova 0.25", "ppl: tova 0.5"]
    assert "3 rows in this folder" in (done / "report.html").read_text()
    assert "3 rows of earlier commands" in quiet.file.getvalue() and len(lines(done)) == 5


def test_rows_of_earlier_versions_are_resumed_and_unknown(config, quiet, done, monkeypatch):
    rows = [json.loads(line) for line in (done / ROWS).read_text().splitlines()]
    old = "".join(json.dumps({name: row[name] for name in row if name not in LATER}) + "\n" for row in rows)
    (done / ROWS).write_text(old)
    monkeypatch.setattr("ag.model.base.load_base", None)
    comparison = compare(config(batch_policies=1), quiet, "another command")
    assert (done / ROWS).read_text() == old
    assert [result.mean for result in comparison.results] == [row["mean"] for row in rows]
    text = (done / "table.md").read_text()
    for line in ("dtype unknown", "- hardware: unknown", "- date: unknown", "- command: `unknown`", "options: unknown"):
        assert line in text


def test_other_settings_are_other_cells(config):
    keys = {cell.key for cell in list_cells(config())}
    for change in (
        {"samples": 3},
        {"dtype": "bfloat16"},
        {"task_options": {"ppl": {"prompt": 41, "continuation": 8}}},
        {"policy_options": {"h2o": {"recent": 2}}},
        {"schedule": "every"},
    ):
        assert {cell.key for cell in list_cells(config(**change))} != keys
    for change in ({"device": "cuda"}, {"batch_policies": 1}, {"output": "elsewhere"}, {"retry": True}):
        assert {cell.key for cell in list_cells(config(**change))} == keys


def test_another_model_in_the_same_folder_is_another_cell(config, tiny_llama, tiny_folder, tmp_path, monkeypatch):
    """The path is the same; files that are not read, names of the hub and aliases are not looked at."""
    folder = shutil.copytree(tiny_folder, tmp_path / "model")

    def keys(model=folder):
        return [cell.key for cell in list_cells(config(model=str(model)))]

    before = keys()
    (folder / "README.md").write_text("A model.")
    assert keys() == before
    model = tiny_llama()
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    model.save_pretrained(folder)
    after = keys()
    assert not {*after} & {*before}
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"rope_theta": 500.0}))
    assert not {*keys()} & {*before, *after}
    for name in ("generation_config.json", "tokenizer_config.json"):  # tokens that end an answer, and a chat template
        before = keys()
        text = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(text | {"eos_token_id": 9, "chat_template": "{{messages}}"}))
        assert not {*keys()} & {*before}
    named = keys("smollm2"), keys("owner/name")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder, "smollm2")
    assert keys("smollm2") == named[0]  # the alias, as where it is loaded
    with monkeypatch.context() as patch:
        patch.setattr("ag.evaluate.comparison.cells.checksums", lambda name: {})
        assert (keys("smollm2"), keys("owner/name")) == named


def test_changed_data_is_measured_again(config, quiet, tiny_folder, tmp_path):
    """As soon as a new policy reads it; what it replaces is named."""
    corpus = tmp_path / "data" / "corpus"
    corpus.mkdir(parents=True)
    texts = (tiny_folder / "corpus" / "test.jsonl").read_text()
    (corpus / "test.jsonl").write_text(texts)
    root = {"root": str(tmp_path / "data"), "view_samples": 0}
    compare(config(policies=["full", "h2o"], budgets=[0.5], **root), quiet)
    (corpus / "test.jsonl").write_text(texts.replace("a", "b"))
    three = {"policies": ["full", "h2o", "tova"], "budgets": [0.5]} | root
    console = Console(file=io.StringIO(), width=200)
    again = compare(config(**three), console)
    names(console.file.getvalue(), "data has changed", "ppl: full, ppl: h2o 0.5")
    fresh = compare(config(output=tmp_path / "fresh", **three), quiet)
    assert [row.mean for row in again.results] == [row.mean for row in fresh.results]
    assert all(row.data == root["root"] for row in again.results)


def test_rows_and_pages_say_where_the_samples_come_from(config, quiet, tiny_folder):
    given = {"ppl": {"prompt": 40, "continuation": 8}} | NEEDLES
    found = compare(config(policies=["full"], tasks=["ppl", "needle_single"], task_options=given), quiet)
    assert [row.data for row in found.results] == [str(tiny_folder), GENERATED]
    assert f"data: {tiny_folder}; {GENERATED}" in (found.folder / "table.md").read_text()


def test_changed_data_is_noticed_where_the_last_new_policy_fails(config, quiet, tiny_folder, tmp_path, monkeypatch):
    corpus = tmp_path / "corpus" / "test.jsonl"
    corpus.parent.mkdir()
    corpus.write_text((tiny_folder / "corpus" / "test.jsonl").read_text())
    root = {"root": str(tmp_path), "view_samples": 0, "budgets": [0.5]}
    compare(config(policies=["full"], **root), quiet)
    corpus.write_text(corpus.read_text().replace("a", "b"))
    monkeypatch.setattr("ag.engine.scorers.h2o.H2O.score", lambda scorer, inputs: {}["absent"])
    again = compare(config(policies=["full", "tova", "h2o"], **root), quiet)
    fresh = compare(config(policies=["full", "tova"], output=tmp_path / "fresh", **root), quiet)
    assert [row.problem is None for row in again.results] == [True, True, False]
    assert [row.mean for row in again.results[:2]] == [row.mean for row in fresh.results]


def test_a_task_whose_samples_differ_from_policy_to_policy_is_refused(config, quiet, monkeypatch):
    kind = tasks.TASKS["ppl"][0]
    run = kind.run

    def leave_out_the_first(self, model, tokenizer, policies, samples):
        outcomes = run(self, model, tokenizer, policies, samples)
        return (pair for pair in outcomes if policies[pair[0]].spec.evicts is False or pair[1].sample != samples[0].id)

    monkeypatch.setattr(kind, "run", leave_out_the_first)
    with refuses(UserError, "ppl", "h2o 0.5", "expected a task that yields every sample for each policy"):
        compare(config(policies=["full", "h2o"], budgets=[0.5]), quiet)


def test_damaged_rows_are_named_and_run_again(config, quiet, done, caplog):
    """A row is torn, and the samples of another one are missing; cells alone give what they give together."""
    before, rows = lines(done), (done / ROWS).read_bytes().splitlines()
    (done / ROWS).write_bytes(b"\n".join([*rows[:4], rows[4][:40], b""]))
    gone = done / "samples" / f"{before[1]['key']}.jsonl"
    scores = [json.loads(line)["score"] for line in gone.read_text().splitlines()]
    gone.unlink()
    compare(config(batch_policies=1), quiet)
    written = (done / ROWS).read_bytes().splitlines()
    assert written[:5] == [*rows[:4], rows[4][:40]] and len(written) == 7
    (done / ROWS).write_bytes(b"\n".join([rows[0], written[5], *rows[2:4], written[6]]))
    assert lines(done) == before
    named = re.findall("line ([0-9]+) is skipped, and its cell runs again", caplog.text)
    assert sorted(named) == ["2", "5"]
    assert [json.loads(line)["score"] for line in gone.read_text().splitlines()] == scores


def test_ctrl_c_says_what_is_left(config, quiet, monkeypatch):
    def stop(self, *_):
        raise KeyboardInterrupt

    compare(config(policies=["full"], budgets=[]), quiet)
    monkeypatch.setattr(work.Worker, "_run", stop)
    with refuses(KeyboardInterrupt, "1 of 5 cells", config().output, "the same command"):
        compare(config(), quiet)


# ---- how rows were measured


def test_the_command_and_how_a_row_was_measured(config, tiny_folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    given = [*words(config(root=".")), f"roots.ppl={tiny_folder}", "budgets=[0.5]", "dtype=bfloat16"]
    given += ["policies=[full, h2o]", "policy_options.h2o.recent=0.25", "samples=7"]
    before = datetime.now(UTC).replace(microsecond=0)
    assert main(given) == 0
    out = capsys.readouterr().out
    assert "h2o 0.5" in out and "to full" in out and out.rstrip().endswith("report.html")
    counts = "6 documents, left out: 1 too short"  # of seven
    assert f"ppl: {counts}" in out.splitlines()
    rows = [json.loads(line) for line in (Path(config().output) / ROWS).read_text().splitlines()]
    assert rows[1]["policy"] == "ag.policy('h2o', budget=0.5, recent=0.25)"
    for row in rows:
        assert (row["dtype"], row["quantization"], row["threads"]) == ("bfloat16", "none", torch.get_num_threads())
        assert (row["prompt_min"], row["prompt_max"], row["prompt_mean"]) == (40, 40, 40.0)
        assert row["task_options"] == {"text_field": "text", "prompt": 40, "continuation": 8}
        assert before <= datetime.fromisoformat(row["date"]) <= datetime.now(UTC)
        assert shlex.split(row["command"]) == ["python", "-m", "ag.compare", *given]
    for page in ("table.md", "report.html"):
        text = (Path(config().output) / page).read_text()
        names(text, counts, f"{tiny_folder}, bfloat16", row["hardware"], "ag.compare", "prompts: 40 tokens; options: ")
    assert main([*given, "policies=[full,h2]"]) == 2
    assert "did you mean h2o?" in capsys.readouterr().err


def test_a_comparison_from_python_has_its_call_in_the_rows(config):
    given = config(policies=["full"])
    known = {"compare": lambda config, _: config, "CompareConfig": CompareConfig, "console": 0}
    assert eval(work.python_call(given), known) == given


def test_progress_waits_for_a_sample_of_every_cell_before_it_tells_a_time(quiet):
    """Without a terminal, a line every half minute: three of eight cells were finished before."""
    now = [0.0]
    progress = ComparisonProgress(quiet, 8, 3, lambda: now[0])
    progress.begin("ppl: full", 2, 40)
    now[0] = 50.0  # 25 samples together
    progress.outcome()
    for _ in range(49):
        progress.outcome()
    now[0] = 80.0
    for _ in range(30):
        progress.outcome()
    assert quiet.file.getvalue().splitlines() == [
        "3 of 8 cells, 0 of 40 samples (ppl: full and 1 more)",
        "3 of 8 cells, 25 of 40 samples, about 0:03:54 left (ppl: full and 1 more)",
    ]
    progress.cells(5)
    assert progress.progress_text() == "5 of 8 cells, about 0:02:00 left"


def test_progress_tells_a_time_at_the_end_of_a_batch_whose_outcomes_come_at_once(quiet):
    now = [0.0]
    progress = ComparisonProgress(quiet, 2, 0, lambda: now[0])
    progress.begin("gsm8k: full", 1, 200, batch=100)
    for seconds in (60.0, 120.0):
        now[0] = seconds
        for _ in range(100):
            progress.outcome()
    assert quiet.file.getvalue().splitlines() == [
        "0 of 2 cells, 100 of 200 samples, about 0:03:00 left (gsm8k: full)",
        "0 of 2 cells, 200 of 200 samples, about 0:02:00 left (gsm8k: full)",
    ]


def test_progress_takes_no_time_for_samples_of_an_earlier_command(quiet):
    now = [0.0]
    progress = ComparisonProgress(quiet, 2, 0, lambda: now[0])
    progress.begin("ppl: full", 2, 40)
    progress.outcome(2 * 20, of_earlier_command=True)
    now[0] = 30.0
    progress.outcome()
    assert progress.progress_text() == "0 of 2 cells, 20 of 40 samples"
    progress.outcome()
    assert progress.progress_text() == "0 of 2 cells, 21 of 40 samples, about 0:09:30 left"


def test_a_terminal_shows_a_bar():
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    progress = ComparisonProgress(console, 2)
    with progress.bar:
        progress.begin("ppl: full", 1, 4)
        progress.outcome()
    assert "ppl: full" in console.file.getvalue() and "0 of 2 cells, 1 of 4 samples" in console.file.getvalue()


@pytest.mark.parametrize("fails", [False, True], ids=["together", "then one by one"])
def test_what_is_done_of_a_pass_of_several_cells_never_counts_less(config, quiet, monkeypatch, fails):
    """So that the time that is left does not jump when their rows are written, or when the pass fails."""
    completed, kind = [], tasks.TASKS["ppl"][0]
    run, show = kind.run, ComparisonProgress._show

    def shown(self):
        completed.append(round(6 * self._completed))  # samples
        show(self)

    def failing(self, model, tokenizer, policies, samples):
        for place, outcome in enumerate(run(self, model, tokenizer, policies, samples)):
            if place == 2 * len(policies) > 2:
                raise MemoryError("none left")
            yield outcome

    monkeypatch.setattr(ComparisonProgress, "_show", shown)
    if fails:
        monkeypatch.setattr(kind, "run", failing)
    comparison = compare(config(policies=["full", "h2o", "knorm"], budgets=[0.5], samples=6), quiet)
    assert not comparison.failed
    assert completed == sorted(completed) and completed[-1] == 3 * 6


# ---- policies


@pytest.mark.slow
def test_gates_by_their_flags_and_ranked(config, quiet, tiny_llama, tmp_path):
    gates = gates_for(tiny_llama(), prefill="sparse", recent_tokens=2)
    export.save(tmp_path / "gates", gates, base_model="tiny")
    path, short = tmp_path / "gates", f"…/{tmp_path.name}/gates"
    policies = ["full", f"flags:{path}", f"gates:{path}"]
    comparison = compare(config(policies=policies, budgets=[0.5]), quiet)
    assert [(e.label, e.budget, e.prefill) for e in comparison.results] == [
        ("full", "", "dense"),
        (f"flags:{short}", "", "sparse"),
        (f"gates:{short}", "0.5", "dense"),
    ]
    full, flags, ranked = comparison.results
    assert 0.2 < flags.kept < 0.95 and ranked.kept == pytest.approx(0.5)
    assert (full.gated, flags.gated, ranked.gated) == (False, True, True)
    with torch.no_grad():
        next(gates.parameters()).add_(0.5)
    export.save(tmp_path / "gates", gates, base_model="tiny")
    again = [cell.key for cell in list_cells(config(policies=policies, budgets=[0.5]))]
    assert again[0] == full.key and not {flags.key, ranked.key} & {*again}


def test_flags_are_found_again_that_were_called_gates(config, quiet, tiny_llama, tmp_path, monkeypatch):
    """Without budgets gates are flags, the same cell in one folder; so were rows before flags had a name."""
    export.save(tmp_path / "gates", gates_for(tiny_llama()), base_model="tiny")
    path = tmp_path / "gates"
    before = compare(config(policies=["full", f"gates:{path}"], budgets=[]), quiet)
    assert before.results[1].policy == f"ag.policy('gates:{path}')"
    monkeypatch.setattr("ag.model.base.load_base", None)
    now = compare(config(policies=["full", f"flags:{path}"], budgets=[]), quiet)
    assert now.results[1].policy == f"ag.policy('flags:{path}')"
    assert now.results[1].mean == before.results[1].mean and now.results[1].gated and not now.hidden
    with refuses(UserError, "'ppl: a'", "'ppl: b'", "one cell"):
        list_cells(config(policies=["full", f"a=flags:{path}", f"b=gates:{path}"], budgets=[]))


@pytest.mark.slow
def test_one_export_at_several_shares_under_labels(config, quiet, tiny_llama, tmp_path):
    """Each label has its own share, row, samples and line."""
    gates = gates_for(tiny_llama(), prefill="sparse", recent_tokens=2)
    gates.calibration = Calibration((0.1, 0.9), (5.0, -5.0))
    export.save(tmp_path / "deep" / "gates", gates, base_model="tiny")
    path = f"flags:{tmp_path / 'deep' / 'gates'}"

    options = {"g90": {"share": 0.9}, "g10": {"share": 0.1}}
    given = config(policies=["full", *(f"{name}={path}" for name in options)], policy_options=options, baseline="g90")
    comparison = compare(given, quiet)
    assert [*comparison.rows.label] == [*comparison.rows.name] == ["full", "g90", "g10"]
    kept = [result.kept for result in comparison.results[1:]]
    assert kept[0] > kept[1] + 0.1
    assert [*comparison.rows.difference.notna()] == [True, False, False]  # g10 holds less than g90
    assert f"- g10: `ag.policy('{path}', share=0.1)`" in (comparison.folder / "table.md").read_text()
    assert f"<code>ag.policy(&#39;{path}&#39;, share=0.1)" in (comparison.folder / "report.html").read_text()


def test_the_full_cache_is_measured_first(config):
    """Where questions are asked also if it is not listed."""
    given = {"tasks": ["ppl", "needle_single"], "task_options": NEEDLES}
    listed = list_cells(config(policies=["h2o", "full"], **given))
    assert [cell.label for cell in listed] == ["full", "h2o", "h2o"] * 2
    left_out = list_cells(config(policies=["h2o"], baseline="h2o", **given))
    assert [cell.label for cell in left_out] == ["h2o", "h2o", "full", "h2o", "h2o"]
    made = config(also=["snapkv"])
    assert made.policies == ["full", "h2o", "tova", "snapkv"]
    assert replace(made).policies == made.policies  # as when a dumped configuration is read


def test_the_baseline_full_is_added_where_it_is_not_listed(config):
    made = config(policies=["h2o", "tova"], budgets=[0.5])
    assert made.policies == ["full", "h2o", "tova"] == replace(made).policies
    assert [cell.label for cell in list_cells(made)] == ["full", "h2o", "tova"]
    assert config(policies=["h2o"], baseline="h2o").policies == ["h2o"]
    with refuses(UserError, "baseline=snapkv", "['h2o']"):
        config(policies=["h2o"], baseline="snapkv")
    with refuses(UserError, "mine=snapkv", "['full', 'a=h2o']"):
        config(policies=["full", "a=h2o"], mine="snapkv")
    assert config(policies=["full", "a=h2o"], mine="a").mine == "a"


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"policies": ["full", "h2o+caot"]}, ("'caot'", "caote?")),
        ({"tasks": ["bolq"]}, ("'bolq'", "boolq?")),
        ({"tasks": []}, ("tasks=[]", "ppl")),
        ({"budgets": []}, ("'h2o'", "budgets=[...]")),
        ({"policies": ["full", "flags"]}, ("'flags'", "flags:EXPORT")),
        ({"policies": ["full", "gates:nowhere"]}, ("nowhere",)),
        ({"task_options": {"pl": {"prompt": 3}}}, ("task_options.pl", "tasks=", "ppl?")),
        ({"policy_options": {"h2": {"recent": 3}}}, ("policies=", "'h2'", "h2o?")),
        ({"roots": {"boolq": "x"}}, ("roots.boolq", "tasks=")),
        ({"budgets": [0.5, 0.5]}, ("policies=", "budgets=", "tasks=")),
        ({"baseline": "snapkv"}, ("baseline=snapkv", "policies")),
    ],
)
def test_mistakes_are_found_before_a_model_is_loaded(config, changes, parts):
    with refuses(UserError, *parts):
        list_cells(config(**changes))


def test_a_new_label_is_written(config, quiet, tmp_path):
    """The joined report then names the policy as the folder's own page does."""
    for text in ("h2o", "g=h2o"):
        comparison = compare(config(policies=["full", text], budgets=[0.5], samples=2), quiet)
    assert [row.name for row in comparison.results] == ["full", "g 0.5"]
    assert [cell.summary.name for cell in join([tmp_path / "out"])[0]] == ["full", "g 0.5"]


def test_missing_data_and_an_unwritable_folder(config, quiet, tmp_path):
    (tmp_path / "file").write_text("")
    for change in ({"root": f"{tmp_path}/nowhere"}, {"output": f"{tmp_path}/file/out"}):
        with refuses(UserError, *change.values()):
            compare(config(**change), quiet)


# ---- samples that eviction cannot change


@pytest.fixture
def one_token(tmp_path, tiny_llama, tiny_tokenizer):
    """A model whose tokenizer has one token for " yes" and for " no", and rows of BoolQ and OpenBookQA."""
    draw = random.Random(0)
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.add_tokens([" yes", " no"])
    tiny_llama().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    text = "".join(draw.choices("abcdefgh", k=60))
    choices = [{"text": texts, "label": ["A", "B"]} for texts in (["yes", "no"], ["no", "yes, now"])]
    for name, rows in {
        "boolq": [{"passage": text, "question": "why not", "answer": bool(i % 2)} for i in range(4)],
        "openbookqa": [{"question_stem": text, "choices": texts, "answerKey": "A"} for texts in choices],
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"model": str(tmp_path), "root": str(tmp_path), "budgets": [0.1], "task_options": {}}


@pytest.mark.slow
def test_what_no_policy_can_change_is_refused(one_token, config, quiet, tiny_llama):
    """Answers of one token after a dense prefill; blocks and sparse gates change them, and the full cache runs."""
    gates = f"{one_token['root']}/gates"
    export.save(gates, gates_for(tiny_llama(), prefill="sparse", recent_tokens=2), base_model="tiny")
    given = one_token | {"tasks": ["boolq"], "policies": ["full", "random", f"mine=flags:{gates}"]}
    given["task_options"] = {"boolq": {"question": "before"}}
    found = compare(config(**given), quiet)
    assert [(one.n, one.untouched) for one in found.results] == [(4, 0), (0, 4), (4, 0)]
    [failed] = found.failed
    names(failed.problem, "boolq", "random 0.1", "task_options.boolq.question=after", "schedule=blocks:m")
    blocks = compare(config(**given, schedule="blocks:16"), quiet).results[1]
    assert (blocks.prefill, blocks.untouched, blocks.n) == ("blocks", 0, 4)
    assert compare(config(**given, schedule="blocks:500"), quiet).failed  # no prompt is longer than a block


def test_samples_that_no_policy_can_change_are_counted(one_token, config, quiet):
    """Of two questions one has answers of one token only."""
    comparison = compare(config(**one_token, tasks=["openbookqa"], policies=["full", "random"]), quiet)
    assert [one.untouched for one in comparison.results] == [0, 1]
    said = "2 questions, left out: 0; question before eviction; 1 with answers of one token"
    assert said in (comparison.folder / "table.md").read_text()

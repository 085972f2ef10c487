"""The comparison as a whole: cells, resuming, sharing the work, bad input."""

import io
import json
import multiprocessing
import os
import re
import shutil
import signal
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

import ag
from ag.compare import CompareConfig, main
from ag.config.keys import ConfigError
from ag.config.recipes import resolve
from ag.errors import UserError
from ag.evaluate import tasks
from ag.evaluate.comparison import charts, work
from ag.evaluate.comparison.cells import list_cells
from ag.evaluate.comparison.compare import compare
from ag.evaluate.comparison.folder import Folder
from ag.evaluate.comparison.progress import Progressing
from ag.evaluate.comparison.tables import counted, printed
from ag.evaluate.tasks import Outcome
from ag.gates import export
from ag.gates.calibration import Calibration
from tests.evaluate.conftest import lines, without_charts, words
from tests.support import by_hand_cells
from tests.support.bounds import hold, of_nats
from tests.support.gates_for import gates_for
from tests.support.refused import refuses

pytestmark = pytest.mark.usefixtures("no_charts")


FORK = multiprocessing.get_context("fork")


@pytest.fixture(scope="module")
def finished(settings, tmp_path_factory):
    """The folder of the five cells, read only."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        without_charts(patch)
        compare(settings(folder), Console(file=io.StringIO(), width=200))
    return folder


@pytest.fixture
def done(config, finished):
    """A copy of that folder, where the next run of ``config()`` finds it."""
    return Path(shutil.copytree(finished, config().output))


def tables(folder):
    """What table.md says of the results, without when and by which command they were had."""
    found, _, _ = (Path(folder) / "table.md").read_text().partition("## How it was measured")
    return found


def in_process(work, *arguments):
    process = FORK.Process(target=work, args=arguments)
    process.start()
    return process


def test_cells_hold_what_a_plain_computation_gives(config, quiet, tiny_folder, tiny_llama):
    comparison = compare(config(), quiet)
    assert [(result.summary.label, result.summary.budget) for result in comparison.results] == [
        ("full", None),
        ("h2o", 0.5),
        ("h2o", 0.25),
        ("tova", 0.5),
        ("tova", 0.25),
    ]
    for result in comparison.results:
        losses, kept = by_hand_cells.continuations(tiny_folder, result.summary.label, result.summary.budget, 40, 8)
        bound = of_nats(tiny_llama())
        assert [outcome.score for outcome in result.outcomes] == pytest.approx(losses, abs=bound)
        assert (result.summary.n, result.summary.too_short, result.summary.too_long) == (6, 1, 0)
        hold(result.summary.mean, sum(losses) / 6, bound)
        assert result.summary.kept == pytest.approx(kept)
        assert result.summary.metric == "nats per token" and not result.summary.higher_is_better
        assert result.summary.prefill == "dense"
    full, h2o = comparison.results[:2]
    assert full.paired is None
    assert h2o.paired.difference == pytest.approx(h2o.summary.mean - full.summary.mean)
    assert h2o.summary.policy == "ag.policy('h2o', budget=0.5)"
    assert h2o.summary.versions["torch"] == torch.__version__


def test_kvzip_is_asked_in_the_models_own_tokens(config, quiet, tiny_folder, tiny_llama, tiny_tokenizer):
    """Beside another policy, which shares the prompt's pass; its second reading is part of the time."""
    [_, result] = compare(config(policies=["full", "kvzip"], budgets=[0.5]), quiet).results
    policy = ag.policy("kvzip", 0.5).with_tokenizer(tiny_tokenizer)
    assert "Repeat" in tiny_tokenizer.decode([int(x) for x in policy.scorer.ask.split()])
    losses, _ = by_hand_cells.continuations(tiny_folder, policy, None, 40, 8)
    assert (result.summary.label, result.summary.kept, len(losses)) == ("kvzip", 0.5, 6)
    assert [outcome.score for outcome in result.outcomes] == pytest.approx(losses, abs=of_nats(tiny_llama()))


def test_a_second_run_computes_nothing_and_changes_nothing(config, quiet, done, monkeypatch):
    compare(config(), quiet)
    folder = done
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    monkeypatch.setattr("ag.model.base.load_base", None)
    compare(config(), quiet)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


def test_other_settings_are_other_cells(config):
    keys = {cell.key for cell in list_cells(config())}
    for change in (
        {"samples": 3},
        {"dtype": "bfloat16"},
        {"quantization": "nf4"},
        {"task_options": {"ppl": {"prompt": 41, "continuation": 8}}},
        {"policy_options": {"h2o": {"recent": 2}}},
        {"schedule": "every"},
    ):
        assert {cell.key for cell in list_cells(config(**change))} != keys
    for change in ({"device": "cuda"}, {"batch_policies": 1}, {"output": "elsewhere"}, {"retry": True}):
        assert {cell.key for cell in list_cells(config(**change))} == keys


@pytest.mark.slow
def test_codes_are_lines_of_their_own(config, quiet):
    """Beside the others, whose cells stay what they were."""
    longer = {"ppl": {"prompt": 66, "continuation": 8}}  # of which half is fewer blocks, also with a spare one
    asked = config(policies=["full", "tova"], budgets=[0.5], kv_dtypes=["float", "int8"], task_options=longer)
    cells = {cell.label: cell for cell in list_cells(asked)}
    assert [*cells] == ["full", "full int8", "tova", "tova int8"]
    assert {cells["full"].key, cells["tova"].key} <= {cell.key for cell in list_cells(config(task_options=longer))}
    comparison = compare(asked, quiet)
    found = {result.summary.label: result for result in comparison.results}
    assert found["tova int8"].summary.policy == "ag.policy('tova', budget=0.5, kv_dtype='int8')"
    for name in ("full", "tova"):
        plain, coded = found[name].summary, found[f"{name} int8"].summary
        assert coded.kept == plain.kept and coded.kv_bytes < 0.5 * plain.kv_bytes
    assert 0 < found["full int8"].summary.kl < found["tova"].summary.kl
    assert found["full"].summary.kl == 0 and found["full"].summary.same_top1 == 1
    assert found["full int8"].paired is not None
    [chart] = charts.over_bytes(comparison, "ppl")
    mix, *others = chart.lines
    drawn = {point.x: point.y for line in others for point in line.points}
    full = found["full"].summary
    wanted = {x.summary.kv_bytes / full.kv_bytes: x.summary.mean - full.mean for x in found.values()}
    assert {x: pytest.approx(y) for x, y in wanted.items() if x != 1} == drawn
    assert [(point.x, point.y) for point in mix.points] == [
        (x, y) for x, y in sorted(drawn.items()) if all(y < other for less, other in drawn.items() if less < x)
    ]
    assert charts.over_bytes(compare(config(), quiet), "ppl") == []


def _die_while_writing(config, quiet):
    append, count = Folder.append, 0

    def torn(self, ended):
        nonlocal count
        count += 1
        if count < 3:
            return append(self, ended)
        with (self.path / "results.jsonl").open("ab") as file:
            file.write(json.dumps(asdict(ended.summary)).encode()[:50])
        os.kill(os.getpid(), signal.SIGKILL)

    Folder.append = torn
    compare(config, quiet)


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_results(config, quiet, finished):
    """SIGKILL in the middle of the third row, its lock held; cells one by one are what they are together."""
    process = in_process(_die_while_writing, config(batch_policies=1), quiet)
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    output = Path(config().output)
    assert len((output / "results.jsonl").read_text().splitlines()) == 3
    assert not (output / "table.md").exists()
    compare(config(batch_policies=1), quiet)
    path = output / "results.jsonl"
    whole = [line for line in path.read_text().splitlines() if line.endswith("}")]
    assert len(whole) == 5 and len(path.read_text().splitlines()) == 6
    path.write_text("\n".join(whole))
    assert lines(output) == lines(finished)
    assert tables(output) == tables(finished)
    assert "line 3 is skipped, and its cell runs again" in quiet.file.getvalue()


@pytest.mark.slow
def test_what_is_damaged_is_named_and_runs_again(config, quiet, done):
    """Of five rows one is whole; the samples of the second are gone, those of the third empty, of the fourth wrong."""
    before, path = lines(done), done / "results.jsonl"
    damage = [b"not json", b'{"key": "x"}', b"[" * 100_000, b"\xff\xfe", b"null"]
    rows = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([*rows[:4], *damage, b""]))
    gone, empty, wrong = (done / "samples" / f"{row['key']}.jsonl" for row in before[1:4])
    whole = gone.read_text()
    gone.unlink()
    empty.write_text("")
    wrong.write_text('{"sample": "0"}\n')
    compare(config(), quiet)
    written = path.read_bytes().splitlines()
    assert written[:9] == [*rows[:4], *damage]
    path.write_bytes(b"\n".join([written[0], *written[9:]]))
    assert lines(config().output) == before
    named = re.findall("line ([0-9]+) is skipped, and its cell runs again", quiet.file.getvalue())
    assert sorted(map(int, named)) == [2, 3, 4, 5, 6, 7, 8, 9]
    scores = [[json.loads(line)["score"] for line in text.splitlines()] for text in (gone.read_text(), whole)]
    assert scores[0] == scores[1]


@pytest.fixture
def failing(monkeypatch):
    """`failing(error)`: policies by tova fail with it after two samples, and tell in a list how many they had."""

    def install(error):
        kind, calls = tasks.TASKS["ppl"][0], []
        run = kind.run

        def fail(self, model, tokenizer, policies, samples):
            calls.append([str(policy.spec) for policy in policies])
            for count, outcome in enumerate(run(self, model, tokenizer, policies, samples)):
                if count == 2 and any(str(policy.spec) == "tova" for policy in policies):
                    raise error
                yield outcome

        monkeypatch.setattr(kind, "run", fail)
        return calls

    return install


@pytest.mark.slow
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 99 bytes"),
        MemoryError("none left"),
    ],
    ids=["cuda", "cpu", "python"],
)
def test_out_of_memory_is_recorded_and_the_run_goes_on(config, quiet, failing, error):
    calls = failing(error)
    comparison = compare(config(policies=["full", "tova", "h2o"]), quiet)
    assert calls == [["full", "tova", "tova", "h2o", "h2o"], ["full"], ["tova"], ["tova"], ["h2o"], ["h2o"]]
    problems = {result.name: result.summary.problem for result in comparison.results}
    assert problems == {
        "full": None,
        "h2o 0.5": None,
        "h2o 0.25": None,
        "tova 0.5": f"out of memory: {error}",
        "tova 0.25": f"out of memory: {error}",
    }
    table = (comparison.folder / "table.md").read_text()
    assert table.count("none: out of memory") == 2
    cells = {line.partition(" | ")[0]: line.count("|") for line in table.splitlines()}  # of the last table
    assert cells["| tova"] == cells["| policy"] == 13


@pytest.mark.slow
def test_failed_cells_run_again_only_when_asked(config, quiet, failing, monkeypatch):
    failing(MemoryError("none left"))
    compare(config(), quiet)
    monkeypatch.undo()
    assert [result.summary.problem is None for result in compare(config(), quiet).results] == [True] * 3 + [False] * 2
    again = compare(config(retry=True), quiet)
    assert [result.summary.problem is None for result in again.results] == [True] * 5
    for page in ("table.md", "report.html"):  # there is no such column where budgets hold
        assert "over budget" not in (again.folder / page).read_text()
    assert len(lines(config().output)) == 7  # of a key the last row counts


def test_rows_say_in_how_many_samples_more_is_protected_than_the_budget_allows(config, capsys):
    """Of 40 tokens: snapkv's window has 32, and 0.1 are 4."""
    out = io.StringIO()
    options = {"h2o+vatp": {"sinks": 2}}
    named = config(policies=["full", "snapkv", "h2o+vatp"], policy_options=options, budgets=[0.1, 0.9])
    comparison = compare(named, Console(file=out, width=200))
    rows = {result.name: result.summary for result in comparison.results}
    assert {name: row.over_budget for name, row in rows.items()} == {
        "full": 0,
        "snapkv 0.1": 6,
        "snapkv 0.9": 0,
        "h2o+vatp 0.1": 0,  # 2 sinks and 2 recents
        "h2o+vatp 0.9": 0,
    }
    assert rows["snapkv 0.1"].kept == pytest.approx(32 / 40)
    assert [row["over_budget"] for row in lines(comparison.folder)] == [0, 6, 0, 0, 0]
    table = (comparison.folder / "table.md").read_text()
    [told] = [line for line in table.splitlines() if line.startswith("| snapkv | 0.1 |")]
    assert told.split(" | ")[2:4] == ["80.0%", "6 of 6"]
    assert table.count(" of 6 |") == 1 and "\nover budget: samples in which more is protected" in table
    assert ">6 of 6<" in (comparison.folder / "report.html").read_text()
    assert "warning" not in out.getvalue()
    Console(file=out, width=80).print(printed(comparison, 80))
    told = out.getvalue()
    assert told.count("*80.0%") == 1 and "* over budget: there are samples in which more is protected" in told
    assert capsys.readouterr().err == ""


def test_a_score_that_is_no_number_is_a_problem(config, quiet, monkeypatch):
    def run(self, model, tokenizer, policies, samples):
        for index in range(len(policies)):
            yield index, Outcome("0", float("nan"), 40, 0.5, 10, 0.0)

    monkeypatch.setattr(tasks.TASKS["ppl"][0], "run", run)
    assert compare(config(policies=["full"]), quiet).results[0].summary.problem == "sample 0 has the score nan."


def test_nothing_but_too_short_samples_is_a_problem(config, quiet):
    options = {"ppl": {"prompt": 400, "continuation": 8}}
    row = compare(config(policies=["full"], task_options=options), quiet).results[0].summary
    assert row.problem.startswith("no sample can be run")
    assert (row.n, row.too_short) == (0, 7)


@pytest.mark.slow
def test_n_samples_are_the_first_n_that_can_be_run(config, quiet, capsys, tiny_folder):
    """Six of seven documents are long enough; the seventh is the short one."""
    comparison = compare(config(samples=6), quiet)
    assert {(result.summary.n, result.summary.too_short) for result in comparison.results} == {(6, 0)}
    comparison = compare(config(samples=7), quiet)
    assert {(result.summary.n, result.summary.too_short) for result in comparison.results} == {(6, 1)}
    said = "6 documents, left out: 1 too short"
    assert counted(comparison, "ppl") == said
    for page in ("table.md", "report.html"):
        text = (comparison.folder / page).read_text()
        assert said in text and text.count("1 too short") == 6  # and in each of the five rows
    assert main([*words(config()), "policies=[full]", "samples=7"]) == 0
    assert f"ppl: {said}" in capsys.readouterr().out.splitlines()


@pytest.mark.slow
def test_gates_by_their_flags_and_ranked(config, quiet, tiny_llama, tmp_path):
    gates = gates_for(tiny_llama(), prefill="sparse", recent_tokens=2)
    export.save(tmp_path / "gates", gates, base_model="tiny")
    path, short = tmp_path / "gates", f"…/{tmp_path.name}/gates"
    policies = ["full", f"flags:{path}", f"gates:{path}", f"gates:{path}@uniform", f"gates:{path}@heads"]
    comparison = compare(config(policies=policies), quiet)
    ranked = [f"gates:{short}", f"gates:{short}@uniform", f"gates:{short}@heads"]
    assert comparison.labels == ["full", f"flags:{short}", *ranked]
    rows = [(e.summary.label, e.summary.budget, e.summary.prefill) for e in comparison.results[1:]]
    assert rows == [
        (f"flags:{short}", None, "sparse"),
        *[(label, budget, "dense") for label in ranked for budget in (0.5, 0.25)],
    ]
    assert 0.2 < comparison.results[1].summary.kept < 0.95
    for result in comparison.results[2:]:
        assert result.summary.kept == pytest.approx(result.summary.budget)
        assert (
            result.summary.policy.startswith(f"ag.policy('gates:{path}")
            and f"budget={result.summary.budget}" in result.summary.policy
        )
    assert all(result.is_gated for result in comparison.results[1:])
    keys = [result.summary.key for result in comparison.results]
    with torch.no_grad():
        next(gates.parameters()).add_(0.5)
    export.save(tmp_path / "gates", gates, base_model="tiny")
    again = [cell.key for cell in list_cells(config(policies=policies))]
    assert again[0] == keys[0] and not set(again[1:]) & set(keys)


def test_flags_are_found_again_that_were_called_gates(config, quiet, tiny_llama, tmp_path, monkeypatch):
    """Without budgets gates are flags, in one folder the same cell; so were rows before flags had a name."""
    export.save(tmp_path / "gates", gates_for(tiny_llama()), base_model="tiny")
    path = tmp_path / "gates"
    before = compare(config(policies=["full", f"gates:{path}"], budgets=[]), quiet)
    assert before.results[1].summary.policy == f"ag.policy('gates:{path}')"
    monkeypatch.setattr("ag.model.base.load_base", None)
    now = compare(config(policies=["full", f"flags:{path}"], budgets=[]), quiet)
    assert now.results[1].summary.policy == f"ag.policy('flags:{path}')"
    assert now.results[1].scores == before.results[1].scores and now.results[1].is_gated and not now.hidden
    with refuses(UserError, "'ppl: a'", "'ppl: b'", "the same"):
        list_cells(config(policies=["full", f"a=flags:{path}", f"b=gates:{path}"], budgets=[]))


@pytest.mark.slow
def test_one_export_at_several_shares_under_labels(config, quiet, tiny_llama, tmp_path, capsys, monkeypatch):
    """Each label has its own share, row, samples and line; a new name computes nothing anew."""
    gates = gates_for(tiny_llama(), prefill="sparse", recent_tokens=2)
    gates.calibration = Calibration((0.1, 0.9), (5.0, -5.0))
    export.save(tmp_path / "deep" / "gates", gates, base_model="tiny")
    path = f"flags:{tmp_path / 'deep' / 'gates'}"

    def labelled(*names, **others):
        options = {name: {"share": share} for name, share in zip(names, (0.9, 0.1), strict=True)}
        return config(policies=["full", *(f"{n}={path}" for n in names)], policy_options=options, **others)

    comparison = compare(labelled("g90", "g10"), quiet)
    assert comparison.labels == [*comparison.named] == ["full", "g90", "g10"]
    kept = []
    for result, share in zip(comparison.results[1:], (0.9, 0.1), strict=True):
        alone = config(policies=["full", path], policy_options={path: {"share": share}}, output=str(tmp_path / "alone"))
        one = compare(alone, quiet).results[1]
        assert one.scores == result.scores
        assert result.summary.policy == f"ag.policy('{path}', share={share})" and result.paired.n == 6
        kept.append(result.summary.kept)
    assert kept[0] > kept[1] + 0.1
    table = tables(comparison.folder)
    assert f"- g10: `ag.policy('{path}', share=0.1)`" in table and table.count(path) == 2
    assert f"<code>ag.policy(&#39;{path}&#39;, share=0.1)" in (comparison.folder / "report.html").read_text()
    monkeypatch.setattr("ag.model.base.load_base", None)
    again = compare(labelled("high", "low", baseline="high"), quiet)
    assert again.labels == ["full", "high", "low"] and again.baseline == "high"
    assert [result.summary.mean for result in again.results] == [result.summary.mean for result in comparison.results]
    assert [result.paired is not None for result in again.results] == [True, False, False]  # low holds less than high
    shares = ["policy_options.high.share=0.9", "policy_options.low.share=0.1"]
    assert main([*words(config()), f"policies=[full,high={path},low={path}]", *shares, "baseline=high"]) == 0
    said = f"ppl: low holds {100 * kept[1]:.1f} %, high {100 * kept[0]:.1f} %"
    assert f"Not compared with each other, because they hold different shares: {said}\n" in capsys.readouterr().out
    listed = [f"policies=[full,a={path},b={path}]", "policy_options.b.share=0.3"]
    assert main([*words(config()), *listed, "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines() == ["ppl: full", "ppl: a", "ppl: b"]
    with refuses(UserError, "'ppl: a'", "'ppl: b'", "the same"):
        list_cells(config(policies=["full", f"a={path}", f"b={path}"]))


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"policies": ["full", "h20"]}, ("'h20'", "h2o?")),
        ({"policies": ["full", "h2o+caot"]}, ("'caot'", "caote?")),
        ({"tasks": ["bolq"]}, ("'bolq'", "boolq?")),
        ({"budgets": []}, ("'h2o'", "budgets=[...]")),
        ({"budgets": [-1]}, ("budget=-1",)),
        ({"policies": ["full", "gates"]}, ("'gates'", "gates:EXPORT")),
        ({"policies": ["full", "flags"]}, ("'flags'", "flags:EXPORT")),
        ({"policies": ["full", "gates:nowhere"]}, ("nowhere",)),
        ({"task_options": {"ppl": {"promt": 3}}}, ("'promt'", "prompt?")),
        ({"task_options": {"pl": {"prompt": 3}}}, ("task_options.pl", "tasks=", "ppl?")),
        ({"policy_options": {"h2": {"recent": 3}}}, ("policies=", "'h2'", "h2o?")),
        ({"policy_options": {"h2o": {"recnt": 3}}}, ("'recnt'", "recent?")),
        ({"roots": {"boolq": "x"}}, ("roots.boolq", "tasks=")),
        ({"budgets": [0.5, 0.5]}, ("policies=", "budgets=", "tasks=")),
        ({"schedule": "evry"}, ("schedule='evry'",)),
        ({"baseline": "snapkv"}, ("baseline=snapkv", "policies")),
        ({"task_options": {"ppl": {"question": "after"}}}, ("Task ppl", "question=after", "context")),
    ],
)
def test_mistakes_are_found_before_a_model_is_loaded(config, changes, parts):
    with refuses(UserError, *parts):
        list_cells(config(**changes))


def test_missing_data_and_an_unwritable_folder(config, quiet, tmp_path):
    with refuses(UserError, str(tmp_path / "nowhere")):
        compare(config(root=str(tmp_path / "nowhere")), quiet)
    (tmp_path / "file").write_text("")
    with refuses(UserError, str(tmp_path / "file" / "out")):
        compare(config(output=str(tmp_path / "file" / "out")), quiet)


def test_a_budgeted_baseline_is_met_at_the_same_budget(config, quiet, done):
    comparison = compare(config(baseline="h2o"), quiet)
    by_name = {result.name: result for result in comparison.results}
    assert by_name["full"].paired is None and by_name["h2o 0.5"].paired is None
    for budget in ("0.5", "0.25"):
        difference = by_name[f"tova {budget}"].summary.mean - by_name[f"h2o {budget}"].summary.mean
        assert by_name[f"tova {budget}"].paired.difference == pytest.approx(difference)


def test_the_command(config, tiny_folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    told = [
        *words(config(root=".")),
        f"roots.ppl={tiny_folder}",
        "budgets=[0.5]",
        "policy_options.h2o.recent=0.25",
    ]
    assert main([*told, "policies=[full,h2o]"]) == 0
    out = capsys.readouterr().out
    assert "h2o 0.5" in out and "to full" in out and out.rstrip().endswith("report.html")
    assert lines(config().output)[1]["policy"] == "ag.policy('h2o', budget=0.5, recent=0.25)"
    assert main([*told[:-1], "policies=[full,h2]"]) == 2
    assert "did you mean h2o?" in capsys.readouterr().err


def test_progress_tells_of_cells(config, monkeypatch):
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    compare(config(), console)
    shown = console.file.getvalue()
    assert "ppl: full and 4 more" in shown and re.search("0 of 5 cells, [0-6] of 6 samples", shown)


def test_progress_without_a_terminal_is_a_line_every_half_minute(quiet):
    """Three of eight cells are there at the start; two cells of 40 samples take a second a sample."""
    now = [0.0]
    progress = Progressing(quiet, 8, lambda: now[0])
    progress.cells(3)
    progress.begin("ppl: full", 2, 40)
    for _ in range(2 * 40):
        now[0] += 1
        progress.outcome()
    progress.cells(5)
    assert quiet.file.getvalue().splitlines() == [
        "3 of 8 cells, 15 of 40 samples, about 0:02:50 left (ppl: full and 1 more)",
        "3 of 8 cells, 30 of 40 samples, about 0:02:20 left (ppl: full and 1 more)",
    ]


def test_progress_waits_for_a_sample_of_every_cell_before_it_tells_a_time(quiet):
    now = [0.0]
    progress = Progressing(quiet, 2, lambda: now[0])
    progress.begin("worked: full", 2, 40)
    now[0] = 300.0  # 25 samples together
    progress.outcome()
    assert quiet.file.getvalue() == "0 of 2 cells, 0 of 40 samples (worked: full and 1 more)\n"
    for _ in range(49):
        progress.outcome()
    assert progress.said() == "0 of 2 cells, 25 of 40 samples, about 0:03:00 left"


def test_rows_of_earlier_commands_stay_and_are_named(config, quiet, done):
    fewer = compare(config(policies=["full", "h2o"], budgets=[0.5]), quiet)
    assert sorted(fewer.hidden) == ["ppl: h2o 0.25", "ppl: tova 0.25", "ppl: tova 0.5"]
    page = (fewer.folder / "report.html").read_text()
    assert "3 rows in this folder" in page and "tova 0.25" in page
    assert "3 rows of earlier commands" in quiet.file.getvalue()
    assert len(lines(config().output)) == 5
    assert compare(config(), quiet).hidden == []


def test_ctrl_c_says_what_is_left(config, quiet, monkeypatch):
    def stop(self, *_):
        raise KeyboardInterrupt

    compare(config(policies=["full"], budgets=[]), quiet)
    monkeypatch.setattr(work.Worker, "_run", stop)
    with refuses(KeyboardInterrupt, "1 of 5 cells", config().output, "the same command"):
        compare(config(), quiet)


def test_entries_go_into_what_a_recipe_says():
    words = {"recipe": "compare_small", "task_options.ppl.prompt": "256", "policy_options.gates:a/b.c/d.recent": "8"}
    config = resolve(CompareConfig, words | {"roots.boolq": "12"})
    assert config.task_options["ppl"] == {"prompt": 256, "continuation": 64}
    assert config.policy_options["gates:a/b.c/d"] == {"recent": 8}
    assert config.policy_options["snapkv"] == {"window": 8}
    assert config.roots == {"boolq": "12"}
    assert resolve(CompareConfig, {"recipe": "compare_small"}).task_options["ppl"]["prompt"] == 512
    with refuses(ConfigError, "task_options.ppl", "task_options.NAME.OPTION="):
        resolve(CompareConfig, {"task_options.ppl": "3"})
    with refuses(ConfigError, "root.boolq"):
        resolve(CompareConfig, {"root.boolq": "3"})


NEEDLES = {"needle_single": {"lengths": [300], "repeats": 2, "depths": [0.5]}}


@pytest.mark.slow
@pytest.mark.parametrize("question", ["after", "before"])
def test_nats_of_right_answers(config, quiet, question):
    options = {"needle_single": NEEDLES["needle_single"] | {"question": question}}
    comparison = compare(config(tasks=["needle_single"], task_options=options), quiet)
    for result in comparison.results:
        tags = [outcome.tags for outcome in result.outcomes]
        assert result.summary.nats == pytest.approx(sum(one["nats"] for one in tags) / 2)
        assert result.summary.hits == pytest.approx(sum(one["hits"] for one in tags) / 2)
        assert (result.summary.question, result.summary.floor) == (question, 0.1)
        assert result.nats[0] == result.summary.nats
    full, h2o = comparison.results[:2]
    assert full.paired_nats is None
    assert h2o.paired_nats.difference == pytest.approx(h2o.summary.nats - full.summary.nats)
    assert h2o.paired_nats.n == 2
    assert counted(comparison, "needle_single") == f"2 haystacks, left out: 0; question {question} eviction"
    remark = "not informative for this model: exact match 0.0000 with the full cache"
    assert comparison.uninformative("needle_single") == remark
    for file in ("report.html", "table.md"):
        assert remark in (comparison.folder / file).read_text()


def test_the_full_cache_is_measured_first(config):
    """Where questions are asked also when it is not listed."""
    listed = list_cells(config(policies=["h2o", "full"], tasks=["ppl", "needle_single"], task_options=NEEDLES))
    assert [cell.label for cell in listed] == ["full", "h2o", "h2o"] * 2
    left_out = config(policies=["h2o"], baseline="h2o", tasks=["ppl", "needle_single"], task_options=NEEDLES)
    assert [(cell.task.name, cell.label) for cell in list_cells(left_out)] == [
        *[("ppl", "h2o")] * 2,
        *[("needle_single", "full"), ("needle_single", "h2o"), ("needle_single", "h2o")],
    ]


def test_policies_beside_those_of_a_recipe(config):
    made = config(also=["snapkv"])
    assert made.policies == ["full", "h2o", "tova", "snapkv"]
    assert replace(made).policies == made.policies  # as when a dumped configuration is read

"""What eviction cannot change is no result: answers of one token that are predicted before anything is evicted."""

import copy
import json
import random
from pathlib import Path

import pytest

from ag.compare import main
from ag.evaluate.comparison.folder import Folder, Summary
from ag.evaluate.tasks import Outcome
from ag.gates import export
from tests.support.bounds import of_nats
from tests.support.gates_for import gates_for
from tests.support.refused import names

SAMPLES = 6
pytestmark = pytest.mark.usefixtures("no_charts")


@pytest.fixture
def folder(tmp_path, tiny_llama, tiny_tokenizer):
    """A model whose tokenizer has one token for " yes" and for " no", and rows of BoolQ and RTE."""
    rng = random.Random(0)

    def text(letters):
        return "".join(rng.choices("abcdefgh ", k=letters)).strip()

    words = copy.deepcopy(tiny_tokenizer)
    words.add_tokens([" yes", " no"])
    tiny_llama().save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    for name, rows in {
        "boolq": [{"passage": text(60), "question": text(12), "answer": bool(i % 2)} for i in range(SAMPLES)],
        "rte": [{"premise": text(60), "hypothesis": text(12), "label": i % 2} for i in range(SAMPLES)],
        "openbookqa": [
            {"question_stem": text(60), "choices": {"text": texts, "label": ["A", "B"]}, "answerKey": "A"}
            for texts in (["yes", "no"], ["no", "yes, now"])
        ],
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.fixture
def run(folder):
    """`run(words)`: the command's results by task and policy, rows with their samples."""

    def run(*words: str, output: str = "out") -> dict[tuple[str, str], tuple[Summary, list[Outcome]]]:
        status = main([f"model={folder}", f"root={folder}", f"output={folder / output}", *words])
        results = Folder(folder / output)
        rows = results.read().values()
        assert status == (2 if any(row.summary.problem for row in rows) else 0)
        return {(row.summary.task, row.summary.label): row[:2] for row in rows}

    return run


def nats(found):
    return [outcome.tags["nats"] for outcome in found[1]]


@pytest.mark.slow
def test_random_eviction_costs_something_on_boolq_and_rte(run, tiny_llama):
    found = run("policies=[full,random,h2o]", "budgets=[0.1]", "tasks=[rte,boolq]")
    for task in ("rte", "boolq"):
        full, others = nats(found[task, "full"]), (nats(found[task, "random"]), nats(found[task, "h2o"]))
        for other in others:
            assert max(abs(a - b) for a, b in zip(full, other, strict=True)) > of_nats(tiny_llama())
        assert others[0] != others[1]
        assert len(full) == SAMPLES and found[task, "full"][0].question == "after"


@pytest.mark.slow
def test_what_no_policy_can_change_is_refused(run, folder, capsys, tiny_llama):
    """Cell by cell, with the task, the policy and the fix; blocks and sparse gates change it, and the full cache is."""
    words = ("budgets=[0.1]", "tasks=[boolq]", "task_options.boolq.question=before")
    found = run("policies=[full,random]", *words)
    row = found["boolq", "random"][0]
    assert (row.mean, row.kept, row.n, row.untouched) == (None, None, 0, SAMPLES)
    names(row.problem, "boolq", "random 0.1", "task_options.boolq.question=after", "schedule=blocks:m")
    assert row.problem in capsys.readouterr().err.replace("\n", " ")
    assert (found["boolq", "full"][0].n, found["boolq", "full"][0].untouched) == (SAMPLES, 0)
    full = nats(found["boolq", "full"])
    blocks = run("policies=[full,random]", *words, "schedule=blocks:16", output="blocks")["boolq", "random"]
    assert blocks[0].prefill == "blocks" and blocks[0].untouched == 0
    assert max(abs(a - b) for a, b in zip(full, nats(blocks), strict=True)) > of_nats(tiny_llama())
    long = run("policies=[full,random]", *words, "schedule=blocks:500", output="long")["boolq", "random"][0]
    assert long.mean is None and long.untouched == SAMPLES  # no prompt is longer than a block
    assert row.problem in (folder / "out" / "table.md").read_text()


@pytest.mark.parametrize(("prefill", "untouched"), [("sparse", 0), ("dense", SAMPLES)])
def test_gates_under_which_prompts_are_read_are_not_refused(run, folder, tiny_llama, prefill, untouched):
    export.save(folder / "gates", gates_for(tiny_llama(), prefill=prefill, recent_tokens=2), base_model="tiny")
    words = ("tasks=[boolq]", "task_options.boolq.question=before")
    found = run(f"policies=[full,mine=flags:{folder / 'gates'}]", *words)["boolq", "mine"][0]
    assert (found.prefill, found.untouched, found.mean is None) == (prefill, untouched, bool(untouched))


def test_samples_that_no_policy_can_change_are_counted(run, folder):
    """Of two questions one has answers of one token only."""
    found = run("policies=[full,random]", "budgets=[0.1]", "tasks=[openbookqa]")
    assert {label: row.untouched for (_, label), (row, _) in found.items()} == {"full": 0, "random": 1}
    assert nats(found["openbookqa", "random"])[0] == nats(found["openbookqa", "full"])[0]
    said = "2 questions, left out: 0; question before eviction; 1 with answers of one token"
    for page in ("table.md", "report.html"):
        assert said in Path(folder / "out" / page).read_text()

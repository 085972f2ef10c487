"""Scores of responses after eviction, against ``by_hand`` forward passes, and the rows that a run has."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import ag
from ag import data
from ag.config import Config, DataConfig, ModelConfig
from ag.config.data import CutConfig
from ag.config.recipes import dump, load_config
from ag.data.rows import Answer, Row
from ag.errors import UserError
from ag.evaluate.tasks import Sample, make
from ag.evaluate.tasks.base import GENERATED
from ag.evaluate.tasks.responses import of_rows
from tests.support import by_hand
from tests.support.bounds import hold, of_nats
from tests.support.gates_for import gates_for
from tests.support.refused import refuses


def test_question_after_the_prompt(tiny_llama):
    """It is read when the prompt was evicted, nothing of it is evicted, and it does not count."""
    model = tiny_llama()
    gates = gates_for(model)
    ag.attach(model, gates)
    rows = [
        Row(np.arange(5, 25) + choice, 12, Answer(0, choice, 1), np.arange(20) >= 17 - choice) for choice in range(2)
    ]
    sample = of_rows("0", rows)
    assert sample.prompt == [*range(6, 18)] and sample.question == [*range(18, 22)]
    assert sample.answers == [[22, 23, 24], [22, 23, 24, 25]] and sample.target == 1
    [(_, outcome)] = make("responses").run(model, None, [ag.policy("gates")], [sample])
    sums = []
    for answer in sample.answers:
        tokens = torch.tensor(sample.prompt + sample.question + answer)
        logits, _ = by_hand.forward(model, gates, tokens, 12)
        sums.append(-float(logits[15:-1].log_softmax(-1).gather(1, tokens[16:, None]).sum()))
    hold(outcome.score, sums[1] / 4, of_nats(model))
    assert (outcome.tags["tokens"], outcome.tags["accuracy"]) == (4, float(sums[1] < sums[0]))
    assert outcome.tags["kl"] > 0 and outcome.tokens == 12 and outcome.kept < 0.95


PIQA = [{"goal": "x" * (4 * i + 4), "sol1": f"yes {i}", "sol2": "no" + "y" * i, "label": i % 2} for i in range(6)]
CORPUS = [{"text": "ab cd " * (8 + i)} for i in range(5)]
KINDS = {
    "sft": DataConfig(kind="sft", name="piqa", max_length=40, prompt_max=20, continuation=9, val_samples=5),
    "text": DataConfig(kind="text", name="corpus", prompt_min=20, prompt_max=44, continuation=6, val_samples=3),
    "facts": DataConfig(prompt_min=20, prompt_max=30, val_samples=4),
}

PAIRS = {name: getattr(CutConfig, name) for name in ("prompt_max", "continuation")}  # rows of pairs are not cut


@pytest.fixture
def run(write, tmp_path):
    """`run(kind)`: the folder of a run on such data."""

    def make_run(kind, **changes):
        for split in ("train", "validation"):
            write(f"data/piqa/{split}", PIQA)
            write(f"data/corpus/{split}", [{"text": "short"}, *CORPUS])
        own = ({} if kind == "facts" else {"root": str(tmp_path / "data")}) | changes
        config = Config(model=ModelConfig(name="none"), data=replace(KINDS[kind], **own), seed=3)
        folder = tmp_path / kind
        folder.mkdir(exist_ok=True)
        (folder / "config.yaml").write_text(dump(config))
        return str(folder)

    return make_run


@pytest.mark.parametrize("kind", KINDS)
def test_the_rows_are_those_that_the_run_was_validated_on(run, tiny_tokenizer, kind):
    folder = run(kind)
    loaded = make("responses", run_folder=folder).load(tiny_tokenizer, None, 512)
    config = load_config(Path(folder) / "config.yaml", Config)
    groups = data.read(config.data, config.seed, tiny_tokenizer, 512).validation
    assert len(loaded.samples) == len(groups) == config.data.val_samples
    for sample, group in zip(loaded.samples, groups, strict=True):
        assert sample.prompt == min((row.tokens[: row.prompt_length].tolist() for row in group), key=len)
        assert sample.answers == [row.tokens[row.prompt_length :].tolist() for row in group]
        assert sample.target == (0 if group[0].answer is None else group[0].answer.target)
    if kind == "sft":  # rows of 40: goals lose their left part, more of it before the longer answer
        lengths = [len(sample.prompt) + max(map(len, sample.answers)) for sample in loaded.samples]
        whole = [len(f"Goal: {row['goal']}\nSolution: {max(row['sol1'], row['sol2'], key=len)}") for row in PIQA]
        assert lengths == [min(40, length) for length in whole[:5]] and lengths[0] < 40
    assert len(make("responses", run_folder=folder).load(tiny_tokenizer, 2, 512).samples) == 2
    assert (loaded.too_long, loaded.too_short) == (0, kind == "text")


@pytest.mark.parametrize("kind", ["sft", "text"])
def test_rows_that_a_run_trains_on_are_refused(run, tiny_tokenizer, write, tmp_path, kind):
    """Without a validation split the run's number says which rows are held out; fewer of them are fine."""
    rows = CORPUS if kind == "text" else [{"prompt": f"abc {i}", "response": f"xyz {i}"} for i in range(6)]
    root, changes = write("mine/train", rows), {} if kind == "text" else PAIRS
    task = make("responses", run_folder=run(kind, root=root, name="mine", val_samples=2, **changes))
    assert [len(task.load(tiny_tokenizer, limit, 512).samples) for limit in (None, 1, 2)] == [2, 1, 2]
    with refuses(UserError, "samples=3", "data.val_samples", "at most 2", "samples=2"):
        task.load(tiny_tokenizer, 3, 512)


def test_a_run_whose_questions_come_after(run, tiny_tokenizer):
    found = {}
    for when, said in (("after", "after"), ("before", None)):
        task = make("responses", run_folder=run("facts", question=when))
        assert task.question == said
        found[when] = task.load(tiny_tokenizer, None, 512).samples
    old, new = found["before"], found["after"]
    assert [sample.prompt + sample.question for sample in new] == [sample.prompt for sample in old]
    assert all("Question:" in tiny_tokenizer.decode(sample.question) for sample in new)
    assert [sample.answers for sample in new] == [sample.answers for sample in old]
    short, long = [[7], [8]], [[7], [8, 9]]
    assert [task.reads_on(Sample("0", [5, 6], answers=case)) for case in (short, long)] == [False, True]
    assert task.reads_on(Sample("0", [5], answers=short, question=[6]))


def test_rows_without_room_for_a_prompt_are_too_long(run, tiny_tokenizer, tmp_path, write):
    write("mine/validation", [{"prompt": "ab", "response": text} for text in ("yes", "y" * 50)])
    root = write("mine/train", [{"prompt": "ab", "response": "yes"}])
    task = make("responses", run_folder=run("sft", root=root, name="mine", **PAIRS))
    loaded = task.load(tiny_tokenizer, None, 40)
    assert (len(loaded.samples), loaded.too_long, loaded.too_short) == (1, 1, 0)


def test_the_source_is_that_of_the_runs_rows(run, tmp_path):
    """The task has no root of its own."""
    assert make("responses", run_folder=run("text")).source == str(tmp_path / "data")
    assert make("responses", run_folder=run("facts")).source == GENERATED


def test_lengths_of_plain_documents_can_be_given(run, tiny_tokenizer, write):
    for where in ({"run_folder": run("text")}, {"root": write("documents/train", CORPUS)}):
        write("documents/validation", CORPUS)
        samples = make("responses", **where, prompt=24, continuation=9).load(tiny_tokenizer, 3, 512).samples
        assert [(len(sample.prompt), len(sample.target_tokens)) for sample in samples] == [(24, 9)] * 3


def test_the_identity_is_that_of_the_data(run, tmp_path):
    folder = run("text")
    before = make("responses", run_folder=folder).identity()
    moved = Path(folder).rename(tmp_path / "moved")
    assert make("responses", run_folder=str(moved)).identity() == before
    assert make("responses", run_folder=str(moved), prompt=31).identity() != before
    assert make("responses", run_folder=run("text", prompt_max=31)).identity() != before


def test_mistakes(run, tiny_tokenizer):
    for options, *parts in (
        ({"run_folder": "nowhere"}, "nowhere"),
        ({"run_folder": 3}, "run_folder=3"),
        ({"run_folder": run("text", packing="packed")}, "text", "root=FOLDER"),
        ({"run_folder": run("sft"), "prompt": 8}, "prompt=8", "data.kind=sft", "leave both out"),
    ):
        with refuses(UserError, *parts):
            make("responses", **options)
    with refuses(UserError, "task_options.responses.run_folder=RUN"):
        make("responses").load(tiny_tokenizer, None, 512)

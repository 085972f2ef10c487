"""When a question is read, and the NLL of the right answer."""

import copy
from dataclasses import replace

import pytest
import torch

import ag
from ag.evaluate.tasks import GROUPS, make
from ag.evaluate.tasks.questions import num_blank_tokens
from ag.gates import export
from tests.support.bounds import hold, of_nats
from tests.support.gates_for import gates_for

PASSAGE = "The river is long. It ends in the sea, and many boats go down it to the old town."
BOOLQ = [{"passage": PASSAGE, "question": f"is it long {i}", "answer": bool(i % 2)} for i in range(2)]
NEEDLES = {"lengths": [300], "repeats": 1}


@pytest.fixture
def root(write):
    write("pg19_style/test", [{"text": "A short line. " * 90}])
    row = {"input": "Who?", "context": PASSAGE, "answers": ["Bob", "Al"], "length": 3, "all_classes": None}
    write("longbench/hotpotqa", [row])
    return write("boolq/validation", BOOLQ)


@pytest.mark.parametrize(("name", "options"), [("needle_books_1", NEEDLES), ("boolq", {}), ("hotpotqa", {})])
def test_asking_after_is_asking_before_where_nothing_is_evicted(name, options, root, tiny_llama, tiny_tokenizer):
    model, tags = tiny_llama(), {}
    for question in ("after", "before"):
        task = make(name, root, question=question, **options)
        samples = task.load(tiny_tokenizer, None, 512).samples[:1]
        tags[question] = [
            outcome.tags for _, outcome in task.run(model, tiny_tokenizer, ["full", ag.policy("h2o", 0.5)], samples)
        ]
        tags[question].append(samples[0])
    (full, evicted, asked), (known, seen, told) = tags["after"], tags["before"]
    assert asked.question and not told.question and asked.prompt + asked.question == told.prompt
    hold(full["nats"], known["nats"], of_nats(model))
    assert full.get("answer") == known.get("answer")
    assert abs(evicted["nats"] - seen["nats"]) > of_nats(model)  # the policy sees the question in one of them only


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["h2o", "gates"])
def test_nats_and_hits_by_hand(policy, root, tiny_llama, tiny_tokenizer, step_by_step, tmp_path):
    """Token by token after prompt and question; the likelier of two answers counts, without its blank."""
    model, task = tiny_llama(), make("hotpotqa", root)
    [sample] = task.load(tiny_tokenizer, None, 512).samples
    assert [tiny_tokenizer.decode(answer) for answer in sample.answers] == [" Bob", " Al"]
    if policy.startswith("gates"):
        export.save(tmp_path / "gates", gates_for(model, prefill="sparse"), base_model="tiny")
        policy = f"gates:{tmp_path / 'gates'}"
    made = ag.policy(policy, 0.5 if policy == "h2o" else None)
    [(_, outcome)] = task.run(model, tiny_tokenizer, [made], [replace(sample, max_new_tokens=1)])
    by_hand = []
    for answer in sample.answers:
        cache = ag.EvictionCache(model, made)
        nats = step_by_step(model, cache, sample.prompt, sample.question + answer)[len(sample.question) :]
        by_hand.append(-float(nats[1:].mean()))
    hold(outcome.tags["nats"], min(by_hand), of_nats(model))
    assert outcome.tags["hits"] == 0.0


def test_hits_and_the_score_of_exact_needles(root, tiny_llama, tiny_tokenizer):
    """With the model's own greedy answer as the right one every token is the likeliest; with another last one not."""
    model = tiny_llama()
    task = make("needle_books_1", root, **NEEDLES)
    [sample] = task.load(tiny_tokenizer, None, 512).samples
    whole = torch.tensor([sample.prompt + sample.question])
    said = model.generate(whole, max_new_tokens=6, do_sample=False)[0, whole.shape[1] :].tolist()
    wrong = [*said[:-1], (said[-1] + 1) % 90 + 5]
    for right, expected in ((said, 1.0), (wrong, 0.0)):
        [(_, outcome)] = task.run(model, tiny_tokenizer, [ag.policy("full")], [replace(sample, answers=[right])])
        assert outcome.score == outcome.tags["hits"] == expected
        assert "answer" not in outcome.tags


def test_blanks_before_an_answer(tiny_tokenizer):
    found = [num_blank_tokens(tiny_tokenizer, tiny_tokenizer(text)["input_ids"]) for text in ("  12 3", "12", "  ")]
    assert found == [2, 0, 1]  # something is left


def test_floors(root, tiny_tokenizer):
    floors = {"needle_single": 0.1, "worked": 0.1, "instructions_4": 0.5, "ppl": None}
    assert {name: make(name).floor([]) for name in floors} == floors
    task = make("boolq", root)
    assert task.floor(task.load(tiny_tokenizer, None, 512).samples) == 0.5 and task.floor([]) is None


def test_answers_of_one_token_are_asked_after_eviction(root, write, tiny_llama, tiny_tokenizer):
    """By default; `before` cannot change them, and the other tasks have nothing to ask after."""
    assert {name: make(name).question for name in GROUPS["multiple_choice"]} == {
        **dict.fromkeys(("boolq", "rte", "mmlu"), "after"),
        **dict.fromkeys(("piqa", "arc_challenge", "arc_easy", "copa", "openbookqa", "hellaswag"), "before"),
    }
    words = copy.deepcopy(tiny_tokenizer)
    words.add_tokens([" yes", " no", " ice"])
    long = {"choices": {"text": ["ice", "fire"], "label": ["A", "B"]}, "answerKey": "B"}
    short = {"choices": {"text": ["ice", "yes"], "label": ["A", "B"]}, "answerKey": "B"}
    write("openbookqa/validation", [long | {"question_stem": "It burns"}, short | {"question_stem": "It is"}])
    model, policies = tiny_llama(), [ag.policy("full"), ag.policy("random", 1)]
    for task, expected in (
        (make("boolq", root), [True] * 2),
        (make("boolq", root, question="before"), [False] * 2),
        (make("openbookqa", root), [True, False]),  # " fire" has several tokens
        (make("needle_books_1", root, question="before", **NEEDLES), [True]),
    ):
        samples = task.load(words, None, 512).samples
        assert [task.reads_on(sample) for sample in samples] == expected
        for sample, touched in zip(samples, expected, strict=True):
            full, evicted = (outcome.tags["nats"] for _, outcome in task.run(model, words, policies, [sample]))
            assert (full != evicted) == touched  # other states, or the very same
    for continuation, touched in ((2, True), (1, False)):
        task = make("ppl", root, data="pg19_style", prompt=9, continuation=continuation)
        assert [task.reads_on(sample) for sample in task.load(words, None, 512).samples] == [touched]


def test_the_identity_names_the_question_where_there_is_a_choice():
    assert "question" not in make("piqa").identity()
    for question in ("after", "before"):
        assert make("boolq", question=question).identity()["question"] == question
    assert {make(name).identity()["question"] for name in (*GROUPS["needle"], *GROUPS["ruler"])} == {"after"}

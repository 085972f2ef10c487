"""When a question is read, and how likely the right answer is."""

import copy
from dataclasses import replace

import pytest
import torch

import ag
from ag.errors import UserError
from ag.evaluate.tasks import GROUPS, make
from ag.evaluate.tasks.follow import feed
from ag.evaluate.tasks.questions import blanks
from ag.gates import export
from ag.model.hooks import lm_logits
from tests.support.bounds import hold, of_logits, of_nats
from tests.support.gates_for import gates_for

PASSAGE = "The river is long. It ends in the sea, and many boats go down it to the old town."
BOOLQ = [{"passage": PASSAGE, "question": f"is it long {i}", "answer": bool(i % 2)} for i in range(3)]
RTE = [{"premise": PASSAGE, "hypothesis": "It is long.", "label": 0}]
KINDS = ["needle_single", "needle_books_1", "passkey", "needle_variables", "boolq", "rte", "hotpotqa"]


@pytest.fixture
def root(write):
    write("pg19_style/test", [{"text": "A short line. " * 90}])
    write("rte/validation", RTE)
    row = {"input": "Who?", "context": PASSAGE, "answers": ["Bob", "Al"], "length": 3, "all_classes": None}
    write("longbench/hotpotqa", [row])
    return write("boolq/validation", BOOLQ)


def options(name):
    if name in ("boolq", "rte", "hotpotqa"):
        return {}
    depths = {"depths": [0.5]} if name == "needle_single" else {}
    return {"lengths": [400 if name == "needle_variables" else 300], "repeats": 1} | depths


def both(name, root, tokenizer, **more):
    made = [make(name, root, **options(name), question=question, **more) for question in ("after", "before")]
    return [(task, task.load(tokenizer, 2, 512).samples) for task in made]


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_asking_after_is_asking_before_where_nothing_is_evicted(name, root, tiny_llama, tiny_tokenizer):
    model = tiny_llama()
    (after, asked), (before, told) = both(name, root, tiny_tokenizer)
    policies = [ag.policy("full"), ag.policy("h2o", 0.5)]
    outcomes = [
        [outcome for index, outcome in task.run(model, tiny_tokenizer, policies, samples) if index == policy]
        for task, samples in ((after, asked), (before, told))
        for policy in (0, 1)
    ]
    for one, two in zip(asked, told, strict=True):
        assert one.question and not two.question
        assert one.prompt + one.question == two.prompt
        with torch.no_grad():
            cache = ag.EvictionCache(model, "full")
            model(torch.tensor([one.prompt]), past_key_values=cache)
            last = feed(model, cache, torch.tensor([one.question]))[:, -1]
            plain = model(torch.tensor([two.prompt]), use_cache=False).logits[:, -1]
        hold(lm_logits(model, last), plain, of_logits(model))
    for one, two in zip(outcomes[0], outcomes[2], strict=True):
        assert one.score == two.score
        hold(one.tags["nats"], two.tags["nats"], of_nats(model))
        assert one.tags.get("answer") == two.tags.get("answer")
    changed = [abs(x.tags["nats"] - y.tags["nats"]) for x, y in zip(outcomes[1], outcomes[3], strict=True)]
    assert max(changed) > of_nats(model)  # the policy sees the question in one of them only


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["full", "h2o", "gates", "gates@heads"])
def test_nats_and_hits_by_hand(policy, root, tiny_llama, tiny_tokenizer, step_by_step, tmp_path):
    """Token by token after prompt and question; the best of two answers counts, without its blank."""
    model = tiny_llama()
    task = make("hotpotqa", root)
    [sample] = task.load(tiny_tokenizer, None, 512).samples
    assert [tiny_tokenizer.decode(answer) for answer in sample.right] == [" Bob", " Al"]
    if policy.startswith("gates"):
        gates = gates_for(model, prefill="dense" if "@" in policy else "sparse")
        export.save(tmp_path / "gates", gates, base_model="tiny")
        policy = policy.replace("gates", f"gates:{tmp_path / 'gates'}")
    made = ag.policy(policy, 0.5 if policy == "h2o" or "@" in policy else None)
    [(_, outcome)] = task.run(model, tiny_tokenizer, [made], [sample])
    by_hand = []
    for answer in sample.right:
        cache = ag.EvictionCache(model, made)
        rest = sample.question + answer
        nats = step_by_step(model, cache, sample.prompt, rest)[len(sample.question) :]
        by_hand.append(-float(nats[1:].mean()))
    hold(outcome.tags["nats"], min(by_hand), of_nats(model))
    assert outcome.tags["hits"] == 0.0


def test_hits_and_the_score_of_exact_needles(root, tiny_llama, tiny_tokenizer):
    """With the model's own greedy answer as the right one every token is the likeliest; with another last one not."""
    model = tiny_llama()
    task = make("needle_books_1", root, lengths=[300], repeats=1)
    [sample] = task.load(tiny_tokenizer, None, 512).samples
    whole = torch.tensor([sample.prompt + sample.question])
    said = model.generate(whole, max_new_tokens=6, do_sample=False)[0, whole.shape[1] :].tolist()
    wrong = [*said[:-1], (said[-1] + 1) % 90 + 5]
    for right, expected in ((said, 1.0), (wrong, 0.0)):
        [(_, outcome)] = task.run(model, tiny_tokenizer, [ag.policy("full")], [replace(sample, right=[right])])
        assert outcome.score == outcome.tags["hits"] == expected
        assert "answer" not in outcome.tags


@pytest.mark.slow
def test_copies_of_the_cache_leave_generation_alone(root, tiny_llama, tiny_tokenizer):
    """Scoring right answers first changes nothing of what the model then says."""
    model = tiny_llama()
    task = make("needle_single", lengths=[300], depths=[0.5], repeats=1)
    [sample] = task.load(tiny_tokenizer, None, 512).samples
    policies = [ag.policy("h2o", 0.5, "every"), ag.policy("snapkv", 0.5)]
    scored = [outcome for _, outcome in task.run(model, tiny_tokenizer, policies, [sample])]
    alone = [outcome for _, outcome in task.run(model, tiny_tokenizer, policies, [replace(sample, right=[])])]
    assert [outcome.tags["answer"] for outcome in scored] == [outcome.tags["answer"] for outcome in alone]
    assert all("nats" not in outcome.tags for outcome in alone)


def test_blanks_before_an_answer(tiny_tokenizer):
    assert blanks(tiny_tokenizer, tiny_tokenizer("  12 3")["input_ids"]) == 2
    assert blanks(tiny_tokenizer, tiny_tokenizer("12")["input_ids"]) == 0
    assert blanks(tiny_tokenizer, tiny_tokenizer("  ")["input_ids"]) == 1  # something is left


def test_floors(root, tiny_tokenizer):
    assert make("needle_single").floor([]) == 0.1
    assert make("ppl").floor([]) is None
    task = make("boolq", root)
    assert task.floor(task.load(tiny_tokenizer, None, 512).samples) == 0.5
    assert task.floor([]) is None


def test_tasks_without_a_question_refuse(root):
    with pytest.raises(UserError, match="Task piqa: question=after needs a context .* this task has none"):
        make("piqa", question="after")
    for name in ("ppl", "ppl_stream", "responses"):
        with pytest.raises(UserError, match=f"Task {name}: question=after needs a context .* this task has none"):
            make(name, question="after")
    with pytest.raises(UserError, match="question='late': expected after or before"):
        make("boolq", question="late")


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
    for task, expected in (
        (make("boolq", root), [True] * 3),
        (make("boolq", root, question="before"), [False] * 3),
        (make("openbookqa", root), [True, False]),  # " fire" has several tokens
        (make("ppl", str(root), data="pg19_style", prompt=9, continuation=2), [True]),
        (make("ppl", str(root), data="pg19_style", prompt=9, continuation=1), [False]),
        (make("needle_books_1", root, lengths=[300], repeats=1, question="before"), [True]),
    ):
        samples = task.load(words, None, 512).samples
        assert [task.reads_on(sample) for sample in samples] == expected
        if task.name == "ppl":
            continue
        model = tiny_llama()
        for sample, touched in zip(samples, expected, strict=True):
            nats = [
                outcome.tags["nats"]
                for _, outcome in task.run(model, words, [ag.policy("full"), ag.policy("random", 1)], [sample])
            ]
            assert (nats[0] != nats[1]) == touched  # the very states, or others


def test_cells_of_earlier_versions_stay_valid():
    """But those of tasks with a context, which may have been answered before anything was evicted."""
    assert "question" not in make("piqa").identity()
    for question in ("after", "before"):
        assert make("boolq", question=question).identity()["question"] == question
    for name in (*GROUPS["needle"], *GROUPS["ruler"], *GROUPS["longbench"]):
        assert make(name).identity()["question"] == "after"

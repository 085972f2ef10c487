"""Worked problems, solved again from their prompts by programs that share nothing with the generators."""

import hashlib
import itertools
import re

import numpy as np
import pytest
from transformers import AutoTokenizer

import ag.data
from ag.config import DataConfig
from ag.data import DataError
from ag.data.problems import answer_of, encode, generate
from tests.support.refused import refuses

PROBLEMS = {
    kind: [generate(0, "train", i, 120, 400, kind) for i in range(60)] for kind in ("addition", "sorting", "variables")
}


def each(kind):
    for problem in PROBLEMS[kind] if kind in PROBLEMS else [generate(0, "train", i, 80, 220, kind) for i in range(12)]:
        *steps, answer = problem.solution.split("\n")
        assert answer == f"Answer: {problem.answer}" and problem.prompt.endswith("\nSolution:")
        yield problem.prompt.removesuffix("\nSolution:"), steps, problem.answer


def test_sums():
    for prompt, [steps], answer in each("addition"):
        columns = [part[1:].split("+") for part in prompt.removeprefix("Add: ").split()]
        numbers = [int("".join(reversed(digits))) for digits in zip(*columns, strict=True)]
        assert len(numbers) >= 2 and all(len(column) == len(numbers) for column in columns)
        assert "".join(re.findall(r"\d", answer)) == str(sum(numbers)).zfill(len(columns))
        assert re.findall("[A-Z]", answer) == sorted(re.findall("[A-Z]", answer), reverse=True)
        carried = 0
        for place, letter, summands, total, name, digit in re.findall(r"((\w)([\d+]+)=(\d\d)) (\w)(\d)", steps):
            assert place.startswith(letter) and name == letter.upper()
            *own, carry = [int(x) for x in summands.split("+")]
            assert own == [int(x) for x in columns[ord(letter) - ord("a")]]
            assert (carry, int(total)) == (carried, sum(own) + carry)
            assert int(digit) == int(total) % 10
            carried = int(total) // 10
        assert carried == 0 and steps.count("=") == len(columns)


def test_sorted_lists():
    for prompt, steps, answer in each("sorting"):
        items = prompt.removeprefix("Sort: ").split()
        assert len(set(items)) == len(items) == len(steps)
        assert answer.split() == sorted(items, key=int)
        for done, (item, step) in enumerate(zip(items, steps, strict=True), 1):
            assert step == f"{item}: {' '.join(sorted(items[:done], key=int))}"


def test_programs():
    overwritten = 0
    for prompt, steps, answer in each("variables"):
        lines, holds = prompt.removeprefix("Run:\n").split("\n"), {}
        assert len(lines) == len(steps)
        for line, step in zip(lines, steps, strict=True):
            target, expression = re.fullmatch(r"\d\d (\w)=(\S+)", line).groups()
            before = [f"{name.upper()}{holds[name]}" for name in re.findall("[a-z]", expression)]
            overwritten += target in holds
            holds[target] = eval(expression, {}, holds) % 10  # text of this test's own generator
            assert step == f"{line}: {' '.join([*before, f'{target.upper()}{holds[target]}'])}"
        assert answer == " ".join(f"{name.upper()}{holds[name]}" for name in sorted(holds))
        assert [line.split()[0] for line in lines] == [str(10 + i) for i in range(len(lines))]
    assert overwritten > 300


def test_chain_sums():
    for prompt, steps, answer in each("chain_sum"):
        expression = re.fullmatch(r"State .*: ([-+ \d]+) =", prompt)[1]
        terms = [int(sign + number) for sign, number in re.findall(r"([-+]?) ?(\d+)", expression)]
        assert len(steps) == len(terms) >= 3 and answer == str(sum(terms))
        assert steps[0] == str(terms[0])
        for done, (term, step) in enumerate(zip(terms[1:], steps[1:], strict=True), 1):
            asked, _, work = step.partition(": ")
            assert int(asked.replace(" ", "")) == term
            totals = [int(x) for x in re.findall(r"(?:^|=)(-?\d+)", work)]
            parts = [int(x) for x in re.findall(r"(?<=\d)([-+]\d+)(?==)", work)]
            assert (totals[0], totals[-1]) == (sum(terms[:done]), sum(terms[: done + 1]))
            assert [later - earlier for earlier, later in itertools.pairwise(totals)] == parts and sum(parts) == term


def test_no_problem_is_in_two_splits():
    """Of lists of two numbers, which are so few that two seeds draw some of them twice."""
    drawn = {
        (split, seed): {generate(seed, split, i, 20, 20, "sorting").prompt for i in range(300)}
        for split in ("train", "validation", "test")
        for seed in (0, 1)
    }
    assert drawn["test", 0] & drawn["test", 1]
    for (one, first), (other, second) in itertools.combinations(drawn.items(), 2):
        assert one[0] == other[0] or not first & second


@pytest.mark.parametrize(
    ("text", "answer"),
    [("10: 10\nAnswer: 10 11", "10 11"), ("Answer: 1\nAnswer:  2 \nmore", "2"), ("10: 10", ""), ("Answer:", "")],
)
def test_answer_of_a_text(text, answer):
    assert answer_of(text) == answer


def test_golden_rows():
    """The generator must not change under a recipe or a comparison that names a seed."""
    texts = "".join(f"{p.prompt} {p.solution}" for problems in PROBLEMS.values() for p in problems)
    assert hashlib.sha256(texts.encode()).hexdigest()[:16] == "732092846c80101b"


def test_lengths_in_tokens(smollm2):
    """Whole steps: at most what was asked for, and less by at most one step; a sorting's step is its list."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    for kind, step in {"addition": 18, "sorting": 75, "variables": 15}.items():
        for tokens in (120, 200, 320, 440, *(() if kind == "addition" else (620, 800))):
            rows = encode(tokenizer, [generate(3, "test", i, tokens, tokens, kind) for i in range(8)], 2048)
            lengths = [len(row.tokens) - row.prompt_length for row in rows]
            assert tokens - step < min(lengths) <= max(lengths) <= tokens, (kind, tokens)


def test_data_module(make_config, tokenizer):
    sizes = {"train_samples": 12, "val_samples": 5, "batch_size": 4, "val_batch_size": 5, "max_length": 1024}
    config = make_config(kind="worked", name="worked", solution_min=60, solution_max=90, **sizes)
    module = ag.data.build(config.data, config.seed, tokenizer, 4096)
    assert len(module.train_rows) == 12 and len(module.val_rows) == 5
    batch = next(iter(module.val_dataloader()))
    assert "question" not in batch
    for i in range(5):
        problem = generate(config.seed, "validation", i, 60, 90)
        ids, labels = batch["input_ids"][i][batch["attention_mask"][i]], batch["labels"][i]
        length = int(batch["prompt_length"][i])
        assert tokenizer.decode(ids[:length]) == problem.prompt
        assert tokenizer.decode(labels[labels >= 0]) == f" {problem.solution}{tokenizer.eos_token}"
        assert (labels[:length] == -100).all()
        assert int(ids[-1]) == tokenizer.eos_token_id and np.count_nonzero(ids == tokenizer.eos_token_id) == 1


def test_a_problem_that_does_not_fit(make_config, tokenizer):
    sizes = {"train_samples": 2, "val_samples": 2, "solution_min": 60, "solution_max": 110}
    config = make_config(kind="worked", name="variables", max_length=2048, **sizes)
    with refuses(DataError, "more than a row of 50", "data.max_length", "data.solution_max"):
        ag.data.build(config.data, config.seed, tokenizer, 50)


def test_unknown_names():
    for kind, name, named in (("sft", "bolq", "boolq?"), ("worked", "facts", "addition")):
        with refuses(DataError, f"data.name={name}", named):
            ag.data.check(DataConfig(kind=kind, name=name))

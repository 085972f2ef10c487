"""Problems of reasoning-gym: their solutions worked out again, what counts as right, and what training may see."""

import importlib.metadata
import itertools
import re
import sys
from fractions import Fraction

import pytest

import ag.data
from ag.config import DataConfig
from ag.data import DataError, reasoning
from ag.data.problems import GROUPS, generate
from ag.evaluate.tasks import make
from tests.support.refused import refuses


def some(kind, many=12):
    for i in range(many):
        problem = generate(0, "train", i, 80, 220, kind)
        *steps, answer = problem.solution.split("\n")
        assert answer == f"Answer: {problem.answer}" and problem.prompt.endswith("\nSolution:")
        assert problem.kind == kind and problem.answer == problem.entry["answer"]
        yield problem.prompt, steps, problem.answer


def test_chain_sums():
    for prompt, steps, answer in some("chain_sum"):
        expression = re.fullmatch(r"State .*: ([-+ \d]+) =\nSolution:", prompt)[1]
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


def test_number_sorting():
    directions = set()
    for prompt, steps, answer in some("number_sorting"):
        direction, listed = re.match(r"Sort these numbers in (\w+) order: (.*)", prompt).groups()
        numbers, down = listed.split(", "), direction == "descending"
        assert len(numbers) == len(steps) >= 3
        for done, (number, step) in enumerate(zip(numbers, steps, strict=True), 1):
            assert step == f"{number}: {' '.join(sorted(numbers[:done], key=Fraction, reverse=down))}"
        assert answer == str(sorted(numbers, key=Fraction, reverse=down))
        directions.add(direction)
    assert directions == {"ascending", "descending"}


def test_number_sequences():
    for prompt, steps, answer in some("number_sequence"):
        shown = [int(x) for x in prompt.partition(", ?")[0].split(", ")]
        assert steps[0] == "Differences: " + " ".join(str(b - a) for a, b in itertools.pairwise(shown))
        assert steps[1].startswith("Rule: ") and len(steps) == 2 and re.fullmatch(r"-?\d+", answer)


def exactly(expression):
    """Work out text of this file's problems in fractions."""
    return eval(re.sub(r"\d+", r"Fraction(\g<0>)", expression), {"Fraction": Fraction})


@pytest.mark.slow
def test_countdowns():
    for prompt, steps, answer in some("countdown", 5):
        assert sorted(re.findall(r"\d+", answer)) == sorted(re.search(r"numbers:? ([\d, ]+\d)", prompt)[1].split(", "))
        assert exactly(answer) == int(re.search(r"(?:equals|make|Calculate) (\d+)", prompt)[1])
        for step in steps:
            operation, result = step.split(" = ")
            assert exactly(operation) == exactly(result)
        assert exactly(steps[-1].split(" = ")[1]) == exactly(answer)


def test_knights_and_knaves():
    def true(claim, case):
        kind, *of = claim
        if kind in ("telling-truth", "lying"):
            return case[of[0]] == (kind == "telling-truth")
        values = [true(part, case) for part in of]
        one, other = values[0], values[-1]
        return {
            "not": not one, "and": all(values), "or": any(values), "->": other or not one, "<=>": one == other
        }[kind]  # fmt: skip

    for i in range(12):
        problem = generate(0, "train", i, 200, 300, "knights_knaves")
        about = problem.entry["metadata"]
        names, terms = about["names"], about["knight_knave_terms"]
        cases = list(itertools.product([True, False], repeat=len(names)))
        said = {case: tuple(true(claim, case) for claim in about["statements"]) for case in cases}
        [right] = [case for case in cases if said[case] == case]
        lines = problem.solution.split("\n")[:-1]
        assert len(lines) == cases.index(right) + 1
        for case, line in zip(cases, lines, strict=False):
            roles, truths, verdict = line.split(": ")
            assert [role.split()[1] == terms["knight"] for role in roles.split(", ")] == list(case)
            assert truths == " ".join(map(str, said[case])).lower()
            assert verdict == ("yes" if case == right else "no")
        assert re.findall(rf"{terms['knight']}|{terms['knave']}", problem.answer) == [
            terms["knight" if honest else "knave"] for honest in right
        ]


def entry(answer, **metadata):
    return {"answer": answer, "metadata": metadata}


COUNTDOWN = entry("94*4 - 61 - 6", numbers=[6, 61, 94, 4], target=309)
LIST = entry("['18.2', '32.6']", direction="ascending")
PEOPLE = entry("Amelia is a hero, and Zoey is a villain.")


@pytest.mark.parametrize(
    ("kind", "given", "answer", "right"),
    [
        *(("chain_sum", entry("-1200"), text, True) for text in ("-1200.0", "-1,200", "\\boxed{-1200}", "-2400/2")),
        *(("chain_sum", entry("12"), text, False) for text in ("", "-12", "1 2", "12**99999999")),
        ("number_sequence", entry("12"), "+12", True),
        ("countdown", COUNTDOWN, "4*94-(6+61)", True),
        *(("countdown", COUNTDOWN, text, False) for text in ("309", "94*4 - 61", "9**9**9**9", "__import__('os')")),
        ("number_sorting", LIST, "[18.2, 32.60]", True),
        *(("number_sorting", LIST, text, False) for text in ("[18.2, 32.7]", "18.2, 32.6", "['a', 'b']", "3")),
        ("knights_knaves", PEOPLE, "Zoey is a villain, Amelia is a hero", True),
        ("knights_knaves", PEOPLE, "Zoey is a hero, Amelia is a hero", False),
    ],
)
def test_what_is_as_right_as_the_answer(kind, given, answer, right):
    assert reasoning.equivalent(kind, answer, given) == right


def test_nothing_that_is_measured_is_in_training(make_config, tokenizer):
    """So few problems that draws repeat: of some seeds and sizes together, training never has one that is measured."""
    kind, sizes = "chain_sum", {"solution_min": 60, "solution_max": 60}
    seen, drawn = {"train": set(), "validation": set()}, 0
    for seed in (0, 1):
        options = {"train_samples": 150, "val_samples": 30, "max_length": 1024}
        config = make_config(kind="worked", name=kind, **options, **sizes)
        config.seed = seed
        module = ag.data.build(config, tokenizer, 4096)
        for split, rows in (("train", module.train_rows), ("validation", [row for [row] in module.val_rows])):
            seen[split] |= {tokenizer.decode(row.tokens[: row.prompt_length]) for row in rows}
            drawn += len(rows)
    tasks = [make("worked", kind=kind, seed=seed, **sizes) for seed in (0, 1)]
    samples = [sample for task in tasks for sample in task.load(tokenizer, 40, 4096).samples]
    measured = {sample.parts[0].prompt for sample in samples}
    assert {tokenizer.decode(sample.prompt) for sample in samples} == measured
    assert not measured & (seen["train"] | seen["validation"]) and not seen["train"] & seen["validation"]
    assert len(measured) > 30 and len(seen["train"]) > 100
    assert len(measured | seen["train"] | seen["validation"]) < drawn + len(samples)


def test_a_group_draws_additions_and_every_kind():
    kinds = {generate(0, "train", i, 60, 60, "reasoning").kind for i in range(40)}
    assert kinds == {"addition", *reasoning.KINDS} == set(GROUPS["reasoning"])


def test_without_the_package(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    task = make("reasoning", problems=1)
    monkeypatch.setattr("importlib.metadata.version", absent)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    for use in (
        lambda: ag.data.check(DataConfig(kind="worked", name="chain_sum")),
        lambda: ag.data.check(DataConfig(kind="worked", name="reasoning")),
        lambda: generate(0, "train", 0, 60, 60, "countdown"),
        task.identity,
    ):
        with refuses(DataError, "reasoning-gym", "pip install 'ag[reasoning]'"):
            use()
    assert ag.data.check(DataConfig(kind="worked", name="worked")) is None

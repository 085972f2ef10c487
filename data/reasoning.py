"""Problems of reasoning-gym (https://github.com/open-thought/reasoning-gym) with a solution written out step by step.

Question, answer and the check of an answer are the package's; how a solution is written is this file's. The package
draws item ``i`` of a seed from ``seed + i``, so that neighbouring seeds share items: here each problem has a seed of
its own, and :func:`ag.data.problems.generate` deals problems to splits by their text.
"""

from __future__ import annotations

import ast
import importlib.metadata
import itertools
import json
import logging
import operator
import random
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from ag.data.sources import DataError

Entry = Mapping[str, Any]  # a problem as the package gives it: question, answer, metadata

PACKAGE = "reasoning-gym"
LONGEST = 400  # characters of an answer that is parsed
_OPERATORS: dict[type[ast.operator], tuple[str, Callable[[Fraction, Fraction], Fraction]]] = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
    ast.Div: ("/", operator.truediv),
}


class Kind(NamedTuple):
    """How problems of one of the package's generators are made, solved and checked."""

    settings: Callable[[int], dict[str, Any]]  # of the generator, for a solution of at most about so many tokens
    steps: Callable[[Entry], list[str]]  # the lines of a solution before its answer
    same: Callable[[str, Entry], bool]  # whether another text than the answer is as right


def make(name: str, rng: random.Random, tokens: int) -> tuple[str, list[str], Entry]:
    """Draw a problem whose own answer passes the package's check; return question, lines of the solution, and entry.

    Raises:
        DataError: reasoning-gym is not installed.
    """
    kind = KINDS[name]
    settings = kind.settings(tokens)
    while True:  # a countdown's target is rounded where a division leaves a rest
        entry = _dataset(name, seed=rng.getrandbits(31), size=1, **settings)[0]
        if _score(name, entry["answer"], entry) == 1:
            return entry["question"].strip(), kind.steps(entry), entry


def equivalent(name: str, answer: str, entry: Entry) -> bool:
    """Return whether an answer that differs in its text from the entry's is as right."""
    return 0 < len(answer) <= LONGEST and KINDS[name].same(answer, entry)


def version(name: str) -> str:
    """Return the installed version of the package; ``name`` is the kind of problem that needs it.

    Raises:
        DataError: it is not installed.
    """
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError as error:
        raise _missing(name) from error


def _missing(name: str) -> DataError:
    return DataError(
        f"problems of kind {name} come from {PACKAGE}, which is not installed: pip install 'ag[reasoning]'"
    )


def _dataset(name: str, **settings: Any) -> Any:
    try:
        from reasoning_gym import create_dataset
    except ImportError as error:
        raise _missing(name) from error
    return create_dataset(name, **settings)


def _score(name: str, answer: str, entry: Entry) -> float:
    return float(_dataset(name, seed=0, size=1).score_answer(answer, entry))


def _between(least: int, most: int, tokens: int, each: int) -> int:
    return max(least, min(most, tokens // each))


def _terms(tokens: int) -> dict[str, Any]:
    terms = _between(2, 40, tokens + 16, 27)  # a line has up to 27 tokens, the first and the last one 11 together
    return {"min_terms": terms, "max_terms": terms, "min_digits": 2, "max_digits": 2}


def _numbers(tokens: int) -> dict[str, Any]:
    count = 2
    # a line has a number, a list and three signs; the answer quotes each number
    while count < 40 and 8 * (count + 1) + 5 * (count + 1) * (count + 2) // 2 + 9 * (count + 1) + 8 <= tokens:
        count += 1
    decimals = {"min_decimals": 1, "max_decimals": 1, "min_value": 10.0, "max_value": 99.9}
    return {"min_numbers": count, "max_numbers": count, **decimals}


def _sequence(tokens: int) -> dict[str, Any]:
    terms = _between(4, 8, tokens, 20)
    return {"min_terms": terms, "max_terms": terms, "max_complexity": 2}


def _countdown(tokens: int) -> dict[str, Any]:
    count = _between(3, 6, tokens, 24)
    return {"min_numbers": count, "max_numbers": count}


def _people(tokens: int) -> dict[str, Any]:
    return {"n_people": 2 if tokens < 250 else 3}


def _running_total(entry: Entry) -> list[str]:
    """Add term by term, and each place of a term by itself: ``- 31: 58-30=28-1=27``."""
    first, *rest = entry["metadata"]["expression"].split()
    total, lines = int(first), [first]
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        line = f"{sign} {term}: {total}"
        for place, digit in enumerate(term):
            part = int(digit) * 10 ** (len(term) - 1 - place)
            if part:
                total += part if sign == "+" else -part
                line += f"{sign}{part}={total}"
        lines.append(line)
    return lines


def _insertion(entry: Entry) -> list[str]:
    """Insert number by number into the sorted list of those before it, which is written out again."""
    numbers, down = entry["metadata"]["original_numbers"], entry["metadata"]["direction"] == "descending"
    return [
        f"{number}: {' '.join(sorted(numbers[: done + 1], key=float, reverse=down))}"
        for done, number in enumerate(numbers)
    ]


def _differences(entry: Entry) -> list[str]:
    """Write the differences between neighbours, and the rule as the generator names it."""
    shown = entry["metadata"]["sequence"][:-1]
    differences = " ".join(str(later - earlier) for earlier, later in itertools.pairwise(shown))
    return [f"Differences: {differences}", f"Rule: {entry['metadata']['rule'] or 'none'}"]


def _evaluation(entry: Entry) -> list[str]:
    """Evaluate the expression operation by operation, as the answer has them."""
    lines: list[str] = []

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.BinOp):
            (sign, apply), left, right = _OPERATORS[type(node.op)], value(node.left), value(node.right)
            lines.append(f"{left} {sign} {right} = {apply(left, right)}")
            return apply(left, right)
        if isinstance(node, ast.UnaryOp):
            return -value(node.operand)
        return Fraction(ast.literal_eval(node))

    value(ast.parse(entry["answer"], mode="eval").body)
    return lines


def _cases(entry: Entry) -> list[str]:
    """Try who tells the truth case by case: what each says is then true or false, and has to fit who says it."""
    holds = _dataset("knights_knaves", seed=0, size=1).test_satisfiability
    about, terms = entry["metadata"], entry["metadata"]["knight_knave_terms"]
    lines = []
    for case in itertools.product([True, False], repeat=len(about["names"])):
        roles = ", ".join(
            f"{name} {terms['knight' if honest else 'knave']}"
            for name, honest in zip(about["names"], case, strict=True)
        )
        said = [bool(holds(statement, case)) for statement in about["statements"]]
        fits = said == list(case)
        lines.append(f"{roles}: {' '.join(map(str, said)).lower()}: {'yes' if fits else 'no'}")
        if fits:
            break
    return lines


def _same_number(answer: str, entry: Entry) -> bool:
    r"""Compare two numbers, however they are written: ``+12``, ``12.0``, ``24/2``, ``\boxed{12}``."""
    if re.search(r"\*\*|\^|!|[A-Za-z]{7}", answer):  # nothing that takes long to work out
        return False
    from math_verify import parse, verify

    # its limits of time are signals, which only a main thread has; it warns that there are none
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    right, given = (parse(text, parsing_timeout=None) for text in (entry["answer"], answer.removeprefix("+")))
    return bool(verify(right, given, timeout_seconds=None))


def _same_list(answer: str, entry: Entry) -> bool:
    """Compare two lists of numbers; the package's check lets each be off by 1."""
    try:
        given, right = (json.loads(text.replace("'", '"')) for text in (answer, entry["answer"]))
        return isinstance(given, list) and list(map(float, given)) == list(map(float, right))
    except (ValueError, TypeError):
        return False


def _reaches_target(answer: str, entry: Entry) -> bool:
    """Let the package work out an expression of numbers, four signs and brackets; it evaluates whatever it gets."""
    plain = re.fullmatch(r"[\d\s()+*/-]+", answer) and not re.search(r"\*\s*\*|/\s*/", answer)
    return bool(plain) and _score("countdown", answer, entry) == 1


def _same_people(answer: str, entry: Entry) -> bool:
    """Compare who is what, in any order."""
    return _score("knights_knaves", answer, entry) == 1


#: The package's generators that are used here, by its names.
KINDS: dict[str, Kind] = {
    "chain_sum": Kind(_terms, _running_total, _same_number),
    "countdown": Kind(_countdown, _evaluation, _reaches_target),
    "number_sorting": Kind(_numbers, _insertion, _same_list),
    "knights_knaves": Kind(_people, _cases, _same_people),
    "number_sequence": Kind(_sequence, _differences, _same_number),
}

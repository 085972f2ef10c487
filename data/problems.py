"""Made-up problems with a written-out solution, whose last line is the answer; the loss is on the solution.

The solution is long and the prompt short: the model itself writes most of the text that the answer needs.

- ``addition``: long numbers in columns, ones first, each digit named by a letter: ``a4+7 b8+3``. A step copies a
  column, adds the carry and names the digit of the sum by the capital letter: ``a4+7+0=11 A1``. The answer collects the
  digits from the highest down, in reverse to the order of writing.
- ``sorting``: two-digit numbers. Each is inserted into the sorted list of earlier numbers, which is written out again.
- ``variables``: a program of numbered lines over variables with one digit; ``c=a+b`` adds without carry, and variables
  are overwritten. A line's trace names the variables that it reads and writes: ``14 c=a+b: A4 B7 C1``. The answer is
  the last value of each variable.
- ``chain_sum`` of reasoning-gym (https://github.com/open-thought/reasoning-gym): the solution adds term by term, and
  each digit of a term by itself: ``- 31: 58-30=28-1=27``.

Digits are single tokens, and a digit or a sign follows each letter; problems therefore look alike in tokens. A hash of
its prompt puts each problem into one split, whatever the seed: no problem is in two splits.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import random
from collections.abc import Callable, Sequence
from string import ascii_lowercase
from typing import TYPE_CHECKING, NamedTuple

from ag.config.data import WorkedConfig
from ag.data.encode import encode as encode_examples
from ag.data.rows import Row
from ag.data.sources import DataError
from ag.data.splits import VALIDATION_ROWS, DataKind, Splits
from ag.data.templates import Example
from ag.data.tokens import end_tokens
from ag.errors import need

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ag.config import DataConfig

ANSWER = "Answer: "  # begins the last line
ANY = "worked"  # addition, sorting or variables, drawn for each problem
PACKAGE = "reasoning-gym"  # makes the problems of chain_sum
MAX_NUMBERS = 4  # most numbers of an addition
VARIABLES = "abcdefgh"
FIRST_LINE = 10  # number of a program's first line; all have two digits
_SPLITS = {"validation": range(1), "test": range(1, 2), "train": range(2, 8)}  # eighths of the hashes


class WorkedProblems(DataKind):
    """Generated problems with a written-out solution."""

    def check(self, data: DataConfig) -> None:
        """Refuse an unknown kind of problem, or a kind whose package is not installed."""
        if data.name not in (names := (ANY, *KINDS)):
            raise DataError(f"data.name={data.name} with data.kind=worked: expected one of {', '.join(names)}")
        if data.name == "chain_sum":
            package_version()

    def read(self, data: DataConfig, seed: int, tokenizer: PreTrainedTokenizerBase, context: int) -> Splits:
        """Generate and tokenise problems; the loss is on the solution.

        ``data.train_samples`` and ``data.val_samples`` say how many (default 4000 and 200).

        Raises:
            DataError: a problem does not fit.
        """
        assert isinstance(data, WorkedConfig)

        def rows(split: str, number: int) -> list[Row]:
            problems = [
                generate(seed, split, i, data.solution_min, data.solution_max, data.name) for i in range(number)
            ]
            return encode(tokenizer, problems, min(data.max_length, context))

        train = rows("train", data.train_samples or data.DEFAULT_TRAIN_ROWS)
        validation = rows("validation", data.val_samples or VALIDATION_ROWS)
        return Splits(train, [[row] for row in validation])


def encode(tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem], limit: int) -> list[Row]:
    """Tokenise problems; a row ends with the end-of-sequence token.

    Raises:
        DataError: a row has more tokens than ``limit``, or the tokenizer has no end-of-sequence token.
    """
    examples = [Example(problem.prompt, [problem.solution], 0) for problem in problems]
    rows = [row for [row] in encode_examples(tokenizer, examples, end=end_tokens(tokenizer))]
    longest = max((len(row.tokens) for row in rows), default=0)
    if longest > limit:
        raise DataError(
            f"a worked problem has {longest} tokens, more than a row of {limit}: raise data.max_length, lower "
            "data.solution_max, or use a model with a longer context"
        )
    return rows


class Problem(NamedTuple):
    """A problem and its solution."""

    kind: str  # one of KINDS
    prompt: str  # ends in "Solution:"
    solution: str  # follows it after a space; its last line is "Answer: " and the answer

    @property
    def answer(self) -> str:
        """The answer on the last line of the solution."""
        return answer_of(self.solution)


def answer_of(text: str) -> str:
    """Return the stripped text after the last ``Answer:`` on its line, or an empty text without ``Answer:``."""
    _, marker, tail = text.rpartition(ANSWER.strip())
    return tail.partition("\n")[0].strip() if marker else ""


def generate(seed: int, split: str, index: int, shortest: int, longest: int, kind: str = ANY) -> Problem:
    """Make one problem of a split (``train``, ``validation`` or ``test``) from these arguments only.

    The solution has ``shortest`` to ``longest`` of SmolLM2's tokens, its end included; whole steps may make it a little
    shorter or longer. An addition has at most four numbers of 26 digits (446 tokens). ``kind`` is one of
    :data:`KINDS`, or ``worked``.

    Raises:
        UserError: ``chain_sum`` needs reasoning-gym, which is not installed.
    """
    rng = random.Random(f"{seed}/{split}/{index}/{kind}")
    while True:
        name = rng.choice(_OWN_KINDS) if kind == ANY else kind
        problem = Problem(name, *KINDS[name](rng, rng.randint(shortest, longest)))
        digest = hashlib.sha256(problem.prompt.encode()).digest()
        if digest[0] % 8 in _SPLITS[split]:
            return problem


def addition(rng: random.Random, tokens: int) -> tuple[str, str]:
    """Add two or more numbers; the highest digit of each is 0 and leaves room for the last carry."""
    numbers = 2
    while numbers < MAX_NUMBERS and tokens > _tokens_for_digits(len(ascii_lowercase), numbers):
        numbers += 1
    num_digits = 2
    while num_digits < len(ascii_lowercase) and _tokens_for_digits(num_digits + 1, numbers) <= tokens:
        num_digits += 1
    letters, carry = ascii_lowercase[:num_digits], 0
    columns, steps, digits = [], [], []
    for letter in letters:
        column = [0 if letter == letters[-1] else rng.randrange(10) for _ in range(numbers)]
        columns.append(letter + "+".join(map(str, column)))
        total = sum(column) + carry
        digits.append(f"{letter.upper()}{total % 10}")
        steps.append(f"{columns[-1]}+{carry}={total:02d} {digits[-1]}")
        carry = total // 10
    return f"Add: {' '.join(columns)}\nSolution:", f"{' '.join(steps)}\n{ANSWER}{' '.join(digits[::-1])}"


def _tokens_for_digits(num_digits: int, numbers: int) -> int:
    return num_digits * (9 + 2 * numbers) + 4


def sorting(rng: random.Random, tokens: int) -> tuple[str, str]:
    """Sort different numbers of two digits by insertion."""
    count = 2
    while count < 90 and 4 + 7 * (count + 1) + 3 * (count + 1) * (count + 2) // 2 <= tokens:
        count += 1
    items = rng.sample(range(10, 100), count)
    lines = [f"{item}: {_listed(sorted(items[: index + 1]))}" for index, item in enumerate(items)]
    return f"Sort: {_listed(items)}\nSolution:", "\n".join([*lines, f"{ANSWER}{_listed(sorted(items))}"])


def _listed(items: list[int]) -> str:
    return " ".join(map(str, items))


def variables(rng: random.Random, tokens: int) -> tuple[str, str]:
    """Follow variables through a program; the first lines give each its first value."""
    names = VARIABLES[: max(2, min(len(VARIABLES), tokens // 30))]
    lines = max(len(names) + 1, min(90, (tokens - 4 + 4 * len(names)) // 15))  # 15 tokens each, the first ones 9
    values: dict[str, int] = {}
    program, trace = [], []
    for number in range(FIRST_LINE, FIRST_LINE + lines):
        reads = [] if len(values) < len(names) else rng.sample(names, 2)
        target = names[len(values)] if not reads else rng.choice(names)
        reads_text = [f"{name.upper()}{values[name]}" for name in reads]
        values[target] = sum(values[name] for name in reads) % 10 if reads else rng.randrange(10)
        program.append(f"{number} {target}={'+'.join(reads) or values[target]}")
        trace.append(f"{program[-1]}: {' '.join([*reads_text, f'{target.upper()}{values[target]}'])}")
    answer = " ".join(f"{name.upper()}{values[name]}" for name in names)
    return "\n".join(["Run:", *program, "Solution:"]), "\n".join([*trace, f"{ANSWER}{answer}"])


def chain_sum(rng: random.Random, tokens: int) -> tuple[str, str]:
    """Sample a chain sum of two-digit numbers; a line of its solution has up to 27 tokens.

    The package samples item i of a seed from ``seed + i``, and neighbouring seeds share items. Each problem therefore
    has its own seed here.
    """
    package_version()
    from reasoning_gym import create_dataset

    terms = max(2, min(40, (tokens + 16) // 27))
    sizes = {"min_terms": terms, "max_terms": terms, "min_digits": 2, "max_digits": 2}
    entry = create_dataset("chain_sum", seed=rng.getrandbits(31), size=1, **sizes)[0]
    first, *signed_terms = entry["metadata"]["expression"].split()
    total, lines = int(first), [first]
    for sign, term in zip(signed_terms[::2], signed_terms[1::2], strict=True):
        line = f"{sign} {term}: {total}"
        for digit, place_value in zip(term, (10, 1), strict=True):
            if part := int(digit) * place_value:
                total += part if sign == "+" else -part
                line += f"{sign}{part}={total}"
        lines.append(line)
    return f"{entry['question'].strip()}\nSolution:", "\n".join([*lines, f"{ANSWER}{entry['answer']}"])


def package_version() -> str:
    """Return the installed version of reasoning-gym; raises as :func:`ag.errors.need`."""
    need("reasoning_gym", "reasoning", "data.name=chain_sum")
    return importlib.metadata.version(PACKAGE)


#: The kinds of problems by the name that ``data.name`` gives them: prompt and solution of about a number of tokens.
KINDS: dict[str, Callable[[random.Random, int], tuple[str, str]]] = {
    "addition": addition,
    "sorting": sorting,
    "variables": variables,
    "chain_sum": chain_sum,
}
_OWN_KINDS = ("addition", "sorting", "variables")

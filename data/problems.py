"""Made-up problems with a written-out solution, whose last line is the answer; the loss is on the solution.

The solution is long and the prompt short, so that most of what the answer needs was written by the model itself:

- ``addition``: long numbers in columns, ones first, each place named by a letter: ``a4+7 b8+3``. A step copies a
  column, adds the carry and names the digit of the sum by the capital letter: ``a4+7+0=11 A1``. The answer collects the
  digits from the highest place down, the reverse of the order in which they were written.
- ``sorting``: two-digit numbers, each inserted into the sorted list of those before it, which is written out again.
- ``variables``: a program of numbered lines over variables that hold one digit; ``c=a+b`` adds without carry, and
  variables are overwritten. A line's trace names what it reads and writes: ``14 c=a+b: A4 B7 C1``. The answer is what
  each variable holds at the end.
- ``chain_sum``, ``countdown``, ``number_sorting``, ``knights_knaves`` and ``number_sequence`` of reasoning-gym
  (:mod:`ag.data.reasoning`).

Digits are single tokens, and a letter is followed by a digit or a sign, so that problems look alike in tokens. Each
problem belongs to one split by a hash of its prompt, whatever the seed: no split can hold a problem of another one.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from functools import partial
from string import ascii_lowercase
from typing import TYPE_CHECKING, NamedTuple

from ag.data import reasoning
from ag.data.collate import Collator, Row, end_tokens, padding_token
from ag.data.encode import encode as encode_examples
from ag.data.module import Counts, DataKind, DataModule
from ag.data.sources import DataError
from ag.data.templates import Example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ag.config import Config, DataConfig

TRAIN_ROWS = 4000
VALIDATION_ROWS = 200
ANSWER = "Answer: "  # begins the last line
ANY = "worked"  # this file's own kinds, one drawn for each problem
REASONING = "reasoning"  # additions and the kinds of reasoning-gym
MOST_NUMBERS = 4  # that are added
VARIABLES = "abcdefgh"
FIRST_LINE = 10  # number of a program's first line; all have two digits
_SPLITS = {"validation": range(1), "test": range(1, 2), "train": range(2, 8)}  # eighths of the hashes


class Worked(DataKind):
    """Generated problems with a written-out solution."""

    def check(self, data: DataConfig) -> None:
        """Refuse a name that no kind of problem has, or whose package is not installed."""
        if data.name not in (known := (*GROUPS, *KINDS)):
            raise DataError(f"data.name={data.name} with data.kind=worked: expected one of {', '.join(known)}")
        if needs_package(data.name):
            reasoning.version(data.name)

    def build(self, config: Config, tokenizer: PreTrainedTokenizerBase, context: int) -> DataModule:
        """Generate and tokenise problems; the loss is on the solution.

        ``data.train_samples`` and ``data.val_samples`` say how many (default 4000 and 200).

        Raises:
            DataError: a problem does not fit.
        """
        data = config.data

        def rows(split: str, number: int) -> list[Row]:
            made = [
                generate(config.seed, split, i, data.solution_min, data.solution_max, data.name) for i in range(number)
            ]
            return encode(tokenizer, made, min(data.max_length, context))

        train = rows("train", data.train_samples or TRAIN_ROWS)
        validation = rows("validation", data.val_samples or VALIDATION_ROWS)
        collator = Collator(padding_token(tokenizer))
        return DataModule(train, [[row] for row in validation], collator, data, config.seed, Counts())


def encode(tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem], limit: int) -> list[Row]:
    """Tokenise problems; a row ends with the end-of-sequence token, after which nothing comes.

    Raises:
        DataError: one has more tokens than ``limit``, or the tokenizer has no end-of-sequence token.
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
    entry: reasoning.Entry | None = None  # the problem as reasoning-gym gave it

    @property
    def answer(self) -> str:
        """What the last line says."""
        return answer_of(self.solution)

    def solved_by(self, answer: str) -> bool:
        """Return whether an answer is right: the same text, or what the check of the kind takes for as right."""
        if answer == self.answer:
            return True
        return self.entry is not None and reasoning.equivalent(self.kind, answer, self.entry)


def answer_of(text: str) -> str:
    """Return what follows the last ``Answer:`` of a solution on its line, without spaces around; else nothing."""
    _, found, rest = text.rpartition(ANSWER.strip())
    return rest.partition("\n")[0].strip() if found else ""


def generate(seed: int, split: str, index: int, shortest: int, longest: int, kind: str = ANY) -> Problem:
    """Make one problem of a split (``train``, ``validation`` or ``test``), which depends on these arguments only.

    The solution has ``shortest`` to ``longest`` of SmolLM2's tokens, its end included, but for a last whole step;
    additions end at 26 places of four numbers, with 446. ``kind`` is one of :data:`KINDS`, or of :data:`GROUPS`: drawn.

    Raises:
        DataError: the kind is one of reasoning-gym's, which is not installed.
    """
    rng = random.Random(f"{seed}/{split}/{index}/{kind}")
    while True:
        name = rng.choice(GROUPS[kind]) if kind in GROUPS else kind
        problem = Problem(name, *KINDS[name](rng, rng.randint(shortest, longest)))
        digest = hashlib.sha256(problem.prompt.encode()).digest()
        if digest[0] % 8 in _SPLITS[split]:
            return problem


def addition(rng: random.Random, tokens: int) -> tuple[str, str]:
    """Add two or more numbers; the highest place is empty, so that the last carry has room."""
    numbers = 2
    while numbers < MOST_NUMBERS and tokens > _places_tokens(len(ascii_lowercase), numbers):
        numbers += 1
    places = 2
    while places < len(ascii_lowercase) and _places_tokens(places + 1, numbers) <= tokens:
        places += 1
    letters, carry = ascii_lowercase[:places], 0
    columns, steps, digits = [], [], []
    for letter in letters:
        column = [0 if letter == letters[-1] else rng.randrange(10) for _ in range(numbers)]
        columns.append(letter + "+".join(map(str, column)))
        total = sum(column) + carry
        digits.append(f"{letter.upper()}{total % 10}")
        steps.append(f"{columns[-1]}+{carry}={total:02d} {digits[-1]}")
        carry = total // 10
    return f"Add: {' '.join(columns)}\nSolution:", f"{' '.join(steps)}\n{ANSWER}{' '.join(digits[::-1])}"


def _places_tokens(places: int, numbers: int) -> int:
    return places * (9 + 2 * numbers) + 4


def sorting(rng: random.Random, tokens: int) -> tuple[str, str]:
    """Sort different numbers of two digits by insertion."""
    count = 2
    while count < 90 and 4 + 7 * (count + 1) + 3 * (count + 1) * (count + 2) // 2 <= tokens:
        count += 1
    items = rng.sample(range(10, 100), count)
    lines = [f"{item}: {_listed(sorted(items[: done + 1]))}" for done, item in enumerate(items)]
    return f"Sort: {_listed(items)}\nSolution:", "\n".join([*lines, f"{ANSWER}{_listed(sorted(items))}"])


def _listed(items: list[int]) -> str:
    return " ".join(map(str, items))


def variables(rng: random.Random, tokens: int) -> tuple[str, str]:
    """Follow variables through a program; the first lines give each its first value."""
    names = VARIABLES[: max(2, min(len(VARIABLES), tokens // 30))]
    lines = max(len(names) + 1, min(90, (tokens - 4 + 4 * len(names)) // 15))  # 15 tokens each, the first ones 9
    holds: dict[str, int] = {}
    program, trace = [], []
    for number in range(FIRST_LINE, FIRST_LINE + lines):
        reads = [] if len(holds) < len(names) else rng.sample(names, 2)
        target = names[len(holds)] if not reads else rng.choice(names)
        seen = [f"{name.upper()}{holds[name]}" for name in reads]
        holds[target] = sum(holds[name] for name in reads) % 10 if reads else rng.randrange(10)
        program.append(f"{number} {target}={'+'.join(reads) or holds[target]}")
        trace.append(f"{program[-1]}: {' '.join([*seen, f'{target.upper()}{holds[target]}'])}")
    answer = " ".join(f"{name.upper()}{holds[name]}" for name in names)
    return "\n".join(["Run:", *program, "Solution:"]), "\n".join([*trace, f"{ANSWER}{answer}"])


def reasoned(name: str, rng: random.Random, tokens: int) -> tuple[str, str, reasoning.Entry]:
    """Draw a problem of one of reasoning-gym's kinds."""
    question, lines, entry = reasoning.make(name, rng, tokens)
    return f"{question}\nSolution:", "\n".join([*lines, f"{ANSWER}{entry['answer']}"]), entry


_OWN = {"addition": addition, "sorting": sorting, "variables": variables}
#: The kinds of problems by the name that ``data.name`` gives them: prompt and solution of about so many tokens.
KINDS: dict[str, Callable[[random.Random, int], tuple[str, str] | tuple[str, str, reasoning.Entry]]] = {
    **_OWN,
    **{name: partial(reasoned, name) for name in reasoning.KINDS},
}
#: Names for several kinds, of which one is drawn for each problem.
GROUPS = {ANY: tuple(_OWN), REASONING: ("addition", *reasoning.KINDS)}


def needs_package(kind: str) -> bool:
    """Return whether a kind or a group of kinds has problems of reasoning-gym."""
    return any(name in reasoning.KINDS for name in GROUPS.get(kind, (kind,)))

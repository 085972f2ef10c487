"""Worked problems: the model writes a solution, and the answer on its last line is graded.

The answer depends on generated tokens: this tests policies that evict these.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field
from transformers import PreTrainedTokenizerBase as Tokenizer

from ag.data.problems import ANY, KINDS, PACKAGE, answer_of, encode, generate, package_version
from ag.errors import require
from ag.evaluate.tasks.base import GENERATED, LeftOut, PositiveInt, Sample, Tags
from ag.evaluate.tasks.questions import FLOOR
from ag.evaluate.tasks.solutions import Decoded, SolutionBatch, SolutionTask

EXTRA_SOLUTION_TOKENS = 16  # tokens by which a solution may be longer than the right solution


@dataclass(frozen=True)
class Worked(SolutionTask):
    """Problems of :mod:`ag.data.problems`, from a split that no training uses.

    The only part of a sample is its problem.
    """

    kind: str = ANY  # of the problems; worked draws one of three for each problem
    problems: PositiveInt = 200  # number of problems
    solution_min: Annotated[int, Field(ge=20)] = 200  # fewest tokens of a right solution, with SmolLM2's tokenizer
    solution_max: PositiveInt = 400  # most of these tokens
    batch: PositiveInt = 16  # problems in a batch
    seed: int = 0  # of the generator

    metric: ClassVar[str] = "exact match"
    chance: ClassVar[float | None] = FLOOR

    def __post_init__(self) -> None:
        """Check the options."""
        known_kinds = (ANY, *KINDS)
        require(self, "kind", self.kind in known_kinds, f"one of {', '.join(known_kinds)}")
        require(self, "solution_max", self.solution_max >= self.solution_min, "at least solution_min")

    @property
    def source(self) -> str:
        """Where the samples come from; see :attr:`Task.source`."""
        return GENERATED

    def identity(self) -> dict[str, Any]:
        """Return the options, and the version of reasoning-gym if its problems are used."""
        package = {PACKAGE: package_version()} if self.kind == "chain_sum" else {}
        return super().identity() | package

    def read(self, tokenizer: Tokenizer, max_tokens: int) -> Iterator[Sample | LeftOut]:
        """Generate the problems; see :meth:`ag.evaluate.tasks.Task.read`."""
        for index in range(self.problems):
            problem = generate(self.seed, "test", index, self.solution_min, self.solution_max, self.kind)
            [row] = encode(tokenizer, [problem], 1 << 20)
            prompt, longest = row.tokens[: row.prompt_length].tolist(), len(row.tokens) + EXTRA_SOLUTION_TOKENS
            max_solution = longest - len(prompt)
            sample = Sample(f"{problem.kind}-{index}", prompt, max_new_tokens=max_solution, parts=[problem])
            yield sample if longest <= max_tokens else "too long"

    def score(self, batch: SolutionBatch) -> list[tuple[Decoded, float, Tags]]:
        """Let the model write solutions, and grade their last lines; see :meth:`SolutionTask.score`."""
        scored: list[tuple[Decoded, float, Tags]] = []
        for sample, solution in zip(batch.samples, batch.decode(), strict=True):
            [problem], answer = sample.parts, answer_of(batch.text(solution))
            scored.append((solution, float(answer == problem.answer), {"kind": problem.kind, "answer": answer}))
        return scored

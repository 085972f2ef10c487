"""Worked problems: the model writes a solution, and the answer on its last line is graded.

The answer depends on generated tokens: this tests policies that evict these.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import nn
from transformers import PreTrainedTokenizerBase as Tokenizer

from ag.data.problems import ANY, KINDS, PACKAGE, answer_of, encode, generate, package_version
from ag.engine import EvictionCache, Policy, read_prompt
from ag.errors import require
from ag.evaluate.tasks.base import LeftOut, Outcome, Outcomes, PositiveInt, Sample, Samples, Task
from ag.evaluate.tasks.follow import continue_batch, end_tokens, padded
from ag.evaluate.tasks.questions import FLOOR

SPARE = 16  # tokens by which a solution may be longer than the right solution


@dataclass(frozen=True)
class Worked(Task):
    """Problems of :mod:`ag.data.problems`, from a split that no training uses.

    In an outcome ``tokens`` counts prompt and solution, and ``kept`` is the kept share of both at the end. The only
    part of a sample is its problem.
    """

    kind: str = ANY  # of the problems; worked draws one of three for each problem
    problems: PositiveInt = 200  # number of problems
    solution_min: Annotated[int, Field(ge=20)] = 200  # fewest tokens of a right solution, with SmolLM2's tokenizer
    solution_max: PositiveInt = 400  # most of these tokens
    batch: PositiveInt = 16  # problems in a batch
    seed: int = 0  # of the generator

    metric: ClassVar[str] = "exact match"
    unit: ClassVar[str] = "problems"
    chance: ClassVar[float | None] = FLOOR

    def __post_init__(self) -> None:
        """Check the options."""
        known_kinds = (ANY, *KINDS)
        require(self, "kind", self.kind in known_kinds, f"one of {', '.join(known_kinds)}")
        require(self, "solution_max", self.solution_max >= self.solution_min, "at least solution_min")

    def identity(self) -> dict[str, Any]:
        """Return the options, and the version of reasoning-gym if its problems are used."""
        package = {PACKAGE: package_version()} if self.kind == "chain_sum" else {}
        return super().identity() | package

    def read(self, tokenizer: Tokenizer, max_tokens: int) -> Iterator[Sample | LeftOut]:
        """Generate the problems; see :meth:`ag.evaluate.tasks.Task.read`."""
        for index in range(self.problems):
            problem = generate(self.seed, "test", index, self.solution_min, self.solution_max, self.kind)
            [row] = encode(tokenizer, [problem], 1 << 20)
            prompt, longest = row.tokens[: row.prompt_length].tolist(), len(row.tokens) + SPARE
            max_solution = longest - len(prompt)
            sample = Sample(f"{problem.kind}-{index}", prompt, max_new_tokens=max_solution, parts=[problem])
            yield sample if longest <= max_tokens else "too long"

    def run(self, model: nn.Module, tokenizer: Tokenizer, policies: Sequence[Policy], samples: Samples) -> Outcomes:
        """Run policies over samples; see :meth:`ag.evaluate.tasks.Task.run`."""
        device, stop = next(model.parameters()).device, end_tokens(model, tokenizer.eos_token_id)
        for start in range(0, len(samples), self.batch):
            group = samples[start : start + self.batch]
            caches = read_prompt(model, policies, *padded([sample.prompt for sample in group], device))
            for index in range(len(policies)):
                cache, last_hidden = caches.pop(0)  # freed before the next policy generates
                begin = time.perf_counter()
                texts = continue_batch(model, cache, last_hidden, [sample.max_new_tokens for sample in group], stop)
                written = [
                    (text_index, tokens, sequence_usage(cache, sequence), bool(cache.over_budget[sequence]))
                    for text_index, sequence, tokens in texts
                ]
                seconds = (time.perf_counter() - begin) / len(group)
                for sample, (_, tokens, size, over) in zip(group, sorted(written), strict=True):
                    [problem], answer = sample.parts, answer_of(str(tokenizer.decode(tokens, skip_special_tokens=True)))
                    tags = {"kind": problem.kind, "generated": len(tokens), "answer": answer}
                    yield index, Outcome(sample.id, float(answer == problem.answer), *size, seconds, tags, over)


def sequence_usage(cache: EvictionCache, sequence: int) -> tuple[int, float, int]:
    """Return the tokens that one sequence of a cache has read, the kept share of their entries, and its bytes."""
    num_tokens, num_cached = int(cache.valid[sequence].sum()), cache.held_tokens()  # by sequence and layer
    share = float(num_cached[sequence].sum() / num_cached.sum()) if bool(num_cached.any()) else 0.0
    return num_tokens, float(num_cached[sequence].mean()) / num_tokens, round(cache.nbytes * share)

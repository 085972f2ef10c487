r"""Problems of GSM8K and MATH-500: the model reasons before it answers, while tokens are evicted.

:class:`Reasoning` grades the answers that the model gives under each policy. :class:`OwnSolutions` needs far fewer
problems to tell policies apart: every policy reads the solutions that the model wrote with a full cache.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase as Tokenizer

from ag.data.rules import prompted
from ag.data.sources import check_fields
from ag.data.tokens import tokenize_prompt
from ag.engine.decode import COLDEST
from ag.evaluate.tasks.answers import final_answer, is_equal
from ag.evaluate.tasks.base import LeftOut, PositiveInt, Sample, Tags
from ag.evaluate.tasks.follow import likeliest
from ag.evaluate.tasks.held_out import held_out
from ag.evaluate.tasks.questions import FLOOR
from ag.evaluate.tasks.solutions import Decoded, SolutionBatch, SolutionTask

INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."


class Dataset(NamedTuple):
    """Where the problems of a dataset are. The field of an answer is ``answer``."""

    hub: str
    subset: str | None  # configuration name on the hub
    problem: str  # field of the problem


DATASETS = {
    "gsm8k": Dataset("openai/gsm8k", "main", "question"),
    "math500": Dataset("HuggingFaceH4/MATH-500", None, "problem"),
}


@dataclass(frozen=True)
class Problems(SolutionTask):
    """Problems with solutions that end in an answer, zero-shot, in the chat template of the model if it has one.

    The datasets are ``gsm8k`` (Cobbe et al. 2021) and ``math500`` (Hendrycks et al. 2021; the 500 problems of Lightman
    et al. 2023).
    """

    dataset: Literal["gsm8k", "math500"] = "gsm8k"
    max_new_tokens: PositiveInt = 512  # largest number of tokens of a solution

    def read(self, tokenizer: Tokenizer, max_tokens: int) -> Iterator[Sample | LeftOut]:
        """Read the problems; see :meth:`ag.evaluate.tasks.Task.read`."""
        hub, subset, field = DATASETS[self.dataset]
        _, location, rows = held_out(self, hub, self.dataset, ("test",), subset)
        for number, row in enumerate(rows):
            check_fields(row, {field: str, "answer": str}, f"{location} row {number + 1}")
            text = prompted(tokenizer, INSTRUCTION, row[field])
            prompt = tokenize_prompt(tokenizer, text)
            answer = row["answer"].rpartition("####")[2].strip()  # in GSM8K a solution and this mark are before it
            if len(prompt) + self.max_new_tokens > max_tokens:
                yield "too long"
            else:
                yield Sample(f"{number}", prompt, max_new_tokens=self.max_new_tokens, references=[answer])


@dataclass(frozen=True)
class Reasoning(Problems):
    """Problems whose answers are graded: 1 if the last box has the value of the right answer.

    See :func:`ag.evaluate.tasks.answers.is_equal`. The tag ``answer`` is the content of the box. Sampled tokens of a
    problem depend neither on its batch nor on the policy.
    """

    temperature: Annotated[float, Field(ge=0)] = 0.0  # at which tokens are sampled; 0: the likeliest tokens
    seed: int = 0  # of the sampled tokens

    metric: ClassVar[str] = "right answers"
    chance: ClassVar[float | None] = FLOOR

    def score(self, batch: SolutionBatch) -> list[tuple[Decoded, float, Tags]]:
        """Let the model write solutions, and grade their answers; see :meth:`SolutionTask.score`."""
        seeds = [random.Random(f"{self.seed}/{sample.id}").getrandbits(63) for sample in batch.samples]
        choose = SampledTokens(self.temperature, seeds) if self.temperature >= COLDEST else likeliest
        scored: list[tuple[Decoded, float, Tags]] = []
        for sample, solution in zip(batch.samples, batch.decode(choose), strict=True):
            answer = final_answer(batch.text(solution))
            scored.append((solution, float(is_equal(answer, *sample.references)), {"answer": answer}))
        return scored


@dataclass(frozen=True)
class OwnSolutions(Problems):
    """Nats per token of the solutions that the model wrote with a full cache, under each policy.

    The full cache writes the solutions of a batch by their likeliest tokens, once for all policies that run together.
    Then each policy, the full cache included, reads the solutions token by token, and evicts as if it decoded them. The
    tag ``solution`` is a hash of the solution's tokens, which may differ on another machine.
    """

    metric: ClassVar[str] = "nats per token"
    higher_is_better: ClassVar[bool] = False
    needs_full: ClassVar[bool] = True

    def score(self, batch: SolutionBatch) -> list[tuple[Decoded, float, Tags]]:
        """Read the solutions; see :meth:`SolutionTask.score`."""
        choose = GivenTexts(batch.solutions)
        decoded = batch.decode(choose)
        scored: list[tuple[Decoded, float, Tags]] = []
        for solution, nats in zip(decoded, choose.nats, strict=True):
            solution_hash = hashlib.sha256(str(solution.tokens).encode()).hexdigest()[:16]
            scored.append((solution, fmean(nats), {"solution": solution_hash}))
        return scored


class SampledTokens:
    """Samples the next tokens of texts. Each text has its own generator."""

    def __init__(self, temperature: float, seeds: Sequence[int]) -> None:
        self.temperature = temperature
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def __call__(self, logits: Tensor, text_indices: Sequence[int]) -> list[int]:
        """Return a token of each text; see :func:`ag.evaluate.tasks.follow.continue_batch`."""
        probabilities = (logits.float() / self.temperature).softmax(-1).cpu()
        return [
            int(torch.multinomial(row, 1, generator=self.generators[index]))
            for row, index in zip(probabilities, text_indices, strict=True)
        ]


class GivenTexts:
    """Returns the tokens of given texts, and records the negative log-likelihood of each in ``nats``."""

    def __init__(self, texts: Sequence[list[int]]) -> None:
        self.texts = texts
        self.nats: list[list[float]] = [[] for _ in texts]

    def __call__(self, logits: Tensor, text_indices: Sequence[int]) -> list[int]:
        """Return the next token of each text; see :func:`ag.evaluate.tasks.follow.continue_batch`."""
        tokens = [self.texts[index][len(self.nats[index])] for index in text_indices]
        losses = F.cross_entropy(logits.float(), torch.tensor(tokens, device=logits.device), reduction="none")
        for index, loss in zip(text_indices, losses.tolist(), strict=True):
            self.nats[index].append(loss)
        return tokens

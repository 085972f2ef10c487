"""Multiple choice by the log-likelihood of the answers, zero-shot."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ag.data.sft import Encoder
from ag.data.templates import TASKS, examples
from ag.engine import EvictionCache
from ag.evaluate.tasks.base import LeftOut, PromptTask, Sample, Tags
from ag.evaluate.tasks.follow import score
from ag.evaluate.tasks.rows import HeldOut

# where the test rows have public labels they are what is published; of the others the validation rows
TESTED = ("arc_challenge", "arc_easy", "openbookqa", "mmlu")


@dataclass(frozen=True)
class Question(Sample):
    """A question.

    Attributes:
        answers: tokens of each answer.
        letters: characters of each answer.
        target: index of the right one.
        split: where it is from.
    """

    answers: list[list[int]]
    letters: list[int]
    target: int
    split: str


@dataclass(frozen=True)
class MultipleChoice(PromptTask):
    """The answer with the highest log-likelihood counts, as in "Attention-Gate" (section 4.1) and lm-eval's ``acc``.

    The tag ``normalised`` holds the same with log-likelihoods divided by the answer's characters (``acc_norm``).
    """

    metric: ClassVar[str] = "accuracy"
    unit: ClassVar[str] = "questions"

    def read(self, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> Iterator[Sample | LeftOut]:
        """Read the questions; see :meth:`ag.evaluate.tasks.Task.read`."""
        task = TASKS[self.name]
        splits = ("test", "validation") if self.name in TESTED else ("validation",)
        data = HeldOut.of(self.name, self.root, task.hub, task.folder, splits, task.subset, task.revision)
        split, rows = data.rows()
        encoder = Encoder(tokenizer, sys.maxsize)
        for number, example in enumerate(examples(task, rows, data.source.where(split))):
            [group] = encoder.encode([example], split, every_choice=True)
            question = Question(
                id=f"{split}-{number}",
                prompt=group[0].tokens[: group[0].prompt_length].tolist(),
                answers=[row.tokens[row.prompt_length :].tolist() for row in group],
                letters=[len(choice) for choice in example.choices],
                target=example.target,
                split=split,
            )
            fits = len(question.prompt) + max(map(len, question.answers)) <= max_tokens
            yield question if fits else "too long"

    def answer(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, cache: EvictionCache, last: Tensor, sample: Question
    ) -> tuple[float, Tags]:
        """Score all answers over one prompt."""
        sums = [float(nats.sum()) for nats, _ in score(model, cache, last, sample.answers)]
        each = [total / letters for total, letters in zip(sums, sample.letters, strict=True)]
        right = float(sums.index(max(sums)) == sample.target)
        return right, {"split": sample.split, "normalised": float(each.index(max(each)) == sample.target)}

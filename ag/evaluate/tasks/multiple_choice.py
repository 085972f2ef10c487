"""Multiple choice by the log-likelihood of the answers, zero-shot."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase as Tokenizer

from ag.data.encode import encode
from ag.data.templates import TASKS, WITH_CONTEXT, examples
from ag.engine import EvictionCache
from ag.evaluate.tasks.base import LeftOut, PromptTask, Sample, Samples, Tags
from ag.evaluate.tasks.follow import score
from ag.evaluate.tasks.held_out import held_out

# tasks whose test rows have public labels; else the validation rows are read, as in publications
TESTED = ("arc_challenge", "arc_easy", "openbookqa", "mmlu")


@dataclass(frozen=True)
class MultipleChoice(PromptTask):
    """Accuracy of the likeliest answer, as in "Attention-Gate" (section 4.1) and lm-eval's ``acc``.

    The tag ``normalised`` is the accuracy by log-likelihood per character (``acc_norm``). The parts of a sample are its
    answers' numbers of characters. If the question is read after the eviction, the prompt is its beginning (the passage
    of BoolQ, the premise of RTE, the question of MMLU with its choices): the default of these three, whose answers have
    one token. Further tasks have no beginning to evict.
    """

    question: Literal["after", "before"] = "before"  # read after or before the eviction

    metric: ClassVar[str] = "accuracy"
    unit: ClassVar[str] = "questions"

    def identity(self) -> dict[str, Any]:
        """Return the options; ``question`` only for tasks that accept both values, since older results lack it."""
        return {k: v for k, v in super().identity().items() if k != "question" or self.name in WITH_CONTEXT}

    def floor(self, samples: Samples) -> float | None:
        """Return the accuracy of guessing."""
        return sum(1 / len(sample.answers) for sample in samples) / len(samples) if samples else None

    def read(self, tokenizer: Tokenizer, max_tokens: int) -> Iterator[Sample | LeftOut]:
        """Read the questions; see :meth:`ag.evaluate.tasks.Task.read`."""
        task = TASKS[self.name]
        splits = ("test", "validation") if self.name in TESTED else ("validation",)
        split, location, rows = held_out(self, task.hub, task.folder, splits, task.subset, task.revision)
        for number, example in enumerate(examples(task, rows, location)):
            [group] = encode(tokenizer, [example], question=self.question, every_choice=True)
            tokens, start, end = group[0].tokens.tolist(), group[0].response_start, group[0].prompt_length
            sample = Sample(
                f"{split}-{number}",
                tokens[:end],
                question=tokens[end:start],
                answers=[row.tokens[row.response_start :].tolist() for row in group],
                target=example.target,
                tags={"split": split} | ({"question": "after"} if self.question == "after" else {}),
                parts=[len(choice) for choice in example.choices],
            )
            yield sample if start + max(map(len, sample.answers)) <= max_tokens else "too long"

    def answer(
        self, model: nn.Module, tokenizer: Tokenizer, cache: EvictionCache, last_hidden: Tensor, sample: Sample
    ) -> tuple[float, Tags]:
        """Score all answers over one prompt."""
        scored = score(model, cache, last_hidden, sample.answers)
        sums = [float(log_likelihoods.sum()) for log_likelihoods, _ in scored]
        by_character = [total / letters for total, letters in zip(sums, sample.parts, strict=True)]
        log_likelihoods, likeliest = scored[sample.target]
        normalised = float(by_character.index(max(by_character)) == sample.target)
        tags = {"normalised": normalised, "nats": -float(log_likelihoods.mean()), "hits": float(likeliest.all())}
        return float(sums.index(max(sums)) == sample.target), {**sample.tags, **tags}

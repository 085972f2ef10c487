"""NLL of a run's validation responses after their evicted prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase as Tokenizer

from ag import data
from ag.config import Config
from ag.config import data as kinds
from ag.config.recipes import load_config
from ag.data.rows import Row
from ag.engine import EvictionCache
from ag.errors import UserError
from ag.evaluate.tasks.base import GENERATED, HUB, LeftOut, Loaded, PositiveInt, PromptTask, Sample, Tags
from ag.evaluate.tasks.follow import score


@dataclass(frozen=True)
class Responses(PromptTask):
    """The validation rows of a run, or windows of plain documents. The score is the right response's NLL per token.

    The tag ``tokens`` is the number of its tokens. The tag ``accuracy`` of multiple-choice questions is 1 if the right
    answer is the likeliest. A row has at most ``max(data.max_length, data.prompt_max + data.continuation)`` tokens; a
    longer prompt loses its left part.
    """

    run_folder: str | None = None  # a run of ag.fit; None: plain documents in root, or in root/documents
    prompt: PositiveInt | None = None  # tokens of each prompt of plain documents; None: the run's number
    continuation: PositiveInt | None = None  # tokens scored after it; None: the run's number

    metric: ClassVar[str] = "nats per token"
    higher_is_better: ClassVar[bool] = False
    unit: ClassVar[str] = "held-out responses"

    def __post_init__(self) -> None:
        """Check the run."""
        if self.run_folder is not None:
            self.recipe()

    @property
    def question(self) -> str | None:
        """``after`` if the run's prompts end before the question."""
        question = None if self.run_folder is None else getattr(self.recipe().data, "question", None)
        return "after" if question == "after" else None

    def recipe(self) -> Config:
        """Return the run's configuration, or one for plain documents, with the options of this task."""
        if self.run_folder is not None:
            recipe = load_config(Path(self.run_folder) / "config.yaml", Config)
        elif self.root is not None:
            recipe = Config(data=kinds.SplitConfig(name="documents"))
        else:
            raise UserError(
                f"Task {self.name}: nothing to read; give task_options.{self.name}.run_folder=RUN, or root=FOLDER of "
                "plain documents."
            )
        part = recipe.data
        if isinstance(part, kinds.PackedConfig):
            raise UserError(
                f"{self.run_folder}: packed text has no prompts to evict; evaluate with root=FOLDER and no run."
            )
        if isinstance(part, kinds.StoredConfig):
            part.root = self.root or part.root
        if isinstance(part, kinds.SplitConfig):
            part.prompt_min, part.prompt_max = self.prompt or part.prompt_min, self.prompt or part.prompt_max
            part.continuation = self.continuation or part.continuation
        elif self.prompt is not None or self.continuation is not None:
            raise UserError(
                f"prompt={self.prompt}, continuation={self.continuation}: the run {self.run_folder} has "
                f"data.kind={part.kind}, whose rows are not cut from plain documents to these lengths; leave both out."
            )
        if not isinstance(part, kinds.RepeatedConfig | kinds.ResponsesConfig):
            longest = [getattr(part, name, getattr(kinds.CutConfig, name)) for name in ("prompt_max", "continuation")]
            part.max_length = max(part.max_length, sum(longest))
        part.train_samples = 1  # read, and not used
        return recipe

    def identity(self) -> dict[str, Any]:
        """Return the name, and the data settings of the run, in all keys as earlier versions; no path of the run."""
        recipe = self.recipe()
        return {"name": self.name, "data": asdict(kinds.OwnDataConfig()) | asdict(recipe.data), "seed": recipe.seed}

    @property
    def source(self) -> str:
        """Where the run's rows come from; see :attr:`Task.source`."""
        part = self.recipe().data
        if not isinstance(part, kinds.StoredConfig):
            return GENERATED
        return HUB if part.root is None else str(Path(part.root).resolve())

    def load(self, tokenizer: Tokenizer, limit: int | None, max_tokens: int) -> Loaded:
        """Read the rows; see :meth:`Task.load`. A limit of None is the run's number, which no limit may exceed."""
        recipe = self.recipe()
        run_samples, recipe.data.val_samples = recipe.data.val_samples, limit or recipe.data.val_samples
        splits = data.read(recipe.data, recipe.seed, tokenizer, max_tokens)
        if run_samples is not None and splits.counts.held_out > run_samples:
            raise UserError(
                f"samples={limit}: expected at most {run_samples}, as the run holds out its first {run_samples} "
                f"training rows (data.val_samples) and trains on the others; give samples={run_samples}, or "
                "root=FOLDER with a validation split."
            )
        samples = [of_rows(f"{number}", group) for number, group in enumerate(splits.validation)]
        left_out = splits.counts.validation.skipped  # documents too short to be cut, or rows without room for a prompt
        in_documents = splits.counts.unit == "documents"
        return Loaded(samples, *((0, left_out) if in_documents else (left_out, 0)))

    def read(self, tokenizer: Tokenizer, max_tokens: int) -> Iterator[Sample | LeftOut]:
        """Yield the rows of the run's validation."""
        yield from self.load(tokenizer, None, max_tokens).samples

    def answer(
        self, model: nn.Module, tokenizer: Tokenizer, cache: EvictionCache, last_hidden: Tensor, sample: Sample
    ) -> tuple[float, Tags]:
        """Return the mean negative log-likelihood of the right response."""
        losses = [-log_likelihoods for log_likelihoods, _ in score(model, cache, last_hidden, sample.answers)]
        tags: dict[str, Any] = {"tokens": len(sample.target_tokens)}
        if len(losses) > 1:
            sums = [float(nats.sum()) for nats in losses]
            tags["accuracy"] = float(sums.index(min(sums)) == sample.target)
        return float(losses[sample.target].mean()), tags


def of_rows(name: str, rows: Sequence[Row]) -> Sample:
    """Return the sample of a row, or of the rows of a question, with their shortest prompt.

    If prompts were cut to fit a row, the prompt before the longest answer is the shortest. In a chat a response ends
    with the assistant's first turn.
    """
    shortest = min(rows, key=lambda row: row.response_start)
    prompt, question = np.split(shortest.tokens[: shortest.response_start], [shortest.prompt_length or 0])
    answers = []
    for row in rows:
        response = row.tokens[row.response_start :]
        ends = np.flatnonzero([] if row.loss is None else ~row.loss[row.response_start :])
        answers.append(response[: ends[0] if len(ends) else None].tolist())
    target = 0 if rows[0].answer is None else rows[0].answer.target
    return Sample(name, prompt.tolist(), question=question.tolist(), answers=answers, target=target)

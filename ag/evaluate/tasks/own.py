"""Your own texts, questions and chats: nats per token of their answers."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase as Tokenizer

from ag.config.data import SftConfig
from ag.data.custom_sft import detect_form, encoded_rows
from ag.data.encode import divided
from ag.data.sources import ENDINGS, DataError, Record, check_fields, read_file
from ag.data.tokens import tokenize_after, tokenize_prompt
from ag.engine import EvictionCache
from ag.errors import UserError
from ag.evaluate.tasks.base import LeftOut, PositiveInt, PromptTask, Sample, Tags
from ag.evaluate.tasks.follow import feed, mean_nats
from ag.model.chat import runs


class Question(NamedTuple):
    """A question about a context, as tokens."""

    question: list[int]  # tokens between the context and the answer
    answer: list[int]


@dataclass(frozen=True)
class Own(PromptTask):
    """The rows of a file, or of all files of a folder. The score is the answers' NLL per token.

    The columns of a file's first row decide how its rows are read:

    - ``context`` with ``question`` and ``answer``, or with ``questions``, a list of such objects. Each question is
      asked alone, from the cache after the context, and the score is the mean over questions;
    - a chat, or a prompt and its response, as in :mod:`ag.data.custom_sft`. All that stands before the answer, which is
      the assistant's last turn, is the prompt;
    - ``text``: its last tokens are the answer. A ``.txt`` file is one text.

    A context is read and evicted before its question. A row that is longer than the model's context is left out, except
    a text, which loses its end. With ``question=before`` a context has one question, which is the end of the prompt, as
    a server reads a request.
    """

    continuation: PositiveInt = 64  # last tokens of a text, which are its answer
    question: Literal["after", "before"] = "after"  # read after or before the context is evicted

    metric: ClassVar[str] = "nats per token"
    higher_is_better: ClassVar[bool] = False
    unit: ClassVar[str] = "rows"
    compares: ClassVar[bool] = False

    def read(self, tokenizer: Tokenizer, max_tokens: int) -> Iterator[Sample | LeftOut]:
        """Read the rows; see :meth:`ag.evaluate.tasks.Task.read`."""
        for file in self._files():
            rows = iter(read_file(file))
            if (first := next(rows, None)) is None:
                continue
            read = self._questions if "context" in first else self._answers
            for sample in read(tokenizer, itertools.chain([first], rows), file, max_tokens):
                longest = max((len(part.question) + len(part.answer) for part in sample.parts), default=0)
                if len(sample.prompt) + max(longest, len(sample.target_tokens)) > max_tokens:
                    yield "too long"
                elif not sample.prompt or not (sample.parts or sample.target_tokens):
                    yield "too short"  # nothing is evicted, or nothing is predicted
                else:
                    yield sample

    def reads_on(self, sample: Sample) -> bool:
        """Return whether tokens are read after the prompt; see :meth:`Task.reads_on`."""
        return bool(sample.parts) or len(sample.target_tokens) > 1

    def answer(
        self, model: nn.Module, tokenizer: Tokenizer, cache: EvictionCache, last_hidden: Tensor, sample: Sample
    ) -> tuple[float, Tags]:
        """Return the mean over the answers of their negative log-likelihood per token."""
        if not sample.parts:
            return mean_nats(model, cache, last_hidden, sample.target_tokens), {}
        nats = []
        for number, part in enumerate(sample.parts, start=1):
            copied = cache if number == len(sample.parts) else copy.deepcopy(cache)
            after = feed(model, copied, torch.tensor([part.question], device=last_hidden.device))[:, -1]
            nats.append(mean_nats(model, copied, after, part.answer))
        return sum(nats) / len(nats), {}

    def _files(self) -> list[Path]:
        if self.root is None:
            raise UserError(f"Task {self.name}: nothing to read: give data=FILE or a folder (in ag.compare root=).")
        path = Path(self.root)
        files = [path] if path.is_file() else sorted(file for file in path.glob("*") if file.name.endswith(ENDINGS))
        if not files or not files[0].name.endswith(ENDINGS):
            raise DataError(f"{path}: expected a file, or a folder of files, that end in {', '.join(ENDINGS)}")
        return files

    def _questions(self, tokenizer: Tokenizer, rows: Iterator[Record], file: Path, max_tokens: int) -> Iterator[Sample]:
        """Tokenise contexts with questions."""
        for number, row in enumerate(rows, start=1):
            location, parts = f"{file} row {number}", []
            check_fields(row, {"context": str}, location)
            context = tokenize_prompt(tokenizer, row["context"])
            for entry in _questions_of(row, location):
                text = f"\n\n{entry['question'].strip()}\n"
                context_and_question = tokenize_prompt(tokenizer, row["context"] + text)
                [answer] = tokenize_after(tokenizer, [entry["answer"].strip()])
                parts.append((divided(context, context_and_question), answer))
            name = f"{file.name}/{number}"
            if self.question == "after":
                shortest = min((prompt for (prompt, _), _ in parts), key=len)
                questions = [
                    Question([*prompt[len(shortest) :], *question], answer) for (prompt, question), answer in parts
                ]
                yield Sample(name, shortest, parts=questions)
            elif len(parts) > 1:
                raise DataError(f"{location} has {len(parts)} questions: question=before reads one a row")
            else:
                [((prompt, question), answer)] = parts
                yield Sample(name, prompt + question, answers=[answer])

    def _answers(self, tokenizer: Tokenizer, rows: Iterator[Record], file: Path, max_tokens: int) -> Iterator[Sample]:
        """Tokenise texts, chats, and prompts with responses."""
        first, data = next(rows), SftConfig(name=str(file))
        form, rows = detect_form(first, data, str(file)), itertools.chain([first], rows)
        if form.columns == [data.text_field]:
            for number, row in enumerate(rows, start=1):
                check_fields(row, {data.text_field: str}, f"{file} row {number}")
                ids = tokenize_prompt(tokenizer, row[data.text_field])[:max_tokens]
                end = max(0, len(ids) - self.continuation)
                yield Sample(f"{file.name}/{number}", ids[:end], answers=[ids[end:]])
            return
        if form.chat and tokenizer.chat_template is None:
            raise DataError(f"{file} has messages, and the tokenizer has no chat template: use an instruct model")
        encoded = encoded_rows(form, data, tokenizer, enumerate(rows, start=1), str(file))
        for number, tokenized in enumerate(encoded, start=1):
            loss, tokens = tokenized.loss, tokenized.tokens.tolist()
            begin, end = (tokenized.response_start, len(tokens)) if loss is None else runs(loss)[-1]
            yield Sample(f"{file.name}/{number}", tokens[:begin], answers=[tokens[begin:end]])


def _questions_of(row: Record, location: str) -> Sequence[dict[str, Any]]:
    """Return the questions of a row with their answers."""
    questions = row.get("questions", [row])
    if not isinstance(questions, list) or not questions or not all(isinstance(entry, dict) for entry in questions):
        raise DataError(f'{location}: expected questions as a list of {{"question": ..., "answer": ...}}')
    for entry in questions:
        check_fields(entry, {"question": str, "answer": str}, location)
        if not entry["answer"].strip():
            raise DataError(f"{location} has an empty answer: leave the question out, or write an answer")
    return questions

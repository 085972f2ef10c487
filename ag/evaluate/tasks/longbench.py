"""LongBench (https://arxiv.org/abs/2308.14508): long documents with questions, summaries, examples and code."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import huggingface_hub
from torch import nn
from transformers import PreTrainedTokenizerBase

from ag.data.collate import tokenize, tokenize_after
from ag.data.sources import DataError, Record, Source, check_fields, local_folder
from ag.errors import UserError
from ag.evaluate.tasks.base import LeftOut, Sample, require_whole
from ag.evaluate.tasks.longbench_subsets import SUBSETS
from ag.evaluate.tasks.questions import Asked, QuestionTask

HUB, ARCHIVE = "zai-org/LongBench", "data.zip"
FIELDS: dict[str, type | tuple[type, ...]] = {
    "input": str,
    "context": str,
    "answers": list,
    "length": int,
    "all_classes": (list, type(None)),
}
SPARE = 8  # tokens by which a text cut in the middle may grow when it is tokenised again


@dataclass(frozen=True)
class Case(Asked):
    """A row; its tags are the subset, the words of the row, and the tokens that were cut from its middle."""

    classes: list[str]  # all of a classification


@dataclass(frozen=True)
class LongBench(QuestionTask):
    """One subset: the benchmark's prompt, greedy answer and metric; too long prompts lose their middle, as it rules.

    Attributes:
        max_length: tokens of a prompt; None: what the model's context leaves beside the answer. The tag ``cut`` says
            how many tokens each prompt lost.
        chat: put the prompt into the tokenizer's chat template, where the benchmark does so.
    """

    max_length: int | None = None
    chat: bool = False

    metric: ClassVar[str] = "score"
    unit: ClassVar[str] = "questions"

    def __post_init__(self) -> None:
        """Check the length."""
        super().__post_init__()
        require_whole(self, "max_length", least=2)

    def read(self, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> Iterator[Sample | LeftOut]:
        """Read the rows; see :meth:`ag.evaluate.tasks.Task.read`."""
        subset = SUBSETS[self.name]
        chat = self.chat and subset.chat
        if chat and tokenizer.chat_template is None:
            raise UserError(f"Task {self.name}: chat=true, and the tokenizer has no chat template; set chat=false.")
        around = len(tokenize(tokenizer, [_chat(tokenizer, "")])[0]) if chat else 0
        room = max_tokens - subset.most
        longest = self.max_length or room - around - SPARE
        if longest < 2:
            raise UserError(
                f"Task {self.name} generates {subset.most} tokens, which leaves no room for a prompt in the model's "
                f"context of {max_tokens}."
            )
        for number, row in enumerate(self._rows(), start=1):
            check_fields(row, FIELDS, f"{self.name} row {number}")
            text = subset.prompt.format(context=row["context"], input=row["input"])
            ids = _encode(tokenizer, text)
            cut = max(0, len(ids) - longest // 2 * 2) if len(ids) > longest else 0
            if cut:
                ends = ids[: longest // 2], ids[-(longest // 2) :]
                text = "".join(str(tokenizer.decode(end, skip_special_tokens=True)) for end in ends)
                ids = _encode(tokenizer, text)
            whole = _chat(tokenizer, text) if chat else text
            if chat:
                [ids] = tokenize(tokenizer, [whole])
            asked = subset.prompt.partition("{context}")[2].format(input=row["input"])
            context = text[: text.rfind(asked)] if asked in text else text[: len(text) // 2]
            beginning = whole[: whole.find(context) + len(context)]
            alone = tokenize(tokenizer, [beginning])[0] if chat else _encode(tokenizer, beginning)
            prompt, question = self.divide(alone, ids)
            gap = "" if text[-1:].isspace() else " "
            answers = [gap + answer for answer in dict.fromkeys(row["answers"]) if answer.strip()]
            right = tokenize_after(tokenizer, answers)
            case = Case(
                id=f"{self.name}-{number}",
                prompt=prompt,
                question=question,
                text=text,
                references=row["answers"],
                right=[answer[: subset.most] for answer in right],
                most=subset.most,
                tags={"subset": self.name, "words": row["length"], "cut": cut, "question": self.question},
                classes=row["all_classes"] or [],
            )
            yield case if len(ids) <= room else "too long"

    def stops(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> tuple[Collection[int], int]:
        """Return what ends an answer; as in the benchmark, samsum's have one line, which is not empty."""
        stop, least = super().stops(model, tokenizer)
        if self.name == "samsum":
            return {*stop, int(tokenizer("\n", add_special_tokens=False)["input_ids"][-1])}, 1
        return stop, least

    def grade(self, text: str, sample: Any) -> float:
        """Return the score of the best match."""
        subset = SUBSETS[self.name]
        found = text.lstrip("\n").split("\n")[0] if subset.first_line else text
        scores = [subset.metric(found, reference, sample.classes) for reference in sample.references]
        return max(scores, default=0.0)

    def _rows(self) -> Iterator[Record]:
        """Return the rows of ``root/longbench/NAME.jsonl[.gz]``, or of the hub's archive."""
        try:
            if self.root:
                return Source(HUB, folder=local_folder(self.root, "longbench")).read(self.name)
            archive = huggingface_hub.hf_hub_download(HUB, ARCHIVE, repo_type="dataset")
        except (DataError, OSError) as error:
            raise DataError(
                f"Task {self.name}: {error}. Give root=FOLDER with longbench/{self.name}.jsonl[.gz] in it, or fetch "
                f"the data once with hf download {HUB} {ARCHIVE} --repo-type dataset and leave root out."
            ) from error
        return _unzipped(archive, f"data/{self.name}.jsonl")


def _unzipped(archive: str, name: str) -> Iterator[Record]:
    with zipfile.ZipFile(archive) as files, files.open(name) as lines:
        for line in lines:
            yield json.loads(line)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
    return ids


def _chat(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    messages = [{"role": "user", "content": text}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

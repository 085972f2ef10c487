"""LongBench (https://arxiv.org/abs/2308.14508): long documents with questions, summaries, examples and code."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import huggingface_hub
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ag.data.sources import DataError, Record, Source, check_fields, local_folder
from ag.engine import EvictionCache
from ag.errors import UserError, require
from ag.evaluate.tasks.base import LeftOut, PromptTask, Sample, Tags
from ag.evaluate.tasks.follow import end_tokens, greedy
from ag.evaluate.tasks.longbench_subsets import SUBSETS

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
class Case(Sample):
    """A row.

    Attributes:
        references: right answers; the best match counts.
        classes: all classes of a classification.
        tags: subset, words of the row, tokens that were cut from its middle.
    """

    references: list[str]
    classes: list[str]
    tags: Tags


@dataclass(frozen=True)
class LongBench(PromptTask):
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
        fits = self.max_length is None or (type(self.max_length) is int and self.max_length > 1)
        require(self, "max_length", fits, "a number of tokens, at least 2")

    def read(self, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> Iterator[Sample | LeftOut]:
        """Read the rows; see :meth:`ag.evaluate.tasks.Task.read`."""
        subset = SUBSETS[self.name]
        chat = self.chat and subset.chat
        if chat and tokenizer.chat_template is None:
            raise UserError(f"Task {self.name}: chat=true, and the tokenizer has no chat template; set chat=false.")
        around = len(_chat(tokenizer, "")) if chat else 0
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
            if chat:
                ids = _chat(tokenizer, text)
            tags = {"subset": self.name, "words": row["length"], "cut": cut}
            case = Case(f"{self.name}-{number}", ids, row["answers"], row["all_classes"] or [], tags)
            yield case if len(ids) <= room else "too long"

    def answer(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, cache: EvictionCache, last: Tensor, sample: Case
    ) -> tuple[float, Tags]:
        """Generate greedily and score; as in the benchmark, samsum's answers have one line, which is not empty."""
        subset = SUBSETS[self.name]
        stop, least = end_tokens(model, tokenizer.eos_token_id), 0
        if self.name == "samsum":
            stop, least = stop | {int(tokenizer("\n", add_special_tokens=False)["input_ids"][-1])}, 1
        tokens = greedy(model, cache, last, subset.most, stop, least)
        text = str(tokenizer.decode(tokens, skip_special_tokens=True))
        found = text.lstrip("\n").split("\n")[0] if subset.first_line else text
        scores = [subset.metric(found, reference, sample.classes) for reference in sample.references]
        return max(scores, default=0.0), {**sample.tags, "answer": text}

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


def _chat(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    messages = [{"role": "user", "content": text}]
    full = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    ids: list[int] = tokenizer(full, add_special_tokens=False, verbose=False)["input_ids"]
    return ids

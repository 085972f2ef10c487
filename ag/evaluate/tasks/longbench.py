"""LongBench (https://arxiv.org/abs/2308.14508): long documents with questions, summaries, examples and code.

Prompts, longest answers and metrics of the English subsets, in longbench.json, are the benchmark's
(https://github.com/THUDM/LongBench, MIT): the wording, slips included, makes numbers comparable.
"""

from __future__ import annotations

import json
import re
import string
import zipfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import huggingface_hub
from pydantic import Field
from torch import nn
from transformers import PreTrainedTokenizerBase as Tokenizer

from ag.data.encode import divided
from ag.data.sources import DataError, Record, Source, check_fields, local_folder
from ag.data.tokens import apply_template, tokenize, tokenize_after
from ag.errors import UserError, need
from ag.evaluate.tasks.base import LeftOut, Sample
from ag.evaluate.tasks.questions import EXTRA_ANSWER_TOKENS, QuestionTask

HUB, ARCHIVE = "zai-org/LongBench", "data.zip"
FIELDS: dict[str, type | tuple[type, ...]] = {"input": str, "context": str, "answers": list, "length": int}
FIELDS["all_classes"] = list, type(None)
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class LongBench(QuestionTask):
    """One subset with the benchmark's prompt, greedy answer and metric. Too long prompts lose their middle.

    Tags are the subset, the words of the row, and the tokens that were cut from its middle; the parts of a sample are
    all classes of a classification.
    """

    max_length: Annotated[int, Field(ge=2)] | None = None  # tokens of a prompt; None: the model's context - the answer
    chat: bool = False  # put the prompt into the tokenizer's chat template where the benchmark does

    metric: ClassVar[str] = "score"
    unit: ClassVar[str] = "questions"

    def identity(self) -> dict[str, Any]:
        """Return the options. In a chat an answer follows the template; once it followed the text inside."""
        chat = self.chat and SUBSETS[self.name].chat
        return super().identity() | ({"follows": "template"} if chat else {})

    def read(self, tokenizer: Tokenizer, max_tokens: int) -> Iterator[Sample | LeftOut]:
        """Read the rows; see :meth:`ag.evaluate.tasks.Task.read`."""
        subset = SUBSETS[self.name]
        if (module := NEEDED.get(subset.metric)) is not None:  # before hours of generation
            need(module, "longbench", f"Task {self.name}")
        chat = self.chat and subset.chat
        if chat and tokenizer.chat_template is None:
            raise UserError(f"Task {self.name}: chat=true, and the tokenizer has no chat template; set chat=false.")

        def encode(text: str) -> list[int]:
            ids: list[int] = tokenize(tokenizer, [text])[0] if chat else tokenizer(text, verbose=False)["input_ids"]
            return ids

        def around(text: str) -> str:
            messages = [{"role": "user", "content": text}]
            if not chat:
                return text
            return apply_template(tokenizer, messages)

        max_prompt = max_tokens - subset.max_new_tokens
        # a text that was cut in the middle may have a few more tokens when tokenised again
        longest = self.max_length or max_prompt - (len(encode(around(""))) if chat else 0) - EXTRA_ANSWER_TOKENS
        if longest < 2:
            raise UserError(
                f"Task {self.name} generates {subset.max_new_tokens} tokens, which leaves no room for a prompt in the "
                f"model's context of {max_tokens}."
            )
        half = longest // 2
        for number, row in enumerate(self._rows(), start=1):
            location = f"{self.name} row {number}"
            check_fields(row, FIELDS, location)
            for answer in row["answers"]:
                check_fields({"answers": answer}, {"answers": str}, location)
            text = subset.prompt.format(context=row["context"], input=row["input"])
            ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
            cut = len(ids) - 2 * half if len(ids) > longest else 0
            if cut:
                ends = ids[:half], ids[-half:]
                text = "".join(str(tokenizer.decode(end, skip_special_tokens=True)) for end in ends)
            prompt_text = around(text)
            ids = encode(prompt_text)
            question_text = subset.prompt.partition("{context}")[2].format(input=row["input"])
            context = text[: text.rfind(question_text)] if question_text in text else text[: len(text) // 2]
            beginning = encode(prompt_text[: prompt_text.find(context) + len(context)])
            prompt, question = (ids, []) if self.question == "before" else divided(beginning, ids)
            gap = "" if prompt_text[-1:].isspace() else " "
            answers = [gap + answer_text for answer_text in dict.fromkeys(row["answers"]) if answer_text.strip()]
            sample = Sample(
                f"{self.name}-{number}",
                prompt,
                question=question,
                answers=[answer[: subset.max_new_tokens] for answer in tokenize_after(tokenizer, answers)],
                max_new_tokens=subset.max_new_tokens,
                references=row["answers"],
                tags={"subset": self.name, "words": row["length"], "cut": cut, "question": self.question},
                parts=row["all_classes"] or [],
            )
            yield sample if len(ids) <= max_prompt else "too long"

    def end_conditions(self, model: nn.Module, tokenizer: Tokenizer) -> tuple[Collection[int], int]:
        """Return the tokens that end an answer; as in the benchmark, samsum's is one line that is not empty."""
        stop, min_new_tokens = super().end_conditions(model, tokenizer)
        if self.name == "samsum":
            return {*stop, int(tokenizer("\n", add_special_tokens=False)["input_ids"][-1])}, 1
        return stop, min_new_tokens

    def grade(self, text: str, sample: Sample) -> float:
        """Return the score of the best match."""
        subset = SUBSETS[self.name]
        graded = text.lstrip("\n").split("\n")[0] if subset.first_line else text
        return max((subset.metric(graded, reference, sample.parts) for reference in sample.references), default=0.0)

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
        with zipfile.ZipFile(archive) as files:
            return map(json.loads, files.read(f"data/{self.name}.jsonl").splitlines())


def f1(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Return the F1 of the words, in small letters, without punctuation and articles."""
    texts = (text.lower().translate(NO_PUNCTUATION) for text in (answer, reference))
    words, wanted = (Counter(re.sub(r"\b(a|an|the)\b", " ", text).split()) for text in texts)
    common = (words & wanted).total()
    return 2 * common / (words.total() + wanted.total()) if common else 0.0


def rouge_l(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Return the F value of ROUGE-L as the package ``rouge`` computes it; 0 if a text has no sentence."""
    if not any(answer.split(".")) or not any(reference.split(".")):
        return 0.0
    from rouge import Rouge  # loaded on use, like thefuzz

    try:
        return float(Rouge(["rouge-l"]).get_scores(answer, reference)[0]["rouge-l"]["f"])
    except RecursionError:  # a sentence of 1,000 words and more: the benchmark also counts 0
        return 0.0


def classification(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Return 1 / (classes in the answer) if the right class is among them; parts of its name do not count."""
    named = [name for name in classes if name in answer and (name == reference or name not in reference)]
    return 1 / len(named) if reference in named else 0.0


def count(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Return the share of the answer's numbers that equal the reference."""
    numbers = re.findall(r"\d+", answer)
    return numbers.count(reference) / len(numbers) if numbers else 0.0


def retrieval(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Return the share of the answer's numbers that equal N of the reference "Paragraph N"."""
    match = re.search(r"Paragraph (\d+)", reference)
    return count(answer, match[1]) if match else 0.0


def code_similarity(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Return the edit similarity of the answer's first line that is neither a comment nor a fence."""
    from thefuzz import fuzz

    lines = answer.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return float(fuzz.ratio(line, reference)) / 100


@dataclass(frozen=True)
class Subset:
    """A subset of the benchmark."""

    prompt: str  # with places for ``{context}`` and ``{input}``
    max_new_tokens: int  # largest number of tokens of an answer
    metric: Callable[[str, str, Sequence[str]], float]  # of one answer, one reference and the possible classes
    first_line: bool = False  # only the first line of an answer counts
    chat: bool = True  # a chat template may go around the prompt


#: Modules of other packages that metrics import.
NEEDED: dict[Callable[..., float], str] = {rouge_l: "rouge", code_similarity: "thefuzz"}
METRICS = {metric.__name__: metric for metric in (f1, rouge_l, classification, count, retrieval, code_similarity)}
SUBSETS = {
    name: Subset(**values | {"metric": METRICS[values["metric"]]})
    for name, values in json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8")).items()
}

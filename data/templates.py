"""The table of supervised tasks: where each lives, what its rows hold, and how a row becomes a question.

The templates are zero-shot and short, in the manner of lm-evaluation-harness. A response is always
``" " + choice``; the prompt never ends in a space.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ag.data.sources import DataError, Record, check_fields
from ag.errors import nearest

if TYPE_CHECKING:
    from ag.config import DataConfig

Fields = dict[str, type | tuple[type, ...]]


class Example(NamedTuple):
    """A question.

    Attributes:
        prompt: all that comes before the answer.
        choices: possible answers, without the space before them.
        target: index of the right one.
        context: the beginning of the prompt that may be evicted before the rest is read; empty where there is none.
    """

    prompt: str
    choices: list[str]
    target: int
    context: str = ""


@dataclass(frozen=True)
class Task:
    """One dataset.

    Attributes:
        hub: hub id that loads with datasets >= 4 (no dataset script).
        folder: its folder under ``data.root``.
        fields: required fields and their types.
        example: turns a row into an :class:`Example`.
        context: its prompts have a beginning that may be evicted before the rest is read: the text before a question,
            or all that comes before "Answer:" where the question itself lists its answers.
        subset: configuration name on the hub.
        revision: git revision on the hub.
    """

    hub: str
    folder: str
    fields: Fields
    example: Callable[[Record], Example]
    context: bool = False
    subset: str | None = None
    revision: str | None = None


def _piqa(row: Record) -> Example:
    return Example(f"Goal: {row['goal'].strip()}\nSolution:", [row["sol1"], row["sol2"]], row["label"])


def _arc(row: Record) -> Example:
    return Example(f"Question: {row['question']}\nAnswer:", row["choices"]["text"], _keyed(row))


def _openbookqa(row: Record) -> Example:
    return Example(row["question_stem"].strip(), row["choices"]["text"], _keyed(row))


def _boolq(row: Record) -> Example:
    question = row["question"].strip().rstrip("?")
    passage = row["passage"].strip()
    return Example(f"{passage}\nQuestion: {question}?\nAnswer:", ["no", "yes"], int(row["answer"]), passage)


def _rte(row: Record) -> Example:
    question = "Does the claim follow from the text?"
    text = f"Text: {row['premise'].strip()}"
    prompt = f"{text}\nClaim: {row['hypothesis'].strip()}\n{question}\nAnswer:"
    return Example(prompt, ["yes", "no"], row["label"], text)


def _copa(row: Record) -> Example:
    link = {"cause": "because", "effect": "so"}[row["question"]]
    premise = row["premise"].strip().rstrip(".")
    choices = [_uncapitalise(row["choice1"]), _uncapitalise(row["choice2"])]
    return Example(f"{premise}, {link}", choices, row["label"])


def _hellaswag(row: Record) -> Example:
    context = row["ctx"]
    if "ctx_a" in row:  # the hub's raw form; the local training rows are joined and cleaned already
        context = f"{row['ctx_a']} {row['ctx_b'].capitalize()}"
    prompt = _clean(f"{row['activity_label']}: {context}")
    return Example(prompt, [_clean(ending) for ending in row["endings"]], int(row["label"]))


def _mmlu(row: Record) -> Example:
    subject = row["subject"].replace("_", " ")
    listed = "\n".join(f"{letter}. {choice}" for letter, choice in zip("ABCD", row["choices"], strict=True))
    about = f"The following are multiple choice questions (with answers) about {subject}."
    text = f"{about}\n\n{row['question'].strip()}\n{listed}"
    return Example(f"{text}\nAnswer:", list("ABCD"), row["answer"], text)


def _keyed(row: Record) -> int:
    """Index of the right choice; the labels are letters in most rows and digits in some."""
    return int(row["choices"]["label"].index(row["answerKey"]))


def _uncapitalise(text: str) -> str:
    return text if re.match(r"I\b", text) else text[:1].lower() + text[1:]


def _clean(text: str) -> str:
    """Turn WikiHow's " [title]" into a full stop; drop the other bracketed marks and double spaces."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return re.sub(r" {2,}", " ", text).strip()


_CHOICES: Fields = {"choices": dict, "answerKey": str}

TASKS: dict[str, Task] = {
    "piqa": Task(
        hub="ybisk/piqa",
        revision="refs/convert/parquet",
        folder="piqa",
        fields={"goal": str, "sol1": str, "sol2": str, "label": int},
        example=_piqa,
    ),
    "arc_challenge": Task(
        hub="allenai/ai2_arc",
        subset="ARC-Challenge",
        folder="arc_challenge",
        fields={"question": str, **_CHOICES},
        example=_arc,
    ),
    "arc_easy": Task(
        hub="allenai/ai2_arc",
        subset="ARC-Easy",
        folder="arc_easy",
        fields={"question": str, **_CHOICES},
        example=_arc,
    ),
    "rte": Task(
        hub="aps/super_glue",
        subset="rte",
        folder="rte",
        fields={"premise": str, "hypothesis": str, "label": int},
        example=_rte,
        context=True,
    ),
    "copa": Task(
        hub="aps/super_glue",
        subset="copa",
        folder="copa",
        fields={"premise": str, "choice1": str, "choice2": str, "question": str, "label": int},
        example=_copa,
    ),
    "boolq": Task(
        hub="google/boolq",
        folder="boolq",
        fields={"question": str, "passage": str, "answer": bool},
        example=_boolq,
        context=True,
    ),
    "openbookqa": Task(
        hub="allenai/openbookqa",
        subset="main",
        folder="openbookqa",
        fields={"question_stem": str, **_CHOICES},
        example=_openbookqa,
    ),
    "hellaswag": Task(
        hub="Rowan/hellaswag",
        folder="hellaswag",
        fields={"activity_label": str, "ctx": str, "endings": list, "label": (str, int)},
        example=_hellaswag,
    ),
    "mmlu": Task(
        hub="cais/mmlu",
        subset="all",
        folder="mmlu",
        fields={"question": str, "subject": str, "choices": list, "answer": int},
        example=_mmlu,
        context=True,
    ),
}


WITH_CONTEXT = [name for name, task in TASKS.items() if task.context]


def is_own(data: DataConfig) -> bool:
    """Whether supervised rows are not those of the table: of a folder, or of ``ORG/NAME`` on the hub."""
    inside = [Path(data.root) / data.name] if data.root else []
    folders = (path.expanduser() for path in (Path(data.name), *inside))
    return data.name not in TASKS and ("/" in data.name or any(folder.is_dir() for folder in folders))


def find_task(name: str) -> Task:
    """Look up a task.

    Raises:
        DataError: no such task; the nearest name is suggested.
    """
    if name in TASKS:
        return TASKS[name]
    known = f"{', '.join(TASKS)}, a folder or ORG/NAME{nearest(name, TASKS, cutoff=0.4)}"
    raise DataError(f"data.name={name} is not a task: expected one of {known}")


def examples(task: Task, rows: Iterable[Record], where: str) -> Iterator[Example]:
    """Turn a split's rows into questions.

    Args:
        task: the task of the table.
        rows: the rows, in order.
        where: file or hub id of the rows, for messages (rows count from 1).

    Raises:
        DataError: a field is missing or of the wrong type, no choice is right, or a choice is not text.
    """
    for number, row in enumerate(rows, start=1):
        place = f"{where} row {number}"
        check_fields(row, task.fields, place)
        try:
            example = task.example(row)
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise DataError(f"{place} does not have the form of {task.hub}: {error!r}") from error
        choices: list[Any] = example.choices
        if not choices or not all(isinstance(choice, str) and choice.strip() for choice in choices):
            raise DataError(f"{place} has a choice that is empty or not text: {choices}")
        if not 0 <= example.target < len(choices):
            raise DataError(f"{place} marks choice {example.target} as right, but has {len(choices)} choices")
        yield example._replace(choices=[choice.strip() for choice in choices])

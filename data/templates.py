"""The table of supervised tasks: their datasets, the fields of their rows, and templates of questions.

The templates are zero-shot and short, like those in lm-evaluation-harness. A response is always ``" " + choice``; the
prompt never ends in a space.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ag.data.sources import ENDINGS, DataError, Record, check_fields, holds_rows
from ag.errors import nearest

if TYPE_CHECKING:
    from ag.config.data import StoredConfig

Fields = dict[str, type | tuple[type, ...]]


class Example(NamedTuple):
    """A question."""

    prompt: str  # all text before the answer
    choices: list[str]  # possible answers, without the space before them
    target: int  # index of the right choice
    context: str = ""  # beginning of the prompt; it may be evicted before the question is read


@dataclass(frozen=True)
class Task:
    """One dataset, on the hub and in a folder under ``data.root``."""

    hub: str  # hub id that loads with datasets >= 4 (no dataset script)
    folder: str
    fields: Fields  # required fields and their types
    example: Callable[[Record], Example]
    context: bool = False  # whether its questions have a context
    subset: str | None = None  # configuration name on the hub
    revision: str | None = None  # git revision on the hub
    train_rows: int | None = None  # on the hub. None: a plan has no number of steps


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
    instruction = f"The following are multiple choice questions (with answers) about {subject}."
    text = f"{instruction}\n\n{row['question'].strip()}\n{listed}"
    return Example(f"{text}\nAnswer:", list("ABCD"), row["answer"], text)


def _keyed(row: Record) -> int:
    """Index of the right choice; the labels are letters in most rows and digits in some."""
    return int(row["choices"]["label"].index(row["answerKey"]))


def _uncapitalise(text: str) -> str:
    return text if re.match(r"I\b", text) else text[:1].lower() + text[1:]


def _clean(text: str) -> str:
    """Turn WikiHow's " [title]" into a full stop; drop further bracketed marks and double spaces."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return re.sub(r" {2,}", " ", text).strip()


_CHOICES: Fields = {"choices": dict, "answerKey": str}

TASKS: dict[str, Task] = {
    "piqa": Task(
        "ybisk/piqa",
        "piqa",
        {"goal": str, "sol1": str, "sol2": str, "label": int},
        _piqa,
        revision="refs/convert/parquet",
        train_rows=16113,
    ),
    "arc_challenge": Task(
        "allenai/ai2_arc",
        "arc_challenge",
        {"question": str, **_CHOICES},
        _arc,
        subset="ARC-Challenge",
        train_rows=1119,
    ),
    "arc_easy": Task(
        "allenai/ai2_arc", "arc_easy", {"question": str, **_CHOICES}, _arc, subset="ARC-Easy", train_rows=2251
    ),
    "rte": Task(
        "aps/super_glue",
        "rte",
        {"premise": str, "hypothesis": str, "label": int},
        _rte,
        context=True,
        subset="rte",
        train_rows=2490,
    ),
    "copa": Task(
        "aps/super_glue",
        "copa",
        {"premise": str, "choice1": str, "choice2": str, "question": str, "label": int},
        _copa,
        subset="copa",
        train_rows=400,
    ),
    "boolq": Task(
        "google/boolq",
        "boolq",
        {"question": str, "passage": str, "answer": bool},
        _boolq,
        context=True,
        train_rows=9427,
    ),
    "openbookqa": Task(
        "allenai/openbookqa",
        "openbookqa",
        {"question_stem": str, **_CHOICES},
        _openbookqa,
        subset="main",
        train_rows=4957,
    ),
    "hellaswag": Task(
        "Rowan/hellaswag",
        "hellaswag",
        {"activity_label": str, "ctx": str, "endings": list, "label": (str, int)},
        _hellaswag,
        train_rows=39905,
    ),
    "mmlu": Task(
        "cais/mmlu",
        "mmlu",
        {"question": str, "subject": str, "choices": list, "answer": int},
        _mmlu,
        context=True,
        subset="all",
    ),
}


WITH_CONTEXT = [name for name, task in TASKS.items() if task.context]


def is_own(data: StoredConfig) -> bool:
    """Whether ``data.name`` is a folder or ``ORG/NAME`` on the hub, not a task of the table."""
    nested = [Path(data.root) / data.name] if data.root else []
    folders = (path.expanduser() for path in (Path(data.name), *nested))
    is_dataset_name = "/" in data.name or any(folder.is_dir() for folder in folders)
    return data.name not in TASKS and (is_dataset_name or (data.root is not None and holds_rows(Path(data.root))))


def find_task(data: StoredConfig) -> Task:
    """Return the task of the table that ``data.name`` names.

    Raises:
        DataError: no task has this name, or ``data.root`` holds neither the task nor rows; the message suggests a
            near name.
    """
    if data.name in TASKS:
        return TASKS[data.name]
    hint = nearest(data.name, TASKS)
    if data.root is not None:
        raise DataError(
            f"data.root={data.root} holds no rows, and no folder {data.name}: expected train.jsonl (or "
            f"{', '.join(ENDINGS[1:])}), shards such as train-*.jsonl, the output of save_to_disk, or data.name=TASK "
            f"with a folder of that task{hint}"
        )
    raise DataError(
        f"data.name={data.name} is not a task: expected one of {', '.join(TASKS)}, a folder or ORG/NAME{hint}"
    )


def examples(task: Task, rows: Iterable[Record], source_name: str) -> Iterator[Example]:
    """Turn a split's rows into questions; ``source_name`` is their file or hub id (rows count from 1).

    Raises:
        DataError: a field is missing or of the wrong type, no choice is right, or a choice is not text.
    """
    for number, row in enumerate(rows, start=1):
        location = f"{source_name} row {number}"
        check_fields(row, task.fields, location)
        try:
            example = task.example(row)
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise DataError(f"{location} does not have the form of {task.hub}: {error!r}") from error
        choices: list[Any] = example.choices
        if not choices or not all(isinstance(choice, str) and choice.strip() for choice in choices):
            raise DataError(f"{location} has a choice that is empty or not text: {choices}")
        if not 0 <= example.target < len(choices):
            raise DataError(f"{location} marks choice {example.target} as right, but has {len(choices)} choices")
        yield example._replace(choices=[choice.strip() for choice in choices])

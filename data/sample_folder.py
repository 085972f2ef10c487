"""A folder of generated data with which every command of the README runs offline: ``ag data sample FOLDER``.

The texts are made of a few hundred phrases. They show how a command is used, not what a policy is worth.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ag.data.facts import ACTIONS, LOCATIONS, SUBJECTS, TIMES
from ag.data.relations import NAMES, RELATIONS, TRADES
from ag.data.samples import HARBOUR
from ag.errors import UserError

DOCUMENTS = {"train": 200, "validation": 60}
DOCUMENT_SENTENCES = (60, 130)  # 700 to 1,600 tokens
BOOKS, BOOK_SENTENCES = 6, 1500  # 18,000 tokens each
QUESTIONS = {"train": 200, "validation": 100}


def write(folder: Path) -> list[Path]:
    """Write the data into a new folder and return its files, always the same ones.

    Raises:
        UserError: the folder exists and is not empty.
    """
    if folder.is_file() or folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"{folder}: it exists: expected a new folder, or an empty one.")
    rng, files = random.Random(0), []
    for split, number in DOCUMENTS.items():
        rows = [{"text": _story(rng, split, rng.randint(*DOCUMENT_SENTENCES))} for _ in range(number)]
        files.append(_write_rows(folder / "corpus" / f"{split}.jsonl", rows))
    books = [{"text": _story(rng, "validation", BOOK_SENTENCES)} for _ in range(BOOKS)]
    files.append(_write_rows(folder / "pg19_style" / "test.jsonl", books))
    for split, number in QUESTIONS.items():
        files.append(_write_rows(folder / "boolq" / f"{split}.jsonl", [_question(rng, split) for _ in range(number)]))
    files.append(folder / "page.txt")
    files[-1].write_text(HARBOUR, encoding="utf-8")
    return files


def _write_rows(file: Path, rows: Iterable[dict[str, Any]]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return file


def _person(rng: random.Random, split: str) -> str:
    return f"{rng.choice(NAMES[split])} the {rng.choice(TRADES)}"


def _story(rng: random.Random, split: str, sentences: int) -> str:
    """Return paragraphs of 8 sentences, of which one in four says something about a person."""
    text = []
    for _ in range(sentences):
        if rng.random() < 0.25:
            relation = rng.choice(RELATIONS)
            text.append(relation.fact.format(who=_person(rng, split), what=rng.choice(relation.answers)))
        else:
            text.append(" ".join(rng.choice(part) for part in (SUBJECTS, ACTIONS, LOCATIONS, TIMES)) + ".")
    return "\n\n".join(" ".join(text[i : i + 8]) for i in range(0, sentences, 8))


def _question(rng: random.Random, split: str) -> dict[str, Any]:
    """Return a row of BoolQ's form: a passage, and a statement about a person in it that is right or wrong."""
    relation, who, right = rng.choice(RELATIONS), _person(rng, split), rng.random() < 0.5
    fact, other = (relation.fact.format(who=who, what=what) for what in rng.sample(relation.answers, 2))
    story = _story(rng, split, 5).split(". ")
    story.insert(rng.randrange(len(story)), fact.rstrip("."))
    statement = (fact if right else other).rstrip(".")
    return {"question": f"is it true that {statement}", "passage": ". ".join(story), "answer": right}

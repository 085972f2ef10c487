"""Questions about one or some of many documents: SQuAD and HotpotQA among paragraphs of other questions."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from transformers import PreTrainedTokenizerBase

from ag.data.sources import DataError, Record, check_fields
from ag.errors import UserError
from ag.evaluate.tasks.generated import Generated, Variant
from ag.evaluate.tasks.held_out import HeldOut
from ag.evaluate.tasks.questions import Puzzle

SOURCES = {"qa_1": ("rajpurkar/squad_v2", "squad_v2", None), "qa_2": ("hotpotqa/hotpot_qa", "hotpot_qa", "distractor")}
ONLY = "Answer the question based on the given documents. Give only the answer, in a few words."


class Item(NamedTuple):
    """A question about some of the documents."""

    question: str
    answers: list[str]  # all annotated ones
    gold: list[int]  # the documents that it is about, by index
    near: list[int]  # documents of the same article, which come before others


class Corpus(NamedTuple):
    """All documents and the questions about them."""

    documents: list[str]
    items: list[Item]


@dataclass(frozen=True)
class DocumentQA(Generated):
    """A question whose documents stand among as many others as fit; right where an annotated answer is named."""

    unit: ClassVar[str] = "questions"
    least: ClassVar[int] = 0

    def material(self, tokenizer: PreTrainedTokenizerBase) -> Corpus:
        """Read all questions and documents."""
        hub, folder, subset = SOURCES[self.name]
        _, where, rows = HeldOut(self.name, self.root, hub, folder, ("validation",), subset).rows()
        corpus = (squad if self.name == "qa_1" else hotpot)(rows, where)
        if not corpus.items:
            raise UserError(f"Task {self.name}: {where} has no question with an answer.")
        return corpus

    def most_units(self, material: Any, variant: Variant) -> int:
        """Return how many documents are not the question's own."""
        return len(material.documents) - len(self._item(material, variant).gold)

    def build(self, rng: random.Random, material: Any, variant: Variant, size: int) -> Puzzle:
        """Draw ``size`` other documents and shuffle all; see :meth:`Generated.build`."""
        item = self._item(material, variant)
        near = list(item.near)
        rng.shuffle(near)
        draws, chosen = random.Random(rng.random()), dict.fromkeys(item.gold + near[:size])
        while len(chosen) < len(item.gold) + size:
            chosen[draws.randrange(len(material.documents))] = None
        order = list(chosen)
        rng.shuffle(order)
        numbered = [f"Document {i}:\n{material.documents[index]}" for i, index in enumerate(order, start=1)]
        context = f"{ONLY}\n\nThe following are given documents.\n\n" + "\n\n".join(numbered)
        right = [f" {answer}" for answer in item.answers]
        return Puzzle(context, f"\n\n{ONLY}\n\nQuestion: {item.question}\nAnswer:", item.answers, right)

    def grade(self, text: str, sample: Any) -> float:
        """Return 1.0 where an answer is named: RULER's ``string_match_part``."""
        return float(any(reference.lower() in text.lower() for reference in sample.references))

    def _item(self, material: Corpus, variant: Variant) -> Item:
        return material.items[(self.seed + variant.repeat) % len(material.items)]


def squad(rows: Iterable[Record], where: str) -> Corpus:
    """Read SQuAD; questions without an answer are left out, their paragraphs stay."""
    documents: dict[str, int] = {}
    articles: dict[str, list[int]] = {}
    asked: list[tuple[str, list[str], int, str]] = []
    fields: dict[str, type | tuple[type, ...]] = {"title": str, "context": str, "question": str, "answers": dict}
    for number, row in enumerate(rows, start=1):
        check_fields(row, fields, f"{where} row {number}")
        index = documents.setdefault(row["context"], len(documents))
        if index not in articles.setdefault(row["title"], []):
            articles[row["title"]].append(index)
        answers = list(dict.fromkeys(row["answers"].get("text", [])))
        if answers:
            asked.append((row["question"], answers, index, row["title"]))
    items = [Item(q, answers, [i], [other for other in articles[t] if other != i]) for q, answers, i, t in asked]
    return Corpus(list(documents), items)


def hotpot(rows: Iterable[Record], where: str) -> Corpus:
    """Read HotpotQA with its distractors; all paragraphs of a question are its own."""
    documents: dict[str, int] = {}
    items = []
    for number, row in enumerate(rows, start=1):
        check_fields(row, {"question": str, "answer": str, "context": dict}, f"{where} row {number}")
        texts = _paragraphs(row["context"], f"{where} row {number}")
        gold = [documents.setdefault(text, len(documents)) for text in texts]
        items.append(Item(row["question"], [row["answer"]], list(dict.fromkeys(gold)), []))
    return Corpus(list(documents), items)


def _paragraphs(context: Record, where: str) -> Sequence[str]:
    try:
        return [f"{t}\n{''.join(s)}" for t, s in zip(context["title"], context["sentences"], strict=True)]
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{where}: context has no titles with sentences, as on the hub: {error!r}") from error

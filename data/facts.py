"""The data of the quickstart: passages that hide one fact among distractors, and a question about it.

A passage states one fact about each of four people among filler sentences, and the question is about one of the four.
The right answer repeats that person's sentence and has several tokens. The wrong answer names another thing of this
kind, which the passage does not contain. Nearly every token may therefore be evicted, and a few must be kept. The
people of training and validation differ.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from ag.config.data import FactsConfig
from ag.data.relations import NAMES, RELATIONS, TRADES
from ag.data.sft import from_examples
from ag.data.splits import VALIDATION_ROWS, DataKind, Splits
from ag.data.templates import Example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ag.config import DataConfig

PEOPLE = 4  # people in a passage, each with one fact
TOKENS_PER_WORD = 1.15  # mean of these sentences with SmolLM2's tokenizer, punctuation included


# fmt: off
SUBJECTS = (
    "A young teacher", "The harbour crew", "An old friend", "The night watch",
    "A group of students", "The town choir", "The postman", "A tired traveller",
    "The museum guide", "A visitor from the coast", "The new neighbour", "The ferry captain",
)
ACTIONS = (
    "waited for the rain to stop", "talked about the weather", "carried two heavy boxes",
    "looked for a quiet bench", "read the morning paper", "counted the boats",
    "fixed a broken lamp", "shared a sandwich", "wrote a long letter", "closed the shutters",
    "swept the stairs", "told the same story again",
)
LOCATIONS = (
    "near the market", "on the old bridge", "behind the station", "in the small park",
    "by the lighthouse", "beside the library", "under the clock tower", "along the river",
    "at the end of the pier", "outside the town hall",
)
TIMES = (
    "before breakfast", "in the late afternoon", "during the storm", "after the meeting",
    "just before noon", "on the last day of the month", "while the shops were closed",
    "until the lights went out",
)
# fmt: on


class Facts(DataKind):
    """Generated passages that hide facts, with a question about one of them."""

    def read(self, data: DataConfig, seed: int, tokenizer: PreTrainedTokenizerBase, context: int) -> Splits:
        """Generate the questions and tokenise them as a supervised task.

        ``data.train_samples`` and ``data.val_samples`` say how many (default 2000 and 200).
        """
        assert isinstance(data, FactsConfig)

        def rows(split: str, number: int) -> list[Example]:
            return [generate(seed, split, i, data.prompt_min, data.prompt_max) for i in range(number)]

        train = rows("train", data.train_samples or data.DEFAULT_TRAIN_ROWS)
        validation = rows("validation", data.val_samples or VALIDATION_ROWS)
        return from_examples(data, tokenizer, context, train, validation)


def generate(seed: int, split: str, index: int, shortest: int, longest: int) -> Example:
    """Write one passage of ``shortest`` to ``longest`` tokens, roughly, and its question, from the arguments alone."""
    rng = random.Random(f"{seed}/{split}/{index}")
    words = int(rng.randint(shortest, longest) / TOKENS_PER_WORD)
    names, trades = rng.sample(NAMES[split], PEOPLE), rng.sample(TRADES, PEOPLE)
    people = [f"{name} the {trade}" for name, trade in zip(names, trades, strict=True)]
    relations = rng.sample(RELATIONS, PEOPLE)
    answers = [rng.sample(relation.answers, 2) for relation in relations]
    person = rng.randrange(PEOPLE)
    facts = [
        [relation.fact.format(who=who, what=answer) for answer in pair]
        for relation, who, pair in zip(relations, people, answers, strict=True)
    ]
    question = f"Question: {relations[person].question.format(who=people[person])}\nAnswer:"

    sentences = [right for right, _ in facts]
    missing = words - len(f"{' '.join(sentences)} {question}".split())
    sentences += _fillers(rng, missing)
    rng.shuffle(sentences)
    target = rng.randrange(2)
    choices = facts[person] if target == 0 else facts[person][::-1]
    passage = " ".join(sentences)
    return Example(f"{passage}\n{question}", choices, target, passage)


def _fillers(rng: random.Random, words: int) -> list[str]:
    """Return different sentences that together have about this number of words."""
    parts = (SUBJECTS, ACTIONS, LOCATIONS, TIMES)
    sentences: dict[str, int] = {}
    while sum(sentences.values()) < words:
        sentence = " ".join(rng.choice(part) for part in parts) + "."
        sentences[sentence] = len(sentence.split())
    return list(sentences)

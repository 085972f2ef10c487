"""Rows of a context and a response to it: a chunk of it again, what follows it, or the answer to a question.

Several rows share a context, so that a model may read it once for all of them (``loss.replay``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ag.data.collate import Row, tokenize, tokenize_after
from ag.data.relations import NAMES, RELATIONS, TRADES
from ag.data.sources import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ag.config import DataConfig
    from ag.data.module import Counts

RESPONSE = 96  # tokens of a chunk, and of what follows a context
LEAD = 8  # tokens before a chunk, which show its place and carry no loss
FACTS = 8  # in a context that is asked about
AGAIN = "\n\nThe same text once more, word for word:\n\n"  # between a context and a chunk of it
KINDS = ("again", "next", "question")


@dataclass(frozen=True)
class Responses:
    """Contexts, cut one after the other from each document, with a row for each kind of response.

    Attributes:
        lengths: tokens of a context, of which one that fits is drawn.
        kinds: of responses, each one of KINDS.
        start: tokens before a context.
        tokenizer: tokenises facts and questions.
        seed: of the draws.
        counts: skipped: documents too short for a context and what follows it.
    """

    lengths: tuple[int, ...]
    kinds: tuple[str, ...]
    start: list[int]
    tokenizer: PreTrainedTokenizerBase
    seed: int
    counts: Counts

    def rows(self, documents: Iterable[list[int]], validates: bool) -> Iterator[Row]:
        """Cut the documents; validation takes the longest context from the start of each."""
        [again] = tokenize_after(self.tokenizer, [AGAIN])
        [[*_, stop]] = tokenize(self.tokenizer, ["."])
        for number, tokens in enumerate(documents):
            rng = np.random.default_rng([self.seed, number])
            position = 0
            while fit := [n for n in self.lengths if n - len(self.start) + RESPONSE <= len(tokens) - position]:
                length = max(fit) if validates else int(rng.choice(fit))
                end = position + length - len(self.start)
                context, after = tokens[position:end], tokens[end : end + RESPONSE]
                for kind in self.kinds:
                    yield self._row(kind, context, after, again, stop, rng, validates)
                position = end + RESPONSE
                if validates:
                    break
            self.counts.skipped += position == 0

    def _row(
        self, kind: str, context: list[int], after: list[int], again: list[int], stop: int,
        rng: np.random.Generator, validates: bool,
    ) -> Row:  # fmt: skip
        silent, response = list[int](), after
        if kind == "again":
            first = int(rng.integers(LEAD, len(context) - RESPONSE + 1))
            silent, response = [*again, *context[first - LEAD : first]], context[first : first + RESPONSE]
        elif kind == "question":
            context, silent, response = self._asked(context, stop, rng, "validation" if validates else "train")
        tokens = np.array([*self.start, *context, *silent, *response], dtype=np.int32)
        loss = np.zeros(len(tokens), dtype=np.bool_)
        loss[len(tokens) - len(response) :] = True
        return Row(tokens, len(self.start) + len(context), loss=loss)

    def _asked(
        self, context: list[int], stop: int, rng: np.random.Generator, split: str
    ) -> tuple[list[int], list[int], list[int]]:
        """Return a context of the same length with facts, a question about one of them, and its answer."""
        names = rng.choice(len(NAMES[split]), FACTS, replace=False)
        facts, questions = [], []
        for name in names:
            relation = RELATIONS[rng.integers(len(RELATIONS))]
            who = f"{NAMES[split][name]} the {TRADES[rng.integers(len(TRADES))]}"
            what = relation.answers[rng.integers(len(relation.answers))]
            facts.append(relation.fact.format(who=who, what=what))
            questions.append(relation.question.format(who=who))
        asked = int(rng.integers(FACTS))
        *stated, answer = tokenize_after(self.tokenizer, [f" {fact}" for fact in [*facts, facts[asked]]])
        [question] = tokenize_after(self.tokenizer, [f"\n\nQuestion: {questions[asked]}\nAnswer:"])
        room = len(context) - sum(map(len, stated))
        if room < FACTS:
            raise DataError(
                f"data.contexts: a context of {len(context)} tokens has no room for {FACTS} facts: use longer ones, or "
                "leave question out of data.responses."
            )
        kept = context[:room]
        ends = [i + 1 for i, token in enumerate(kept) if token == stop] or list(range(1, room))
        places = sorted(rng.choice(ends, FACTS).tolist())
        pieces = [kept[a:b] for a, b in zip([0, *places], [*places, room], strict=True)]
        mixed = [
            *pieces[0],
            *(token for fact, piece in zip(stated, pieces[1:], strict=True) for token in [*fact, *piece]),
        ]
        return mixed, question, answer


def responses(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase, longest: int, start: list[int], seed: int, counts: Counts
) -> Responses:
    """Return what cuts documents for ``data.packing=responses``.

    Raises:
        DataError: for an unknown kind of response, or contexts that do not fit.
    """
    if unknown := [kind for kind in data.responses if kind not in KINDS]:
        raise DataError(f"data.responses={data.responses}: {unknown[0]} is unknown: expected {', '.join(KINDS)}.")
    [again] = tokenize_after(tokenizer, [AGAIN])
    needed = len(again) + LEAD + RESPONSE
    wrong = [n for n in data.contexts if not 2 * RESPONSE <= n <= longest - needed]
    if wrong or not data.contexts:
        raise DataError(
            f"data.contexts={data.contexts}: expected lengths of {2 * RESPONSE} to {longest - needed} tokens, as a "
            f"response takes up to {needed} of data.max_length={data.max_length} or of the model's context; change one "
            "of the two."
        )
    counts.remedy = f"too short for a context and what follows it; use a lower data.contexts={data.contexts}"
    return Responses(tuple(sorted(data.contexts)), tuple(data.responses), start, tokenizer, seed, counts)

"""Rows of a context and a response to it: a chunk of it again, what follows it, or the answer to a question.

Several rows share a context, so that a model may read it once for all of them (``loss.replay``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np

from ag.data.collate import Row, tokenize, tokenize_after
from ag.data.relations import NAMES, NUMBERS, RELATIONS, TRADES
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
        split = "validation" if validates else "train"
        for number, tokens in enumerate(documents):
            rng = np.random.default_rng([self.seed, number])
            position = 0
            while fit := [n for n in self.lengths if n - len(self.start) + RESPONSE <= len(tokens) - position]:
                length = max(fit) if validates else int(rng.choice(fit))
                end = position + length - len(self.start)
                context, after = tokens[position:end], tokens[end : end + RESPONSE]
                asked: Iterable[tuple[list[int], list[int]]] = ()
                if "question" in self.kinds:
                    context, asked = self._with_facts(context, stop, rng, split)
                questions = cycle(asked)
                for kind in self.kinds:
                    silent, response = next(questions) if kind == "question" else ([], after)
                    if kind == "again":
                        first = int(rng.integers(LEAD, len(context) - RESPONSE + 1))
                        silent = [*again, *context[first - LEAD : first]]
                        response = context[first : first + RESPONSE]
                    yield self._row(context, silent, response)
                position = end + RESPONSE
                if validates:
                    break
            self.counts.skipped += position == 0

    def _row(self, context: list[int], silent: list[int], response: list[int]) -> Row:
        """Return the row of a response that follows tokens without loss."""
        tokens = np.array([*self.start, *context, *silent, *response], dtype=np.int32)
        loss = np.zeros(len(tokens), dtype=np.bool_)
        loss[len(tokens) - len(response) :] = True
        return Row(tokens, len(self.start) + len(context), loss=loss)

    def _with_facts(
        self, context: list[int], stop: int, rng: np.random.Generator, split: str
    ) -> tuple[list[int], list[tuple[list[int], list[int]]]]:
        """Return a context of the same length with facts between its sentences, and a question and an answer for each.

        In half of the contexts all facts are of one relation, so that the name alone tells them apart. Half of the
        questions end with the beginning of the fact, whose end is the answer.
        """
        relations = [*RELATIONS, *NUMBERS]
        if rng.random() < 0.5:
            relations = [relations[rng.integers(len(relations))]]
        facts, told = [], []
        for name in rng.choice(len(NAMES[split]), FACTS, replace=False):
            relation = relations[rng.integers(len(relations))]
            who = f"{NAMES[split][name]} the {TRADES[rng.integers(len(TRADES))]}"
            what = relation.answers[rng.integers(len(relation.answers))]
            before, _, after = relation.fact.partition("{what}")
            begun, end = before.format(who=who).rstrip(), f" {what}{after}"
            question = relation.question.format(who=who)
            facts.append(f" {begun}{end}")
            if rng.random() < 0.5:
                told.append((f"\n\nQuestion: {question}\nAnswer:", facts[-1]))
            else:
                told.append((f"\n\n{question}\n{begun}", end))
        stated = tokenize_after(self.tokenizer, facts)
        room = len(context) - sum(map(len, stated))
        if room < FACTS:
            raise DataError(
                f"data.contexts: a context of {len(context)} tokens has no room for {FACTS} facts: use longer ones, or "
                "leave question out of data.responses."
            )
        kept = context[len(context) - room :]  # the end, so that what follows continues it
        ends = [i + 1 for i, token in enumerate(kept[:-1]) if token == stop] or list(range(1, room))
        places = sorted(rng.choice(ends, FACTS).tolist())
        pieces = [kept[a:b] for a, b in zip([0, *places], [*places, room], strict=True)]
        mixed = [token for fact, piece in zip([[], *stated], pieces, strict=True) for token in [*fact, *piece]]
        leads, answers = (tokenize_after(self.tokenizer, texts) for texts in zip(*told, strict=True))
        return mixed, [(leads[place], answers[place]) for place in rng.permutation(FACTS)]


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

"""Rows of a context and a response to it: a chunk of it again, what follows it, or an answer by a fact or a rule in it.

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
from ag.data.rules import MARKS, REQUESTS, ROLES, RULES, prompted
from ag.data.sources import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ag.config import DataConfig
    from ag.data.module import Counts

RESPONSE = 96  # tokens of a chunk, and of what follows a context
LEAD = 8  # tokens before a chunk, which show its place and carry no loss
FACTS = 8  # in half of the contexts with questions
RULES_BEFORE = 3, 6  # the fewest and the most before the other half
TEXT = "<text>"  # stands for a context in a message
AGAIN = "\n\nThe same text once more, word for word:\n\n"  # between a context and a chunk of it
KINDS = ("again", "next", "question")


@dataclass(frozen=True)
class Responses:
    """Contexts, cut one after the other from each document, with a row for each kind of response.

    Attributes:
        lengths: tokens of a context, of which one that fits is drawn.
        kinds: of responses, each one of KINDS. With ``question`` half of the contexts have facts, the others rules.
        start: tokens before a context.
        tokenizer: tokenises facts and questions.
        seed: of the draws.
        counts: of documents, and of their ends.
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
        counts = self.counts.of(validates)
        for number, tokens in enumerate(documents):
            counts.add(len(tokens))
            rng = np.random.default_rng([self.seed, number])
            position = 0
            while fit := [n for n in self.lengths if n - len(self.start) + RESPONSE <= len(tokens) - position]:
                length = max(fit) if validates else int(rng.choice(fit))
                end = position + length - len(self.start)
                context, after = tokens[position:end], tokens[end : end + RESPONSE]
                asked: Iterable[tuple[list[int], list[int]]] = ()
                if "question" in self.kinds and rng.random() < 0.5:
                    context, asked = self._with_facts(context, stop, rng, split)
                elif "question" in self.kinds:
                    context, asked = self._with_rules(context, rng)
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
            counts.keep(len(tokens) if validates and position else position, len(tokens))

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
        kept = _end(context, sum(map(len, stated)), f"{FACTS} facts")
        room = len(kept)
        ends = [i + 1 for i, token in enumerate(kept[:-1]) if token == stop] or list(range(1, room))
        places = sorted(rng.choice(ends, FACTS).tolist())
        pieces = [kept[a:b] for a, b in zip([0, *places], [*places, room], strict=True)]
        mixed = [token for fact, piece in zip([[], *stated], pieces, strict=True) for token in [*fact, *piece]]
        leads, answers = (tokenize_after(self.tokenizer, texts) for texts in zip(*told, strict=True))
        return mixed, [(leads[place], answers[place]) for place in rng.permutation(FACTS)]

    def _with_rules(
        self, context: list[int], rng: np.random.Generator
    ) -> tuple[list[int], list[tuple[list[int], list[int]]]]:
        """Return a context of the same length that begins with rules, and what each demands, with what comes before.

        The rules are a system prompt, and the rest of the context begins the message behind it. The end of that
        message, the opening of an answer and its first words come before what a rule demands.
        """
        fewest, most = RULES_BEFORE
        number = int(rng.integers(fewest, most + 1))
        chosen = [RULES[i] for i in rng.choice(len(RULES), number, replace=False)]
        drawn = [(rule, rule.demands[rng.integers(len(rule.demands))]) for rule in chosen]
        mark, role, request = (texts[rng.integers(len(texts))] for texts in (MARKS, ROLES, REQUESTS))
        rules = [rule.text.format(what=what) for rule, what in drawn]
        system = "\n".join([role, *(mark.format(i) + rule for i, rule in enumerate(rules, 1))])
        before, _, behind = prompted(self.tokenizer, system, f"{TEXT}\n\n{request}").partition(TEXT)
        [head] = tokenize(self.tokenizer, [before])
        leads = tokenize_after(self.tokenizer, [behind + rule.lead for rule in chosen])
        answers = tokenize_after(self.tokenizer, [rule.followed.format(what=what) for rule, what in drawn])
        kept = _end(context, len(head), f"a system prompt of {len(head)} tokens")
        # in another order than listed, as a context may have fewer questions than rules
        return [*head, *kept], [(leads[place], answers[place]) for place in rng.permutation(number)]


def _end(context: list[int], taken: int, what: str) -> list[int]:
    """Return the end of a context, which what follows continues, without as many tokens as are taken for ``what``."""
    room = len(context) - taken
    if room < FACTS:
        raise DataError(
            f"data.contexts: a context of {len(context)} tokens has no room for {what}: use longer ones, or leave "
            "question out of data.responses."
        )
    return context[taken:]


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

"""Rows of a context and a response: a chunk of the context, a continuation, or an answer by a fact or rule in it.

Several rows share a context: with ``loss.replay`` a model reads it once for all of them. A continuation may begin
inside of the context, as what a causal model has read of a text begins with what it has read of the text's beginning.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np

from ag.data.relations import NAMES, NUMBERS, RELATIONS, TRADES
from ag.data.rows import Row
from ag.data.rules import MARKS, REQUESTS, ROLES, RULES, prompted
from ag.data.sources import DataError
from ag.data.tokens import tokenize, tokenize_after

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ag.config.data import ResponsesConfig
    from ag.data.splits import Counts

RESPONSE_TOKENS = 96  # tokens of a chunk or of a continuation
MIN_PROMPT = 2 * RESPONSE_TOKENS  # fewest tokens before a continuation, and of a context
LEAD_TOKENS = 8  # tokens before a chunk; they show where it begins and carry no loss
NUM_FACTS = 8  # facts in each context of the first half of the contexts with questions
NUM_RULES = 3, 6  # fewest and most rules before each context of the second half
TEXT_MARK = "<text>"  # stands for a context in a message
REPEAT_PROMPT = "\n\nThe same text once more, word for word:\n\n"  # between a context and a chunk of it
RESPONSE_KINDS = ("again", "next", "question")


@dataclass(frozen=True)
class ResponseCutter:
    """Contexts, cut one after the other from each document, with a row for each kind of response.

    Attributes:
        lengths: tokens of a context; a length that fits is sampled.
        response_kinds: of RESPONSE_KINDS. With ``question``, half of the contexts have facts and half have rules.
        start: tokens before a context.
        tokenizer: tokenises facts and questions.
        seed: seed of the random choices.
        counts: counts of documents, and of tokens that were cut off their ends.
    """

    lengths: tuple[int, ...]
    response_kinds: tuple[str, ...]
    start: list[int]
    tokenizer: PreTrainedTokenizerBase
    seed: int
    counts: Counts

    def rows(self, documents: Iterable[list[int]], validates: bool) -> Iterator[Row]:
        """Cut the documents; validation takes the longest context from the start of each."""
        [repeat_prompt] = tokenize_after(self.tokenizer, [REPEAT_PROMPT])
        [[*_, stop]] = tokenize(self.tokenizer, ["."])
        split = "validation" if validates else "train"
        counts = self.counts.of(validates)
        for number, tokens in enumerate(documents):
            counts.add(len(tokens))
            rng = np.random.default_rng([self.seed, number])
            prompt_rng = np.random.default_rng([self.seed, number, 1])  # the contexts do not depend on its draws
            position = 0
            while fitting := [
                n for n in self.lengths if n + RESPONSE_TOKENS <= len(self.start) + len(tokens) - position
            ]:
                length = max(fitting) if validates else int(rng.choice(fitting))
                end = position + length - len(self.start)
                passage, next_tokens = tokens[position:end], tokens[end : end + RESPONSE_TOKENS]
                context = passage
                questions_answers: Iterable[tuple[list[int], list[int]]] = ()
                if "question" in self.response_kinds and rng.random() < 0.5:
                    context, questions_answers = self._with_facts(passage, stop, rng, split)
                elif "question" in self.response_kinds:
                    context, questions_answers = self._with_rules(passage, rng)
                questions = cycle(questions_answers)
                for kind in self.response_kinds:
                    if kind == "again":
                        first = int(rng.integers(LEAD_TOKENS, len(context) - RESPONSE_TOKENS + 1))
                        lead = [*repeat_prompt, *context[first - LEAD_TOKENS : first]]
                        yield self._row(context, lead, context[first : first + RESPONSE_TOKENS])
                    elif kind == "next":
                        # uniform in its logarithm: short prompts are drawn as often as long ones
                        prompt = int(MIN_PROMPT * (length / MIN_PROMPT) ** prompt_rng.random())
                        yield self._continuation(context, next_tokens, prompt)
                    else:
                        yield self._row(context, *next(questions))
                position = end + RESPONSE_TOKENS
                if validates:
                    break
            counts.keep(len(tokens) if validates and position else position, len(tokens))

    def _row(self, context: list[int], without_loss: list[int], response: list[int]) -> Row:
        """Return the row of a context, further tokens without loss, and a response."""
        tokens = np.array([*self.start, *context, *without_loss, *response], dtype=np.int32)
        context_length = len(self.start) + len(context)
        loss = np.arange(len(tokens)) >= len(tokens) - len(response)
        return Row(tokens, context_length, loss=loss, context_length=context_length)

    def _continuation(self, context: list[int], next_tokens: list[int], prompt: int) -> Row:
        """Return the row whose response continues the first ``prompt`` tokens of a context."""
        tokens = np.array([*self.start, *context, *next_tokens], dtype=np.int32)
        token_index = np.arange(len(tokens))
        loss = (token_index >= prompt) & (token_index < prompt + RESPONSE_TOKENS)
        return Row(tokens, prompt, loss=loss, context_length=len(self.start) + len(context))

    def _with_facts(
        self, passage: list[int], stop: int, rng: np.random.Generator, split: str
    ) -> tuple[list[int], list[tuple[list[int], list[int]]]]:
        """Return a context, and a question and answer for each of the facts in it.

        The context is as long as the passage: its text, cut at the start, with the facts between its sentences.

        In half of the contexts all facts have one relation, and only the names tell them apart. Half of the questions
        end with the beginning of the fact; the answer is its end.
        """
        relations = [*RELATIONS, *NUMBERS]
        if rng.random() < 0.5:
            relations = [relations[rng.integers(len(relations))]]
        facts, questions = [], []
        for name in rng.choice(len(NAMES[split]), NUM_FACTS, replace=False):
            relation = relations[rng.integers(len(relations))]
            who = f"{NAMES[split][name]} the {TRADES[rng.integers(len(TRADES))]}"
            answer = relation.answers[rng.integers(len(relation.answers))]
            before_answer, _, after_answer = relation.fact.partition("{what}")
            beginning, end = before_answer.format(who=who).rstrip(), f" {answer}{after_answer}"
            question = relation.question.format(who=who)
            facts.append(f" {beginning}{end}")
            if rng.random() < 0.5:
                questions.append((f"\n\nQuestion: {question}\nAnswer:", facts[-1]))
            else:
                questions.append((f"\n\n{question}\n{beginning}", end))
        stated = tokenize_after(self.tokenizer, facts)
        text = _trim_passage(passage, sum(map(len, stated)), f"{NUM_FACTS} facts")
        room = len(text)
        ends = [i + 1 for i, token in enumerate(text[:-1]) if token == stop] or list(range(1, room))
        cuts = sorted(rng.choice(ends, NUM_FACTS).tolist())
        segments = [text[a:b] for a, b in zip([0, *cuts], [*cuts, room], strict=True)]
        mixed = [token for fact, segment in zip([[], *stated], segments, strict=True) for token in [*fact, *segment]]
        prompts, answers = (tokenize_after(self.tokenizer, texts) for texts in zip(*questions, strict=True))
        return mixed, [(prompts[index], answers[index]) for index in rng.permutation(NUM_FACTS)]

    def _with_rules(
        self, passage: list[int], rng: np.random.Generator
    ) -> tuple[list[int], list[tuple[list[int], list[int]]]]:
        """Return a context that begins with rules, and for each rule a lead and the text it demands.

        The context is as long as the passage. The rules are a system prompt; the passage, cut at the start, begins the
        user's message. A lead is the end of this message, the opening of an answer and its first words.
        """
        min_rules, max_rules = NUM_RULES
        number = int(rng.integers(min_rules, max_rules + 1))
        chosen_rules = [RULES[i] for i in rng.choice(len(RULES), number, replace=False)]
        demands = [(rule, rule.demands[rng.integers(len(rule.demands))]) for rule in chosen_rules]
        mark, role, request = (texts[rng.integers(len(texts))] for texts in (MARKS, ROLES, REQUESTS))
        rules = [rule.text.format(what=demand) for rule, demand in demands]
        system = "\n".join([role, *(mark.format(i) + rule for i, rule in enumerate(rules, 1))])
        before_text, _, after_text = prompted(self.tokenizer, system, f"{TEXT_MARK}\n\n{request}").partition(TEXT_MARK)
        [head] = tokenize(self.tokenizer, [before_text])
        prompts = tokenize_after(self.tokenizer, [after_text + rule.lead for rule in chosen_rules])
        answers = tokenize_after(self.tokenizer, [rule.followed.format(what=demand) for rule, demand in demands])
        text = _trim_passage(passage, len(head), f"a system prompt of {len(head)} tokens")
        # shuffled: a context may have fewer questions than rules
        return [*head, *text], [(prompts[index], answers[index]) for index in rng.permutation(number)]


def _trim_passage(passage: list[int], reserved: int, purpose: str) -> list[int]:
    """Cut ``reserved`` tokens off a passage's start; the text after the passage still continues it."""
    room = len(passage) - reserved
    if room < NUM_FACTS:
        raise DataError(
            f"data.contexts: a context of {len(passage)} tokens has no room for {purpose}: use longer ones, or leave "
            "question out of data.responses."
        )
    return passage[reserved:]


def make_cutter(
    data: ResponsesConfig, tokenizer: PreTrainedTokenizerBase, longest: int, start: list[int], seed: int, counts: Counts
) -> ResponseCutter:
    """Return the cutter of documents for ``data.packing=responses``.

    Raises:
        DataError: a kind of response is unknown, or contexts do not fit.
    """
    if unknown := [kind for kind in data.responses if kind not in RESPONSE_KINDS]:
        raise DataError(
            f"data.responses={data.responses}: {unknown[0]} is unknown: expected {', '.join(RESPONSE_KINDS)}."
        )
    [repeat_prompt] = tokenize_after(tokenizer, [REPEAT_PROMPT])
    response_room = len(repeat_prompt) + LEAD_TOKENS + RESPONSE_TOKENS
    unfit = [n for n in data.contexts if not MIN_PROMPT <= n <= longest - response_room]
    if unfit or not data.contexts:
        raise DataError(
            f"data.contexts={data.contexts}: expected lengths of {MIN_PROMPT} to {longest - response_room} "
            f"tokens, as a response takes up to {response_room} of data.max_length={data.max_length} or of the model's "
            "context; change one of the two."
        )
    counts.remedy = f"too short for a context and a response; use a lower data.contexts={data.contexts}"
    return ResponseCutter(tuple(sorted(data.contexts)), tuple(data.responses), start, tokenizer, seed, counts)

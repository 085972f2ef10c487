"""Several questions over one context, which is evicted once: in turn, or each from a copy of the evicted cache.

The two modes follow SCBench (https://arxiv.org/abs/2412.10319). Kinds of questions and wording are our own.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase as Tokenizer

from ag.data.tokens import tokenize_after
from ag.engine import EvictionCache, Policy, policy, read_prompt
from ag.evaluate.tasks import ruler
from ag.evaluate.tasks.base import Outcome, Outcomes, PositiveInt, Sample, Samples, by_part, synchronised_time
from ag.evaluate.tasks.follow import distance, feed_texts
from ag.evaluate.tasks.questions import TextSample, num_blank_tokens
from ag.evaluate.tasks.ruler import Digits, Haystack, Variant
from ag.model.structure import lm_logits

Text = TypeVar("Text", str, list[int])
QUESTION_KINDS = ("key", "key", "latest", "updated", "variable", "variable")  # of the questions of a conversation


class Turn(NamedTuple, Generic[Text]):
    """One of several questions over a context, as text or as tokens."""

    kind: str  # one of QUESTION_KINDS
    question: Text  # what stands before the answer; its end is the beginning of the answer
    answer: Text  # with the space that separates it from the question
    first: int = 0  # index of the first scored token of the answer, after blanks


@dataclass(frozen=True)
class Turns(Haystack):
    """Six questions over one context. The score is the share of exact answers.

    The context hides numbers: of keys, of a key whose number changes twice, and of variables that are set to each
    other. Two questions ask for a ``key``, two for a ``variable``, one for the ``latest`` number of a key, and one
    for a number that an earlier turn ``updated``. Their order is drawn. The update is the beginning of a turn
    before its question, or of its question if questions are read apart.

    A policy evicts from the context. Then the turns are read, each question with its right answer: all policies read
    equal turns. Nothing is generated: an answer is exact if each of its tokens is the likeliest. There are tags by
    ``turn`` and by ``kind`` of question. The parts of a sample are its turns as tokens, its question is all of them.
    """

    question: Literal["after"] = "after"
    generate: None = None
    haystack: Literal["text", "noise"] = "text"
    apart: bool = False  # read each question alone, with a copy of the cache after the context
    hops: PositiveInt = 1  # variables that a number is copied to
    digits: Digits = 5  # of a number

    metric: ClassVar[str] = "exact match"
    unit: ClassVar[str] = "conversations"
    generates: ClassVar[bool] = False
    series: ClassVar[str] = "turns"  # samples do not depend on ``apart``

    def build(self, rng: random.Random, material: Any, variant: Variant, size: int) -> TextSample:
        """Draw the facts, the turns and the places, then the text around them."""
        question_kinds = rng.sample(QUESTION_KINDS, len(QUESTION_KINDS))
        while question_kinds[0] == "updated":
            rng.shuffle(question_kinds)
        update_turn = rng.randrange(question_kinds.index("updated"))  # the turn with the new number
        keys = iter(ruler.draw_distinct(rng, "noun", len(QUESTION_KINDS)))
        values = iter(ruler.draw_distinct(rng, "number", 2 * len(QUESTION_KINDS), self.digits))
        names = iter(ruler.draw_distinct(rng, "name", 2 * (self.hops + 1), 3))
        chains, turns, update = [], list[Turn[str]](), ""
        for kind in question_kinds:
            if kind == "variable":
                chain, value = [next(names) for _ in range(self.hops + 1)], next(values)
                chains.append(ruler.assignments(chain, value))
                asks, lead = f"What is the value of VAR {chain[-1]}", f"VAR {chain[-1]} ="
            else:
                owner, value = f"The secret number of the {next(keys)}", next(values)
                chain = [f"{owner} is {value}."]
                if kind == "latest":
                    chain.append(f"{owner} is now {next(values)}.")
                    value = next(values)
                    chain.append(f"{owner} is now {value}.")
                elif kind == "updated":
                    value = next(values)
                    update = f"From now on t{owner[1:]} is {value}.\n"
                now_text = " now" if kind in ("latest", "updated") else ""
                chains.append(chain)
                asks, lead = f"What is t{owner[1:]}{now_text}", f"{owner} is{now_text}"
            turns.append(Turn(kind, f"Question: {asks}?\nAnswer: {lead}", f" {value}"))
        needles, sentences = ruler.interleave(rng, chains), ruler.sample_sentences(rng, material, size)
        context = ruler.join(sentences, needles, sorted(ruler.sample_depths(rng, len(needles))))

        def question_text(number: int, apart: bool) -> str:
            stop = "." if number and not apart else ""  # after the previous answer
            new = turns[number].kind == "updated" if apart else number == update_turn
            return f"{stop}\n\n{update if new else ''}{turns[number].question}"

        question = "".join(question_text(i, False) + turn.answer for i, turn in enumerate(turns))
        turns = [turn._replace(question=question_text(i, self.apart)) for i, turn in enumerate(turns)]
        return TextSample(context, question, [], [turns[-1].answer], turns)

    def sample_fields(self, tokenizer: Tokenizer, text_sample: TextSample, context: list[int]) -> dict[str, Any]:
        """Return context and turns as tokens."""
        turns = []
        for turn in text_sample.parts:
            question, answer = tokenize_after(tokenizer, [turn.question, turn.answer])
            turns.append(Turn(turn.kind, question, answer, num_blank_tokens(tokenizer, answer)))
        tokens = [token for turn in turns for token in turn.question + turn.answer]
        return {"prompt": context, "question": tokens, "answers": [], "max_new_tokens": 0, "parts": turns}

    def run(self, model: nn.Module, tokenizer: Tokenizer, policies: Sequence[Policy], samples: Samples) -> Outcomes:
        """Run policies over conversations; see :meth:`Task.run`."""
        device = next(model.parameters()).device
        for sample in samples:
            caches = read_prompt(model, [policy("full"), *policies], torch.tensor([sample.prompt], device=device))
            full = self._answer_log_probs(model, caches.pop(0)[0], sample)
            for index in range(len(policies)):
                cache, _ = caches.pop(0)  # freed before the next policy runs
                usage, over = (cache.kept_share(), cache.nbytes), bool(cache.over_budget.any())
                seconds, start = cache.scoring_seconds, synchronised_time(device)  # later scoring counts in the turns
                log_probs = self._answer_log_probs(model, cache, sample)
                seconds += synchronised_time(device) - start
                score, tags = _outcome_score(sample, log_probs)
                tags |= distance(full, log_probs)
                yield index, Outcome(sample.id, score, len(sample.prompt), *usage, seconds, tags, over)

    @torch.no_grad()
    def _answer_log_probs(self, model: nn.Module, cache: EvictionCache, sample: Sample) -> Tensor:
        """Return the log-probabilities ``[T, V]`` at each token of each right answer. The cache is changed.

        Under a policy that does not evict again this is one pass, of one sequence or of one for each question.
        """
        rows = [[turn] for turn in sample.parts] if self.apart else [sample.parts]
        texts = [[token for turn in turns for token in turn.question + turn.answer][:-1] for turns in rows]
        answer_states = list[Tensor]()  # states that predict the answers
        for turns, states in zip(rows, feed_texts(model, cache, texts), strict=True):
            end = -1
            for turn in turns:
                start, end = end + len(turn.question), end + len(turn.question) + len(turn.answer)
                answer_states.append(states[start:end])
        return lm_logits(model, torch.cat(answer_states)).float().log_softmax(-1)


def _outcome_score(sample: Sample, log_probs: Tensor) -> tuple[float, dict[str, Any]]:
    """Return the share of exact answers, and the tags."""
    scores, nats = list[float](), list[float]()
    answer_log_probs = log_probs.split([len(turn.answer) for turn in sample.parts])
    for turn, log_probabilities in zip(sample.parts, answer_log_probs, strict=True):
        right = torch.tensor(turn.answer, device=log_probabilities.device)[:, None]
        nats.append(-float(log_probabilities.gather(1, right)[turn.first :].mean()))
        scores.append(float((log_probabilities.argmax(-1, True) == right)[turn.first :].all()))
    tags: dict[str, Any] = {**sample.tags, "nats": sum(nats) / len(nats)}
    tags |= by_part("turn", zip(range(1, len(nats) + 1), scores, nats, strict=True))
    tags |= by_part("kind", zip([turn.kind for turn in sample.parts], scores, nats, strict=True))
    return sum(scores) / len(scores), tags

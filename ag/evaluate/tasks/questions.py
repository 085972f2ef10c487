"""Questions about a context: when they are read, the NLL of right answers, and generated answers."""

from __future__ import annotations

import copy
import itertools
from abc import abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase as Tokenizer

from ag.data.encode import divided
from ag.data.tokens import tokenize_after, tokenize_prompt
from ag.engine import EvictionCache
from ag.evaluate.tasks.base import PromptTask, Sample, Tags
from ag.evaluate.tasks.follow import greedy, score
from ag.model.structure import end_tokens

FLOOR = 0.1
EXTRA_ANSWER_TOKENS = 8  # tokens by which an answer may be longer than the longest right answer


class TextSample(NamedTuple):
    """A sample before it is tokenised."""

    context: str  # the evicted text
    question: str  # the text after the context; its end may be the beginning of the answer
    references: list[str]  # texts that the answer must contain
    answers: list[str]  # right answers, with the space between question and answer
    parts: Sequence[Any] = ()  # one entry for each thing that is asked for, if a task asks for several

    @property
    def text(self) -> str:
        """Context and question."""
        return self.context + self.question


@dataclass(frozen=True)
class QuestionTask(PromptTask):
    """A task whose samples are a context and a question about it.

    Every right answer is scored under teacher forcing: the tag ``nats`` is the NLL per token of the likeliest one,
    ``hits`` is 1 if each of its tokens is the likeliest. Blank tokens before the first word do not count. Then the
    model answers greedily, and :meth:`grade` gives the score. With ``question=before`` the question is the end of the
    prompt, where a policy can use it.
    """

    question: Literal["after", "before"] = "after"  # read after or before the context is evicted

    #: Whether the model answers. If not, the score is 1 if each token of the right answer is the likeliest.
    generates: ClassVar[bool] = True
    chance: ClassVar[float | None] = FLOOR

    @abstractmethod
    def grade(self, text: str, sample: Sample) -> float:
        """Return the score of a generated answer."""

    def end_conditions(self, model: nn.Module, tokenizer: Tokenizer) -> tuple[Collection[int], int]:
        """Return the tokens that end an answer, and its smallest number of tokens."""
        return end_tokens(model, tokenizer.eos_token_id), 0

    def reads_on(self, sample: Sample) -> bool:
        """Return whether tokens are read after the prompt; see :meth:`Task.reads_on`."""
        return super().reads_on(sample if self.generates else replace(sample, max_new_tokens=0))

    def tokenize_sample(
        self, tokenizer: Tokenizer, name: str, text_sample: TextSample, tags: Tags, max_new_tokens: int | None = None
    ) -> Sample:
        """Tokenise a sample. A ``max_new_tokens`` of None means the tokens of the longest right answer, and 8 more."""
        context, context_and_question = (
            tokenize_prompt(tokenizer, text) for text in (text_sample.context, text_sample.text)
        )
        prompt, question = (
            (context_and_question, []) if self.question == "before" else divided(context, context_and_question)
        )
        answers = tokenize_after(tokenizer, text_sample.answers)
        sample = Sample(
            name,
            prompt,
            question=question,
            answers=answers,
            max_new_tokens=max(map(len, answers)) + EXTRA_ANSWER_TOKENS if max_new_tokens is None else max_new_tokens,
            references=text_sample.references,
            tags={**tags, "question": self.question},
        )
        return replace(sample, **self.sample_fields(tokenizer, text_sample, context))

    def sample_fields(self, tokenizer: Tokenizer, text_sample: TextSample, context: list[int]) -> dict[str, Any]:
        """Return further fields of a sample. ``context`` are the tokens of the context alone."""
        return {}

    def answer(
        self, model: nn.Module, tokenizer: Tokenizer, cache: EvictionCache, last_hidden: Tensor, sample: Sample
    ) -> tuple[float, Tags]:
        """Score the right answers; the score is 1 if each token of the likeliest one is the likeliest token."""
        tags, scored = dict(sample.tags), []
        for number, answer in enumerate(sample.answers, start=1):  # one by one: memory for one more cache suffices
            used_up = not self.generates and number == len(sample.answers)
            answer_cache = cache if used_up else copy.deepcopy(cache)
            [(log_likelihoods, likeliest)] = score(model, answer_cache, last_hidden, [answer])
            first = num_blank_tokens(tokenizer, answer)
            scored.append((float(-log_likelihoods[first:].mean()), likeliest[first:]))
        if scored:
            nats_of, likeliest = min(scored, key=lambda pair: pair[0])
            tags |= {"nats": nats_of, "hits": float(likeliest.all())}
        return float(tags.get("hits", 0.0)), tags

    def write(
        self, model: nn.Module, tokenizer: Tokenizer, prompts: Sequence[tuple[EvictionCache, Tensor]], sample: Sample
    ) -> list[tuple[float, Tags]]:
        """Let the model answer under all policies in one batch; the scores are the grades of the answers."""
        if not self.generates:
            return []
        stop, min_new_tokens = self.end_conditions(model, tokenizer)
        written = greedy(model, prompts, sample.max_new_tokens, stop, min_new_tokens)
        texts = [str(tokenizer.decode(tokens, skip_special_tokens=True)) for tokens in written]
        return [(self.grade(text, sample), {"answer": text}) for text in texts]


def num_blank_tokens(tokenizer: Tokenizer, answer: list[int]) -> int:
    """Return the number of tokens of an answer before its first word."""
    return len([*itertools.takewhile(lambda token: not str(tokenizer.decode([token])).strip(), answer[:-1])])

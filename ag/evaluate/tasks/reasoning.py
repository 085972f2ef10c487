r"""Problems of GSM8K and MATH-500: the model reasons before it answers, while tokens are evicted.

:class:`Reasoning` grades the answers that the model gives under each policy. :class:`OwnSolutions` needs far fewer
problems to tell policies apart: every policy reads the solutions that the model wrote with a full cache.
"""

from __future__ import annotations

import random
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase as Tokenizer

from ag.data.rules import prompted
from ag.data.sources import check_fields
from ag.data.tokens import start_tokens, tokenize
from ag.engine import EvictionCache, Policy, policy, read_prompt
from ag.evaluate.tasks.answers import final_answer, is_equal
from ag.evaluate.tasks.base import LeftOut, Outcome, Outcomes, PositiveInt, Sample, Samples, Tags, Task
from ag.evaluate.tasks.follow import continue_batch, end_tokens, likeliest, padded
from ag.evaluate.tasks.held_out import held_out
from ag.evaluate.tasks.questions import FLOOR
from ag.evaluate.tasks.worked import sequence_usage

INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."


class Dataset(NamedTuple):
    """Where the problems of a dataset are. The field of an answer is ``answer``."""

    hub: str
    subset: str | None  # configuration name on the hub
    problem: str  # field of the problem


DATASETS = {
    "gsm8k": Dataset("openai/gsm8k", "main", "question"),
    "math500": Dataset("HuggingFaceH4/MATH-500", None, "problem"),
}


class Decoded(NamedTuple):
    """The solution of one problem, as one cache decoded it."""

    tokens: list[int]  # with the end token, if it ended
    held: list[float]  # tokens that the cache held before each of them, the mean over layers and KV heads
    usage: tuple[int, float, int]  # see sequence_usage
    over_budget: bool


@dataclass(frozen=True)
class Problems(Task):
    """Problems with solutions that end in an answer, zero-shot, in the chat template of the model if it has one.

    Policies evict from the prompt, and from the solution by their schedule. In an outcome ``tokens`` counts prompt and
    solution, and ``kept`` is the kept share of both at the end. The tag ``generated`` is the number of the solution's
    tokens, its end token included. ``held`` is the number of tokens in the cache at the end of the solution, as the
    mean over layers and KV heads, and ``most_held`` the largest number during the solution. The datasets are ``gsm8k``
    (Cobbe et al. 2021) and ``math500`` (Hendrycks et al. 2021; the 500 problems of Lightman et al. 2023).
    """

    dataset: Literal["gsm8k", "math500"] = "gsm8k"
    max_new_tokens: PositiveInt = 512  # largest number of tokens of a solution
    batch: PositiveInt = 8  # problems in a batch

    unit: ClassVar[str] = "problems"
    #: Whether the model writes each solution with a full cache first.
    needs_full: ClassVar[bool] = False

    def read(self, tokenizer: Tokenizer, max_tokens: int) -> Iterator[Sample | LeftOut]:
        """Read the problems; see :meth:`ag.evaluate.tasks.Task.read`."""
        hub, subset, field = DATASETS[self.dataset]
        _, location, rows = held_out(self, hub, self.dataset, ("test",), subset)
        for number, row in enumerate(rows):
            check_fields(row, {field: str, "answer": str}, f"{location} row {number + 1}")
            text = prompted(tokenizer, INSTRUCTION, row[field])
            prompt = start_tokens(tokenizer) + tokenize(tokenizer, [text])[0]
            answer = row["answer"].rpartition("####")[2].strip()  # in GSM8K a solution and this mark are before it
            if len(prompt) + self.max_new_tokens > max_tokens:
                yield "too long"
            else:
                yield Sample(f"{number}", prompt, max_new_tokens=self.max_new_tokens, references=[answer])

    def run(self, model: nn.Module, tokenizer: Tokenizer, policies: Sequence[Policy], samples: Samples) -> Outcomes:
        """Run policies over samples; see :meth:`ag.evaluate.tasks.Task.run`."""
        device, stop = next(model.parameters()).device, end_tokens(model, tokenizer.eos_token_id)
        full = [policy("full")] if self.needs_full else []
        for start in range(0, len(samples), self.batch):
            group = samples[start : start + self.batch]
            max_new_tokens = [sample.max_new_tokens for sample in group]
            caches = read_prompt(model, [*full, *policies], *padded([sample.prompt for sample in group], device))
            written = [decode(model, *caches.pop(0), max_new_tokens, stop) for _ in full]
            solutions = [text.tokens for texts in written for text in texts]
            for index in range(len(policies)):
                cache, last_hidden = caches.pop(0)  # freed before the next policy decodes
                begin = time.perf_counter()
                scored = self.score(model, tokenizer, cache, last_hidden, group, solutions)
                seconds = (time.perf_counter() - begin) / len(group)
                for sample, (text, score, tags) in zip(group, scored, strict=True):
                    tags = {**tags, "generated": len(text.tokens), "held": text.held[-1], "most_held": max(text.held)}
                    yield index, Outcome(sample.id, score, *text.usage, seconds, tags, text.over_budget)

    @abstractmethod
    def score(
        self,
        model: nn.Module,
        tokenizer: Tokenizer,
        cache: EvictionCache,
        last_hidden: Tensor,
        group: Samples,
        solutions: list[list[int]],
    ) -> list[tuple[Decoded, float, Tags]]:
        """Decode the solutions of a batch, and return each with its score and tags.

        Args:
            model: the model.
            tokenizer: its tokenizer.
            cache: a cache that has read and evicted the prompts; this method may change it.
            last_hidden: ``[B, d]``, the final hidden states of each prompt's last token.
            group: the B samples.
            solutions: tokens of the solutions that the model wrote with a full cache; empty unless ``needs_full``.
        """


@dataclass(frozen=True)
class Reasoning(Problems):
    """Problems whose answers are graded: 1 if the last box has the value of the right answer.

    See :func:`ag.evaluate.tasks.answers.is_equal`. The tag ``answer`` is the content of the box. Sampled tokens of a
    problem depend neither on its batch nor on the policy.
    """

    temperature: Annotated[float, Field(ge=0)] = 0.0  # at which tokens are sampled; 0: the likeliest tokens
    seed: int = 0  # of the sampled tokens

    metric: ClassVar[str] = "right answers"
    chance: ClassVar[float | None] = FLOOR

    def score(
        self,
        model: nn.Module,
        tokenizer: Tokenizer,
        cache: EvictionCache,
        last_hidden: Tensor,
        group: Samples,
        solutions: list[list[int]],
    ) -> list[tuple[Decoded, float, Tags]]:
        """Let the model write solutions, and grade their answers; see :meth:`Problems.score`."""
        stop, max_new_tokens = end_tokens(model, tokenizer.eos_token_id), [sample.max_new_tokens for sample in group]
        seeds = [random.Random(f"{self.seed}/{sample.id}").getrandbits(63) for sample in group]
        choose = SampledTokens(self.temperature, seeds) if self.temperature else likeliest
        scored: list[tuple[Decoded, float, Tags]] = []
        decoded = decode(model, cache, last_hidden, max_new_tokens, stop, choose)
        for sample, text in zip(group, decoded, strict=True):
            answer = final_answer(str(tokenizer.decode(text.tokens, skip_special_tokens=True)))
            scored.append((text, float(is_equal(answer, *sample.references)), {"answer": answer}))
        return scored


@dataclass(frozen=True)
class OwnSolutions(Problems):
    """Nats per token of the solutions that the model wrote with a full cache, under each policy.

    The full cache writes each solution once, by its likeliest tokens. Then every policy, the full cache included, reads
    the solution token by token, and evicts as if it decoded it.
    """

    metric: ClassVar[str] = "nats per token"
    higher_is_better: ClassVar[bool] = False
    needs_full: ClassVar[bool] = True

    def score(
        self,
        model: nn.Module,
        tokenizer: Tokenizer,
        cache: EvictionCache,
        last_hidden: Tensor,
        group: Samples,
        solutions: list[list[int]],
    ) -> list[tuple[Decoded, float, Tags]]:
        """Read the solutions; see :meth:`Problems.score`."""
        choose = GivenTexts(solutions)
        decoded = decode(model, cache, last_hidden, [*map(len, solutions)], (), choose)
        return [(text, fmean(nats), {}) for text, nats in zip(decoded, choose.nats, strict=True)]


class SampledTokens:
    """Samples the next tokens of texts. Each text has its own generator."""

    def __init__(self, temperature: float, seeds: Sequence[int]) -> None:
        self.temperature = temperature
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def __call__(self, logits: Tensor, text_indices: Sequence[int]) -> list[int]:
        """Return a token of each text; see :func:`ag.evaluate.tasks.follow.continue_batch`."""
        probabilities = (logits.float() / self.temperature).softmax(-1).cpu()
        return [
            int(torch.multinomial(row, 1, generator=self.generators[index]))
            for row, index in zip(probabilities, text_indices, strict=True)
        ]


class GivenTexts:
    """Returns the tokens of given texts, and records the negative log-likelihood of each in ``nats``."""

    def __init__(self, texts: Sequence[list[int]]) -> None:
        self.texts = texts
        self.nats: list[list[float]] = [[] for _ in texts]

    def __call__(self, logits: Tensor, text_indices: Sequence[int]) -> list[int]:
        """Return the next token of each text; see :func:`ag.evaluate.tasks.follow.continue_batch`."""
        tokens = [self.texts[index][len(self.nats[index])] for index in text_indices]
        losses = F.cross_entropy(logits.float(), torch.tensor(tokens, device=logits.device), reduction="none")
        for index, loss in zip(text_indices, losses.tolist(), strict=True):
            self.nats[index].append(loss)
        return tokens


def decode(
    model: nn.Module,
    cache: EvictionCache,
    last_hidden: Tensor,
    max_new_tokens: Sequence[int],
    stop: Collection[int],
    choose: Callable[[Tensor, Sequence[int]], list[int]] = likeliest,
) -> list[Decoded]:
    """Continue prompts token by token, and return the continuations in the order of the prompts.

    Args:
        model: the model.
        cache: a cache with B prompts; this function changes it.
        last_hidden: ``[B, d]``, the final hidden state of each prompt's last token.
        max_new_tokens: largest number of tokens of each text.
        stop: tokens that end a text.
        choose: see :func:`ag.evaluate.tasks.follow.continue_batch`.
    """
    tokens: list[list[int]] = [[] for _ in max_new_tokens]
    held_by_token: list[list[float]] = [[] for _ in max_new_tokens]

    def choose_and_record(logits: Tensor, text_indices: Sequence[int]) -> list[int]:
        chosen = choose(logits, text_indices)
        for index, token, size in zip(text_indices, chosen, cache.held_tokens().mean(1).tolist(), strict=True):
            tokens[index].append(token)
            held_by_token[index].append(size)
        return chosen

    finished = {
        text_index: (sequence_usage(cache, sequence), bool(cache.over_budget[sequence]))
        for text_index, sequence, _ in continue_batch(
            model, cache, last_hidden, max_new_tokens, stop, choose=choose_and_record
        )
    }
    return [Decoded(tokens[index], held_by_token[index], *finished[index]) for index in range(len(tokens))]

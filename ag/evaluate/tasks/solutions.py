"""Tasks whose solutions the model writes, a batch at a time, while tokens are evicted."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase as Tokenizer

from ag.engine import EvictionCache, Policy, policy, read_prompt
from ag.evaluate.tasks.base import Outcome, Outcomes, PositiveInt, Samples, Tags, Task, synchronised_time
from ag.evaluate.tasks.follow import continue_batch, likeliest, padded
from ag.model.structure import end_tokens


class Decoded(NamedTuple):
    """The solution of one problem, as one cache decoded it."""

    tokens: list[int]  # with the end token, if it ended
    held: list[float]  # tokens that the cache held before each of them, the mean over layers and KV heads
    usage: tuple[int, float, int]  # see sequence_usage
    over_budget: bool


class SolutionBatch(NamedTuple):
    """B problems, whose prompts a cache has read and evicted."""

    model: nn.Module
    tokenizer: Tokenizer
    cache: EvictionCache
    last_hidden: Tensor  # [B, d], the final hidden states of each prompt's last token
    samples: Samples
    solutions: Sequence[list[int]] = ()  # tokens that the model wrote with a full cache, if the task needs them

    def decode(self, choose: Callable[[Tensor, Sequence[int]], list[int]] = likeliest) -> list[Decoded]:
        """Let the model write the solutions, which changes the cache; ``choose`` is an argument of :func:`decode`."""
        max_new_tokens = [sample.max_new_tokens for sample in self.samples]
        stop = end_tokens(self.model, self.tokenizer.eos_token_id)
        return decode(self.model, self.cache, self.last_hidden, max_new_tokens, stop, choose)

    def text(self, solution: Decoded) -> str:
        """Return the text of a solution, without special tokens."""
        return str(self.tokenizer.decode(solution.tokens, skip_special_tokens=True))


@dataclass(frozen=True)
class SolutionTask(Task):
    """A task of problems with solutions that the model writes or reads.

    Policies evict from the prompt, and from the solution by their schedule. In an outcome ``tokens`` counts prompt and
    solution, and ``kept`` is the kept share of both at the end. The tag ``generated`` is the number of the solution's
    tokens, its end token included. ``held`` is the number of tokens in the cache at the end of the solution, as the
    mean over layers and KV heads, and ``most_held`` the largest number during the solution.
    """

    batch: PositiveInt = 8  # problems in a batch

    unit: ClassVar[str] = "problems"
    #: Whether the model writes each solution with a full cache first.
    needs_full: ClassVar[bool] = False

    def run(self, model: nn.Module, tokenizer: Tokenizer, policies: Sequence[Policy], samples: Samples) -> Outcomes:
        """Run policies over samples; see :meth:`ag.evaluate.tasks.Task.run`."""
        device = next(model.parameters()).device
        full = [policy("full")] if self.needs_full else []
        for start in range(0, len(samples), self.batch):
            group = samples[start : start + self.batch]
            caches = read_prompt(model, [*full, *policies], *padded([sample.prompt for sample in group], device))
            written = [SolutionBatch(model, tokenizer, *caches.pop(0), group).decode() for _ in full]
            solutions = [text.tokens for texts in written for text in texts]
            for index in range(len(policies)):
                cache, last_hidden = caches.pop(0)
                # scoring after this counts in the time of the solutions
                seconds, start_time = cache.scoring_seconds, synchronised_time(device)
                scored = self.score(SolutionBatch(model, tokenizer, cache, last_hidden, group, solutions))
                seconds = (seconds + synchronised_time(device) - start_time) / len(group)
                for sample, (text, score, tags) in zip(group, scored, strict=True):
                    tags = {**tags, "generated": len(text.tokens), "held": text.held[-1], "most_held": max(text.held)}
                    yield index, Outcome(sample.id, score, *text.usage, seconds, tags, text.over_budget)

    @abstractmethod
    def score(self, batch: SolutionBatch) -> list[tuple[Decoded, float, Tags]]:
        """Decode the solutions of a batch, and return each with its score and tags."""


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


def sequence_usage(cache: EvictionCache, sequence: int) -> tuple[int, float, int]:
    """Return the tokens that one sequence of a cache has read, the kept share of their entries, and its bytes."""
    num_tokens, num_cached = int(cache.valid[sequence].sum()), cache.held_tokens()  # by sequence and layer
    share = float(num_cached[sequence].sum() / num_cached.sum()) if bool(num_cached.any()) else 0.0
    return num_tokens, float(num_cached[sequence].mean()) / num_tokens, round(cache.nbytes * share)

"""What a task is: samples, and what a policy makes of each of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import nn
from transformers import PreTrainedTokenizerBase

from ag.engine import Policy

Tags = Mapping[str, str | int | float]


@dataclass(frozen=True)
class Sample:
    """One question, document or haystack.

    Attributes:
        id: names it, the same in every run.
        prompt: its tokens up to the answer, ``[T]``; what a policy evicts from.
    """

    id: str
    prompt: list[int]


@dataclass(frozen=True)
class Outcome:
    """What a policy made of one sample.

    Attributes:
        sample: its id.
        score: the task's metric on it: accuracy 0 or 1, nats per token, F1 in 0..1, ...
        tokens: prompt tokens.
        kept: share of the (token, layer, KV head) entries that was held after the prompt, measured in the cache.
        kv_bytes: allocated for keys and values at that moment.
        seconds: for the policy's own work: eviction and answer, and the prompt where no other policy shared it.
        tags: what tells samples apart: needle length and depth, subset of a benchmark, bins of a curve.
    """

    sample: str
    score: float
    tokens: int
    kept: float
    kv_bytes: int
    seconds: float
    tags: Tags = field(default_factory=dict)


@dataclass(frozen=True)
class Loaded:
    """The samples of a task.

    Attributes:
        samples: those that can be run, in their stored order.
        too_long: how many were left out because they do not fit the model.
        too_short: how many were left out because they have fewer tokens than the task needs.
    """

    samples: list[Any]
    too_long: int = 0
    too_short: int = 0


@dataclass(frozen=True)
class Task(ABC):
    """A task; its fields are its options.

    Attributes:
        name: what the command calls it.
        root: local folder of the data; None: the Hugging Face hub.
    """

    name: str
    root: str | None = None

    metric: ClassVar[str]
    higher_is_better: ClassVar[bool] = True

    @abstractmethod
    def load(self, tokenizer: PreTrainedTokenizerBase, limit: int | None, max_tokens: int) -> Loaded:
        """Read and tokenise the samples.

        Args:
            tokenizer: the model's.
            limit: at most so many samples, the first ones; None: all.
            max_tokens: the model's context. A sample that needs more is left out and counted.

        Raises:
            UserError: the data is missing or damaged; the message says how to get it.
        """

    @abstractmethod
    def run(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        policies: Sequence[Policy],
        samples: Sequence[Any],
    ) -> Iterator[tuple[int, Outcome]]:
        """Run policies over samples, and yield (index of the policy, outcome) as each is done.

        Sample by sample, and for each sample policy by policy: those that read the prompt densely share one forward
        pass of it.

        Raises:
            UserError: a policy cannot do the task.
        """

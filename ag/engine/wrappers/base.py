"""A wrapper is a scorer that changes the score of another scorer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Self, get_type_hints

import torch
from torch import Tensor

from ag.engine.records import Records
from ag.engine.scorer_inputs import Needs, ScorerInputs
from ag.engine.scorers.base import RowScorer, Scorer
from ag.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Wrapper(Scorer):
    """Changes the score of ``inner``; tokens that ``inner`` protects are protected under the wrapper too.

    Attributes:
        inner: the scorer on which the wrapper acts.
    """

    inner: Scorer

    #: Whether the wrapper scores each head by itself; then the inner scorer must too.
    scores_heads: ClassVar[bool] = True

    @classmethod
    def accepts(cls, inner: type[Scorer], options: dict[str, Any], spec: Any) -> None:
        """Refuse a scorer on which the wrapper cannot act, and add the options that the scorer has under the wrapper.

        A scorer has to derive from the type of the field ``inner``. ``spec`` is the parsed text of the policy.
        """
        rows = issubclass(get_type_hints(cls)["inner"], RowScorer) and not issubclass(inner, RowScorer)
        if reason := inner.alone or ("it has no attention rows to act on" if rows else ""):
            raise UserError(f"Policy '{spec}': {spec.wrapper} cannot act on {spec.scorer}, because {reason}.")
        for name, (value, why) in inner.wrapped(cls.scores_heads).items():
            if options.setdefault(name, value) != value:
                because = why.format(wrapper=spec.wrapper)
                raise UserError(
                    f"Policy '{spec}': {name}={options[name]} has no meaning, because {because}; leave it out."
                )

    @cached_property
    def needs(self) -> Needs:
        """The needs of the inner scorer and of the wrapper."""
        return self.add_needs(self.inner.needs)

    @cached_property
    def decode_needs(self) -> Needs:
        """The needs of both after the prompt."""
        return self.add_needs(self.inner.decode_needs)

    def add_needs(self, needs: Needs) -> Needs:
        """Return the needs of the inner scorer with the inputs that the wrapper reads itself."""
        return replace(needs, steady=False)

    def note(self, inputs: ScorerInputs, records: Records) -> None:
        """Let the inner scorer record."""
        self.inner.note(inputs, records)

    def with_tokenizer(self, tokenizer: Any) -> Self:
        """Return the wrapper on an inner scorer with the instructions of a tokenizer."""
        return replace(self, inner=self.inner.with_tokenizer(tokenizer))

    def with_trained_protection(self, sinks: int, recent: int) -> Self:
        """Return the wrapper on an inner scorer that protects these tokens, as :class:`Scorer` does."""
        return replace(self, inner=self.inner.with_trained_protection(sinks, recent))

    def limits(self, capacity: Tensor) -> tuple[int | Tensor, int | Tensor]:
        """Return the larger numbers of tokens that the inner scorer or the wrapper protects."""
        return larger_counts(self.inner.limits(capacity), super().limits(capacity))


def larger_counts(
    first_counts: tuple[int | Tensor, ...], other_counts: tuple[int | Tensor, ...]
) -> tuple[int | Tensor, int | Tensor]:
    """Return the larger first and the larger second number of two pairs; a number is an int or ``[B]`` long."""
    first, second = (
        max(a, b) if isinstance(a, int) and isinstance(b, int) else torch.as_tensor(a).maximum(torch.as_tensor(b))
        for a, b in zip(first_counts, other_counts, strict=True)
    )
    return first, second

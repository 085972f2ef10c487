"""A wrapper is a scorer that changes the score of another scorer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Self, get_type_hints

import torch
from torch import Tensor

from ag.engine.records import Records
from ag.engine.scorer_inputs import ScorerInputs
from ag.engine.scorers.base import Needs, RowScorer, Scorer
from ag.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Wrapper(Scorer):
    """Changes the score of ``inner``; what ``inner`` protects stays protected.

    Attributes:
        inner: the scorer it acts on.
    """

    inner: Scorer

    #: Whether it scores each head by itself, so that the inner scorer must too.
    scores_heads: ClassVar[bool] = True

    @classmethod
    def accepts(cls, inner: type[Scorer], options: dict[str, Any], spec: Any) -> None:
        """Refuse a scorer that it cannot act on, and add the options that the scorer has under it.

        The type of the field ``inner`` says from which class a scorer has to derive; ``spec`` is that of the policy.
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
        """The needs of the inner scorer, to which a wrapper adds by :func:`dataclasses.replace`."""
        return replace(self.inner.needs, steady=False)

    def note(self, inputs: ScorerInputs, records: Records) -> None:
        """Record what the inner scorer does."""
        self.inner.note(inputs, records)

    @property
    def rereader(self) -> Any:
        """The inner scorer, where it lets the model repeat the prompt."""
        return self.inner.rereader

    def with_tokenizer(self, tokenizer: Any) -> Self:
        """Return the same on an inner scorer with the instructions of a tokenizer."""
        return replace(self, inner=self.inner.with_tokenizer(tokenizer))

    def trained_with(self, sinks: int, recent: int) -> Self:
        """Return the same on an inner scorer that protects what the training of its gates did."""
        return replace(self, inner=self.inner.trained_with(sinks, recent))

    def limits(self, capacity: Tensor) -> tuple[int | Tensor, int | Tensor]:
        """Return the larger ones of what the inner scorer and this one protect."""
        return larger_counts(self.inner.limits(capacity), super().limits(capacity))


def larger_counts(
    first_counts: tuple[int | Tensor, ...], other_counts: tuple[int | Tensor, ...]
) -> tuple[int | Tensor, int | Tensor]:
    """Return the larger ones of two pairs of numbers, each a number or ``[B]``."""
    first, second = (
        max(a, b) if isinstance(a, int) and isinstance(b, int) else torch.as_tensor(a).maximum(torch.as_tensor(b))
        for a, b in zip(first_counts, other_counts, strict=True)
    )
    return first, second

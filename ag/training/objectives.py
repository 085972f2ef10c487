"""The objectives by the name of ``loss.objective``: to add one, write its class and a line in OBJECTIVES."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import ClassVar

from torch import Tensor, nn

from ag.config.loss import REGRESS
from ag.plugins import part
from ag.training.losses import token_kl, token_nll

MEASURED = ("lm", REGRESS)  # validation measures the cross-entropy alone


class Objective(ABC):
    """A loss of each token that carries loss, logged as ``NAME_loss``, a mean over samples."""

    #: Whether it needs the hidden states of the model with open gates and without adapters.
    needs_teacher: ClassVar[bool] = False

    @abstractmethod
    def tokens(
        self, model: nn.Module, hidden: Tensor, teacher: Tensor | None, labels: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        """Compute the loss of each token.

        Args:
            model: the language model, for its head.
            hidden: the model's final hidden states under the gates ``[B, T, d]``.
            teacher: final hidden states with open gates and without adapters ``[B, T, d]``. None: ``needs_teacher`` is
                False.
            labels: ``[B, T]``, aligned with the input, -100 for tokens without loss.
            chunk: tokens whose logits exist at once.

        Returns:
            The losses ``[N]``, float32, and their rows ``[N]``.
        """


class NextToken(Objective):
    """Cross-entropy of the next token, in nats."""

    def tokens(
        self, model: nn.Module, hidden: Tensor, teacher: Tensor | None, labels: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        """Return :func:`ag.training.losses.token_nll`."""
        return token_nll(model, hidden, labels, chunk)


class Distillation(Objective):
    """KL divergence from the model with open gates and no adapter, in nats."""

    needs_teacher: ClassVar[bool] = True

    def tokens(
        self, model: nn.Module, hidden: Tensor, teacher: Tensor | None, labels: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        """Return :func:`ag.training.losses.token_kl`."""
        assert teacher is not None
        return token_kl(model, hidden, teacher, labels, chunk)


#: The objectives by the name that ``loss.objective`` gives them, beside ``regress``.
OBJECTIVES: dict[str, type[Objective]] = {"lm": NextToken, "kl": Distillation}


def objective(name: str) -> Objective:
    """Make the objective of a name, or raise a ``UserError``; only validation uses the objective of ``regress``."""
    chosen: Objective = NextToken() if name == REGRESS else part("ag.losses", "loss.objective", name, Objective)()
    return chosen


def loss_names(metrics: Iterable[str]) -> dict[str, str]:
    """Return the names of the losses among metrics for messages: ``train/lm_loss`` is the LM loss."""
    names = {"lm": "LM", "kl": "KL", REGRESS: "regression"}
    matches = (match for key in metrics if (match := re.fullmatch(r"train/(\w+)_loss", key)))
    return {match[0]: f"{names.get(match[1], match[1])} loss" for match in matches if match[1] != "eviction"}
